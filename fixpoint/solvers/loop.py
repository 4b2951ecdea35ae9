"""The solver loop: the only place that evaluates phi, updates and stops."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fixpoint._torch import inside_forward_mode, inside_vmap, no_gradients, tree_map
from fixpoint.derivatives import Derivatives, MatrixMap
from fixpoint.solution import Result, Solution
from fixpoint.solvers.monitor import ConvergenceMonitor, MonitorOptions

VMAP = (
    "torch.func.vmap cannot pass through a solve to a tolerance, whose end depends on values: make "
    "its axis the batch axis of z0, or solve with a fixed number of steps (rtol = atol = 0)"
)


class Iteration(MonitorOptions, Protocol):
    """What the loop needs of a solver; see `IterativeSolver`."""

    max_iter: int

    @property
    def needs_derivatives(self) -> bool: ...
    @property
    def state_has_rows(self) -> bool: ...

    def init(self, z: Tensor, t: int | None) -> Any: ...

    def update(self, k: int, z: Tensor, fz: Tensor, state: Any) -> tuple[Tensor, Any]: ...

    def restart(self, state: Any, rows: Tensor, z: Tensor, fz: Tensor) -> Any: ...


class Problem(NamedTuple):
    """phi, its derivatives, the time index of a sequence, and the first differentiable update."""

    phi: MatrixMap
    derivatives: Derivatives
    t: int | None = None
    track_from: int = 0


def iterate(solver: Iteration, problem: Problem, z: Tensor) -> tuple[Solution, Any]:
    """The solution from z, (B, D), and the solver's last state.

    Under grad mode the updates from number `track_from` on are differentiable.
    """
    measured = solver.has_tolerance or solver.record is not None
    run, tracking = _measured if measured else _fixed_steps, torch.is_grad_enabled()
    with torch.set_grad_enabled(tracking and problem.track_from <= 0):
        return run(solver, problem, z, tracking)


def _measured(
    solver: Iteration, problem: Problem, z: Tensor, tracking: bool
) -> tuple[Solution, Any]:
    """Until all samples have ended; a sample that has ended does not move."""
    phi, derivatives, t, track_from = problem
    given = {"derivatives": derivatives} if solver.needs_derivatives else {}
    monitor = ConvergenceMonitor(solver, z, getattr(phi, "columns", ()))
    state = None
    evaluate = derivatives.evaluate if solver.needs_derivatives else phi
    fz = evaluate(z)
    if inside_vmap(z) or inside_vmap(fz):
        raise RuntimeError(VMAP)
    z, fz = monitor.observe(0, z, fz, phi)
    for k in range(solver.max_iter):
        if monitor.done:
            break
        if k == 0:
            state = solver.init(z, t)
        if monitor.restarting is not None:
            state = solver.restart(state, monitor.restarting, z, fz)
        start, fz = monitor.stop_finished((z, fz))
        if solver.state_has_rows:
            state = monitor.stop_finished(state)
        proposal, state = solver.update(k, start, fz, state, **given)
        z = monitor.freeze(proposal, z)
        if k + 1 == track_from:
            z, state = _detached(solver, z, state)
            torch.set_grad_enabled(tracking)
        z, fz = monitor.observe(k + 1, z, evaluate(monitor.stop_finished(z)), phi)
    return monitor.solution(z, derivatives), state


def _detached(solver: Iteration, z: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Both without the tangents of forward mode, which no_grad lets pass."""
    if not inside_forward_mode():
        return z, state
    with no_gradients():
        return z.clone(), tree_map(_copied, state) if solver.state_has_rows else state


def _copied(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _fixed_steps(
    solver: Iteration, problem: Problem, z: Tensor, tracking: bool
) -> tuple[Solution, Any]:
    """Exactly `max_iter` updates, nothing measured."""
    phi, derivatives, t, track_from = problem
    given = {"derivatives": derivatives} if solver.needs_derivatives else {}
    evaluate = derivatives.evaluate if solver.needs_derivatives else phi
    state = None
    for k in range(solver.max_iter):
        if k == track_from and k > 0:
            z, state = _detached(solver, z, state)
            torch.set_grad_enabled(tracking)
        fz = evaluate(z)
        if k == 0:
            state = solver.init(z, t)
        z, state = solver.update(k, z, fz, state, **given)
    iterations = torch.full((z.shape[0],), solver.max_iter, dtype=torch.int64, device=z.device)
    result = torch.full((z.shape[0],), Result.FIXED_STEPS.value, dtype=torch.int8, device=z.device)
    evaluations = solver.max_iter + derivatives.evaluations
    return (
        Solution(z, None, iterations, evaluations, result, products=derivatives.products),
        state,
    )
