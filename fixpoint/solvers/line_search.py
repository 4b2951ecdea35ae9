"""Backtracking of each sample by itself, one trial step an update."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fixpoint.solvers._rowwise import at_least_float32, dot

MIN_STEP_SIZE = 1e-8
"""A trial step shorter than this fraction of the direction is not made: the sample gives up."""


class LineSearchState(NamedTuple):
    """The step z + step_size * direction that a sample is trying.

    z, g: the state that it starts from and phi(z) - z there, (B, D). All but z is in at least
        float32.
    merit: |g|^2, (B, 1).
    direction: (B, D); step_size: (B, 1).
    """

    z: Tensor
    g: Tensor
    merit: Tensor
    direction: Tensor
    step_size: Tensor

    def armijo(self) -> Tensor:
        """Return the largest |g|^2 that satisfies the condition of Armijo at the end of the step,
        (B, 1).
        """
        return (1 - 2e-4 * self.step_size) * self.merit


class LineSearchResult(NamedTuple):
    """State of each sample after a trial: its end if accepted, else its start."""

    accepted: Tensor  # (B, 1)
    all_accepted: bool  # known to the host
    z: Tensor
    g: Tensor
    merit: Tensor
    step_size: Tensor  # 1 if accepted, else that of the next trial, 0 if given up


def accept_or_backtrack(
    trial: LineSearchState | None,
    z: Tensor,
    fz: Tensor,
    *,
    may_sync: bool,
    max_merit: Tensor | None = None,
) -> LineSearchResult:
    """Accept the trial that ended in z, with fz = phi(z), or shorten it.

    It is accepted where |g(z)|^2 <= `max_merit`, (B, 1), by default (1 - 2e-4 step_size) |g|^2 of
    its start: the condition of Armijo for a Newton direction, along which the slope of |g|^2 is
    -2 |g|^2. The next step size is the minimiser of the parabola through the start, that slope
    and the trial's end, kept between a tenth and a half of the last. `may_sync`: whether the host
    may read the outcome.
    """
    g = at_least_float32(fz - z)
    merit = dot(g, g)
    if trial is None:
        accepted = torch.ones_like(merit, dtype=torch.bool)
        return LineSearchResult(accepted, True, z, g, merit, torch.ones_like(merit))
    if max_merit is None:
        max_merit = trial.armijo()
    with torch.no_grad():
        # False where merit is NaN, and for good once a sample has given up.
        accepted = (merit <= max_merit) & (trial.step_size > 0)
        if may_sync and bool(accepted.all()):
            return LineSearchResult(accepted, True, z, g, merit, torch.ones_like(merit))
        finite = ~accepted & (merit < torch.inf)
    if torch.is_grad_enabled():  # the zero gradient of a merit that is not finite would be NaN
        end = torch.where(finite, g, 0.0)
        merit = torch.where(finite, dot(end, end), 0.0)
    last = trial.step_size
    below = merit - trial.merit + 2 * trial.merit * last
    usable = finite & (below != 0)
    parabola = trial.merit * last**2 / torch.where(usable, below, 1.0)
    shorter = torch.where(usable, parabola, torch.where(finite, last, 0.0))
    shorter = shorter.clamp(min=0.1 * last, max=0.5 * last)
    shorter = torch.where(shorter < MIN_STEP_SIZE, 0.0, shorter)
    step_size = torch.where(accepted, 1.0, shorter)
    z, g = torch.where(accepted, z, trial.z), torch.where(accepted, g, trial.g)
    # Not chosen from both merits: the zero gradient of one that is not finite would be NaN.
    return LineSearchResult(accepted, False, z, g, dot(g, g), step_size)
