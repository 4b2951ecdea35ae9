"""Several solvers in turn, each for the samples that those before it did not solve."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from fixpoint._torch import has_values
from fixpoint.derivatives import Derivatives, MatrixMap
from fixpoint.solution import Result, Solution, Trace
from fixpoint.solvers._rowwise import at_least_float32, dot
from fixpoint.solvers.anderson import Anderson
from fixpoint.solvers.base import IterativeSolver
from fixpoint.solvers.broyden import Broyden
from fixpoint.solvers.damped_picard import DampedPicard
from fixpoint.solvers.levenberg_marquardt import LevenbergMarquardt
from fixpoint.solvers.loop.gauge import Gauge
from fixpoint.solvers.loop.norms import Norms
from fixpoint.solvers.loop.rules import MAX_EXCESS
from fixpoint.solvers.newton import Newton

MIN_UPDATES = 20
"""Updates that Anderson makes before it may give a sample up."""
MAX_SHARE, MAX_ALONE = 0.8, 50
"""Fraction of the updates that Anderson may make, but all where they are so few."""
MAX_START = 10.0
"""A stage starts at z0 where the state before it is larger than that of z0 by more than this."""
MAX_DIRECT = 64
"""Largest D at which a D x D factorization of each sample is cheap."""


class Later(NamedTuple):
    """A stage after Anderson.

    fraction: of the updates left that it may make; fresh: whether it starts at z0, or else at the
    sample's best state.
    """

    name: str
    build: Callable[..., IterativeSolver]
    fraction: float
    fresh: bool


SMALL = (
    Later("newton", Newton, 0.15, fresh=True),
    Later("levenberg-marquardt", LevenbergMarquardt, 0.55, fresh=True),
    Later("broyden", Broyden, 0.7, fresh=True),
    Later("levenberg-marquardt", LevenbergMarquardt, 1.0, fresh=False),
)
LARGE = (
    Later("damped-picard", DampedPicard, 0.15, fresh=False),
    Later("broyden", Broyden, 0.45, fresh=True),
    Later("newton-krylov", partial(Newton, linear="gmres"), 0.5, fresh=False),
    Later("newton-krylov", partial(Newton, linear="gmres"), 1.0, fresh=True),
)


class Auto(IterativeSolver):
    """Anderson, then other solvers for the samples that it does not solve.

    For D up to 64 these are Newton, Levenberg-Marquardt and Broyden from z0, and
    Levenberg-Marquardt from the sample's best state; for larger D damped Picard from the best
    state, Broyden from z0, and Newton-Krylov from both. The best state of one solver may lie in a
    valley of |phi(z) - z| that another would not have entered, so both starts are tried.

    Anderson gives a sample up when its least residual lies in the first half of its updates, when
    phi is not finite there, or after 80 % of `max_iter`. Each later stage has a fraction of the
    updates that are left. Samples that are solved take no part in later stages, so that a batch
    that Anderson solves costs what Anderson costs. `Solution.solved_by` names the solver of each
    sample.

    What to take when nothing is known of phi. With rtol = atol = 0 it is Anderson.

    Args:
        memory: of Anderson.
        options: see `IterativeSolver`; `max_iter` counts the updates of all stages. With
            `keep_best=False` a sample that failed is returned where its last stage left it.

    Example:
        >>> import torch
        >>> from fixpoint import Auto, solve
        >>> phi = lambda z: torch.cat((z[:1].cos(), z[1:] - z[1:].log()))
        >>> solution = solve(phi, torch.tensor([[0.0], [5.0]]), Auto())
        >>> solution.converged.tolist(), solution.solved_by
        ([True, True], ('anderson', 'anderson'))
    """

    unrollable = False

    def __init__(self, *, max_iter: int = 200, memory: int = 5, **options: Any) -> None:
        super().__init__(max_iter=max_iter, **options)
        self.memory = memory

    def run_with_state(
        self,
        phi: MatrixMap,
        z: Tensor,
        t: int | None = None,
        *,
        track_from: int = 0,
        derivatives: Derivatives | None = None,
    ) -> tuple[Solution, Any]:
        options = self.options_of(IterativeSolver)
        anderson = Anderson(memory=self.memory, **options)
        if not (self.has_tolerance and has_values(z)):
            return anderson.run_with_state(phi, z, t, track_from=track_from)
        derivatives = derivatives or Derivatives(phi)
        given: Any = {"track_from": track_from, "derivatives": derivatives}
        limit = min(self.max_iter, max(math.ceil(MAX_SHARE * self.max_iter), MAX_ALONE))
        budget = torch.full((len(z),), limit, device=z.device)
        stage = _Stage(anderson, budget, options, gives_up=True)
        solution = stage.run(phi, z, t, **given)
        names, solver_index, fz = ["anderson"], torch.zeros_like(budget), None
        for later in SMALL if z.shape[1] <= MAX_DIRECT else LARGE:
            left = self.max_iter - solution.iterations
            open_ = ~solution.converged & (left > 0)
            open_ &= (solution.iterations > 0) | (solution.result != Result.NONFINITE.value)
            if not bool(open_.any()) or bool((solution.result == Result.STOPPED.value).any()):
                break
            budget = torch.where(open_, (later.fraction * left).ceil().long(), 0)
            stage = _Stage(later.build(**options), budget, options)
            if fz is None:
                fz = phi(z).detach()
                solution = replace(solution, evaluations=solution.evaluations + 1)
            stage.origin = z.detach(), fz
            fresh = open_ & (later.fresh | self._far(solution.z, z, fz, phi))
            counted = derivatives.evaluations, derivatives.products
            more = stage.run(phi, torch.where(fresh[:, None], z, solution.z), t, **given)
            more = replace(
                more, evaluations=more.evaluations - counted[0], products=more.products - counted[1]
            )
            joined = _joined(solution, more, open_, budget, keep_best=self.keep_best)
            if _may_be_apart(joined, more):
                more = replace(more, evaluations=more.evaluations + 1)
                if not self._holds(joined, phi, stage.origin):
                    more = replace(more, coupled=True)
                joined = _joined(solution, more, open_, budget, keep_best=self.keep_best)
            solver_index = torch.where(open_ | more.coupled, len(names), solver_index)
            names.append(later.name)
            solution = joined
        index = torch.where(solution.converged, solver_index, -1).tolist()
        solved_by = tuple(None if i < 0 else names[i] for i in index)
        return replace(solution, solved_by=solved_by), None

    def _far(self, state: Tensor, z: Tensor, fz: Tensor, phi: MatrixMap) -> Tensor:
        """Return samples that may have run away from z, (B,): their residual would look small
        there.
        """
        norms = Norms(z, self.tolerance, getattr(phi, "columns", ()))
        size, *start = (norms.size(x.detach(), norms.dtype) for x in (state, z, fz))
        far = size > MAX_START * (start[0] + start[1])
        return far if far.dim() == 1 else far.any(1)

    def _holds(self, solution: Solution, phi: MatrixMap, origin: tuple[Tensor, Tensor]) -> bool:
        """Tell whether what several stages have solved are solutions beside each other."""
        gauge = Gauge(*origin, self.tolerance, getattr(phi, "columns", ()))
        r, _ = gauge.measure(solution.z, phi(solution.z).detach())
        return bool((~_is_solved(solution) | (r <= MAX_EXCESS)).all())


def _is_solved(solution: Solution) -> Tensor:
    return solution.result == Result.CONVERGED.value


def _may_be_apart(joined: Solution, last: Solution) -> bool:
    """Tell whether samples may be solved next to states that are not those of the joined solution,
    where rows of phi depend on each other.
    """
    solved = _is_solved(joined)
    apart = (solved & ~_is_solved(last)) | (joined.z != last.z).any(1)
    return not joined.coupled and bool(solved.any() and apart.any())


class _StageState(NamedTuple):
    """State of the solver, least |g|^2 of each sample, (B, 1), and the update that reached it.

    z, fz: before the last step, (B, D); restarted: samples that were put back there, (B, 1).
    """

    inner: Any
    merit: Tensor
    best_update: Tensor
    z: Tensor
    fz: Tensor
    restarted: Tensor


class _Stage(IterativeSolver):
    """A solver that stops a sample, by proposing its state again, at the end of its budget.

    gives_up: it does so too where it makes no progress.
    """

    backtracks = True

    def __init__(
        self,
        inner: IterativeSolver,
        budget: Tensor,
        options: dict[str, Any],
        *,
        gives_up: bool = False,
    ) -> None:
        most = int(budget.max()) if len(budget) else 0
        super().__init__(**(options | {"max_iter": min(most + 1, inner.max_iter)}))
        self.inner = inner
        self.budget = budget
        self.gives_up = gives_up
        self.needs_derivatives, self.guesses = inner.needs_derivatives, inner.guesses

    @property
    def keeps_best(self) -> bool:
        return self.keep_best or self.inner.backtracks

    def as_one(self, shape: Size) -> _Stage:
        one = copy.copy(self)
        one.budget = self.budget.max().view(1)
        return one

    def doubts(self, state: _StageState) -> Tensor | None:
        return self.inner.doubts(state.inner)

    def update(
        self, k: int, z: Tensor, fz: Tensor, state: _StageState | None, **given: Any
    ) -> tuple[Tensor, _StageState]:
        with torch.no_grad():
            g = at_least_float32(fz - z)
            merit = dot(g, g)
            if state is None:
                update = torch.zeros_like(merit)
                state = _StageState(None, merit, update, z, fz, update > 0)
            better = merit < state.merit
            best_update = torch.where(better, k, state.best_update)
            least = torch.where(better, merit, state.merit)
            stop = k >= self.budget[:, None]
            if self.gives_up and k >= MIN_UPDATES:
                stop = stop | (best_update <= k // 2)
        inner, start, end, lost = state.inner, z, fz, torch.zeros_like(better)
        if self.inner.restarts:  # as the loop does, which leaves it to solvers that backtrack
            lost = ~(fz.isfinite() & z.isfinite()).all(1, keepdim=True)
            stop = stop | (lost & state.restarted)
            # On another device it is done without looking, for which the host would wait.
            if k > 0 and not (self.may_sync and z.is_cpu and not bool(lost.any())):
                start, end = torch.where(lost, state.z, z), torch.where(lost, state.fz, fz)
                inner = self.inner.restart(inner, lost[:, 0], start, end)
        proposal, inner = self.inner.update(k, start, end, inner, **given)
        new = _StageState(inner, least, best_update, start, end, lost)
        return torch.where(stop, z, proposal), new


def _joined(
    first: Solution, second: Solution, moved: Tensor, budget: Tensor, *, keep_best: bool
) -> Solution:
    """Return both solves as one; the second moved those samples only, by at most their budget.

    The update by which a stage ends a sample that has just improved is none. Rows that depend on
    each other are solutions together: all of them are those of one solve.
    """
    trace = None
    if first.trace is not None and second.trace is not None:
        residual = torch.cat((first.trace.residual, second.trace.residual[1:]))
        iterates = None
        if first.trace.iterates is not None and second.trace.iterates is not None:
            iterates = torch.cat((first.trace.iterates, second.trace.iterates[1:]))
        trace = Trace(residual, iterates)
    assert first.residual is not None
    assert second.residual is not None
    before, after = first.residual, second.residual
    coupled = first.coupled or second.coupled
    if coupled:
        moved = torch.ones_like(moved)
        before = before.max().expand_as(before) if first.coupled else before + torch.inf
        after = after.max().expand_as(after)
    better = moved & (after <= before) if keep_best else moved
    ended = better if coupled else moved
    stall = first.stall
    if first.stall is not None and second.stall is not None:
        stall = torch.where(ended, second.stall, first.stall)
    return Solution(
        z=torch.where(better[:, None], second.z, first.z),
        residual=torch.where(better, second.residual, first.residual),
        iterations=first.iterations + torch.minimum(second.iterations, budget),
        evaluations=first.evaluations + second.evaluations,
        result=torch.where(ended, second.result, first.result),
        trace=trace,
        products=first.products + second.products,
        stall=stall,
        coupled=coupled,
        atol_decides=second.atol_decides,
    )
