"""Backpropagation through plain updates of equilibria through time, as one operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from fixpoint._denormals import without_denormals
from fixpoint.failure import NonConvergenceHandler
from fixpoint.models.ops.common import dispatch as op
from fixpoint.models.ops.common.autograd import (
    asks_for_gradients,
    differentiable_gradients,
    of_each_instance,
    only_needed,
)
from fixpoint.models.ops.equilibrium.arguments import (
    Ending,
    FixedStepsArguments,
    ForwardArguments,
    Inputs,
    Method,
    Report,
    UnrolledArguments,
    ending,
)
from fixpoint.models.ops.equilibrium.reference import equilibrium_reference
from fixpoint.models.ops.equilibrium.results import as_solution, new_report
from fixpoint.models.ops.equilibrium.settings import iteration_of, steps_of
from fixpoint.models.ops.equilibrium.weight_gradients import WeightGradients
from fixpoint.solution import Result
from fixpoint.solvers import Anderson, Solver


def unrolled_scan(inputs: Inputs, method: Method) -> tuple[Tensor, Ending]:
    """Return the states of `equilibrium_scan` with the gradient of their updates."""
    T = len(inputs.x)
    steps = steps_of(method.solver, method.start, T)
    if asks_for_gradients((steps, *inputs)):
        states, iterations, result, *measured = _UnrolledScan.apply(method, steps, *inputs)
        residual, stall = measured or (None, None)
        return states, Ending(iterations, residual, result, stall)
    S, _, end = _run(inputs, method, steps)
    return S[1:], end


def _run(inputs: Inputs, method: Method, steps: Tensor) -> tuple[Tensor, Tensor, Ending]:
    """Return h_0 .. h_T, (T + 1, B, n), how many updates lead to each state, (T, B), and the
    ending.
    """
    x, W, bias, U, V, h0 = inputs
    h, T = op.copy(h0), len(x)
    S, activation = op.states(h, T), method.activation
    report = new_report(T, h)
    if method.solver.has_tolerance:
        iteration = iteration_of(method.solver, method.start, T, h)
        counts = torch.empty_like(report.iterations)
        none = op.empty((0, *h.shape), h)
        op.module("equilibrium", "numba_kernels").forward(
            ForwardArguments(x, W, bias, U, V, S, none, report, activation, iteration), counts
        )
        return S, counts, ending(report)
    arguments = FixedStepsArguments(x, W, bias, U, V, S, activation, steps)
    op.module("equilibrium", "numba_unrolled").forward_fixed(arguments)
    iterations = report.iterations.fill_(steps.shape[1])
    result = report.result.fill_(Result.FIXED_STEPS.value)
    return S, iterations, Ending(iterations, None, result, None)


class _UnrolledScan(Function):
    """Function of autograd that saves each state and how many updates led to it."""

    @staticmethod
    def forward(
        ctx: Any, method: Method, steps: Tensor, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        S, counts, end = _run(Inputs._make(tensors), method, steps)
        ctx.method = method
        warm = (end.iterations == 0) & (end.result == Result.CONVERGED.value)
        ctx.save_for_backward(steps, *tensors, S, counts, warm)
        outputs = [
            v for v in (end.iterations, end.result, end.residual, end.stall) if v is not None
        ]
        ctx.mark_non_differentiable(*outputs)
        return S[1:].clone(), *outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        method: Method = ctx.method
        steps, *tensors, S, counts, warm = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (
                None,
                *differentiable_gradients(
                    lambda steps, *given: equilibrium_reference(
                        Inputs._make(given), method, steps=steps
                    ),
                    (steps, *tensors),
                    grad,
                ),
            )
        inputs, needed = Inputs._make(tensors), Inputs._make(ctx.needs_input_grad[2:])

        def gradients(grad: Tensor) -> list[Tensor | None]:
            dsteps, found = _gradients(inputs, S, counts, warm, steps, grad, method, needed)
            return only_needed([dsteps, *found], ctx.needs_input_grad[1:])

        return (None, *of_each_instance(gradients, [grad]))


@without_denormals
def _gradients(
    inputs: Inputs,
    S: Tensor,
    counts: Tensor,
    warm: Tensor,
    steps: Tensor,
    grad: Tensor,
    method: Method,
    needed: Inputs,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Compute the gradients of the steps and of all inputs, in chunks of time."""
    x, W, bias, U, V, _ = inputs
    V = V.contiguous()
    U = None if U is None else U.contiguous()
    (T, B), n = counts.shape, len(V)
    G, g = op.output_gradients(grad, whole=True)
    length, backend = op.chunk_length(T, 1, g), op.module("equilibrium", "numba_unrolled")
    report, solver = new_report(T, g), _adjoint_solver(method.solver, g.dtype)
    adjoint = iteration_of(solver, 0, 1, g)
    for v, value in zip(report, (0, 0.0, Result.CONVERGED.value), strict=True):
        v.fill_(value)
    D, sums, dsteps = op.empty((length, B, n), g), WeightGradients(inputs, S, needed), []
    for lo in reversed(range(0, T, length)):
        at = slice(lo, min(lo + length, T))
        d, part = D[: at.stop - lo], Report(*(v[at] for v in report))
        dU, found = backend.backward(
            UnrolledArguments(
                G[at], x[at], W, bias, U, V, g, S[lo : at.stop + 1], counts[at], warm[at], d, part,
                method.activation, steps[at] if len(steps) > 1 else steps, adjoint,
            )
        )  # fmt: skip
        sums.add(at, d)
        if U is not None:
            sums.dU += dU
        dsteps.append(found)
    if bool(warm.any()):
        NonConvergenceHandler("the adjoint solve", "warn").check(as_solution(g, ending(report)))
    total = torch.cat(dsteps[::-1]) if len(steps) > 1 else torch.stack(dsteps).sum(0)
    return total.to(steps.dtype), sums.of_inputs(g)


def _adjoint_solver(solver: Solver, dtype: torch.dtype) -> Solver:
    """Make the adjoint solver of states that made no update; see `Unrolled`."""
    rtol = solver.rtol or solver.atol or 100 * torch.finfo(dtype).eps
    return Anderson(max_iter=100, rtol=rtol, atol=0.0)
