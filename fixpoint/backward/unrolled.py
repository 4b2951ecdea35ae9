"""Backpropagation through the updates of a solve."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fixpoint._torch import stored, tracks
from fixpoint._validation import at_least
from fixpoint._with_gradient import with_gradient_of
from fixpoint.backward._evaluation import first_with_gradient, run_with_gradients_in_phi
from fixpoint.backward._settled import run_until_settled, with_implicit_gradients
from fixpoint.backward.base import Backward, guarded_map, solve_then_track
from fixpoint.derivatives import MatrixMap
from fixpoint.failure import FailedRows, checked_failed, some_lost
from fixpoint.solution import Result, Solution
from fixpoint.solvers import Anderson, BarzilaiBorwein, Broyden, DampedPicard, Newton, Solver

USES_DIFFERENCES = (Anderson, BarzilaiBorwein, Broyden)
"""Solvers that make updates from differences of iterates: rounding noise at a solution."""
COMPARES_RESIDUALS = (DampedPicard, Newton)
"""Solvers that shorten steps where |phi(z) - z| has not fallen: at random at a solution."""


class Unrolled(Backward):
    """Backpropagation through the updates themselves: exact for what was computed.

    Memory grows with the number of updates. Choose it for few updates (K up to about 5) and
    wherever the solver is learned; `Implicit` where an equilibrium is really reached.

    Three kinds of samples have the gradient of `Implicit` in place of that of their updates: those
    that start within the tolerance and so make none, those of a batch whose rows turn out to depend
    on each other (`Solution.coupled`), and, in a fixed number of updates of `Anderson`, `Broyden`
    or `BarzilaiBorwein`, and with `last` of `Newton` or `DampedPicard`, those with
    |phi(z) - z| <= sqrt(eps) |phi(z)|, where updates are made of rounding noise; these keep the
    best of their states. A loose tolerance (1e-3) gives the gradient of what was computed, which
    may be far from that of the equilibrium. So has a sample that does not converge, unless `failed`
    says otherwise; one that is NONFINITE has none, and does not touch those of the others.

    Args:
        last: number of last updates to go through; the state before them is detached, unless they
            are all. A solve to a tolerance runs first without gradient; as many first updates from
            its solution then give the gradient (not the value), so that each sample gets them all.
            They are those that the solver makes without a history: damped plain updates, whose
            gradient is the Neumann series as in `Phantom` and improves with `last` where these
            contract; or Newton steps; one step is exact.
        failed: the gradient of samples that do not converge: "keep" that of their updates, "zero",
            "phantom" or "raise"; see `Implicit`.

    Example:
        >>> import torch
        >>> from fixpoint import FixedPoint, InexactNewton, Unrolled
        >>> layer = FixedPoint(InexactNewton(max_iter=2, eta=0.5), Unrolled())
        >>> layer(torch.cos, torch.zeros(1, 1)).z.sum().backward()
        >>> layer.solver.eta.grad.shape
        torch.Size([2])
    """

    def __init__(self, last: int | None = None, *, failed: FailedRows = "keep") -> None:
        super().__init__()
        self.failed = checked_failed(failed)
        self.last = last if last is None else at_least(1, last=last)

    def compiles(self, solver: Solver) -> bool:
        """Tell whether torch.compile makes one graph of it; the loop to a tolerance has no
        gradient, and with `last` samples that settle in a fixed number of updates would have none.
        """
        if not solver.compiles:
            return False
        if self.last is None:
            return not solver.has_tolerance
        return solver.has_tolerance or not isinstance(solver, USES_DIFFERENCES + COMPARES_RESIDUALS)

    def solve(self, solver: Solver, phi: MatrixMap, z0: Tensor, t: int | None) -> Solution:
        if self.last is not None and solver.has_tolerance:
            return solve_then_track(solver, solver, self.last, phi, z0, t)
        return run_with_gradients_in_phi(lambda phi: self._all(solver, phi, z0, t), phi)

    def _all(self, solver: Solver, phi: MatrixMap, z0: Tensor, t: int | None) -> Solution:
        solution = self._run(solver, phi, z0, t)
        if not tracks() or not some_lost(solution):
            return solution
        # Once more, with 0 in place of what is not finite in the rows of the lost samples.
        lost = solution.result == Result.NONFINITE.value
        guarded = guarded_map(phi, lost)
        start = torch.where(lost[:, None], 0.0, z0)
        again = self._run(_as_long(solver, solution), guarded, start, t)
        z = torch.where(lost[:, None], solution.z.detach(), again.z)
        return replace(solution, z=with_gradient_of(solution.z.detach(), z))

    def _run(self, solver: Solver, phi: MatrixMap, z0: Tensor, t: int | None) -> Solution:
        if not solver.has_tolerance:
            track_from = 0 if self.last is None else solver.max_iter - self.last
            if track_from > 0 and not torch.compiler.is_compiling():
                phi = first_with_gradient(phi)
            # Of the last updates alone: all of them are exact, whatever their lengths.
            kinds = USES_DIFFERENCES if track_from <= 0 else USES_DIFFERENCES + COMPARES_RESIDUALS
            if isinstance(solver, kinds) and solver.record is None:
                return run_until_settled(solver, phi, z0, t, track_from)
            return solver.run(phi, z0, t, track_from=track_from)
        solution = solver.run(phi, z0, t)
        return with_implicit_gradients(solution, solver, phi, z0, t)

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


def _as_long(solver: Solver, solution: Solution) -> Solver:
    """Return the solver for the updates that were made: a lost sample, which is finite in them when
    they are repeated, must not end the batch.
    """
    if isinstance(getattr(solver, "stop", "each"), str):
        return solver
    return solver.with_options(max_iter=int(stored(solution.iterations).max()), stop="each")
