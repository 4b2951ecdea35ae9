"""Derivatives of a map at a point, for the whole batch at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def batch_jacobian(phi: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """J = d phi / d z of each sample, (B, D, D), for z, (B, D); not differentiable.

    D vector-Jacobian products in one batched backward pass; rows of phi must be independent.
    """
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        fz = phi(z)
    rows, size = z.shape
    if not fz.requires_grad:
        return z.new_zeros(rows, size, size)
    units = torch.eye(size, dtype=z.dtype, device=z.device).unsqueeze(1).expand(size, rows, size)
    (jacobian,) = torch.autograd.grad(fz, z, units, is_grads_batched=True, allow_unused=True)
    return z.new_zeros(rows, size, size) if jacobian is None else jacobian.transpose(0, 1)
