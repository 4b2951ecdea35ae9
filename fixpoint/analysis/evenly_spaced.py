"""Rows or time steps that stand for all."""

from __future__ import annotations

import torch
from torch import Tensor


def evenly_spaced(total: int, count: int) -> Tensor:
    """Spread at most `count` indices over 0 to `total` - 1, the first and the last included, int64.

    Example:
        >>> from fixpoint.analysis import evenly_spaced
        >>> evenly_spaced(9, 3).tolist(), evenly_spaced(2, 3).tolist()
        ([0, 4, 8], [0, 1])
    """
    return torch.linspace(0, total - 1, min(total, count), dtype=torch.float64).round().long()
