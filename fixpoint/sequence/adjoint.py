"""The gradient of a sequence: lambda_t = g_t + J_{t+1}^T lambda_{t+1}, whatever found its states.

Differentiable again by the same rule, as the adjoint of an equilibrium is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fixpoint._validation import at_least, non_negative
from fixpoint.captured import captured_tensors, stop_gradient_at
from fixpoint.failure import NonConvergenceHandler, OnFailure
from fixpoint.sequence.iteration import Tolerance, iterate_linear, rounding_tolerance
from fixpoint.sequence.jacobians import SequenceJacobian
from fixpoint.sequence.recurrence import Recurrence
from fixpoint.sequence.sequential import sequential_adjoint, sequential_tangent
from fixpoint.solution import Result, Solution


class SequenceAdjoint:
    """Solver of the reversed recurrence of a gradient.

    It is iterated with the Jacobian of the forward solve to a tolerance relative to lambda, one
    batched vector-Jacobian product an iteration; samples that do not converge are solved step by
    step, with the result FALLBACK. Either way the gradient is that of the sequential recurrence.

    Args:
        rtol: tolerance relative to each lambda_t; None takes one just above rounding, (8 +
            sqrt(T) / 2) eps.
        max_iter: most updates before the fallback.
        on_failure: "ignore", "warn" (once) or "raise" where neither path is finite.

    Attributes:
        solution: `Solution` of the last backward pass, its z lambda, (T, B, n), divided by each
            sample's max |g|; with windows that of the first one. None before.

    Example:
        >>> import torch
        >>> from fixpoint.sequence import SequenceAdjoint, solve_sequence
        >>> w, adjoint = torch.tensor(0.5, requires_grad=True), SequenceAdjoint()
        >>> f = lambda h, x: w * h + x
        >>> solution = solve_sequence(f, torch.ones(3, 1, 1), torch.zeros(1, 1), adjoint=adjoint)
        >>> solution.z[-1].sum().backward()
        >>> w.grad, adjoint.solution.result  # h_3 = w^2 + w + 1
        (tensor(2.), tensor([0], dtype=torch.int8))
    """

    def __init__(
        self, *, rtol: float | None = None, max_iter: int = 100, on_failure: OnFailure = "warn"
    ) -> None:
        self.rtol = None if rtol is None else non_negative(rtol=rtol)
        self.max_iter = at_least(1, max_iter=max_iter)
        self.handler = NonConvergenceHandler("the adjoint of the sequence", on_failure)
        self.solution: Solution | None = None

    def tolerance(self, T: int, dtype: torch.dtype) -> Tolerance:
        rtol = rounding_tolerance(T, dtype) if self.rtol is None else self.rtol
        return Tolerance(rtol, torch.finfo(dtype).eps ** 2, self.max_iter)

    def finish(self, solution: Solution) -> None:
        self.solution = solution
        self.handler.check(solution)


def attach_gradient(
    recurrence: Recurrence, H: Tensor, jacobian: SequenceJacobian, adjoint: SequenceAdjoint
) -> Tensor:
    """Return H, (T, B, n), as a differentiable function of all that the recurrence depends on."""
    z = H.detach().requires_grad_()
    F, outer = captured_tensors(recurrence.whole, z)
    if not outer:
        return H
    return _Sequence.apply(_Problem(recurrence, z, F, jacobian.plain(), adjoint), F, *outer)


class _Problem(NamedTuple):
    """Linear problem of one backward pass: z is the detached H, F = f(z) with its graph."""

    recurrence: Recurrence
    z: Tensor
    F: Tensor
    jacobian: SequenceJacobian
    adjoint: SequenceAdjoint


class _Sequence(torch.autograd.Function):
    """H as a function of F = f(H), or of the tensors that f depends on."""

    @staticmethod
    def forward(ctx: Any, problem: _Problem, F: Tensor, *outer: Tensor) -> Tensor:
        z = problem.z.detach().clone()
        ctx.problem = problem
        ctx.save_for_backward(z, *outer)
        ctx.set_materialize_grads(False)
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * len(ctx.needs_input_grad)
        problem: _Problem = ctx.problem
        if not torch.is_grad_enabled():
            u = _Linear(problem).solve(problem.F, problem.z, g)
            return None, u, *(None for _ in ctx.needs_input_grad[2:])
        z, *outer = ctx.saved_tensors
        F = problem.recurrence.whole(z)
        u = _Linear(problem).solve(F, z, g)
        with stop_gradient_at([z, *outer]):
            return None, None, *_vjp(F, outer, u)


class _Linear:
    """The linear recurrence u = J^T u + g at a trajectory, or with `tangent` e = J e + g."""

    def __init__(self, problem: _Problem) -> None:
        self.problem = problem
        recurrence = problem.recurrence
        with torch.no_grad():
            start = recurrence.h0.detach().unsqueeze(0)
            self.path = torch.cat([start, problem.z.detach()])
            self.scan = problem.jacobian.linearize(recurrence, self.path).scan

    def solve(self, F: Tensor, z: Tensor, g: Tensor, *, tangent: bool = False) -> Tensor:
        """Return the solution for z -> F, or of z -> F the map u -> J^T u where `tangent`."""
        # With max |g| = 1 neither tiny nor huge cotangents leave the range of the dtype.
        size = g.detach().abs().amax((0, 2), keepdim=True)
        unit = g / torch.where(size > 0, size, 1.0)

        def linear_map(u: Tensor) -> Tensor:
            (product,) = _vjp(F, [z], u)
            return unit if product is None else product + unit

        u = self._without_gradient(linear_map, unit.detach(), tangent)
        if torch.is_grad_enabled():
            u = u.requires_grad_()
            psi, outer = captured_tensors(linear_map, u)
            if outer:
                u = _Again.apply(self, linear_map, psi, u, not tangent, *outer)
        return u * size

    def _without_gradient(self, linear_map: Any, g: Tensor, tangent: bool) -> Tensor:
        precondition = self.scan.forward if tangent else self.scan.transposed
        adjoint = self.problem.adjoint
        solution = iterate_linear(linear_map, precondition, g, adjoint.tolerance(len(g), g.dtype))
        lost = (solution.result != Result.CONVERGED).nonzero().flatten()
        if len(lost):
            run = sequential_tangent if tangent else sequential_adjoint
            recurrence = self.problem.recurrence.select(lost)
            exact = run(recurrence, self.path[:, lost], g[:, lost])
            solution.z[:, lost] = exact
            finite = exact.isfinite().all(2).all(0)
            codes = torch.where(finite, int(Result.FALLBACK), int(Result.NONFINITE))
            solution.result[lost] = codes.to(torch.int8)
        adjoint.finish(solution)
        return solution.z


class _Again(torch.autograd.Function):
    """The solution u of a linear recurrence as a function of the tensors it depends on."""

    @staticmethod
    def forward(
        ctx: Any,
        linear: _Linear,
        map_of: Any,
        psi: Tensor,
        u: Tensor,
        tangent: bool,
        *outer: Tensor,
    ) -> Tensor:
        out = u.detach().clone()
        ctx.linear, ctx.map_of, ctx.psi, ctx.u, ctx.tangent = linear, map_of, psi, u, tangent
        ctx.save_for_backward(out, *outer)
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * len(ctx.needs_input_grad)
        if not torch.is_grad_enabled():
            e = ctx.linear.solve(ctx.psi, ctx.u, g, tangent=ctx.tangent)
            return None, None, e, *(None for _ in ctx.needs_input_grad[3:])
        u, *outer = ctx.saved_tensors
        psi = ctx.map_of(u)
        e = ctx.linear.solve(psi, u, g, tangent=ctx.tangent)
        with stop_gradient_at([u, *outer]):
            return None, None, None, None, None, *_vjp(psi, outer, e)


def _vjp(F: Tensor, inputs: list[Tensor], u: Tensor) -> tuple[Tensor | None, ...]:
    if not F.requires_grad:
        return (None,) * len(inputs)
    return torch.autograd.grad(
        F,
        inputs,
        u,
        retain_graph=True,
        create_graph=torch.is_grad_enabled(),
        allow_unused=True,
    )
