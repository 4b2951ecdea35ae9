"""Backpropagation through the updates of a solve."""

from __future__ import annotations

import torch
from torch import Tensor

from fixpoint._validation import at_least
from fixpoint.backward.base import Backward, tracked_updates
from fixpoint.derivatives import MatrixMap
from fixpoint.solution import Solution
from fixpoint.solvers import Solver


class Unrolled(Backward):
    """Backpropagation through the updates themselves: exact for what was computed.

    Memory grows with the number of updates. Choose it for few updates (K up to about 5) and
    wherever the solver is learned; `Implicit` where an equilibrium is really reached.

    Args:
        last: only through the last so many updates; the state before them is detached. A solve
            to a tolerance runs first without gradient; so many further updates from its solution
            then give the gradient (not the value), so that each sample gets them all.

    Example:
        >>> import torch
        >>> from fixpoint import FixedPoint, InexactNewton, Unrolled
        >>> layer = FixedPoint(InexactNewton(max_iter=2, eta=0.5), Unrolled())
        >>> layer(torch.cos, torch.zeros(1, 1)).z.sum().backward()
        >>> layer.solver.eta.grad.shape
        torch.Size([2])
    """

    def __init__(self, last: int | None = None) -> None:
        super().__init__()
        self.last = last if last is None else at_least(1, last=last)

    def solve(self, solver: Solver, phi: MatrixMap, z0: Tensor, t: int | None) -> Solution:
        if self.last is None:
            return solver.run(phi, z0, t)
        if not solver.has_tolerance:
            return solver.run(phi, z0, t, track_from=solver.max_iter - self.last)
        with torch.no_grad():
            solution = solver.run(phi, z0, t)
        if not torch.is_grad_enabled():
            return solution
        updates = solver.with_options(max_iter=self.last, rtol=0.0, atol=0.0, record=None)
        return tracked_updates(solution, updates, phi, t)

    def check(self, solver: Solver) -> None:
        if not solver.unrollable:
            raise ValueError(
                f"backpropagation through the updates of {solver} is not possible: use Implicit()"
            )
        if self.last is not None and self.last > solver.max_iter:
            raise ValueError(
                f"Unrolled(last={self.last}) asks for more updates than max_iter="
                f"{solver.max_iter}: lower last, or last=None for all"
            )

    def extra_repr(self) -> str:
        return "" if self.last is None else f"last={self.last}"
