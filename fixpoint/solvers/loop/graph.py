"""The loop of a solve as one operation of a graph, for torch.compile and torch.export.

The same rules as on the host, on tensors: no value is read, no shape changes. Each update keeps its
numbers to rounding; a row that is coupled to others moves again by itself (`Solution.coupled`).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from fixpoint._torch import prepare_loops, tree_flatten, tree_unflatten, while_loop
from fixpoint.derivatives import MatrixMap
from fixpoint.solution import Result, Solution
from fixpoint.solvers._rowwise import either
from fixpoint.solvers.loop import rules
from fixpoint.solvers.loop.norms import LoopOptions, Norms, Tolerance, checked_test
from fixpoint.solvers.loop.rules import Measures, Rules, Status

Carried = tuple[Tensor, ...]


class GraphIteration(LoopOptions, Protocol):
    """Interface of a solver to a loop in a graph; see `IterativeSolver`."""

    max_iter: int
    check_every: int

    def init_fixed(self, z: Tensor, fz: Tensor, t: int | None = None) -> Any: ...

    def update_fixed(self, k: Tensor, z: Tensor, fz: Tensor, state: Any) -> tuple[Tensor, Any]: ...

    def restart_fixed(self, state: Any, rows: Tensor, z: Tensor, fz: Tensor) -> Any: ...


def iterate_in_graph(
    solver: GraphIteration,
    phi: MatrixMap,
    z0: Tensor,
    t: int | None = None,
    *,
    tolerance: Tolerance | None = None,
    differentiates: bool = False,
) -> Solution:
    """Return the solution from z0, (B, D), to a tolerance, without gradient.

    Args:
        tolerance: that of the solver if not given; no compiler makes a copy of a solver.
        differentiates: whether phi is made of derivatives, as in an adjoint: these are traced in
            loops alone, and each sample ends as soon as it has converged.
    """
    prepare_loops()
    z0 = z0.detach()
    norms = Norms(z0, tolerance or solver.tolerance, getattr(phi, "columns", ())).on(z0.device)
    step = _Step(solver, phi, norms, adjoint=differentiates)
    z = own(z0)
    fz = _evaluate_once(phi, z) if differentiates else phi(z)
    m = step.measure(z, fz)
    start = norms.size(z, norms.dtype)
    begun = rules.begin(torch, m, start)
    status = rules.observe(torch, step.rules, begun, 0, m, accepts=step.accepts(z, fz))
    state, spec = tree_flatten(solver.init_fixed(z, fz, t))
    k = torch.zeros((), dtype=torch.int64, device=z0.device)
    carried = (k, z, fz, z, m.residual, m.size, *status, *state)

    def goes_on(*carried: Tensor) -> Tensor:
        return step.goes_on(*carried)

    def body(*carried: Tensor) -> Carried:
        return tuple(own(x) for x in step.pass_once(spec, carried))

    end = while_loop(goes_on, body, tuple(own(x) for x in carried))
    return step.solution(end)


class _Step:
    """Updates of all samples: the body of the loop, and its condition."""

    def __init__(
        self, solver: GraphIteration, phi: MatrixMap, norms: Norms, *, adjoint: bool
    ) -> None:
        self.solver, self.phi, self.norms = solver, phi, norms
        self.rules = Rules.of(norms, solver, alone=adjoint)
        self.test = None if adjoint else solver.stop_when
        self.keep_best, self.adjoint = solver.keeps_best, adjoint

    def goes_on(self, *carried: Tensor) -> Tensor:
        k, status = carried[0], Status(*carried[6 : 6 + len(Status._fields)])
        going = (k < self.solver.max_iter) & status.active.any()
        if self.rules.fraction < 1:
            going = going & ~rules.has_enough(self.rules, status)
        return going

    def accepts(self, z: Tensor, fz: Tensor) -> Tensor | None:
        return None if self.test is None else checked_test(self.test(z, fz), z)

    def pass_once(self, spec: Any, carried: Carried) -> Carried:
        """Return the `check_every` updates of one pass; none beyond `max_iter`, or when enough
        samples have converged.
        """
        every, most = self.solver.check_every, self.solver.max_iter
        may_end = most % every > 0 or self.rules.fraction < 1
        for j in range(every):
            new = self.advance(spec, *carried)
            if j > 0 and may_end:
                goes_on = self.goes_on(*carried)
                pairs = zip(new, carried, strict=True)
                new = tuple(either(goes_on, a, b) for a, b in pairs)
            carried = new
        return carried

    def advance(self, spec: Any, *carried: Tensor) -> Carried:
        k, z, fz, best = carried[:4]
        before, leaves = _split(carried)
        state = tree_unflatten(list(leaves), spec)
        if self.solver.restarts:
            state = self.solver.restart_fixed(state, before.restarting, z, fz)
        proposal, state = self.solver.update_fixed(k, z, fz, state)
        k = k + 1
        new = _choose(before.active, proposal, z)
        fnew = self.phi(new)
        m = self.measure(new, fnew)
        distance = self._distance(z, fz, new, fnew, m)
        accepts = self.accepts(new, fnew)
        status = rules.observe(torch, self.rules, before, k, m, distance, accepts)
        if self.rules.backtracks:
            moved = (proposal != z).any(1)
            status = rules.end_refused(torch, before, status, moved)
        else:
            finite = rules.are_finite(m)
            new, fnew = _choose(finite, new, z), _choose(finite, fnew, fz)
        status = self._end_at_floor(status, k, m)
        if self.keep_best:
            best = _choose(status.improved, new, best)
        leaves = tuple(tree_flatten(state)[0])
        return (k, new, fnew, best, m.residual, m.size, *status, *leaves)

    def measure(self, z: Tensor, fz: Tensor) -> Measures:
        norms = self.norms
        return Measures(norms.size(fz - z, norms.dtype), norms.size(fz, norms.dtype))

    def _distance(self, z: Tensor, fz: Tensor, new: Tensor, fnew: Tensor, m: Measures) -> Tensor:
        """Estimate the distance to the solution by the secant of the last step."""
        norms = self.norms
        step = norms.size(new - z, norms.dtype)
        change = norms.size((fnew - new) - (fz - z), norms.dtype) - 4 * norms.eps * m.size
        distance = m.residual * step / torch.where(change > 0, change, 1.0)
        distance = torch.where(change > 0, distance, torch.inf)
        return torch.where(m.residual > 0, distance, 0.0)

    def _end_at_floor(self, status: Status, k: Tensor, m: Measures) -> Status:
        ended = rules.end_at_floor(torch, self.rules, status, k, m)
        looks = (k % rules.FLOOR_CHECK == 0) & (k < self.solver.max_iter)
        return status._replace(
            floor_checks=torch.where(looks, ended.floor_checks, status.floor_checks),
            stall=torch.where(looks, ended.stall, status.stall),
            active=status.active & (ended.active | ~looks),
        )

    def solution(self, end: Carried) -> Solution:
        k, z, _, best, residual, size = end[:6]
        status, _ = _split(end)
        m = Measures(residual, size)
        result, stall = rules.finish(torch, self.rules, status, k, m)
        r, is_last = status.r, rules.is_last(status)
        evaluations, coupled = k + 1, status.coupled
        if self.keep_best:
            z, r = _choose(is_last, z, best), torch.where(is_last, r, status.best_r)
            if not self.adjoint:
                looks = rules.solved(status).any() & ~is_last.all()
                fz = _evaluate_if(looks, self.phi, z)
                there, evaluations = self.measure(z, fz), evaluations + looks
                apart = looks & rules.contradicted(torch, self.rules, status, there)
                r = torch.where(apart, rules.plain_residual(torch, self.rules, status, there), r)
                result = torch.where(apart, int(Result.MAX_ITER), result)
                coupled = coupled | apart.any()
        return Solution(
            z=z,
            residual=r,
            iterations=torch.where(status.active, k, status.iterations),
            evaluations=evaluations,  # type: ignore[arg-type] # a tensor, as all of the graph
            result=result.to(torch.int8),
            stall=stall.to(torch.int8),
            coupled=coupled,
            atol_decides=rules.atol_decides(torch, self.rules, status, m),
        )


def _evaluate_once(phi: MatrixMap, z: Tensor) -> Tensor:
    """Return phi(z) by a loop of one update."""
    return _evaluate_if(torch.ones((), dtype=torch.bool, device=z.device), phi, z)


def _evaluate_if(condition: Tensor, phi: MatrixMap, z: Tensor) -> Tensor:
    """Return phi(z) by a loop of one update, z where the condition, 0-d, is False."""

    def body(goes_on: Tensor, z: Tensor) -> Carried:
        return goes_on.logical_not(), own(phi(z))

    return while_loop(lambda goes_on, z: own(goes_on), body, (own(condition), own(z)))[1]


def own(x: Tensor) -> Tensor:
    """Return a copy that no compiler takes for the original.

    Inductor removes a plain clone of the first carry of a loop, and then writes to the original.
    """
    return x.logical_not().logical_not() if x.dtype == torch.bool else x.neg().neg()


def _split(carried: Carried) -> tuple[Status, Carried]:
    """Return the status and the leaves of the solver's state."""
    count = 6 + len(Status._fields)
    return Status(*carried[6:count]), carried[count:]


def _choose(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(rows[:, None], new, old)
