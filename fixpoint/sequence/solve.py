"""Solving h_t = f(h_{t-1}, x_t) for all t at once: `solve_sequence`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fixpoint._roots import Known
from fixpoint._torch import inside_forward_mode, outside_graph
from fixpoint._tree import Tree
from fixpoint._validation import at_least, names_options, non_negative
from fixpoint.sequence.adjoint import SequenceAdjoint
from fixpoint.sequence.jacobians import SequenceJacobian, make_jacobian
from fixpoint.sequence.parallel import ParallelTime, rounding_tolerance
from fixpoint.sequence.recurrence import (
    SequenceProblem,
    Step,
    as_samples,
    make_recurrence,
    states_of,
)
from fixpoint.sequence.sequential import sequential_states
from fixpoint.solution import Result, Solution, has_failed
from fixpoint.solvers import Solver, make_solver

Fallback = Literal["sequential"] | None
CONTIGUOUS = torch.contiguous_format


class SequenceTolerance(NamedTuple):
    """Tolerances and most updates; rtol = atol = 0 makes exactly max_iter updates."""

    rtol: float
    atol: float
    max_iter: int

    @property
    def is_set(self) -> bool:
        return self.rtol > 0 or self.atol > 0


@names_options
def solve_sequence(
    f: Step,
    x: Tree,
    h0: Tensor,
    *,
    jacobian: str | SequenceJacobian = "auto",
    decay: Tensor | float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    max_iter: int = 100,
    window: int | None = None,
    start: Tensor | None = None,
    adjoint: SequenceAdjoint | None = None,
    fallback: Fallback = "sequential",
) -> Solution:
    """Return the states of h_t = f(h_{t-1}, x_t), t = 1 .. T, solved for all t at once,
    differentiable.

    One iteration evaluates f on all T B rows in one call, scans the residuals,
    delta_t = A_t delta_{t-1} + f(h_{t-1}, x_t) - h_t, and adds delta. h_1 .. h_i are exact after i
    iterations; where the recurrence forgets or leaks, a few suffice for any T. The residual of
    `Solution` is the largest over t of rms(delta_t) / (atol + rtol rms(h_t)) at the last update,
    which converged samples have taken.

    It pays for steps of many small operations and sequences over about 100 steps; a fused
    recurrence (`fixpoint.models`) is faster on the CPU. A sample that does not converge, turns
    non-finite or runs away is solved step by step: `FALLBACK`, its states are right.

    Args:
        f: (h_prev, x) -> h on any number of rows, (R, n) and (R, ...); each row on its own.
        x: (T, B, ...), or a tree of such tensors: whatever changes over time belongs here.
        h0: (B, n).
        jacobian: A_t: "leaky" (decay_t I), "zero", "identity", "diagonal", "dense", or a
            `SequenceJacobian` with options. "auto" is leaky where decay is given, dense for
            n <= 32, else diagonal.
        decay: of the leaky Jacobian, a number or (T,): 1 - eta_t for an ERNN.
        rtol, atol: relative tolerance, and absolute tolerance in units of h. None takes values
            just above rounding, (8 + sqrt(T) / 2) eps and 4 eps. Both 0: exactly max_iter updates,
            nothing measured.
        max_iter: most updates of a sample.
        window: most time steps that are solved at once, one window after the other: memory and
            iterations remain bounded for any T. None takes all.
        start: states to start from, (T, B, n), as those of an earlier call; h0 if not given.
        adjoint: how the gradient's recurrence is solved; keeps its `Solution`.
        fallback: None leaves samples that fail at their last iterate, with a result that says so.

    Returns:
        `Solution` with z = (h_1 .. h_T), (T, B, n). With windows iterations and residual are the
        largest over them, evaluations and products their sums.

    Raises:
        ValueError: shapes or options do not fit.
        TypeError: a tensor is not of a floating-point dtype, or f changes it.

    Source: Lim et al. (2023), Parallelizing non-linear sequential models over the sequence length;
        Danieli et al. (2023), DeepPCR.

    Example:
        >>> import torch
        >>> from fixpoint.sequence import solve_sequence
        >>> f = lambda h, x: 0.9 * h + 0.1 * torch.tanh(h.flip(1) + x)
        >>> x = torch.randn(1000, 4, 16)
        >>> solution = solve_sequence(f, x, torch.zeros(4, 16), decay=0.9)
        >>> solution.z.shape, bool(solution.converged.all())
        (torch.Size([1000, 4, 16]), True)
    """
    recurrence = make_recurrence(f, x, h0, joint=False)
    tolerance = _tolerance(rtol, atol, max_iter, recurrence)
    made = make_jacobian(jacobian, decay, recurrence)
    return _solve(recurrence, made, tolerance, window, start, adjoint, fallback, None)


@names_options
def solve_equilibrium_sequence(
    phi: Step,
    x: Tree,
    h0: Tensor,
    *,
    jacobian: str | SequenceJacobian = "auto",
    solver: str | Solver = "anderson",
    rtol: float | None = None,
    atol: float | None = None,
    max_iter: int = 100,
    window: int | None = None,
    start: Tensor | None = None,
    adjoint: SequenceAdjoint | None = None,
    fallback: Fallback = "sequential",
) -> Solution:
    """Return the states of h_t = phi(h_t, h_{t-1}, x_t): inner equilibria and time as one fixed
    point.

    One iteration evaluates phi on all T B rows, with h_t and h_{t-1} of the iterate, and solves
    (I - d phi / d h) delta_t = (d phi / d h_prev) delta_{t-1} + phi - h_t with the chosen
    Jacobians. No equilibrium is solved on the way.

    Args:
        phi: (h, h_prev, x) -> h on any number of rows; each row on its own.
        jacobian: "dense" (n <= 32), "diagonal" or "zero" (plain iteration on all states).
        solver: solves each step's equilibrium where a sample falls back.
        x, h0, rtol, atol, max_iter, window, start, adjoint, fallback: see `solve_sequence`.

    Returns, Raises: see `solve_sequence`.

    Example:
        >>> import torch
        >>> from fixpoint.sequence import solve_equilibrium_sequence
        >>> phi = lambda h, h_prev, x: torch.tanh(0.3 * h.flip(1) + 0.5 * h_prev + x)
        >>> solution = solve_equilibrium_sequence(phi, torch.randn(50, 4, 8), torch.zeros(4, 8))
        >>> bool(solution.converged.all())
        True
    """
    recurrence = make_recurrence(phi, x, h0, joint=True)
    tolerance = _tolerance(rtol, atol, max_iter, recurrence)
    made = make_jacobian(jacobian, None, recurrence)
    inner = make_solver(solver)
    return _solve(recurrence, made, tolerance, window, start, adjoint, fallback, inner)


def _solve(recurrence: SequenceProblem, *arguments: Any) -> Solution:
    if torch.compiler.is_compiling():
        return outside_graph(_solve_windows, recurrence, *arguments)
    return _solve_windows(recurrence, *arguments)


def _solve_windows(
    recurrence: SequenceProblem,
    jacobian: SequenceJacobian,
    tolerance: SequenceTolerance,
    window: int | None,
    start: Tensor | None,
    adjoint: SequenceAdjoint | None,
    fallback: Fallback,
    solver: Solver | None,
) -> Solution:
    T, B, n = recurrence.shape
    if start is not None and start.shape != (T, B, n):
        raise ValueError(f"start must be (T, B, n) = {(T, B, n)}; got {tuple(start.shape)}")
    if fallback not in ("sequential", None):
        raise ValueError(f'fallback must be "sequential" or None; got {fallback!r}')
    size = T if window is None else at_least(1, window=window)
    adjoint = adjoint or SequenceAdjoint()
    h, parts = recurrence.h0, []
    for first in range(0, T, size):
        times = slice(first, first + size)
        part = _solve_window(
            recurrence if size >= T else recurrence.window(times, h),
            jacobian.window(times),
            tolerance,
            None if start is None else start[times].detach(),
            adjoint,
            fallback,
            solver,
        )
        parts.append(part)
        h = part.z[-1]
    return parts[0] if len(parts) == 1 else _joined(parts)


def _solve_window(
    recurrence: SequenceProblem,
    jacobian: SequenceJacobian,
    tolerance: SequenceTolerance,
    start: Tensor | None,
    adjoint: SequenceAdjoint,
    fallback: Fallback,
    solver: Solver | None,
) -> Solution:
    T, recurrence = recurrence.shape[0], recurrence.with_rows()
    parallel = ParallelTime(recurrence, jacobian, **tolerance._asdict())
    H0 = recurrence.h0.detach().expand(recurrence.shape) if start is None else start
    z0 = as_samples(H0)
    if inside_forward_mode():
        backward = adjoint.backward(recurrence, jacobian)
        solution = backward.solve(parallel, recurrence.of_samples, z0, None)
        return replace(solution, z=states_of(solution.z, T).contiguous())
    if torch.is_grad_enabled():
        recurrence.make_what_is_kept()
    solution = parallel.solve_states(z0)
    if fallback is not None and tolerance.is_set:
        solution = _fall_back(recurrence, solution, solver)
    if torch.is_grad_enabled():
        solution = _with_gradient(recurrence, jacobian, solution, adjoint, parallel)
    return replace(solution, z=states_of(solution.z, T).clone(memory_format=CONTIGUOUS))


def _with_gradient(
    recurrence: SequenceProblem,
    jacobian: SequenceJacobian,
    solution: Solution,
    adjoint: SequenceAdjoint,
    parallel: ParallelTime,
) -> Solution:
    """Return the solution as a function of all that the recurrence depends on.

    A sample that failed has no part in any gradient: 0 times NaN is NaN.
    """
    failed = has_failed(solution.result)
    good = None if not bool(failed.any()) else (~failed).nonzero().flatten()
    part = solution
    if good is not None:
        recurrence = recurrence.select(good)
        part = solution.with_samples(solution.z[good], lambda x: x[good])
    backward = adjoint.backward(recurrence, jacobian)
    known = Known(parallel, part)
    z = backward.solve(known, recurrence.of_samples, part.z, None).z
    return replace(solution, z=z if good is None else solution.z.index_copy(0, good, z))


def _fall_back(recurrence: SequenceProblem, solution: Solution, solver: Solver | None) -> Solution:
    """Return the solution with its failed samples solved step by step."""
    failed = has_failed(solution.result).nonzero().flatten()
    if not len(failed):
        return solution
    states, inner = sequential_states(recurrence.select(failed), solver)
    z, result, residual = solution.z, solution.result, solution.residual
    z[failed] = as_samples(states)
    finite = states.isfinite().all(2).all(0)
    code = torch.where(inner > Result.FIXED_STEPS, inner, int(Result.FALLBACK))
    result[failed] = torch.where(finite, code, int(Result.NONFINITE)).to(result.dtype)
    if residual is not None:
        residual[failed] = torch.where(finite, 0.0, torch.inf).to(residual.dtype)
    return replace(solution, stall=None, evaluations=solution.evaluations + len(states))


def _joined(parts: list[Solution]) -> Solution:
    residuals = [part.residual for part in parts if part.residual is not None]
    return Solution(
        torch.cat([part.z for part in parts]),
        torch.stack(residuals).amax(0) if residuals else None,
        torch.stack([part.iterations for part in parts]).amax(0),
        sum(part.evaluations for part in parts),
        torch.stack([part.result for part in parts]).amax(0),
        None,
        sum(part.products for part in parts),
    )


def _tolerance(
    rtol: float | None, atol: float | None, max_iter: int, recurrence: SequenceProblem
) -> SequenceTolerance:
    T, dtype = recurrence.shape[0], recurrence.h0.dtype
    return SequenceTolerance(
        rounding_tolerance(T, dtype) if rtol is None else non_negative(rtol=rtol),
        4 * torch.finfo(dtype).eps if atol is None else non_negative(atol=atol),
        at_least(0, max_iter=max_iter),
    )
