"""Backtracking of each sample by itself, one trial an update: the loop evaluates, this judges."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fixpoint.solvers.base import at_least_float32, dot

LEAST_LENGTH = 1e-8
"""A step shorter than this share of the direction is given up."""


class LineSearchState(NamedTuple):
    """The step z + length * direction that a sample is trying.

    z, g: the state that it starts from and phi(z) - z there, (B, D). All but z is in at least
        float32.
    merit: |g|^2, (B, 1).
    direction: (B, D); length: (B, 1).
    """

    z: Tensor
    g: Tensor
    merit: Tensor
    direction: Tensor
    length: Tensor


class LineSearchResult(NamedTuple):
    """Where each sample stands after a trial: at its end if accepted, else where it started."""

    accepted: Tensor  # (B, 1)
    all_accepted: bool  # known to the host
    z: Tensor
    g: Tensor
    merit: Tensor
    length: Tensor  # 1 if accepted, else that of the next trial, 0 if given up


def judge(
    trial: LineSearchState | None, z: Tensor, fz: Tensor, *, look: bool, most: Tensor | None = None
) -> LineSearchResult:
    """Accept the trial that ended in z, with fz = phi(z), or shorten it.

    It is accepted where |g(z)|^2 <= `most`, (B, 1), by default (1 - 2e-4 length) |g|^2 of its
    start: the condition of Armijo for a Newton direction, along which the slope of |g|^2 is
    -2 |g|^2. The next length is the minimiser of the parabola through the start, that slope and
    the trial's end, kept between a tenth and a half of the last. `look`: whether the host may
    read the outcome.
    """
    g = at_least_float32(fz - z)
    merit = dot(g, g)
    if trial is None:
        accepted = torch.ones_like(merit, dtype=torch.bool)
        return LineSearchResult(accepted, True, z, g, merit, torch.ones_like(merit))
    if most is None:
        most = (1 - 2e-4 * trial.length) * trial.merit
    with torch.no_grad():
        # False where merit is NaN, and for good once a sample has given up.
        accepted = (merit <= most) & (trial.length > 0)
        if look and bool(accepted.all()):
            return LineSearchResult(accepted, True, z, g, merit, torch.ones_like(merit))
        last = trial.length
        parabola = trial.merit * last**2 / (merit - trial.merit + 2 * trial.merit * last)
        shorter = parabola.nan_to_num(0.0).clamp(min=0.1 * last, max=0.5 * last)
        shorter = torch.where(shorter < LEAST_LENGTH, 0.0, shorter)
        length = torch.where(accepted, 1.0, shorter)
    z, g = torch.where(accepted, z, trial.z), torch.where(accepted, g, trial.g)
    # Not chosen from both merits: the zero gradient of one that is not finite would be NaN.
    return LineSearchResult(accepted, False, z, g, dot(g, g), length)
