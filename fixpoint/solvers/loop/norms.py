"""The norms that a solve is measured by, of each sample or of each leaf of its tree."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fixpoint._groups import groups_of
from fixpoint._torch import autocast_enabled, to_host

Norm = Callable[[Tensor], Tensor]
"""Size of each sample: (B, D) -> (B,)."""
Test = Callable[[Tensor, Tensor], Tensor]
"""Whether each sample may end at z with phi(z): (B, D), (B, D) -> (B,) bool."""
Stop = Literal["each", "all"] | float
"""When a batch ends; see `IterativeSolver`."""


class Tolerance(NamedTuple):
    """Divisor of a residual, atol + rtol |phi(z)|, and the norm.

    leaf_atol: takes the place of atol, one for each leaf of a tree.
    relative_atol: whether atol is in units of the state's own scale where that is below 1.
    """

    rtol: float
    atol: float
    norm: Norm | None = None
    leaf_atol: Sequence[float] | None = None
    relative_atol: bool = False


class Norms:
    """Sizes of states like z, (B, D): 2-norms, of each leaf where the state is a tree, or `norm`.

    Attributes:
        rtol, atol: as they apply to these sizes; atol is a number, or one for each leaf, (L,).
            Where there is no tolerance, rtol is 1: residuals are relative to phi(z).
        unit: the size of a state of ones, by which an RMS differs from the 2-norm. Where samples
            are groups of rows, atol and unit have an axis of samples in front.
        eps: relative spacing of the numbers that phi computes with.
        safe: least size whose square keeps all its digits in the dtype of the norms.

    Args:
        z: a state.
        tolerance: of the solver.
        columns: numbers of each leaf of a tree.

    Raises:
        ValueError: leaf_atol has not one value for each leaf.
    """

    def __init__(self, z: Tensor, tolerance: Tolerance, columns: Sequence[int] = ()) -> None:
        self.norm, leaf_atol = tolerance.norm, tolerance.leaf_atol
        groups = groups_of(columns)
        columns = columns or (z.shape[1],)
        if leaf_atol is not None and len(leaf_atol) != len(columns):
            raise ValueError(
                f"leaf_atol needs one value for each tensor of z0, {len(columns)}; got "
                f"{len(leaf_atol)}"
            )
        self.dtype = torch.promote_types(z.dtype, torch.float32)
        self.numpy_dtype = np.float32 if self.dtype == torch.float32 else np.float64
        self.wide = torch.float32 if z.device.type == "mps" else torch.float64
        self.eps = resolution(z)
        self.safe = smallest_safe_norm(self.dtype)
        self.columns = list(columns) if len(columns) > 1 and self.norm is None else None
        measures = tolerance.rtol > 0 or tolerance.atol > 0 or any(leaf_atol or ())
        self.rtol = tolerance.rtol if measures else 1.0
        self.atol: Any = tolerance.atol
        self.unit: Any = 1.0
        if self.columns is not None:
            self.atol = np.array(
                [tolerance.atol] * len(columns) if leaf_atol is None else leaf_atol
            )
            self.unit = np.sqrt(np.maximum(columns if groups is None else groups.fill(columns), 1))
        elif leaf_atol is not None:
            self.atol = leaf_atol[0]
        if self.norm is None:  # RMS on both sides: the factor 1 / sqrt(D) moves to atol
            if self.columns is None:
                self.unit = math.sqrt(max(columns[0], 1))
                if groups is not None:
                    self.unit = np.sqrt(np.maximum(groups.fill(columns)[:, 0], 1))
            self.atol = self.atol * self.unit
        self.relative_atol = tolerance.relative_atol and leaf_atol is None

    def on(self, device: torch.device) -> Norms:
        """Return these norms with tensors for what depends on D and for NumPy arrays."""
        other = copy.copy(self)

        def tensor(x: Any) -> Tensor:
            if self.columns is None:  # D may be a symbol, and x a function of it
                return torch.scalar_tensor(x, dtype=self.dtype, device=device)
            return torch.tensor(list(x), dtype=self.dtype, device=device)

        other.atol, other.unit = tensor(self.atol), tensor(self.unit)
        return other

    def size(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the norm of each sample, (B,), or of each of its leaves, (B, leaves)."""
        if self.norm is not None:
            return self.norm(x).to(dtype)
        if self.columns is None:
            return torch.linalg.vector_norm(x, dim=1, dtype=dtype)
        leaves = x.split(self.columns, dim=1)
        return torch.stack([torch.linalg.vector_norm(y, dim=1, dtype=dtype) for y in leaves], 1)

    def measure(
        self,
        z: Tensor,
        fz: Tensor,
        *others: Tensor,
        atol: Any = None,
        least_atol: float = 0.0,
        flags: Sequence[Tensor] = (),
    ) -> np.ndarray:
        """Return sizes of phi(z) - z, phi(z) and other states, and flags, on the host by one read.

        Squares of float32 numbers as small as 1e-30 or as large as 1e30 leave float32: such
        samples are measured once more in float64, and only they, so that what is measured of a
        sample does not depend on its batch-mates.

        Args:
            z, fz, others: (B, D).
            atol: the absolute tolerance in force, None at a start; the least size that is compared
                depends on it.
            least_atol: the smallest number of it.
            flags: (B,) bool each.

        Returns:
            (2 + others + flags, B), or (.., B, leaves), float64.
        """
        z, fz = z.detach(), fz.detach()
        states = (fz - z, fz, *others)
        sizes = self._read(states, self.dtype, flags)
        if self._are_safe(sizes, least_atol):
            return sizes
        if atol is None:  # one relative to the scale of the state, which is not known yet, is 0
            atol = 0.0 if self.relative_atol else self.atol
        with np.errstate(all="ignore"):
            scale = self.rtol * sizes[1] + atol
            exact = (scale >= self.safe) & (sizes[0] + sizes[1] < np.inf)
        if not exact.all():
            sizes = np.where(exact, sizes, self._read(states, self.wide, flags))
        return sizes

    def _are_safe(self, sizes: np.ndarray, least_atol: float) -> bool:
        """Tell whether no size is one whose square has left the dtype of the norms."""
        if sizes[0].size == 1:  # Python's numbers are faster than arrays of one
            numbers = sizes.ravel().tolist()
            return self.rtol * min(numbers[1], 1.0) + least_atol >= self.safe and (
                sum(numbers) < math.inf
            )
        least = self.rtol * sizes[1].min(initial=1.0) + least_atol
        return bool(least >= self.safe and sizes.max(initial=0.0) < np.inf)

    def _sizes(self, states: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        return [self.size(x, dtype) for x in states]

    def _read(
        self, states: Sequence[Tensor], dtype: torch.dtype, flags: Sequence[Tensor]
    ) -> np.ndarray:
        sizes = self._sizes(states, dtype)
        for flag in flags:
            sizes.append(flag.view(-1, *(1,) * (sizes[0].dim() - 1)).to(dtype).expand_as(sizes[0]))
        return to_host(torch.stack(sizes)).astype(np.float64)


def checked_test(accepts: Tensor, z: Tensor) -> Tensor:
    """Return what `stop_when` has returned for states z, (B, D), if it is of the right kind."""
    if not isinstance(accepts, Tensor) or accepts.dtype != torch.bool or accepts.dim() != 1:
        raise TypeError(f"stop_when must return a bool for each sample, (B,); got {accepts!r}")
    if len(accepts) != len(z):
        raise ValueError(
            f"stop_when must return a bool for each of {len(z)} samples; got {len(accepts)}"
        )
    return accepts


def resolution(z: Tensor) -> float:
    """Return relative spacing of the numbers that phi computes with, which autocast may lower."""
    eps = torch.finfo(z.dtype).eps
    if autocast_enabled(z.device.type):
        eps = max(eps, torch.finfo(torch.get_autocast_dtype(z.device.type)).eps)
    return eps


def smallest_safe_norm(dtype: torch.dtype) -> float:
    """Return the least 2-norm whose square keeps all its digits in this dtype."""
    return math.sqrt(torch.finfo(dtype).tiny / torch.finfo(dtype).eps)


class LoopOptions(Protocol):
    """Options of any loop, on the host or in a graph; see `IterativeSolver`."""

    min_iter: int
    stop: Stop
    stop_when: Test | None

    @property
    def keeps_best(self) -> bool: ...
    @property
    def backtracks(self) -> bool: ...
    @property
    def restarts(self) -> bool: ...
    @property
    def tolerance(self) -> Tolerance: ...
