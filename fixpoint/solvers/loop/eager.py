"""The loop of a solve: evaluates phi, updates, and stops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fixpoint._torch import (
    has_values,
    inside_forward_mode,
    inside_vmap,
    is_readable,
    is_traced_by_fx,
    no_gradients,
    stored,
    tracks,
    tree_map,
)
from fixpoint.derivatives import Derivatives, MatrixMap
from fixpoint.row_guard import clean_rows
from fixpoint.solution import Result, Solution
from fixpoint.solvers._rowwise import choose_rows
from fixpoint.solvers.loop.course import Course, CourseOptions
from fixpoint.solvers.loop.finished import stop_finished
from fixpoint.solvers.loop.noise import NoiseOptions, with_noise
from fixpoint.solvers.loop.norms import Norms
from fixpoint.solvers.loop.watch import AtSolution, Record, Settling
from fixpoint.solvers.loop.whole import RowNorms, as_one, derivatives_as_one, join

VMAP = (
    "torch.func.vmap cannot pass through the updates of a solve to a tolerance, whose end depends "
    "on values: use Implicit() or Phantom(), make its axis the batch axis of z0, or solve with a "
    "fixed number of steps (rtol = atol = 0)"
)
FX = (
    "make_fx, and torch.func.linearize by it, cannot trace a solve to a tolerance, whose end "
    "depends on values: use torch.func.jvp, torch.compile or torch.export, or a fixed number of "
    "steps (rtol = atol = 0) with Unrolled() or Phantom()"
)


class Iteration(CourseOptions, NoiseOptions, Protocol):
    """Interface of a solver to the loop; see `IterativeSolver`."""

    max_iter: int

    @property
    def has_tolerance(self) -> bool: ...
    @property
    def needs_derivatives(self) -> bool: ...
    @property
    def state_has_rows(self) -> bool: ...
    @property
    def guesses(self) -> bool: ...

    def init(self, z: Tensor, t: int | None) -> Any: ...

    def update(self, k: int, z: Tensor, fz: Tensor, state: Any) -> tuple[Tensor, Any]: ...

    def doubts(self, state: Any) -> Tensor | None: ...

    def restart(self, state: Any, rows: Tensor, z: Tensor, fz: Tensor) -> Any: ...

    def as_one(self, shape: torch.Size) -> Iteration: ...


class Problem(NamedTuple):
    """phi, its derivatives, the time index of a sequence, and the first differentiable update."""

    phi: MatrixMap
    derivatives: Derivatives
    t: int | None = None
    track_from: int = 0


def iterate(
    solver: Iteration, problem: Problem, z: Tensor, norms: Norms | None = None
) -> tuple[Solution, Any]:
    """Return the solution from z, (B, D), and the solver's last state.

    Under grad mode the updates from number `track_from` on are differentiable.

    Args:
        norms: by which the tolerance is reached; None takes those of the solver.
    """
    tracking, columns = torch.is_grad_enabled(), getattr(problem.phi, "columns", ())
    with torch.set_grad_enabled(tracking and problem.track_from <= 0):
        if not solver.has_tolerance:
            return make_updates(solver, problem, z, tracking, Record(solver, z, columns))
        if not has_values(z):
            if is_traced_by_fx():
                raise RuntimeError(FX)
            return _without_values(problem.phi(z)), None
        norms = norms or Norms(z, solver.tolerance, columns)
        return _to_tolerance(solver, problem, z, tracking, norms, solver.max_iter)


def _without_values(z: Tensor) -> Solution:
    """Return the shapes of a solution, on the meta device or of fake tensors."""
    counts = z.new_zeros(len(z), dtype=torch.int64)
    code = z.new_zeros(len(z), dtype=torch.int8)
    residual = z.new_zeros(len(z), dtype=torch.promote_types(z.dtype, torch.float32))
    return Solution(z, residual, counts, 1, code, stall=code.clone())


def _to_tolerance(
    solver: Iteration, problem: Problem, z: Tensor, tracking: bool, norms: Norms, most: int
) -> tuple[Solution, Any]:
    """Iterate until all samples have ended, or for `most` updates; one that has ended does not
    move.
    """
    run = Run(solver, problem, z, norms, tracking=tracking, most=most)
    course = run.course
    while run.updates < most and (course.coupled or not course.done):
        if course.coupled:
            return _as_one(course, solver, problem, run.z, tracking, most - run.updates)
        run.advance()
    if course.mixes_states and course.contradicts(z := course.returned(run.z), problem.phi):
        return _as_one(course, solver, problem, z, tracking, most - run.updates)
    return run.solution(), run.state


class Run:
    """A solve to a tolerance, update by update.

    Attributes:
        z, fz: the state and phi of it, (B, D); state: of the solver; updates: made so far.

    Args:
        tracking: whether the updates from number `track_from` of the problem on are differentiable.
        most: number of the last update.
    """

    def __init__(
        self,
        solver: Iteration,
        problem: Problem,
        z: Tensor,
        norms: Norms,
        *,
        tracking: bool = False,
        most: int,
    ) -> None:
        self.solver, self.problem, self.tracking = solver, problem, tracking
        derivatives = problem.derivatives
        self.given: dict[str, Any] = {}
        if solver.needs_derivatives:
            self.given = {"derivatives": derivatives}
        if solver.guesses and tracking:
            self.given["certain"] = True
        # In a graph a lost sample has to be seen at once, before it enters a weight's sum.
        every = 1 if tracking or solver.record is not None else solver.check_every
        self.course = Course(solver, z, norms, every=every, most=most)
        self.evaluate = derivatives.evaluate if solver.needs_derivatives else problem.phi
        fz = self.evaluate(z)
        if inside_vmap(z) or inside_vmap(fz):
            raise RuntimeError(VMAP)
        self.state: Any = None
        self.updates = 0
        self.z, self.fz = self.course.observe(0, z, fz, problem.phi)

    def advance(self) -> None:
        """Make one update."""
        solver, course, k = self.solver, self.course, self.updates
        z, fz = self.z, self.fz
        if k == 0:
            self.state = _first_state(solver, z, self.problem.t, self.tracking)
        elif course.restarting is not None:
            self.state = solver.restart(self.state, course.restarting, z, fz)
        state = self.state
        start, finished = z, None
        if course.active is not None and torch.is_grad_enabled():
            finished = ~course.active
            start, fz = stop_finished(course.active, (z, fz))
            state = stop_finished(course.active, state) if solver.state_has_rows else state
        before = state
        updated = solver.update(k, start, fz, before, **self.given)
        if k == 0:
            _check_update(solver, updated, start)
        proposal, state = updated
        if solver.noise > 0:
            proposal = with_noise(solver, proposal, start)
        moved = course.freeze(proposal, z)
        if k + 1 == self.problem.track_from:
            moved, state = _detached(solver, moved, state)
            torch.set_grad_enabled(self.tracking)
        # Others may depend on a finished sample, as long as its derivative is finite.
        end = self.evaluate(moved if finished is None else clean_rows(moved, finished))
        doubts = solver.doubts(state)
        if doubts is not None and not course.trusts(k + 1, moved, end, doubts):
            again = self.given | {"certain": True}
            proposal, state = solver.update(k, start, fz, before, **again)
            moved = course.freeze(proposal, z)
            end = self.evaluate(moved)
        self.state, self.updates = state, k + 1
        self.z, self.fz = course.observe(k + 1, moved, end, self.problem.phi)

    def solution(self) -> Solution:
        """Return the solution after the last update."""
        return self.course.solution(self.z, self.problem.derivatives)


def _as_one(
    course: Course, solver: Iteration, problem: Problem, z: Tensor, tracking: bool, most: int
) -> tuple[Solution, Any]:
    """Return the rest of a solve whose rows of phi depend on each other, with the batch as one
    sample.

    Each row still reaches the tolerance by itself, as the leaves of a tree do.
    """
    first, rows = course.solution(z, problem.derivatives), problem.derivatives
    phi = as_one(problem.phi, z.shape)
    whole = problem._replace(phi=phi, derivatives=derivatives_as_one(phi, rows, z.shape))
    norms = RowNorms(course.norms, z.shape)
    flat = z.reshape(1, -1)
    rest, _ = _to_tolerance(solver.as_one(z.shape), whole, flat, tracking, norms, most)
    return join(first, rest, z.shape), None


def settle(
    solver: Iteration, problem: Problem, z: Tensor, at_solution: AtSolution
) -> tuple[Solution, Settling]:
    """Make exactly `max_iter` updates, in which samples at their solution settle.

    If others, on which they depend, move some away from it again, all are made once more, in which
    these do not settle; if others depend on them, once more with their implicit derivatives.
    """
    tracking, tracked, implicit, earlier = torch.is_grad_enabled(), tracks(), None, 0
    restless = torch.zeros(len(z), dtype=torch.bool, device=z.device)
    while True:
        settling = Settling(z, restless, implicit)
        with torch.set_grad_enabled(tracking and problem.track_from <= 0):
            solution, _ = make_updates(solver, problem, z, tracking, settling)
        if len(z) == 1 or not is_readable(z) or not bool(stored(settling.settled).any()):
            break
        with no_gradients():
            left, depend, looks = _depending(settling, problem.phi, solution.z, tracked)
        if not (left is not None or (depend and implicit is None)):
            earlier += looks
            break
        earlier += looks + solution.evaluations - problem.derivatives.evaluations
        if left is not None:
            restless = restless | left
        else:
            implicit = at_solution
        del solution, settling  # with their graph
    return replace(solution, evaluations=solution.evaluations + earlier), settling


def _depending(
    settling: Settling, phi: MatrixMap, z: Tensor, tracked: bool
) -> tuple[Tensor | None, bool, int]:
    """Return settled samples that others have moved away from their solution, (B,), None for none,
    whether others depend on settled ones, where that is `tracked`, and the number of evaluations.
    """
    settled, count = settling.settled, 0
    left = torch.zeros_like(settled)
    while True:  # one that has left may have moved further ones
        rows = (settled & ~left)[:, None]
        mixed = torch.where(rows, settling.best, z)
        fz, count = phi(mixed), count + 1
        more = settling.left(mixed, fz) & ~left
        if not bool(stored(more).any()):
            break
        left = left | more
    if count > 1:
        return left, False, count
    if not tracked or bool(stored(settled).all()):
        return None, False, count
    moved = phi(torch.where(rows, 1.01 * mixed + 0.01, mixed))
    depend = ~rows & fz.isfinite() & (moved != fz)
    return None, bool(stored(depend).any()), count + 1


def make_updates(
    solver: Iteration, problem: Problem, z: Tensor, tracking: bool, watch: Record | Settling
) -> tuple[Solution, Any]:
    """Make exactly `max_iter` updates; nothing is read, and measured only by what watches."""
    phi, derivatives, t, track_from = problem
    given = {"derivatives": derivatives} if solver.needs_derivatives else {}
    evaluate = derivatives.evaluate if solver.needs_derivatives else phi
    state = None
    for k in range(solver.max_iter):
        if k == track_from and k > 0:
            z, state = _detached(solver, z, state)
            torch.set_grad_enabled(tracking)
        start = watch.enter(z) if k else z
        fz = evaluate(start)
        watch.note(z, fz)
        if k == 0:
            state = _first_state(solver, z, t, tracking)
        start, fz = watch.stop_settled((start, fz))
        if solver.state_has_rows:
            state = watch.stop_settled(state)
        updated = solver.update(k, start, fz, state, **given)
        if k == 0:
            _check_update(solver, updated, start)
        z, state = updated
        if solver.noise > 0:
            z = with_noise(solver, z, start)
    evaluations = solver.max_iter
    if watch.looks:
        with no_gradients():
            fz = phi(z)
        watch.note(z, fz)
        evaluations += 1
    shape, device = (z.shape[0],), z.device
    solution = Solution(
        z=z,
        residual=watch.residual,
        iterations=torch.full(shape, solver.max_iter, dtype=torch.int64, device=device),
        evaluations=evaluations + derivatives.evaluations,
        result=torch.full(shape, Result.FIXED_STEPS.value, dtype=torch.int8, device=device),
        trace=watch.trace(),
        products=derivatives.products,
    )
    return solution, state


def make_first_updates(
    solver: Iteration, problem: Problem, z: Tensor, count: int, frozen: Tensor
) -> tuple[Tensor, int]:
    """Make the first updates of a solve, each from the end of the other, and count evaluations.

    Past convergence the differences of iterates, from which later updates are made, are rounding
    noise, and a line search refuses steps at random.

    Args:
        frozen: samples that do not move, (B,).
    """
    phi, derivatives, t, _ = problem
    given = {"derivatives": derivatives} if solver.needs_derivatives else {}
    start = z
    for k in range(count):
        # With a fresh state each is the first update, but of a solver whose steps are numbered.
        number = 0 if solver.state_has_rows else k
        moved, _ = solver.update(number, z, phi(z), solver.init(z, t), **given)
        z = choose_rows(frozen, start, moved)
    return z, count + derivatives.evaluations


def _first_state(solver: Iteration, z: Tensor, t: int | None, tracking: bool) -> Any:
    """Return the state before the first update; learned steps have the graph that differentiable
    updates need, also where these come later.
    """
    if solver.state_has_rows or torch.is_grad_enabled() == tracking:
        return solver.init(z, t)
    with torch.set_grad_enabled(tracking):
        return solver.init(z, t)


def _check_update(solver: Iteration, updated: Any, z: Tensor) -> None:
    """Refuse another result of an update than the next z, (B, D), and a state."""
    pair = isinstance(updated, (tuple, list)) and len(updated) == 2
    if pair and isinstance(updated[0], Tensor) and updated[0].shape == z.shape:
        return
    found = updated[0] if pair else updated
    is_tensor = isinstance(found, Tensor)
    given = f"a tensor, {tuple(found.shape)}" if is_tensor else torch.typename(found)
    given += ", as z" if pair else ""
    raise TypeError(
        f"{type(solver).__name__}.update must return the next z, {tuple(z.shape)}, and a state, as "
        f"a tuple; it returned {given}"
    )


def _detached(solver: Iteration, z: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Return both without the tangents of forward mode, which no_grad lets pass."""
    if not inside_forward_mode():
        return z, state
    with no_gradients():
        return z.clone(), tree_map(_copied, state) if solver.state_has_rows else state


def _copied(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x
