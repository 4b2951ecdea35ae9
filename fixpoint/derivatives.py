"""Derivatives of a map at a point, for the whole batch at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fixpoint._groups import groups_of
from fixpoint._torch import has_values, inside_forward_mode, inside_transform, version
from fixpoint.row_guard import guard_rows

MatrixMap = Callable[[Tensor], Tensor]
MAX_SINGLE_PASSES = 512
"""Most backward passes one by one in place of a batched one."""


class Linearization:
    """J = d fz / d z of each sample from one graph that leads from z to fz, both (B, D).

    argument: the copy of z that phi was given, by default z.
    """

    def __init__(self, fz: Tensor, z: Tensor, argument: Tensor | None = None) -> None:
        self.fz, self.z = fz, z
        self.argument = z if argument is None else argument
        self._reverse: tuple[Tensor, Tensor] | None = None

    def jacobian(self) -> Tensor:
        """Return J, (B, D, D)."""
        return batch_vjp_of_units(self.fz, self.z)

    def vjp(self, u: Tensor) -> Tensor:
        """Return J^T u, (B, D)."""
        return _gradient(self.fz, self.z, u)

    def jvp(self, v: Tensor) -> Tensor:
        """Return J v, (B, D): J^T u is linear in u, and J v its derivative.

        Two reverse passes, for which far more operations have a rule than for forward mode, and
        which threads do not share as they do the levels of forward mode.
        """
        if self._reverse is None:
            with torch.enable_grad():
                u = torch.zeros_like(self.fz).requires_grad_()
                self._reverse = u, _gradient(self.fz, self.z, u, create_graph=True)
        u, product = self._reverse
        return _gradient(product, u, v)


class Derivatives:
    """Jacobian J = d phi / d z of a map of (B, D) states with independent rows.

    `evaluate` keeps the graph of its evaluation, from which J and its products at that z follow
    without another one.

    Attributes:
        products: Jacobian-vector products made so far, for the whole batch; a Jacobian is D.
        evaluations: calls of phi made besides those of `evaluate`, one at each other z.
    """

    def __init__(self, phi: MatrixMap) -> None:
        self.phi = phi
        self.products = 0
        self.evaluations = 0
        self.columns = getattr(phi, "columns", ())
        self._last: tuple[Tensor, Linearization] | None = None
        self._lost: Tensor | None = None

    def evaluate(self, z: Tensor) -> Tensor:
        """Return phi(z), (B, D), for a solver that will ask for J at this very tensor z.

        Where the evaluation is itself differentiated it is phi(z) and nothing is kept.
        """
        self._last = self._lost = None
        if torch.is_grad_enabled() or inside_forward_mode():
            fz = self.phi(z)
            self._note_lost(fz)
            return fz
        linearization = linearize(self.phi, z)
        if version(linearization.argument) > 0:
            return self.phi(z)  # it writes into its input: so that this shows there
        self._note_lost(linearization.fz)
        if self._lost is None:
            self._last = z, linearization
        return linearization.fz.detach()

    def jacobian(self, z: Tensor) -> Tensor:
        """Return J of each sample, (B, D, D).

        Raises:
            RuntimeError: J takes more memory than there is, or too many backward passes.
        """
        self.products += z.shape[1]
        with _naming_gmres(z):
            if torch.is_grad_enabled() or inside_transform():
                self.evaluations += 1
                return batch_jacobian(self._guarded, z)
            return self._linearization(z).jacobian()

    def jvp(self, z: Tensor, v: Tensor) -> Tensor:
        """Return J v of each sample, (B, D); products at one z share one evaluation of phi."""
        self.products += 1
        return self._linearization(z).jvp(v)

    def _linearization(self, z: Tensor) -> Linearization:
        if self._last is None or self._last[0] is not z:
            self._last = None  # two graphs at a time would take twice the memory
            self._last = z, linearize(self._guarded, z)
            self.evaluations += 1
        return self._last[1]

    def _note_lost(self, fz: Tensor) -> None:
        """Note the samples that are not finite, whose rows phi combines with those of others.

        It multiplies them by 0, as by a matrix of all graphs; 0 * NaN is NaN.
        """
        if groups_of(self.columns) is not None and has_values(fz) and not inside_transform():
            lost = ~fz.detach().isfinite().all(1)
            self._lost = lost if bool(lost.any()) else None

    def _guarded(self, z: Tensor) -> Tensor:
        with guard_rows(self._lost, self.columns):
            return self.phi(z)


@contextmanager
def _naming_gmres(z: Tensor) -> Iterator[None]:
    """Say which solver to take where J of each sample of z, (B, D), cannot be had."""
    samples, size = z.shape
    needed, cure = samples * size**2 * z.itemsize, 'choose Newton(linear="gmres"), which needs none'
    too_large = RuntimeError(
        f"the Jacobians of {samples} samples of {size} numbers take {needed} bytes "
        f"({needed / 2**30:.3g} GiB), more than there is: {cure}"
    )
    if z.device.type == "cpu" and needed > _physical_memory():
        raise too_large
    try:
        yield
    except RuntimeError as error:
        if _is_out_of_memory(error):
            raise too_large from error
        if size <= MAX_SINGLE_PASSES:
            raise
        raise RuntimeError(
            f"phi has no Jacobian by one batched backward pass ({error}), and {size} single ones "
            f"would take too long: {cure}"
        ) from error


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


def _physical_memory() -> float:
    """Return bytes of this machine, inf where it does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return float("inf")


def linearize(phi: MatrixMap, z: Tensor) -> Linearization:
    """Return one evaluation of phi at z, (B, D), from which its products follow."""
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        # The other kernels of attention have no second derivative.
        z = z.detach().requires_grad_()
        argument = z.clone()  # no leaf, which must not be written into
        return Linearization(phi(argument), z, argument)


def _gradient(out: Tensor, z: Tensor, u: Tensor, *, create_graph: bool = False) -> Tensor:
    if not out.requires_grad:
        return torch.zeros_like(z)
    (found,) = torch.autograd.grad(
        out, z, u, retain_graph=True, create_graph=create_graph, allow_unused=True
    )
    # Of another layout sums along rows depend on their number.
    return torch.zeros_like(z) if found is None else found.contiguous()


def batch_jacobian(phi: MatrixMap, z: Tensor) -> Tensor:
    """Return J = d phi / d z of each sample, (B, D, D), for z, (B, D); differentiable under grad
    mode.

    D vector-Jacobian products in one batched backward pass, or as many Jacobian-vector products
    inside a torch.func transform; rows of phi must be independent.
    """
    if inside_transform():
        # Not torch.func.vjp, whose product is computed outside of its level: there an
        # autograd.Function in phi finds its tensors dead.
        rows = torch.func.vmap(lambda u: torch.func.grad(lambda z: (phi(z) * u).sum())(z))
        return rows(_units(z)).transpose(0, 1)
    tracking = torch.is_grad_enabled()
    with torch.enable_grad():
        # An alias, since phi may close over z itself or over what was computed from it.
        z = z.view_as(z) if tracking and z.requires_grad else z.detach().requires_grad_()
        fz = phi(z)
    return batch_vjp_of_units(fz, z, create_graph=tracking)


def batch_vjp_of_units(fz: Tensor, z: Tensor, *, create_graph: bool = False) -> Tensor:
    """Return J of each sample, (B, D, D), from a graph that leads from z to fz, both (B, D)."""
    rows, size = z.shape
    zero = z.new_zeros(rows, size, size)
    if not fz.requires_grad or size == 0:
        return zero
    try:
        with _no_nan_checks():
            jacobian = _vjp(fz, z, _units(z), batched=True, create_graph=create_graph)
    except RuntimeError as error:
        if size > MAX_SINGLE_PASSES or _is_out_of_memory(error):
            raise
        # An operation of phi has no rule for batched backward passes, as sparse products.
        found = [_vjp(fz, z, unit, create_graph=create_graph) for unit in _units(z)]
        jacobian = None if found[0] is None else torch.stack([x for x in found if x is not None])
    return zero if jacobian is None else jacobian.transpose(0, 1)


def _vjp(
    fz: Tensor, z: Tensor, u: Tensor, *, batched: bool = False, create_graph: bool = False
) -> Tensor | None:
    """Return J^T u, or that of several u, (n, B, D); None where fz does not depend on z."""
    (found,) = torch.autograd.grad(
        fz,
        z,
        u,
        is_grads_batched=batched,
        allow_unused=True,
        retain_graph=True,
        create_graph=create_graph,
    )
    return found


@contextmanager
def _no_nan_checks() -> Iterator[None]:
    """Leave out the search for NaN of `detect_anomaly`, which reads numbers of a batched pass."""
    if not torch.is_anomaly_enabled():
        yield
        return
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        yield


def _units(z: Tensor) -> Tensor:
    """Return the unit vectors for the rows of z, (B, D): (D, B, D)."""
    rows, size = z.shape
    return torch.eye(size, dtype=z.dtype, device=z.device).unsqueeze(1).expand(size, rows, size)
