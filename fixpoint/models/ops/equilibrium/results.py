"""Results of the solves of an equilibrium through time."""

from __future__ import annotations

from functools import total_ordering
from typing import Any, cast

import torch
from torch import Tensor

from fixpoint.models.ops.equilibrium.arguments import Ending, Report
from fixpoint.solution import Solution


def new_report(T: int, h: Tensor) -> Report:
    B, at_least_float32 = len(h), torch.promote_types(h.dtype, torch.float32)
    return Report(
        torch.empty(T, B, dtype=torch.int64, device=h.device),
        torch.empty(T, B, dtype=at_least_float32, device=h.device),
        torch.empty(T, B, dtype=torch.int8, device=h.device),
    )


def as_solution(z: Tensor, end: Ending, *, linearizations: int = 0) -> Solution:
    """Return all time steps as one `Solution`, its per-sample tensors (T, B).

    linearizations: calls of phi that a loop over whole batches makes for J in each update.
    """
    most = end.iterations.amax(1) if end.iterations.numel() else end.iterations.new_zeros(0)
    measured = 0 if end.residual is None else 1
    count = (most * (1 + linearizations) + measured).sum()
    evaluations = cast(int, CountOnDevice(count)) if count.is_cuda else int(count)
    return Solution(z, end.residual, end.iterations, evaluations, end.result, stall=end.stall)


@total_ordering
class CountOnDevice:
    """A whole number on a device; the host waits for it when it is asked for.

    It adds, compares and prints as an `int`.
    """

    def __init__(self, count: Tensor) -> None:
        self._count = count

    def __index__(self) -> int:
        return int(self._count)

    __int__ = __index__

    def __add__(self, other: Any) -> Any:
        if isinstance(other, int):  # as the 0 with which a sum begins
            return CountOnDevice(self._count + other)
        if isinstance(other, CountOnDevice):
            return CountOnDevice(self._count + other._count)
        return NotImplemented

    __radd__ = __add__

    def __eq__(self, other: object) -> bool:
        return int(self) == other

    def __hash__(self) -> int:
        return hash(int(self))

    def __lt__(self, other: int) -> bool:
        return int(self) < int(other)

    def __repr__(self) -> str:
        return repr(int(self))

    def __format__(self, how: str) -> str:
        return format(int(self), how)
