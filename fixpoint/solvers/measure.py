"""The residual of each sample, and whether it is finite."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fixpoint.solvers.base import IterativeSolver


class Measured(NamedTuple):
    """Norms of phi(z) - z and phi(z), their tolerance and their quotient, (B,) each."""

    residual: Tensor
    size: Tensor
    scale: Tensor
    r: Tensor

    @classmethod
    def of(cls, solver: IterativeSolver, z: Tensor, fz: Tensor, *, wide: bool = False) -> Measured:
        """In the dtype of z, at least float32, or in the widest of the device."""
        z, fz = z.detach(), fz.detach()
        dtype = _widest(z) if wide else norm_dtype(z)
        rtol, atol = (solver.rtol, solver.atol) if solver.has_tolerance else (1.0, 0.0)
        if solver.norm is not None:
            residual, size = solver.norm(fz - z).to(dtype), solver.norm(fz).to(dtype)
        else:
            residual = torch.linalg.vector_norm(fz - z, dim=1, dtype=dtype)
            size = torch.linalg.vector_norm(fz, dim=1, dtype=dtype)
            # Both sides of the test are RMS: the factor 1 / sqrt(D) moves to atol.
            atol = atol * z.shape[1] ** 0.5
        scale = size * rtol
        if atol > 0:
            scale = scale + atol
        return cls(residual, size, scale, residual / scale)

    def closely(self, solver: IterativeSolver, z: Tensor, fz: Tensor) -> tuple[Tensor, Tensor]:
        """Residuals r, never inf, and whether z and fz are finite, (B,) each.

        Squares of float32 numbers as small as 1e-30 or as large as 1e30 leave float32: such
        samples are measured once more in float64, and only they, so that what is measured of a
        sample does not depend on its batch-mates.
        """
        narrow = self.r.dtype
        exact = (self.scale >= least_exact_norm(narrow)) & (self.residual + self.size < torch.inf)
        wide = Measured.of(solver, z, fz, wide=True)
        finite = wide.residual + wide.size < torch.inf  # False for NaN; cheaper than isfinite
        scale = torch.maximum(wide.scale, torch.finfo(narrow).tiny * wide.residual)
        r = wide.residual / scale.clamp_min(torch.finfo(scale.dtype).tiny)
        return torch.where(exact, self.r, r.to(narrow)), finite


def measure(solver: IterativeSolver, z: Tensor, fz: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled residual of each sample, (B,), never inf, and whether z and fz are finite."""
    return Measured.of(solver, z, fz).closely(solver, z, fz)


def least_exact_norm(dtype: torch.dtype) -> float:
    """Least 2-norm whose square keeps all its digits in this dtype."""
    return math.sqrt(torch.finfo(dtype).tiny / torch.finfo(dtype).eps)


def norm_dtype(z: Tensor) -> torch.dtype:
    return torch.promote_types(z.dtype, torch.float32)


def _widest(z: Tensor) -> torch.dtype:
    return torch.float32 if z.device.type == "mps" else torch.float64
