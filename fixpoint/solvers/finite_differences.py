"""Derivatives of maps that autograd cannot see through."""

from __future__ import annotations

import torch
from torch import Tensor

from fixpoint.derivatives import Derivatives, MatrixMap


class FiniteDifferences(Derivatives):
    """Derivatives by central differences, (phi(z + h v) - phi(z - h v)) / 2h.

    Exact up to rounding where phi is affine, as an adjoint map is. A Jacobian takes 2 D + 1
    evaluations, a product 3.
    """

    def evaluate(self, z: Tensor) -> Tensor:
        """Return phi(z), (B, D)."""
        return self.phi(z)

    def jacobian(self, z: Tensor) -> Tensor:
        """Return J of each sample, (B, D, D)."""
        h = self._step(z)
        units = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
        return torch.stack([self._difference(z, h * unit) / h for unit in units], 2)

    def jvp(self, z: Tensor, v: Tensor) -> Tensor:
        """Return J v of each sample, (B, D)."""
        size = _rms(v)
        h = self._step(z) / torch.where(size > 0, size, 1.0)
        return self._difference(z, h * v) / h

    def _step(self, z: Tensor) -> Tensor:
        """Return eps^(1/3) times the size of z or phi(z), the larger one, (B, 1)."""
        self.evaluations += 1
        size = torch.maximum(_rms(z), _rms(self.phi(z)))
        return torch.finfo(z.dtype).eps ** (1 / 3) * torch.where(size > 0, size, 1.0)

    def _difference(self, z: Tensor, step: Tensor) -> Tensor:
        self.evaluations += 2
        return (self.phi(z + step) - self.phi(z - step)) / 2


def derivatives_of(phi: MatrixMap, z: Tensor) -> Derivatives:
    """Return derivatives by autograd where it leads from z, (B, D), to phi(z), else by differences.

    An adjoint map is built of ready gradients, whose own graph is gone: autograd would take its
    J for zero. One evaluation finds out.
    """
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        fz = phi(z)
        found = fz.requires_grad and torch.autograd.grad(fz.sum(), z, allow_unused=True)[0]
    derivatives = Derivatives(phi) if isinstance(found, Tensor) else FiniteDifferences(phi)
    derivatives.evaluations += 1
    return derivatives


def _rms(x: Tensor) -> Tensor:
    return x.square().mean(1, keepdim=True).sqrt()
