"""Several solvers in turn, each for the samples that those before it did not solve."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from fixpoint.derivatives import Derivatives, MatrixMap
from fixpoint.solution import Result, Solution, Trace
from fixpoint.solvers._rowwise import at_least_float32, dot
from fixpoint.solvers.anderson import Anderson
from fixpoint.solvers.base import IterativeSolver
from fixpoint.solvers.broyden import Broyden
from fixpoint.solvers.damped_picard import DampedPicard
from fixpoint.solvers.loop import Norms
from fixpoint.solvers.newton import Newton

MIN_UPDATES = 20
"""Updates that a stage makes before it may give a sample up."""


MAX_START = 10.0
"""A stage starts at z0 where the state before it is larger than that of z0 by more than this."""


class Auto(IterativeSolver):
    """Anderson, then for the samples it does not solve damped Picard, Broyden, Newton-Krylov.

    A stage gives a sample up when its least residual lies in the first half of its updates, or
    when phi is not finite there, and the next stage starts from the sample's best state. Of the
    updates that are left, a quarter is for damped Picard and half of the rest for Broyden.
    Samples that are solved take no part in later stages, so that a batch that Anderson solves
    costs what Anderson costs. `Solution.solved_by` names the solver of each sample.

    What to take when nothing is known of phi. With rtol = atol = 0 it is Anderson.

    Args:
        memory: of Anderson.
        options: see `IterativeSolver`; `max_iter` counts the updates of all stages.

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
        given: dict[str, Any] = {
            "rtol": self.rtol,
            "atol": None if self.relative_atol else self.atol,
            "norm": self.norm,
            "leaf_atol": self.leaf_atol,
            "record": self.record,
            "check_every": self.check_every,
        }
        anderson = Anderson(max_iter=self.max_iter, memory=self.memory, **given)
        if not self.has_tolerance:
            return anderson.run_with_state(phi, z, t, track_from=track_from)
        budget = torch.full((len(z),), self.max_iter, device=z.device)
        solution = _Stage(anderson, budget, given).run(phi, z, t, track_from=track_from)
        norms = Norms(z, self.tolerance, getattr(phi, "columns", ()))
        stages, fz = ["anderson"], None
        solver_index = torch.zeros_like(budget)
        for name, kind, part in LATER_STAGES:
            left = self.max_iter - solution.iterations
            open_ = ~solution.converged & (left > 0)
            open_ &= (solution.iterations > 0) | (solution.result != Result.NONFINITE.value)
            if not bool(open_.any()):
                break
            budget = torch.where(open_, (part * left).ceil().long(), 0)
            inner = kind(max_iter=self.max_iter, **given)
            stage = _Stage(inner, budget, given | {"max_iter": int(budget.max()) + 1})
            if fz is None:
                fz = phi(z).detach()
                solution = replace(solution, evaluations=solution.evaluations + 1)
            stage.origin = z.detach(), fz
            # From a state that may have run away its residual would look small.
            sizes = [norms.size(x.detach(), norms.dtype) for x in (solution.z, z, fz)]
            far = sizes[0] > MAX_START * (sizes[1] + sizes[2])
            far = far if far.dim() == 1 else far.any(1)
            start = torch.where(far[:, None], z, solution.z)
            more = stage.run(phi, start, t, track_from=track_from, derivatives=derivatives)
            solver_index = torch.where(open_, len(stages), solver_index)
            stages.append(name)
            solution = _joined(solution, more, open_, budget)
        index = torch.where(solution.converged, solver_index, -1).tolist()
        solved_by = tuple(None if i < 0 else stages[i] for i in index)
        return replace(solution, solved_by=solved_by), None


def _newton_krylov(**options: Any) -> Newton:
    return Newton(linear="gmres", **options)


LATER_STAGES: tuple[tuple[str, Any, float], ...] = (
    ("damped-picard", DampedPicard, 0.25),
    ("broyden", Broyden, 0.5),
    ("newton-krylov", _newton_krylov, 1.0),
)
"""Name, solver, and the fraction of the updates left that it may make."""


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
    """A solver that stops a sample, by proposing its state again, where it makes no progress."""

    backtracks = True

    def __init__(self, inner: IterativeSolver, budget: Tensor, options: dict[str, Any]) -> None:
        super().__init__(**({"max_iter": inner.max_iter} | options))
        self.inner = inner
        self.budget = budget
        self.needs_derivatives = inner.needs_derivatives

    def as_one(self, shape: Size) -> _Stage:
        one = copy.copy(self)
        one.budget = self.budget.max().view(1)
        return one

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
            stop = (k >= MIN_UPDATES) & (best_update <= k // 2) | (k >= self.budget[:, None])
        inner, start, end, lost = state.inner, z, fz, torch.zeros_like(better)
        if self.inner.restarts:  # as the loop does, which leaves it to solvers that backtrack
            lost = ~(fz.isfinite() & z.isfinite()).all(1, keepdim=True)
            stop = stop | (lost & state.restarted)
            if k > 0 and (not self.may_sync or bool(lost.any())):
                start, end = torch.where(lost, state.z, z), torch.where(lost, state.fz, fz)
                inner = self.inner.restart(inner, lost[:, 0], start, end)
        proposal, inner = self.inner.update(k, start, end, inner, **given)
        new = _StageState(inner, least, best_update, start, end, lost)
        return torch.where(stop, z, proposal), new


def _joined(first: Solution, second: Solution, moved: Tensor, budget: Tensor) -> Solution:
    """Both solves as one; the second moved those samples only, by at most their budget.

    The update by which a stage ends a sample that has just improved is none.
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
    better = moved & (second.residual <= first.residual)
    stall = first.stall
    if first.stall is not None and second.stall is not None:
        stall = torch.where(moved, second.stall, first.stall)
    return Solution(
        z=torch.where(better[:, None], second.z, first.z),
        residual=torch.where(better, second.residual, first.residual),
        iterations=first.iterations + torch.minimum(second.iterations, budget),
        evaluations=first.evaluations + second.evaluations,
        result=torch.where(moved, second.result, first.result),
        trace=trace,
        products=first.products + second.products,
        stall=stall,
    )
