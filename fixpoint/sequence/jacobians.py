"""Substitutes for the Jacobian of each step: A_t of the scan delta_t = A_t delta_{t-1} + r_t."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fixpoint._messages import unknown_name
from fixpoint._tree import Tree
from fixpoint._validation import at_least, positive
from fixpoint.derivatives import batch_vjp_of_units
from fixpoint.sequence.affine_scan import (
    AffineScan,
    DenseScan,
    DiagonalScan,
    ScalarScan,
    ZeroScan,
)
from fixpoint.sequence.recurrence import SequenceProblem, as_rows, as_states
from fixpoint.sequence.trust_region import TrustRegionScan

ValueAndDiagonal = Callable[[Tensor, Tree], tuple[Tensor, Tensor]]
"""(h_prev, x) -> f(h_prev, x) and the diagonal of d f / d h_prev, (R, n) each."""

MAX_INNER = 0.9
"""Largest diagonal entry of d phi / d h that 1 - d is divided by."""
MAX_DENSE = 32
"""Most units n of a dense Jacobian that "auto" takes: it costs T n^3 where f costs T n^2."""


class StepLinearization(NamedTuple):
    """F = f(h_prev, x), (T, B, n), the scan that stands for its derivative, and products made."""

    F: Tensor
    scan: AffineScan
    products: int = 0


class SequenceJacobian:
    """A choice of A_t; `linearize` gives the scan at a trajectory.

    Example:
        >>> from fixpoint.sequence import LeakyJacobian, SequenceJacobian
        >>> issubclass(LeakyJacobian, SequenceJacobian)
        True
    """

    def linearize(
        self, recurrence: SequenceProblem, h: Tensor, h_prev: Tensor
    ) -> StepLinearization:
        """Linearize at the states h = h_1 .. h_T and h_prev = h_0 .. h_{T-1}, (T, B, n) each."""
        raise NotImplementedError

    def window(self, times: slice) -> SequenceJacobian:
        """Return the Jacobian of a stretch of time."""
        return self

    def plain(self) -> SequenceJacobian:
        """Return the Jacobian without what bounds an update of the states: that of the adjoint."""
        return self


class ZeroJacobian(SequenceJacobian):
    """A = 0: plain (Jacobi) iteration on the stacked states. For recurrences that forget fast.

    Example:
        >>> import torch
        >>> from fixpoint.sequence import ZeroJacobian, solve_sequence
        >>> x, h0 = torch.randn(50, 4, 3), torch.zeros(4, 3)
        >>> f = lambda h_prev, x: 0.9 * h_prev + 0.1 * torch.tanh(h_prev + x)
        >>> solve_sequence(f, x, h0, jacobian=ZeroJacobian()).check().z.shape
        torch.Size([50, 4, 3])
    """

    def linearize(
        self, recurrence: SequenceProblem, h: Tensor, h_prev: Tensor
    ) -> StepLinearization:
        return StepLinearization(recurrence.evaluate(h, h_prev), ZeroScan())


class LeakyJacobian(SequenceJacobian):
    """A_t = decay_t I: exact where f = decay_t h_prev + (what does not depend on h_prev).

    It needs no derivative: the scan is one triangular matrix for all samples and units. For ERNN
    decay = 1 - eta_t, for FastRNN sigmoid(beta), for Picard's iteration of an ODE 1.

    Args:
        decay: (T,), or a number for all t; of any sign and size.

    Example:
        >>> import torch
        >>> from fixpoint.sequence import LeakyJacobian, solve_sequence
        >>> x, h0 = torch.randn(50, 4, 3), torch.zeros(4, 3)
        >>> f = lambda h_prev, x: 0.9 * h_prev + 0.1 * torch.tanh(h_prev + x)
        >>> solve_sequence(f, x, h0, jacobian=LeakyJacobian(0.9)).check().z.shape
        torch.Size([50, 4, 3])
    """

    def __init__(self, decay: Tensor | float) -> None:
        self.decay = torch.as_tensor(decay).detach()
        if self.decay.dim() > 1:
            raise ValueError(f"decay must be a number or (T,); got {tuple(self.decay.shape)}")
        self._scan: ScalarScan | None = None

    def linearize(
        self, recurrence: SequenceProblem, h: Tensor, h_prev: Tensor
    ) -> StepLinearization:
        scan = self.scan(len(h), h)
        return StepLinearization(recurrence.evaluate(h, h_prev), scan)

    def window(self, times: slice) -> LeakyJacobian:
        return self if self.decay.dim() == 0 else LeakyJacobian(self.decay[times])

    def scan(self, T: int, like: Tensor) -> ScalarScan:
        """Return the scan of T steps, in the dtype and on the device of a tensor."""
        if self.decay.dim() and len(self.decay) != T:
            raise ValueError(f"decay must have T = {T} entries; got {len(self.decay)}")
        scan = self._scan
        where = like.dtype, like.device
        if scan is None or len(scan.a) != T or (scan.a.dtype, scan.a.device) != where:
            decay = self.decay.to(like.dtype).to(like.device)
            self._scan = scan = ScalarScan(decay.expand(T))
        return scan


class DiagonalJacobian(SequenceJacobian):
    """A_t = the diagonal of the Jacobian, or an estimate of it (quasi-DEER).

    Without a formula it is the mean of z * (J z) over `probes` random sign vectors z, each one
    Jacobian-vector product: one is exact where f acts unit by unit; elsewhere the off-diagonal
    entries are noise in an estimate.

    Args:
        formula: (h_prev, x) -> f(h_prev, x) and the diagonal, (R, n) each.
        probes: sign vectors where there is no formula. None takes n unit vectors, which are exact,
            for n <= 32, and 4 sign vectors above.
        clip: entries are kept within [-clip, clip], so that the scan does not grow; None leaves
            them.
        trust_region: strength (ELK) that keeps an update near the iterate; 0 is off.

    Source: Gonzalez et al. (2024), Towards scalable and stable parallelization of nonlinear RNNs.

    Example:
        >>> import torch
        >>> from fixpoint.sequence import DiagonalJacobian, solve_sequence
        >>> x, h0 = torch.randn(50, 4, 3), torch.zeros(4, 3)
        >>> f = lambda h_prev, x: 0.9 * h_prev + 0.1 * torch.tanh(h_prev + x)
        >>> solve_sequence(f, x, h0, jacobian=DiagonalJacobian()).check().z.shape
        torch.Size([50, 4, 3])
    """

    def __init__(
        self,
        formula: ValueAndDiagonal | None = None,
        *,
        probes: int | None = None,
        clip: float | None = 1.0,
        trust_region: float = 0.0,
    ) -> None:
        self.formula = formula
        self.probes = None if probes is None else at_least(1, probes=probes)
        self.clip = None if clip is None else positive(clip=clip)
        self.trust_region = trust_region and positive(trust_region=trust_region)

    def linearize(
        self, recurrence: SequenceProblem, h: Tensor, h_prev: Tensor
    ) -> StepLinearization:
        if recurrence.joint:
            return self._joint(recurrence, h, h_prev)
        F, a, products = self._value_and_diagonal(recurrence, h_prev)
        if self.clip is not None:
            a = a.clamp(-self.clip, self.clip)
        scan: AffineScan = DiagonalScan(a)
        if self.trust_region:
            scan = TrustRegionScan(a, 1 / self.trust_region)
        return StepLinearization(F, scan, products)

    def plain(self) -> DiagonalJacobian:
        return DiagonalJacobian(self.formula, probes=self.probes, clip=self.clip)

    def _value_and_diagonal(
        self, recurrence: SequenceProblem, h_prev: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        T, h_prev, x = len(h_prev), as_rows(h_prev), recurrence.flat_x()
        if self.formula is not None:
            F, a = self.formula(h_prev, x)
            return as_states(F, T), as_states(a, T), 0
        step = recurrence.step_at(x)
        F, a, products = self._probe(lambda h: step(h, h), h_prev)
        return as_states(F, T), as_states(a, T), products

    def _joint(self, recurrence: SequenceProblem, h: Tensor, h_prev: Tensor) -> StepLinearization:
        """Return delta_t = (r_t + d_prev delta_{t-1}) / (1 - d) with the diagonals d, d_prev of
        phi.
        """
        if self.formula is not None or self.trust_region:
            raise ValueError("an equilibrium takes no formula and no trust region: leave them out")
        T, step = len(h), recurrence.step_at(recurrence.flat_x())
        h, h_prev = as_rows(h), as_rows(h_prev)
        F, d, products = self._probe(lambda h: step(h, h_prev), h)
        _, d_prev, more = self._probe(lambda h_prev: step(h, h_prev), h_prev)
        scale = 1 / (1 - d.clamp(-1.0, MAX_INNER))
        a = scale * d_prev
        if self.clip is not None:
            a = a.clamp(-self.clip, self.clip)
        scan = DiagonalScan(as_states(a, T), as_states(scale, T))
        return StepLinearization(as_states(F, T), scan, products + more)

    def _probe(self, phi: Callable[[Tensor], Tensor], h: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return phi(h), its diagonal or the mean of z * (J z), and the products made."""
        n = h.shape[1]
        if self.probes is None and n <= MAX_DENSE:
            with torch.enable_grad():
                h = h.detach().requires_grad_()
                F = phi(h)
            J = batch_vjp_of_units(F, h)
            return F.detach(), J.diagonal(dim1=1, dim2=2).contiguous(), n
        probes = self.probes or 4
        generator, total = torch.Generator().manual_seed(0), torch.zeros_like(h)
        for _ in range(probes):
            z = torch.randint(0, 2, (n,), generator=generator).to(h) * 2 - 1
            pair = torch.func.jvp(phi, (h,), (z.expand_as(h).contiguous(),))
            F, total = pair[0], total + z * pair[1]
        return F, total / probes, probes


class DenseJacobian(SequenceJacobian):
    """A_t = the Jacobian itself: Newton's method on the whole sequence (DEER).

    It converges quadratically, costs T n^3 and keeps T B n^2 numbers: for n up to about 32.

    Source: Lim et al. (2023), Parallelizing non-linear sequential models over the sequence length.

    Example:
        >>> import torch
        >>> from fixpoint.sequence import DenseJacobian, solve_sequence
        >>> x, h0 = torch.randn(50, 4, 3), torch.zeros(4, 3)
        >>> f = lambda h_prev, x: 0.9 * h_prev + 0.1 * torch.tanh(h_prev + x)
        >>> solve_sequence(f, x, h0, jacobian=DenseJacobian()).check().z.shape
        torch.Size([50, 4, 3])
    """

    def linearize(
        self, recurrence: SequenceProblem, h: Tensor, h_prev: Tensor
    ) -> StepLinearization:
        T, n = len(h), h.shape[2]
        step = recurrence.step_at(recurrence.flat_x())
        with torch.enable_grad():
            h, h_prev = (as_rows(x.detach()).requires_grad_() for x in (h, h_prev))
            F = step(h, h_prev)
        a = as_states(batch_vjp_of_units(F, h_prev), T)
        if not recurrence.joint:
            return StepLinearization(as_states(F.detach(), T), DenseScan(a), n)
        # (I - d phi / d h) delta_t = (d phi / d h_prev) delta_{t-1} + r_t
        inner = -batch_vjp_of_units(F, h)
        inner.diagonal(dim1=-2, dim2=-1).add_(1)
        scale = as_states(torch.linalg.inv_ex(inner)[0], T)
        return StepLinearization(as_states(F.detach(), T), DenseScan(scale @ a, scale), 2 * n)


JACOBIANS = ("auto", "leaky", "zero", "identity", "diagonal", "dense")


def make_jacobian(
    name: str | SequenceJacobian, decay: Tensor | float | None, recurrence: SequenceProblem
) -> SequenceJacobian:
    """Return the Jacobian of that name, or the given one.

    "auto" is leaky where a decay is given, dense for n <= 32, else diagonal.

    Raises:
        ValueError: the name is unknown, or it and `decay` do not fit.
    """
    if isinstance(name, str) and name not in JACOBIANS:
        raise ValueError(unknown_name("jacobian", name, JACOBIANS))
    if name == "auto":
        small = recurrence.h0.shape[1] <= MAX_DENSE
        name = "leaky" if decay is not None else "dense" if small else "diagonal"
    if name == "leaky":
        if decay is None:
            raise ValueError('jacobian="leaky" needs decay, a number or (T,): give 1 - eta')
        return LeakyJacobian(decay)
    if decay is not None:
        raise ValueError(f'decay belongs to jacobian="leaky"; got jacobian={name!r}: leave it out')
    kinds = {"zero": ZeroJacobian, "diagonal": DiagonalJacobian, "dense": DenseJacobian}
    made = name
    if isinstance(made, str):
        made = LeakyJacobian(1.0) if made == "identity" else kinds[made]()
    if recurrence.joint and isinstance(made, LeakyJacobian):
        raise ValueError(
            'a leaky or identity Jacobian belongs to h = f(h_prev, x): use "zero", "diagonal" '
            'or "dense" for an equilibrium'
        )
    return made
