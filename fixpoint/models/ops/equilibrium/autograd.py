"""Equilibria through time as one differentiable operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from fixpoint.backward import Implicit
from fixpoint.models.ops.common import dispatch as op
from fixpoint.models.ops.common.autograd import differentiable_gradients, only_needed
from fixpoint.models.ops.equilibrium.arguments import (
    BackwardArguments,
    ForwardArguments,
    Inputs,
    Iteration,
    Method,
    Report,
)
from fixpoint.models.ops.equilibrium.reference import equilibrium_reference
from fixpoint.solution import Result, Solution, Stall
from fixpoint.solvers import Anderson, InexactNewton, Picard, Solver


def equilibrium_scan(inputs: Inputs, method: Method) -> tuple[Tensor, Report]:
    """h_1 .. h_T, (T, B, n), and how each was solved.

    The same as `equilibrium_reference`, by one kernel for all time steps and one for the adjoints
    of all of them, in which each sample stops at its own tolerance. A gradient of a gradient
    (create_graph) goes through the reference.

    Raises:
        ValueError: `unsupported` or `unsupported_method` gives a reason.
    """
    tensors = {k: v for k, v in inputs._asdict().items() if v is not None}
    reason = unsupported_method(method.solver, method.backward) or unsupported(
        activation=method.activation, **tensors
    )
    if reason:
        raise ValueError(
            f"the equilibrium scan does not apply: {reason}; use equilibrium_reference"
        )
    if torch.is_grad_enabled() and any(v.requires_grad for v in tensors.values()):
        states, *report = _EquilibriumScan.apply(method, *inputs)
        return states, Report(*report)
    S, _, report = _solve(inputs, method, keep=False)
    return S[1:], report


def unsupported(*, activation: str, **tensors: Tensor | None) -> str | None:
    """Why the scan cannot take these tensors, or None where it can."""
    n = 0 if tensors["V"] is None else len(tensors["V"])
    if n > op.MAX_SIZE:
        return f"it takes at most {op.MAX_SIZE} units, and the state has {n}"
    if torch.compiler.is_compiling():
        return "it cannot be compiled"
    return op.unsupported_reason(tensors, activation)


def unsupported_method(solver: Solver, backward: object) -> str | None:
    """Why the scan cannot take this solver and backward, or None where it can."""
    if not op.has_numba():
        return "it needs numba, which is not installed"
    if not isinstance(backward, Implicit):
        return f"it differentiates by Implicit(), not {type(backward).__name__}"
    for what, used in (("solver", solver), ("adjoint solver", backward.solver)):
        if used is not None and (reason := _unsupported_solver(used)):
            return f"its {what} {reason}"
    if isinstance(solver, InexactNewton) and solver.timesteps and backward.solver is None:
        return "its adjoint needs a solver without timesteps: give one to Implicit(solver)"
    return None


def _unsupported_solver(solver: Solver) -> str | None:
    name = type(solver).__name__
    if type(solver) not in (Picard, InexactNewton, Anderson):
        return f"must be Picard, Anderson or InexactNewton, not {name}"
    if not solver.has_tolerance:
        return f"must stop at a tolerance, and {name} has rtol = atol = 0"
    for option, default in (("norm", None), ("record", None), ("keep_best", True)):
        if getattr(solver, option) is not default:
            return f"must have {option}={default}"
    if isinstance(solver, Anderson) and solver.ridge > 0:
        return "must have ridge=0"
    return None if solver.check_every == 1 else "must have check_every=1"


def _iteration(solver: Solver, T: int) -> Iteration:
    memory = solver.memory if isinstance(solver, Anderson) else 0
    if isinstance(solver, InexactNewton):
        steps = torch.atleast_2d(solver.steps_until(T).detach())
    else:
        assert isinstance(solver, Picard | Anderson)
        steps = torch.full((1, solver.max_iter), solver.beta, dtype=torch.float64)
    return Iteration(steps, memory, solver.rtol, solver.atol)


def _adjoint_solver(method: Method) -> Solver:
    """See `Implicit`."""
    solver = method.solver
    if method.backward.solver is not None:
        return method.backward.solver
    return solver.with_options(atol=0.0, rtol=solver.rtol or solver.atol)


def _new_report(T: int, h: Tensor) -> Report:
    B, at_least_float32 = len(h), torch.promote_types(h.dtype, torch.float32)
    return Report(
        torch.empty(T, B, dtype=torch.int64),
        torch.empty(T, B, dtype=at_least_float32),
        torch.empty(T, B, dtype=torch.int8),
    )


def _solve(inputs: Inputs, method: Method, *, keep: bool) -> tuple[Tensor, Tensor, Report]:
    """h_0 .. h_T, (T + 1, B, n), sigma(.) at each where kept, (T, B, n), and the report."""
    x, W, bias, U, V, h0 = inputs
    h, T = op.copy(h0), len(x)
    S = op.states(h, T)
    C = op.empty((T if keep else 0, *h.shape), h)
    report = _new_report(T, h)
    iteration = _iteration(method.solver, T)
    op.backend("equilibrium", h).forward(
        ForwardArguments(x.contiguous(), W, bias, U, V, S, C, report, method.activation, iteration)
    )
    return S, C, report


class _EquilibriumScan(Function):
    """Saves each state and sigma(.) there."""

    @staticmethod
    def forward(ctx: Any, method: Method, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        S, C, report = _solve(Inputs._make(tensors), method, keep=True)
        ctx.method = method
        method.backward.adjoints.clear()
        ctx.save_for_backward(*tensors, S, C, report.result)
        ctx.mark_non_differentiable(*report)
        return S[1:], *report

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        method: Method = ctx.method
        *tensors, S, C, result = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (
                None,
                *differentiable_gradients(
                    lambda *given: equilibrium_reference(Inputs._make(given), method),
                    tensors,
                    grad,
                ),
            )
        needed = Inputs._make(ctx.needs_input_grad[1:])
        gradients = _gradients(Inputs._make(tensors), S, C, result, grad, method)
        return (None, *only_needed(gradients, needed))


def _gradients(
    inputs: Inputs, S: Tensor, C: Tensor, result: Tensor, grad: Tensor, method: Method
) -> Any:
    """Of all inputs, in chunks of time, so that the products find their factors in the cache."""
    x, W, _, U, V, _ = inputs
    x, V = x.contiguous(), V.contiguous()
    T, B, n = C.shape
    G, g = op.output_gradients(grad, last_only=False)
    steps, backend = op.chunk_length(T, 1, g), op.backend("equilibrium", g)
    U = None if U is None else U.contiguous()
    report, iteration = _new_report(T, g), _iteration(_adjoint_solver(method), 1)
    D, adjoint = op.empty((steps, B, n), g), torch.empty_like(g)
    dx = torch.empty_like(x)
    dW, dV = torch.zeros_like(W.t()), torch.zeros_like(V)
    dU, dbias = torch.zeros_like(V), g.new_zeros(n)
    for lo in reversed(range(0, T, steps)):
        at = slice(lo, min(lo + steps, T))
        d = D[: at.stop - lo]
        part = Report(*(v[at] for v in report))
        backend.backward(
            BackwardArguments(
                G[at], U, V, g, C[at], result[at], d, adjoint, part, method.activation, iteration
            )
        )
        rows, inside = d.flatten(0, 1), x[at].flatten(0, 1)
        dV.addmm_(rows.t(), S[at].flatten(0, 1))
        if U is not None:
            dU.addmm_(rows.t(), S[lo + 1 : at.stop + 1].flatten(0, 1))
        dW.addmm_(inside.t(), rows)
        dbias += rows.sum(0)
        torch.mm(rows, W, out=dx[at].view(inside.shape))
    method.backward._finish(as_solution(adjoint, report))
    return Inputs(dx, dW.t(), dbias, dU, dV, g)


def as_solution(z: Tensor, report: Report) -> Solution:
    """The report of all time steps as one `Solution`, its per-sample tensors (T, B)."""
    iterations, residual, result = report
    # Calls of phi that a loop over whole batches would have made.
    evaluations = int((iterations.amax(1) + 1).sum()) if iterations.numel() else 0
    stall = torch.where(result == Result.STALLED, Stall.NO_PROGRESS.value, Stall.NONE.value)
    return Solution(z, residual, iterations, evaluations, result, stall=stall.to(torch.int8))
