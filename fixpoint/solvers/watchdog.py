"""Undamped steps, each sample by itself, where a line search makes little progress."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fixpoint.solvers.line_search import LineSearchResult

WINDOW = 8
"""Little progress: |g|^2 has not halved in this many updates."""
STEPS = 20
"""Undamped steps before a sample returns to where they began."""
MAX_GROWTH = 100.0
"""It returns at once where |g| exceeds that of the beginning by this factor."""


class Excursion(NamedTuple):
    """The undamped steps of each sample.

    begun: whether it has begun them, and left: how many are still to make, 0 where none is under
        way, (B, 1) each.
    z, g: where they began, (B, D), merit: |g|^2 there, and step_size: that of the step that was
        due, (B, 1), the first undamped one or none; half of it is tried after a return, along
        direction, that of the first one, (B, D); None until the solver has it.
    """

    begun: Tensor
    left: Tensor
    z: Tensor
    g: Tensor
    merit: Tensor
    step_size: Tensor
    direction: Tensor | None = None


class Watchdog(NamedTuple):
    """Watchdog of the line search of each sample, which lets a sample go without it once.

    Where |g|^2 has not halved in `WINDOW` updates, or the line search gives up, undamped steps
    follow from the last accepted one. Unless these halve |g|^2, the sample returns and continues
    with the line search. They lead out of valleys of |g| along a nearly singular I - J, in which
    a monotone line search creeps.

    merits: |g|^2 before the last updates, (B, 1) each.
    excursion: None while no sample has made an undamped step.
    begins, returns: samples that begin their undamped steps now, and those put back where they
        began, (B, 1); None where there are none.

    Source: Chamberlain, Powell, Lemarechal and Pedersen (1982), The watchdog technique for forcing
        convergence in algorithms for constrained optimization.
    """

    merits: tuple[Tensor, ...] = ()
    excursion: Excursion | None = None
    begins: Tensor | None = None
    returns: Tensor | None = None

    def max_merit(self, line_search: Tensor) -> Tensor:
        """Return the largest |g|^2 at which a step is accepted, (B, 1); line_search: by the line
        search.
        """
        if self.excursion is None:
            return line_search
        free = MAX_GROWTH**2 * self.excursion.merit
        return torch.where(self.excursion.left > 0, free, line_search)

    def follow(
        self, after: LineSearchResult, *, may_sync: bool
    ) -> tuple[LineSearchResult, Watchdog]:
        """Find from where each sample continues after a step that was judged by `max_merit`."""
        excursion, begins, returns = self.excursion, None, None
        if excursion is not None:
            after, excursion, returns = _return(after, excursion)
        merits = (*self.merits, after.merit.detach())[-WINDOW - 1 :]
        if len(merits) > WINDOW:
            slow = after.accepted & (merits[-1] > 0.5 * merits[0]) | (after.step_size == 0)
            slow = slow if excursion is None else slow & ~excursion.begun
            if not may_sync or bool(slow.any()):
                after, excursion = _begin(after, slow, excursion)
                begins = slow
        return after, Watchdog(merits, excursion, begins, returns)

    def direct(self, direction: Tensor) -> tuple[Tensor, Watchdog]:
        """Return the directions, (B, D), with those of samples that have returned, kept from when
        they
        left."""
        excursion = self.excursion
        if excursion is None:
            return direction, self
        kept = direction if excursion.direction is None else excursion.direction
        if self.returns is not None:
            direction = torch.where(self.returns, kept, direction)
        if self.begins is not None:
            kept = torch.where(self.begins, direction, kept)
        return direction, self._replace(excursion=excursion._replace(direction=kept))


def _return(
    after: LineSearchResult, excursion: Excursion
) -> tuple[LineSearchResult, Excursion, Tensor]:
    """Return samples whose undamped steps have ended without success, back where they began."""
    under_way = excursion.left > 0
    fell = after.accepted & (after.merit <= 0.5 * excursion.merit)
    left = torch.where(under_way & after.accepted & ~fell, excursion.left - 1, 0)
    back = under_way & ~fell & (left == 0)
    after = after._replace(
        accepted=after.accepted | back,
        z=torch.where(back, excursion.z, after.z),
        g=torch.where(back, excursion.g, after.g),
        merit=torch.where(back, excursion.merit, after.merit),
        step_size=torch.where(back, 0.5 * excursion.step_size, after.step_size),
    )
    return after, excursion._replace(left=left), back


def _begin(
    after: LineSearchResult, slow: Tensor, before: Excursion | None
) -> tuple[LineSearchResult, Excursion]:
    """Return samples that begin their undamped steps."""
    left = torch.where(slow, STEPS, 0 if before is None else before.left)
    new = Excursion(slow, left, after.z, after.g, after.merit.detach(), after.step_size)
    if before is not None:
        z, g, merit, step = (
            torch.where(slow, a, b) for a, b in zip(new[2:6], before[2:6], strict=True)
        )
        new = Excursion(slow | before.begun, left, z, g, merit, step, before.direction)
    return after._replace(step_size=torch.where(slow, 1.0, after.step_size)), new
