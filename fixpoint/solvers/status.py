"""How the solve of each sample ends: the one rule for STALLED, and the result codes."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from fixpoint.solution import Result, Stall

MIN_UPDATES = 10
"""A solve of fewer updates is not called stalled for its residuals."""


T = TypeVar("T", int, Tensor)


def has_stalled(best_update: T, updates: int) -> T:
    """Whether the smallest residual, reached after `best_update` updates, lies in the first half
    of at least ten `updates`, (B,)."""
    return (best_update <= updates // 2) & (updates >= MIN_UPDATES)


def classify(r: Tensor, *, nonfinite: Tensor, stall: Tensor) -> tuple[Tensor, Tensor]:
    """`Result` and `Stall` codes, (B,) int8 each, of a solve to a tolerance.

    Args:
        r: scaled residual of each sample.
        nonfinite: samples that were lost to NaN or inf.
        stall: why a sample without a solution made no progress, 0 where it did.
    """
    stall = torch.where((r <= 1) | nonfinite, int(Stall.NONE), stall)
    result = torch.where(stall > 0, int(Result.STALLED), int(Result.MAX_ITER))
    result = torch.where(r <= 1, int(Result.CONVERGED), result)
    result = torch.where(nonfinite, int(Result.NONFINITE), result)
    return result.to(torch.int8), stall.to(torch.int8)
