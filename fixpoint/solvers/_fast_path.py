"""The shortcut of a solve while all samples are finite: one read of the host an update.

It leaves out what only a batch with a lost or frozen sample needs, and changes no result.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fixpoint._torch import values
from fixpoint.solvers.residual import Residuals


class Summary(NamedTuple):
    """What the host reads of an update after which all samples are finite.

    improved: the residual of each unsolved sample is its smallest so far.
    least_r: the smallest scaled residual of an active sample, inf where there is none.
    done: no active sample is above its tolerance.
    sizes: the smallest and the largest |phi(z)| of all samples.
    """

    improved: bool
    least_r: float
    done: bool
    sizes: tuple[float, float]


class Masks(NamedTuple):
    """Samples that the solve moves, and those whose best state it keeps, (B,) bool each.

    inf: (B,), since to make a tensor of a Python number takes longer than its use.
    """

    active: Tensor
    unsolved: Tensor
    inf: Tensor


def summarize(
    measured: Residuals, best_r: Tensor, masks: Masks | None, safe_size: float
) -> Summary | None:
    """The summary, or None where a sample is not finite or has to be measured in float64.

    One pass over the measures and one device synchronisation.

    Args:
        measured: of all samples.
        best_r: smallest residual of each sample so far, (B,).
        masks: None while every sample is active.
        safe_size: least |phi(z)| that is measured exactly enough in the dtype of the measures.
    """
    r, size = measured.r, measured.size
    least_size, largest_size = (size, size) if size.dim() == 1 else (size.amin(1), size.amax(1))
    # Minima alone, the largest of what is negated: one reduction is faster than two.
    rows = [best_r - r, least_size, -largest_size, r, -r]
    if masks is not None:
        # A sample that has converged needs no best state, and the solve does not wait for it.
        rows[0] = torch.where(masks.unsolved, rows[0], masks.inf)
        rows += [torch.where(masks.active, r, masks.inf), torch.where(masks.active, -r, masks.inf)]
    improvement, least, largest, *residuals = values(torch.stack(rows).amin(1))
    if not (residuals[1] > -math.inf and safe_size <= least and largest > -math.inf):
        return None
    return Summary(improvement > 0, residuals[-2], residuals[-1] >= -1, (least, -largest))
