"""Derivatives of a map at a point, for the whole batch at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fixpoint._torch import inside_transform

MatrixMap = Callable[[Tensor], Tensor]


class Derivatives:
    """Jacobian J = d phi / d z of a map of (B, D) states with independent rows.

    Attributes:
        products: Jacobian-vector products made so far, for the whole batch; a Jacobian is D.
        evaluations: calls of phi made to build Jacobians.
    """

    def __init__(self, phi: MatrixMap) -> None:
        self.phi = phi
        self.products = 0
        self.evaluations = 0

    def jacobian(self, z: Tensor) -> Tensor:
        """J of each sample, (B, D, D)."""
        self.products += z.shape[1]
        self.evaluations += 1
        return batch_jacobian(self.phi, z)

    def jvp(self, z: Tensor, v: Tensor) -> Tensor:
        """J v of each sample, (B, D)."""
        self.products += 1
        # A dual number takes no expanded tensor.
        return torch.func.jvp(self.phi, (z.contiguous(),), (v.contiguous(),))[1]


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
        if not (tracking and z.requires_grad):
            z = z.detach().requires_grad_()
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
