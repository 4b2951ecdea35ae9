"""The residual of each sample, and whether it is finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

Norm = Callable[[Tensor], Tensor]
"""Size of each sample: (B, D) -> (B,)."""


class Tolerance(NamedTuple):
    """What a residual is divided by, atol + rtol |phi(z)|, and the norm.

    leaf_atol: takes the place of atol, one for each leaf of a tree.
    """

    rtol: float
    atol: float
    norm: Norm | None = None
    leaf_atol: Sequence[float] | None = None


class Residuals(NamedTuple):
    """Norms of phi(z) - z and phi(z) and their tolerance, (B,) or (B, leaves), and the largest
    quotient of each sample, (B,)."""

    residual: Tensor
    size: Tensor
    scale: Tensor
    r: Tensor


class ResidualNorm:
    """Measures states like z, (B, D): r = |phi(z) - z| / (atol + rtol |phi(z)|).

    With rtol = atol = 0 it is |phi(z) - z| / |phi(z)|. |.| is the RMS, of each leaf where the
    state is a tree, or `norm`, of the whole state.

    Args:
        z: a state.
        tolerance: of the solver.
        columns: numbers of each leaf of a tree.

    Raises:
        ValueError: leaf_atol has not one value for each leaf.
    """

    def __init__(self, z: Tensor, tolerance: Tolerance, columns: Sequence[int] = ()) -> None:
        rtol, atol, self.norm, leaf_atol = tolerance
        columns = columns or (z.shape[1],)
        if leaf_atol is not None and len(leaf_atol) != len(columns):
            raise ValueError(
                f"leaf_atol needs one value for each tensor of z0, {len(columns)}; got "
                f"{len(leaf_atol)}"
            )
        self.dtype = torch.promote_types(z.dtype, torch.float32)
        self.smallest_safe = smallest_safe_norm(self.dtype)
        self.eps = resolution(z)
        atols = [atol] * len(columns) if leaf_atol is None else list(leaf_atol)
        if not (rtol > 0 or max(atols) > 0):
            rtol = 1.0
        if self.norm is None:  # RMS on both sides: the factor 1 / sqrt(D) moves to atol
            atols = [a * d**0.5 for a, d in zip(atols, columns, strict=True)]
        self.safe_size = least_safe_size(self.smallest_safe, rtol, min(atols))
        # As tensors: to make one of a Python number takes longer than the product.
        scalar = torch.float32 if z.device.type == "mps" else torch.float64
        self.columns = list(columns) if len(columns) > 1 and self.norm is None else None
        self.rtol = torch.tensor(rtol, dtype=scalar)
        self.atol: Tensor | None = None
        if max(atols) > 0:
            values = atols if self.columns else atols[0]
            self.atol = torch.tensor(values, dtype=self.dtype if self.columns else scalar)
            if self.columns:
                self.atol = self.atol.to(z.device)

    def measure(self, z: Tensor, fz: Tensor, dtype: torch.dtype | None = None) -> Residuals:
        """In the dtype of z, at least float32, or in another."""
        if fz.requires_grad or z.requires_grad:
            z, fz = z.detach(), fz.detach()
        dtype = dtype or self.dtype
        residual, size = self.size(fz - z, dtype), self.size(fz, dtype)
        scale = size * self.rtol
        if self.atol is not None:
            scale = scale + self.atol
        return Residuals(residual, size, scale, self._largest(residual, scale))

    def size(self, z: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Norm of each sample, (B,), or of each of its leaves, (B, leaves)."""
        dtype = dtype or self.dtype
        if self.norm is not None:
            return self.norm(z).to(dtype)
        if self.columns is None:
            return torch.linalg.vector_norm(z, dim=1, dtype=dtype)
        leaves = z.split(self.columns, dim=1)
        return torch.stack([torch.linalg.vector_norm(x, dim=1, dtype=dtype) for x in leaves], 1)

    def _largest(self, residual: Tensor, scale: Tensor) -> Tensor:
        """The largest quotient of each sample, (B,)."""
        if self.columns is None:
            return residual / scale
        # A leaf without numbers, or at rest at 0, is solved.
        return torch.where(residual == 0, residual, residual / scale).amax(1)

    def level(self, measured: Residuals) -> Tensor:
        """Residual in units of the rounding of phi(z), (B,), of the leaves above tolerance."""
        level = measured.residual / (self.eps * measured.size)
        if self.columns is None:
            return level
        return torch.where(measured.residual > measured.scale, level, 0.0).amax(1)

    def measure_masked(self, measured: Residuals, z: Tensor, fz: Tensor) -> tuple[Tensor, Tensor]:
        """Residuals r, never inf, and whether z and fz are finite, (B,) each.

        Squares of float32 numbers as small as 1e-30 or as large as 1e30 leave float32: such
        samples are measured once more in float64, and only they, so that what is measured of a
        sample does not depend on its batch-mates.
        """
        exact = measured.scale >= self.smallest_safe
        exact = exact & (measured.residual + measured.size < torch.inf)
        wide = self.measure(z, fz, self.rtol.dtype)
        finite = wide.residual + wide.size < torch.inf  # False for NaN; cheaper than isfinite
        if self.columns is not None:
            exact, finite = exact.all(1), finite.all(1)
        scale = torch.maximum(wide.scale, torch.finfo(self.dtype).tiny * wide.residual)
        r = self._largest(wide.residual, scale.clamp_min(torch.finfo(scale.dtype).tiny))
        return torch.where(exact, measured.r, r.to(self.dtype)), finite

    def measure_once(self, z: Tensor, fz: Tensor) -> tuple[Tensor, Tensor]:
        """Residuals r of one evaluation, never inf, and whether z and fz are finite, (B,) each."""
        return self.measure_masked(self.measure(z, fz), z, fz)


def any_leaf(condition: Tensor) -> Tensor:
    """Whether it holds for a leaf of the sample, (B,), from (B,) or (B, leaves)."""
    return condition if condition.dim() == 1 else condition.any(1)


def resolution(z: Tensor) -> float:
    """Relative spacing of the numbers that phi computes with, which autocast may lower."""
    eps = torch.finfo(z.dtype).eps
    if torch.is_autocast_enabled(z.device.type):
        eps = max(eps, torch.finfo(torch.get_autocast_dtype(z.device.type)).eps)
    return eps


def least_safe_size(smallest_safe: float, rtol: float, atol: float) -> float:
    """Size of phi(z) from which on its tolerance is safe in this dtype, whatever the rounding."""
    missing = smallest_safe * (1 + 1e-5) - atol * (1 - 1e-5)
    if rtol > 0:
        return missing / rtol
    return math.inf if missing > 0 else 0.0


@cache
def smallest_safe_norm(dtype: torch.dtype) -> float:
    """Least 2-norm whose square keeps all its digits in this dtype."""
    return math.sqrt(torch.finfo(dtype).tiny / torch.finfo(dtype).eps)
