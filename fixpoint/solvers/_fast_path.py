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
    some_converged: a sample reaches its tolerance.
    done: no active sample is above its tolerance.
    """

    improved: bool
    some_converged: bool
    done: bool


class Masks(NamedTuple):
    """Samples that the solve moves, and those whose best state it keeps, (B,) bool each."""

    active: Tensor
    unsolved: Tensor


def summarize(
    measured: Residuals, best_r: Tensor, masks: Masks | None, smallest_safe: float
) -> Summary | None:
    """The summary, or None where a sample is not finite or has to be measured in float64.

    One pass over the measures and one device synchronisation.

    Args:
        measured: of all samples.
        best_r: smallest residual of each sample so far, (B,).
        masks: None while every sample is active.
        smallest_safe: least norm whose square keeps all its digits.
    """
    r, scale = measured.r, measured.scale
    improvement, active_residual = best_r - r, r
    if masks is not None:
        # A sample that has converged needs no best state, and the solve does not wait for it.
        improvement = torch.where(masks.unsolved, improvement, torch.inf)
        active_residual = torch.where(masks.active, r, 0.0)
    rows = torch.stack((-(r + scale), scale, improvement, r, -active_residual))
    minus_sum, least_scale, least_improvement, least_r, minus_largest = rows.amin(1).tolist()
    if not (minus_sum > -math.inf and least_scale >= smallest_safe):
        return None
    return Summary(least_improvement > 0, least_r <= 1, minus_largest >= -1)
