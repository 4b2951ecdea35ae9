"""The residual of each sample, and whether it is finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Norm = Callable[[Tensor], Tensor]
"""Size of each sample: (B, D) -> (B,)."""


class Residuals(NamedTuple):
    """Norms of phi(z) - z and phi(z), their tolerance and their quotient, (B,) each."""

    residual: Tensor
    size: Tensor
    scale: Tensor
    r: Tensor


class ResidualNorm:
    """Measures states like z, (B, D): r = |phi(z) - z| / (atol + rtol |phi(z)|).

    With rtol = atol = 0 it is |phi(z) - z| / |phi(z)|. |.| is the RMS, or `norm`.
    """

    def __init__(self, z: Tensor, *, rtol: float, atol: float, norm: Norm | None = None) -> None:
        self.norm = norm
        self.dtype = torch.promote_types(z.dtype, torch.float32)
        self.smallest_safe = smallest_safe_norm(self.dtype)
        if not (rtol > 0 or atol > 0):
            rtol = 1.0
        if norm is None:  # RMS on both sides: the factor 1 / sqrt(D) moves to atol
            atol *= z.shape[1] ** 0.5
        # As tensors: to make one of a Python number takes longer than the product.
        scalar = torch.float32 if z.device.type == "mps" else torch.float64
        self.rtol = torch.tensor(rtol, dtype=scalar)
        self.atol = torch.tensor(atol, dtype=scalar) if atol > 0 else None

    def measure(self, z: Tensor, fz: Tensor, dtype: torch.dtype | None = None) -> Residuals:
        """In the dtype of z, at least float32, or in another."""
        if fz.requires_grad or z.requires_grad:
            z, fz = z.detach(), fz.detach()
        dtype, change = dtype or self.dtype, fz - z
        if self.norm is None:
            residual = torch.linalg.vector_norm(change, dim=1, dtype=dtype)
            size = torch.linalg.vector_norm(fz, dim=1, dtype=dtype)
        else:
            residual, size = self.norm(change).to(dtype), self.norm(fz).to(dtype)
        scale = size * self.rtol
        if self.atol is not None:
            scale = scale + self.atol
        return Residuals(residual, size, scale, residual / scale)

    def measure_masked(self, measured: Residuals, z: Tensor, fz: Tensor) -> tuple[Tensor, Tensor]:
        """Residuals r, never inf, and whether z and fz are finite, (B,) each.

        Squares of float32 numbers as small as 1e-30 or as large as 1e30 leave float32: such
        samples are measured once more in float64, and only they, so that what is measured of a
        sample does not depend on its batch-mates.
        """
        finite = measured.residual + measured.size < torch.inf
        exact = (measured.scale >= self.smallest_safe) & finite
        wide = self.measure(z, fz, self.rtol.dtype)
        finite = wide.residual + wide.size < torch.inf  # False for NaN; cheaper than isfinite
        scale = torch.maximum(wide.scale, torch.finfo(self.dtype).tiny * wide.residual)
        r = wide.residual / scale.clamp_min(torch.finfo(scale.dtype).tiny)
        return torch.where(exact, measured.r, r.to(self.dtype)), finite

    def measure_once(self, z: Tensor, fz: Tensor) -> tuple[Tensor, Tensor]:
        """Residuals r of one evaluation, never inf, and whether z and fz are finite, (B,) each."""
        return self.measure_masked(self.measure(z, fz), z, fz)


def smallest_safe_norm(dtype: torch.dtype) -> float:
    """Least 2-norm whose square keeps all its digits in this dtype."""
    return math.sqrt(torch.finfo(dtype).tiny / torch.finfo(dtype).eps)
