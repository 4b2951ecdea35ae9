"""The shortcut of a solve while all samples are finite: one read of the host an update.

It leaves out what only a batch with a lost or frozen sample needs, and changes no result.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fixpoint.solvers.residual import Residuals


class Summary(NamedTuple):
    """What the host reads of an update after which all samples are finite.

    improved: the residual of each unsolved sample is its smallest so far.
    least_r: the smallest scaled residual of an active sample, inf where there is none.
    done: no active sample is above its tolerance.
    within_reach: no sample is larger than its reach.
    """

    improved: bool
    least_r: float
    done: bool
    within_reach: bool


class Masks(NamedTuple):
    """Samples that the solve moves, and those whose best state it keeps, (B,) bool each.

    zero, inf: as tensors, since to make one of a Python number takes longer than its use.
    """

    active: Tensor
    unsolved: Tensor
    zero: Tensor
    inf: Tensor


def summarize(
    measured: Residuals, best_r: Tensor, reach: Tensor, masks: Masks | None, smallest_safe: float
) -> Summary | None:
    """The summary, or None where a sample is not finite or has to be measured in float64.

    One pass over the measures and one device synchronisation.

    Args:
        measured: of all samples.
        best_r: smallest residual of each sample so far, (B,).
        reach: largest size at which a residual is judged by the size of its state alone, (B,) or
            (B, leaves).
        masks: None while every sample is active.
        smallest_safe: least norm whose square keeps all its digits.
    """
    r, scale, headroom = measured.r, measured.scale, reach - measured.size
    if scale.dim() == 2:  # of the leaves
        scale, headroom = scale.amin(1), headroom.amin(1)
    improvement, highest, lowest = best_r - r, r, r
    if masks is not None:
        # A sample that has converged needs no best state, and the solve does not wait for it.
        improvement = torch.where(masks.unsolved, improvement, masks.inf)
        highest = torch.where(masks.active, r, masks.zero)
        lowest = torch.where(masks.active, r, masks.inf)
    rows = torch.stack((r + scale, scale, improvement, lowest, highest, headroom))
    least, largest = torch.stack(torch.aminmax(rows, dim=1)).tolist()
    if not (largest[0] < math.inf and least[1] >= smallest_safe):
        return None
    return Summary(least[2] > 0, least[3], largest[4] <= 1, least[5] >= 0)
