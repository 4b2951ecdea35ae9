"""Rows that belong together as one sample: the nodes of each graph of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from fixpoint._torch import to_host

REMEDY = (
    "number them 0 .. G - 1, each with a row, as torch.unique(groups, return_inverse=True)[1] does"
)


class Groups:
    """Rows, (N, d), that are one sample each, as (G, S d), S the size of the largest.

    A smaller group ends with zeros, whose residual is 0: norms, inner products and spans are those
    of the group alone.

    Attributes:
        number: of the group of each row, (N,).
        sizes: rows of each group, (G,).

    Args:
        groups: numbers 0 .. G - 1, (N,) of an integer dtype, in any order.
        rows: N.

    Raises:
        TypeError: groups is not a tensor of integers.
        ValueError: it has another shape than (N,), or a number is negative or missing.
    """

    def __init__(self, groups: Tensor, rows: int, device: torch.device) -> None:
        number = _checked(groups, rows).astype(np.int64)
        self.sizes = np.bincount(number)
        if not self.sizes.all():
            missing = int(self.sizes.argmin())
            raise ValueError(
                f"groups must have a row for each number; none has {missing}: {REMEDY}"
            )
        self.largest = int(self.sizes.max(initial=0))
        order = number.argsort(kind="stable")
        first = self.sizes.cumsum() - self.sizes
        slot = np.empty_like(number)
        slot[order] = number[order] * self.largest + np.arange(rows) - first[number[order]]
        self.number, self.slot = (torch.from_numpy(x).to(device) for x in (number, slot))

    def join(self, x: Tensor) -> Tensor:
        """Return rows, (N, d), as samples, (G, S d)."""
        padded = x.new_zeros(len(self.sizes) * self.largest, x.shape[1])
        return padded.index_copy(0, self.slot, x).view(len(self.sizes), self.largest * x.shape[1])

    def split(self, z: Tensor) -> Tensor:
        """Return samples, (..., G, S d), as rows, (..., N, d)."""
        width = z.shape[-1] // max(self.largest, 1)
        rows = len(self.sizes) * self.largest
        return z.reshape(*z.shape[:-2], rows, width).index_select(-2, self.slot)

    def fill(self, columns: Sequence[int]) -> np.ndarray:
        """Count the numbers of each leaf without the zeros that end a group, (G, leaves)."""
        return np.outer(self.sizes, np.array(columns) // max(self.largest, 1))


class Columns(tuple[int, ...]):
    """Numbers of each leaf of a sample, and the groups whose rows make the samples."""

    groups: Groups

    def __new__(cls, columns: Iterable[int], groups: Groups) -> Columns:
        self = super().__new__(cls, columns)
        self.groups = groups
        return self


def groups_of(columns: Sequence[int]) -> Groups | None:
    """Return the groups whose rows make the samples, if any."""
    return columns.groups if isinstance(columns, Columns) else None


def _checked(groups: Tensor, rows: int) -> np.ndarray:
    if not isinstance(groups, Tensor):
        raise TypeError(f"groups must be a tensor of integers, (N,); got {groups!r}")
    if groups.dtype.is_floating_point or groups.dtype.is_complex or groups.dtype == torch.bool:
        raise TypeError(f"groups must be a tensor of integers, as int64; got {groups.dtype}")
    if groups.shape != (rows,):
        raise ValueError(
            f"groups needs a number for each of the {rows} rows of z0, shape ({rows},); got "
            f"{tuple(groups.shape)}"
        )
    number = to_host(groups)
    if rows and (number.min() < 0 or number.max() >= rows):
        raise ValueError(
            f"groups of {rows} rows must be from 0 to {rows - 1}; got {number.min()} to "
            f"{number.max()}: {REMEDY}"
        )
    return number
