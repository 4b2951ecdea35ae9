"""How the solves of an equilibrium through time ended."""

from __future__ import annotations

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
    """All time steps as one `Solution`, its per-sample tensors (T, B).

    linearizations: calls of phi that a loop over whole batches makes for J in each update.
    """
    most = end.iterations.amax(1) if end.iterations.numel() else end.iterations.new_zeros(0)
    measured = 0 if end.residual is None else 1
    evaluations = int((most * (1 + linearizations) + measured).sum())
    return Solution(z, end.residual, end.iterations, evaluations, end.result, stall=end.stall)
