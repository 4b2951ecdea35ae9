"""Equilibria through time as one differentiable operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from fixpoint._denormals import without_denormals
from fixpoint.backward import Implicit, Unrolled
from fixpoint.models.ops.common import dispatch as op
from fixpoint.models.ops.common.autograd import (
    asks_for_gradients,
    differentiable_gradients,
    of_each_instance,
    only_needed,
)
from fixpoint.models.ops.equilibrium.arguments import (
    BackwardArguments,
    Ending,
    ForwardArguments,
    Inputs,
    Method,
    Report,
    ending,
)
from fixpoint.models.ops.equilibrium.reference import equilibrium_reference
from fixpoint.models.ops.equilibrium.results import as_solution, new_report
from fixpoint.models.ops.equilibrium.settings import iteration_of, unsupported_method
from fixpoint.models.ops.equilibrium.unrolled import unrolled_scan
from fixpoint.models.ops.equilibrium.weight_gradients import WeightGradients
from fixpoint.solvers import Solver


def equilibrium_scan(inputs: Inputs, method: Method) -> tuple[Tensor, Ending]:
    """Return h_1 .. h_T, (T, B, n), and how each was solved.

    The same as `equilibrium_reference`, by one kernel for all time steps and one for the adjoints
    of all of them, in which each sample stops at its own tolerance. A gradient of a gradient
    (create_graph) goes through the reference.

    Raises:
        ValueError: `unsupported` or `unsupported_method` gives a reason.
    """
    tensors = {k: v for k, v in inputs._asdict().items() if v is not None}
    reason = unsupported_method(method.solver, method.backward, inputs.V.device) or unsupported(
        activation=method.activation, **tensors
    )
    if reason:
        raise ValueError(
            f"the equilibrium scan does not apply: {reason}; use equilibrium_reference"
        )
    return run_equilibrium_scan(inputs, method)


def run_equilibrium_scan(inputs: Inputs, method: Method) -> tuple[Tensor, Ending]:
    """Return the same for inputs that are supported."""
    inputs = inputs._replace(x=inputs.x.contiguous())  # once for both passes
    if isinstance(method.backward, Unrolled):
        return unrolled_scan(inputs, method)
    if asks_for_gradients(inputs):
        states, *end = _EquilibriumScan.apply(method, *inputs)
        return states, Ending(*end)
    S, _, end = _solve(inputs, method, keep=False)
    return S[1:], end


def unsupported(*, activation: str, **tensors: Tensor | None) -> str | None:
    """Return why the scan cannot take these tensors, or None where it can."""
    n = 0 if tensors["V"] is None else len(tensors["V"])
    if n > op.MAX_SIZE:
        return f"it takes at most {op.MAX_SIZE} units, and the state has {n}"
    if torch.compiler.is_compiling():
        return "it cannot be compiled"
    if reason := op.unsupported_reason(tensors, activation, kernel="equilibrium"):
        return reason
    V = tensors["V"]
    if V is not None and V.is_cuda and V.dtype != torch.float32:
        return f"it takes float32 on a CUDA device and V is {V.dtype}"
    return None


def _solve(inputs: Inputs, method: Method, *, keep: bool) -> tuple[Tensor, Tensor, Ending]:
    """Solve: h_0 .. h_T, (T + 1, B, n), sigma(.) at each where kept, (T, B, n), and the endings."""
    x, W, bias, U, V, h0 = inputs
    h, T = op.copy(h0), len(x)
    S = op.states(h, T)
    C = op.empty((T if keep else 0, *h.shape), h)
    report = new_report(T, h)
    iteration = iteration_of(method.solver, method.start, T, h)
    op.backend("equilibrium", h).forward(
        ForwardArguments(x, W, bias, U, V, S, C, report, method.activation, iteration)
    )
    return S, C, ending(report)


def _adjoint_solver(method: Method) -> Solver:
    """Make the solver of the adjoint; see `Implicit`."""
    solver = method.solver
    assert isinstance(method.backward, Implicit)
    if method.backward.solver is not None:
        return method.backward.solver
    return solver.with_options(atol=0.0, rtol=solver.rtol or solver.atol)


class _EquilibriumScan(Function):
    """Function of autograd that saves each state and sigma(.) there."""

    @staticmethod
    def forward(ctx: Any, method: Method, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        S, C, end = _solve(Inputs._make(tensors), method, keep=True)
        ctx.method = method
        assert isinstance(method.backward, Implicit)
        method.backward.adjoints.clear()
        ctx.save_for_backward(*tensors, S, C, end.result)
        ctx.mark_non_differentiable(*end)
        return S[1:].clone(), *end

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
        inputs, needed = Inputs._make(tensors), Inputs._make(ctx.needs_input_grad[1:])

        def gradients(grad: Tensor) -> list[Tensor | None]:
            found = _gradients(inputs, S, C, result, grad, method, needed)
            return only_needed(found, needed)

        return (None, *of_each_instance(gradients, [grad]))


@without_denormals
def _gradients(
    inputs: Inputs,
    S: Tensor,
    C: Tensor,
    result: Tensor,
    grad: Tensor,
    method: Method,
    needed: Inputs,
) -> Any:
    """Compute the gradients of all inputs in chunks of time, so that the cache holds factors."""
    _, _, _, U, V, _ = inputs
    U, V = None if U is None else U.contiguous(), V.contiguous()
    T, B, n = C.shape
    G, g = op.output_gradients(grad, whole=True)
    steps, backend = op.chunk_length(T, 1, g), op.backend("equilibrium", g)
    report, iteration = new_report(T, g), iteration_of(_adjoint_solver(method), 0, 1, g)
    D, adjoint = op.empty((steps, B, n), g), torch.empty_like(g)
    sums = WeightGradients(inputs, S, needed)
    for lo in reversed(range(0, T, steps)):
        at = slice(lo, min(lo + steps, T))
        d = D[: at.stop - lo]
        part = Report(*(v[at] for v in report))
        backend.backward(
            BackwardArguments(
                G[at], U, V, g, C[at], result[at], d, adjoint, part, method.activation, iteration
            )
        )
        sums.add(at, d)
        if U is not None:
            sums.dU.addmm_(d.flatten(0, 1).t(), S[lo + 1 : at.stop + 1].flatten(0, 1))
    assert isinstance(method.backward, Implicit)
    method.backward._finish(as_solution(adjoint, ending(report)))
    return sums.of_inputs(g)
