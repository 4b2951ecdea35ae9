"""All states of a sequence at once as one fixed point: its map, its norms and its solver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Unpack

from fixpoint._denormals import without_denormals
from fixpoint.backward._linear import LinearDerivatives
from fixpoint.derivatives import Derivatives, MatrixMap
from fixpoint.sequence.affine_scan import AffineScan, ZeroScan
from fixpoint.sequence.jacobians import LeakyJacobian, SequenceJacobian
from fixpoint.sequence.recurrence import SequenceProblem, as_samples, states_of
from fixpoint.sequence.sequential import sequential_adjoint, sequential_tangent
from fixpoint.solution import Result, Solution, has_failed
from fixpoint.solvers import Picard
from fixpoint.solvers._rowwise import choose_rows
from fixpoint.solvers.base import IterativeOptions
from fixpoint.solvers.loop.eager import Problem, iterate
from fixpoint.solvers.loop.norms import Norms, Tolerance

Scan = Callable[[Tensor], Tensor]
"""r -> delta, (T, B, n) each."""


def rounding_tolerance(T: int, dtype: torch.dtype) -> float:
    """Return the relative tolerance just above rounding, which adds up as sqrt(T)."""
    return torch.finfo(dtype).eps * (8 + T**0.5 / 2)


def add_states(z: Tensor, delta: Tensor) -> Tensor:
    """Return samples z, (B, T n), plus states, (T, B, n)."""
    rows = z.view(len(z), len(delta), delta.shape[2])
    return torch.add(rows, delta.transpose(0, 1)).reshape(z.shape)


class StepNorms(Norms):
    """Norms by which each time step reaches the tolerance by itself.

    The residual of a sample is the largest over t of |r_t| / (atol + rtol |h_t|), in units of the
    largest |h_t|, which is its size.

    Args:
        z: rows, (B, T n).
        tolerance: of the solver.
        T: time steps.
    """

    def __init__(self, z: Tensor, tolerance: Tolerance, T: int) -> None:
        super().__init__(z, tolerance, (z.shape[1] // T,))
        self.T = T
        tiny = torch.finfo(self.dtype).tiny
        self.least = max(self.atol / self.rtol, tiny) if self.rtol else None
        """The size below which atol decides; None where it always does."""

    def size(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self._of_steps(x, dtype).amax(1)

    def _of_steps(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        steps = x.view(len(x), self.T, x.shape[1] // self.T)
        return torch.linalg.vector_norm(steps, dim=2, dtype=dtype)

    def _read(
        self, states: Sequence[Tensor], dtype: torch.dtype, flags: Sequence[Tensor]
    ) -> np.ndarray:
        sizes = super()._read(states, dtype, flags)
        if self.least is not None:
            with np.errstate(all="ignore"):
                sizes[0] *= sizes[1] + self.least
        return sizes

    def _sizes(self, states: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        r, fz, *others = states
        residual, size = self._of_steps(r, dtype), self._of_steps(fz, dtype)
        if self.least is not None:
            residual = residual / (size + self.least)
        return [residual.amax(1), size.amax(1), *(self.size(x, dtype) for x in others)]


class ParallelTime(Picard):
    """Solver of z = f(z), the states of all time steps: z <- z + S (f(z) - z), S a scan over time.

    S stands for (I - J)^-1, J the Jacobian of f. Without a joint equilibrium J is strictly below
    the diagonal in time, and h_1 .. h_i are exact after i updates, whatever S is. For the linear
    problem of a derivative S is the scan at the solution, or its transpose; samples that do not
    converge there are solved step by step.

    Args:
        recurrence: of T steps.
        jacobian: gives S.
        note: takes the `Solution` of each linear problem, its z (T, B, n).
        options: see `IterativeSolver`.
    """

    def __init__(
        self,
        recurrence: SequenceProblem,
        jacobian: SequenceJacobian,
        *,
        note: Callable[[Solution], None] | None = None,
        **options: Unpack[IterativeOptions],
    ) -> None:
        super().__init__(**options)
        self.recurrence, self.jacobian, self.note = recurrence, jacobian, note

    @property
    def T(self) -> int:
        return self.recurrence.shape[0]

    def solve_states(self, z: Tensor) -> Solution:
        """Return the solution of the recurrence from rows z, (B, T n), without gradient."""
        products = 0

        def updated(z: Tensor) -> Tensor:
            nonlocal products
            H = states_of(z, self.T)
            F, scan, made = self.jacobian.linearize(self.recurrence, H, self.recurrence.before(H))
            products += made
            return add_states(z, scan.forward(F - H))

        with torch.no_grad():
            solution = self._iterate(updated, z)
        return replace(solution, products=products)

    def run(
        self,
        phi: MatrixMap,
        z: Tensor,
        t: int | None = None,
        *,
        track_from: int = 0,
        derivatives: Derivatives | None = None,
    ) -> Solution:
        if isinstance(derivatives, LinearDerivatives) and derivatives.at is not None:
            return self._solve_linear(phi, z, derivatives)
        # In torch.func rows are those of several instances, and f has no values to linearize at;
        # T updates are exact.
        scan: AffineScan = ZeroScan()
        if self.note is None and isinstance(self.jacobian, LeakyJacobian):
            scan = self.jacobian.scan(self.T, self.recurrence.h0)
        exact = self.with_options(max_iter=max(self.max_iter, self.T))
        return exact._iterate(self._preconditioned(phi, scan.forward), z)

    def _preconditioned(self, phi: MatrixMap, scan: Scan) -> MatrixMap:
        return lambda z: add_states(z, scan(states_of(phi(z) - z, self.T)))

    def _iterate(self, phi: MatrixMap, z: Tensor) -> Solution:
        """Iterate z <- phi(z); converged samples take the measured update too, which is made."""
        moved = z

        def noted(z: Tensor) -> Tensor:
            nonlocal moved
            moved = phi(z)
            return moved

        problem = Problem(noted, Derivatives(noted))
        solution = iterate(self, problem, z, StepNorms(z, self.tolerance, self.T))[0]
        converged = solution.result == Result.CONVERGED.value
        if not self.has_tolerance:
            return solution
        return replace(solution, z=choose_rows(converged, moved, solution.z))

    @without_denormals
    def _solve_linear(self, phi: MatrixMap, b: Tensor, linear: LinearDerivatives) -> Solution:
        """Return x = A x + b with A = J^T, or J, at the states that `linear.at` holds."""
        T, recurrence, at = self.T, self.recurrence, linear.at
        assert at is not None
        H = states_of(at, T)
        scan = self.jacobian.linearize(recurrence, H, recurrence.before(H)).scan
        transposed = linear.transposed
        apply = scan.transposed if transposed else scan.forward
        start = as_samples(apply(states_of(b, T).clone()))
        solution = self._iterate(self._preconditioned(phi, apply), start)
        failed = has_failed(solution.result).nonzero().flatten()
        if len(failed):
            step_by_step = sequential_adjoint if transposed else sequential_tangent
            path = torch.cat([recurrence.h0.detach().unsqueeze(0), H])[:, failed]
            exact = step_by_step(recurrence.select(failed), path, states_of(b, T)[:, failed])
            finite = exact.isfinite().all(2).all(0)
            codes = torch.where(finite, int(Result.FALLBACK), int(Result.NONFINITE))
            solution.z[failed] = as_samples(exact)
            solution.result[failed] = codes.to(solution.result.dtype)
        if self.note is not None:
            self.note(replace(solution, z=states_of(solution.z, T)))
        return solution
