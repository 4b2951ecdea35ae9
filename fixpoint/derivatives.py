"""Derivatives of a map at a point, for the whole batch at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fixpoint._torch import inside_transform

MatrixMap = Callable[[Tensor], Tensor]


class Linearization:
    """J = d fz / d z of each sample from one graph that leads from z to fz, both (B, D)."""

    def __init__(self, fz: Tensor, z: Tensor) -> None:
        self.fz, self.z = fz, z
        self._reverse: tuple[Tensor, Tensor] | None = None

    def jacobian(self) -> Tensor:
        """J, (B, D, D)."""
        return batch_vjp_of_units(self.fz, self.z)

    def vjp(self, u: Tensor) -> Tensor:
        """J^T u, (B, D)."""
        return _gradient(self.fz, self.z, u)

    def jvp(self, v: Tensor) -> Tensor:
        """J v, (B, D): J^T u is linear in u, and J v its derivative.

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

    Attributes:
        products: Jacobian-vector products made so far, for the whole batch; a Jacobian is D.
        evaluations: calls of phi made to linearize it, one at each z.
    """

    def __init__(self, phi: MatrixMap) -> None:
        self.phi = phi
        self.products = 0
        self.evaluations = 0
        self._last: tuple[Tensor, Linearization] | None = None

    def jacobian(self, z: Tensor) -> Tensor:
        """J of each sample, (B, D, D)."""
        self.products += z.shape[1]
        self.evaluations += 1
        return batch_jacobian(self.phi, z)

    def jvp(self, z: Tensor, v: Tensor) -> Tensor:
        """J v of each sample, (B, D); products at one z share one evaluation of phi."""
        self.products += 1
        if self._last is None or self._last[0] is not z:
            self._last = z, linearize(self.phi, z)
            self.evaluations += 1
        return self._last[1].jvp(v)


def linearize(phi: MatrixMap, z: Tensor) -> Linearization:
    """One evaluation of phi at z, (B, D), from which its products follow."""
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        # The other kernels of attention have no second derivative.
        z = z.detach().clone().requires_grad_()
        return Linearization(phi(z), z)


def _gradient(out: Tensor, z: Tensor, u: Tensor, *, create_graph: bool = False) -> Tensor:
    if not out.requires_grad:
        return torch.zeros_like(z)
    (found,) = torch.autograd.grad(
        out, z, u, retain_graph=True, create_graph=create_graph, allow_unused=True
    )
    return torch.zeros_like(z) if found is None else found


def batch_jacobian(phi: MatrixMap, z: Tensor) -> Tensor:
    """J = d phi / d z of each sample, (B, D, D), for z, (B, D); differentiable under grad mode.

    D vector-Jacobian products in one batched backward pass, or as many Jacobian-vector products
    inside a torch.func transform; rows of phi must be independent.
    """
    if inside_transform():
        units = _units(z)
        columns = torch.func.vmap(lambda v: torch.func.jvp(phi, (z,), (v,))[1])(units)
        return columns.permute(1, 2, 0)
    tracking = torch.is_grad_enabled()
    with torch.enable_grad():
        # An alias, since phi may close over z itself or over what was computed from it.
        z = z.view_as(z) if tracking and z.requires_grad else z.detach().requires_grad_()
        fz = phi(z)
    return batch_vjp_of_units(fz, z, create_graph=tracking)


def batch_vjp_of_units(fz: Tensor, z: Tensor, *, create_graph: bool = False) -> Tensor:
    """J of each sample, (B, D, D), from a graph that leads from z to fz, both (B, D)."""
    rows, size = z.shape
    zero = z.new_zeros(rows, size, size)
    if not fz.requires_grad or size == 0:
        return zero
    (jacobian,) = torch.autograd.grad(
        fz,
        z,
        _units(z),
        is_grads_batched=True,
        allow_unused=True,
        retain_graph=True,
        create_graph=create_graph,
    )
    return zero if jacobian is None else jacobian.transpose(0, 1)


def _units(z: Tensor) -> Tensor:
    """Unit vectors for the rows of z, (B, D): (D, B, D)."""
    rows, size = z.shape
    return torch.eye(size, dtype=z.dtype, device=z.device).unsqueeze(1).expand(size, rows, size)
