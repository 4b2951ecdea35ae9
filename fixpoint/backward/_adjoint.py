"""The solution z of z = f(z, *captured) as a function of the captured tensors.

One operation for autograd, forward mode and torch.func. Its derivatives are solutions of linear
fixed-point problems, so again operations of this kind: there are derivatives of any order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from fixpoint._torch import (
    batched,
    has_values,
    inside_transform,
    stored,
    tangents_of_outer_levels,
    unbatched,
    without_ended,
)
from fixpoint.backward._linear import (
    LinearDerivatives,
    Operator,
    Scaled,
    Transposed,
    couples_rows,
    row_scale,
    solve_as_one,
)
from fixpoint.derivatives import Linearization
from fixpoint.failure import FailedRows, some_failed
from fixpoint.row_guard import guard_rows
from fixpoint.solution import Result, Solution, has_failed
from fixpoint.solvers import Solver
from fixpoint.tracing import PureMap, is_differentiable, stop_gradient_at

Preconditioner = Callable[[Tensor, Tensor], Tensor]
NONE: tuple[Preconditioner | None, Preconditioner | None] = (None, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdjointSolve:
    """Solver of the linear problems of the derivatives.

    solver: of x = A x + b.
    finish: takes each `Solution` and says whether a sample failed.
    failed: what samples contribute whose linear solve fails.
    preconditioners: (z*, v) -> an estimate of (I - A)^-1 v, for A = J and for A = J^T.
    start: x to start from as a function of b, for A = J^T.
    """

    solver: Solver
    finish: Callable[[Solution], bool]
    failed: FailedRows = "zero"
    preconditioners: tuple[Preconditioner | None, Preconditioner | None] = NONE
    start: Callable[[Tensor], Tensor] | None = None

    def solver_at(self, z: Tensor | None, *, transposed: bool) -> Solver:
        """Return the solver with its preconditioner at z, which an adjoint iterate would not tell
        it.
        """
        if getattr(self.solver, "preconditioner", None) is None and self.preconditioners == NONE:
            return self.solver
        given = self.preconditioners[transposed]
        if z is None or given is None:
            return self.solver.with_options(preconditioner=None)
        return self.solver.with_options(preconditioner=lambda _, v: given(z, v))


@dataclasses.dataclass(kw_only=True)
class ImplicitProblem:
    """z = f(z, *captured), and how to solve and to differentiate it.

    function: f.
    solver: of this problem, at time t.
    adjoint: how the linear problems of its derivatives are solved.
    opaque: how many of the captured tensors, the last ones, f reaches by itself, and not as
        arguments.
    instances: whether rows are those of several instances of torch.func.vmap.
    solution: the solution, where it is known.
    graph: f evaluated there, and the leaves that stand for the captured tensors.
    note: takes each `Solution` of this problem.
    """

    function: PureMap
    solver: Solver
    adjoint: AdjointSolve
    t: int | None = None
    opaque: int = 0
    instances: bool = False
    solution: Solution | None = None
    graph: tuple[Linearization, list[Tensor]] | None = None
    note: Callable[[Solution], None] | None = None

    @property
    def operator(self) -> Operator | None:
        """d f / d z at the solution, where it is known."""
        return None if self.graph is None else self.graph[0]

    def solve(self, z0: Tensor, captured: Sequence[Tensor]) -> Solution:
        """Return the solution for these tensors, started at z0."""
        solution = self.solution
        if solution is None:
            solution = self.solver.run(lambda z: self.function(z, *captured), z0, self.t)
        if self.note is not None:
            self.note(solution)
        return solution

    def of_instances(self, size: int, in_dims: Sequence[int | None]) -> ImplicitProblem:
        """Return the problem of `size` of its instances at once, as further rows."""
        return dataclasses.replace(
            self,
            function=_OfInstances(self.function, size, in_dims),
            adjoint=_of_any_rows(self.adjoint),
            instances=True,
            solution=None,
            graph=None,
        )


@dataclasses.dataclass(kw_only=True)
class LinearProblem(ImplicitProblem):
    """x = A x + b with A = J^T, or J itself: f(x, b, z, *captured), J that of `of`(z, *captured).

    The derivative of the solution of `of`: in reverse mode with J^T, in forward mode with J.

    known: A, where it is known.
    reverse: whether A is J^T of the map that was solved first, of whose derivatives this is one.
    order: of this derivative, from 1.
    """

    of: PureMap
    transposed: bool
    known: Operator | None = None
    reverse: bool
    order: int
    some_failed: bool = True  # until it is known

    @property
    def operator(self) -> Operator | None:
        return self.known

    def solve(self, z0: Tensor, captured: Sequence[Tensor]) -> Solution:
        b, z, *others = captured
        b = b.contiguous()  # as `Packing.pack` makes all states
        if inside_transform():
            return ImplicitProblem.solve(self, z0, captured)
        with torch.no_grad():
            operator = self.known or self._linearized(z, others)
            scale = row_scale(b)
            scaled, unit = Scaled(operator, scale), b.detach() / scale

            def affine(x: Tensor) -> Tensor:
                return scaled.jvp(x) + unit

            # Each derivative adds its b and its z in front of those of the one before.
            at = None if self.instances else captured[2 * self.order - 1].detach()
            derivatives = LinearDerivatives(affine, scaled, at=at, transposed=self.reverse)
            start = self.adjoint.start if self.reverse else None
            solver = self.adjoint.solver_at(at, transposed=self.reverse)
            solution = solver.run(
                affine, unit if start is None else start(unit), self.t, derivatives=derivatives
            )
            if some_failed(solution.result) and couples_rows(scaled, unit):
                solution = solve_as_one(solver, scaled, unit, solution)
            solution = dataclasses.replace(solution, z=solution.z * scale)
        self.some_failed = self.adjoint.finish(solution)
        return solution

    def _linearized(self, z: Tensor, captured: list[Tensor]) -> Operator:
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            fz = self.of(z, *(x.detach() for x in captured))
        linearization = Linearization(fz, z)
        return Transposed(linearization) if self.transposed else linearization

    def of_instances(self, size: int, in_dims: Sequence[int | None]) -> ImplicitProblem:
        # b and z have rows as x has; they come with all instances as rows.
        of = _OfInstances(self.of, size, in_dims[2:])
        adjoint = _of_any_rows(self.adjoint)
        problem = dataclasses.replace(self, adjoint=adjoint, instances=True, known=None)
        linear = linear_problem(problem, of, transposed=self.transposed)
        return dataclasses.replace(linear, reverse=self.reverse, order=self.order)


def _of_any_rows(adjoint: AdjointSolve) -> AdjointSolve:
    """Drop what depends on the samples that were solved."""
    return dataclasses.replace(adjoint, preconditioners=NONE, start=None)


def linear_problem(problem: ImplicitProblem, of: PureMap, *, transposed: bool) -> LinearProblem:
    """Return the linear problem of a derivative of a problem whose map is `of`."""

    def function(x: Tensor, b: Tensor, z: Tensor, *captured: Tensor) -> Tensor:
        def at(z: Tensor) -> Tensor:
            return of(z, *captured)

        if transposed:
            (product,) = pullback(at, [z], x)
        else:
            product = push(at, [z], [x])
        return b if product is None else product + b

    known = problem.operator
    if transposed and known is not None:
        known = Transposed(known)
    return LinearProblem(
        function=function,
        of=of,
        transposed=transposed,
        known=known,
        solver=problem.adjoint.solver,
        adjoint=problem.adjoint,
        t=problem.t,
        opaque=problem.opaque,
        instances=problem.instances,
        reverse=transposed != (isinstance(problem, LinearProblem) and problem.reverse),
        order=problem.order + 1 if isinstance(problem, LinearProblem) else 1,
    )


def implicit_function(
    problem: ImplicitProblem, z0: Tensor, *captured: Tensor
) -> tuple[Tensor, ...]:
    """Return z, iterations, result and, where measured, the residual, as one operation."""
    tensors = (z0, *captured)
    if has_torch_function(tensors):
        return handle_torch_function(implicit_function, tensors, problem, z0, *captured)
    return _ImplicitFunction.apply(problem, z0, *captured)


class _ImplicitFunction(torch.autograd.Function):
    """The derivative of z solves a linear problem with the J of f at z."""

    @staticmethod
    def forward(problem: ImplicitProblem, z0: Tensor, *captured: Tensor) -> tuple[Tensor, ...]:
        solution = problem.solve(z0, captured)
        measured = () if solution.residual is None else (solution.residual.clone(),)
        return solution.z.clone(), solution.iterations, solution.result.clone(), *measured

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        problem, _, *captured = inputs
        z, iterations, result, *measured = output
        ctx.others = len(output) - 1
        ctx.problem = problem  # its graph leads to leaves of its own: no reference cycle
        ctx.mark_non_differentiable(iterations, result, *measured)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(z, result, *captured)
        ctx.save_for_forward(z, result, *captured)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * len(ctx.needs_input_grad)
        tensors = [without_ended(x) for x in ctx.saved_tensors]
        # torch.func.vjp asks for a graph, also where it would lead nowhere.
        leads = inside_transform() or any(x.requires_grad for x in (g, *tensors))
        with torch.set_grad_enabled(torch.is_grad_enabled() and leads):
            return None, None, *_ImplicitFunction._captured_gradients(ctx.problem, *tensors, g=g)

    @staticmethod
    def _captured_gradients(
        problem: ImplicitProblem, z: Tensor, result: Tensor, *captured: Tensor, g: Tensor
    ) -> Sequence[Tensor | None]:
        lost = result == Result.NONFINITE.value
        problem, added = _without_rows(problem, lost)
        rows, given, first = lost[:, None], [*added, *captured], len(added)
        instances = unbatched(g)
        if instances is None:
            return _gradients(problem, z, given, torch.where(rows, 0.0, g))[first:]
        found = _gradients_of_instances(problem, z, rows, given, instances)
        return [None if x is None else batched(x) for x in found[first:]]

    @staticmethod
    def jvp(ctx: Any, _: None, z0: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        with tangents_of_outer_levels(ctx) as (z, result, *captured):
            lost = result == Result.NONFINITE.value
            problem, added = _without_rows(ctx.problem, lost)
            given = [*(None for _ in added), *tangents]
            dz = _tangent(problem, z, lost[:, None], [*added, *captured], given)
        return dz, *(None,) * ctx.others

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], problem: ImplicitProblem, z0: Tensor, *captured: Tensor
    ) -> tuple[Any, Any]:
        size, dims = info.batch_size, in_dims[1:]
        rows = 3 if isinstance(problem, LinearProblem) else 1
        parts = [
            x if d is None else x.movedim(d, 0) for x, d in zip((z0, *captured), dims, strict=True)
        ]
        for i in range(rows):
            x = parts[i] if dims[i] is not None else parts[i].expand(size, *parts[i].shape)
            parts[i] = x.flatten(0, 1)
        inner = [None if d is None else 0 for d in dims[1:]]
        out = implicit_function(problem.of_instances(size, inner), *parts)
        return tuple(x.unflatten(0, (size, -1)) for x in out), (0,) * len(out)


def _tangent(
    problem: ImplicitProblem,
    z: Tensor,
    lost: Tensor,
    captured: list[Tensor],
    tangents: Sequence[Tensor | None],
) -> Tensor:
    """Return the tangent of z, differentiable in any way."""
    places = [i for i, x in enumerate(tangents) if x is not None]
    given = [x for x in tangents if x is not None]

    def tangent(*tangents: Tensor) -> Tensor:
        function = _of_some(problem.function, z, captured, places)
        b = push(function, [captured[i] for i in places], list(tangents))
        linear = linear_problem(problem, problem.function, transposed=False)
        return _solve_linear(linear, z, captured, torch.where(lost, 0.0, b))

    instances = [unbatched(x) for x in given]
    if all(x is None for x in instances):
        return tangent(*given)
    in_dims = tuple(None if x is None else 0 for x in instances)
    parts = [x if y is None else y for x, y in zip(given, instances, strict=True)]
    return batched(torch.func.vmap(tangent, in_dims)(*parts))


class _OfInstances:
    """f of `size` instances as rows of one map."""

    def __init__(self, function: PureMap, size: int, in_dims: Sequence[int | None]) -> None:
        self.function, self.size, self.in_dims = function, size, in_dims

    def __call__(self, z: Tensor, *captured: Tensor) -> Tensor:
        instances = z.unflatten(0, (self.size, -1))
        fz = torch.func.vmap(self.function, (0, *self.in_dims))(instances, *captured)
        return fz.flatten(0, 1)


def _without_rows(problem: ImplicitProblem, lost: Tensor) -> tuple[ImplicitProblem, list[Tensor]]:
    """Return the problem in which lost rows, (B,), touch no other row's derivative, and tensors to
    be captured before the others.
    """
    if problem.graph is not None or isinstance(problem, LinearProblem):
        return problem, []  # a recorded map, or a derivative of such a problem, leaves them out
    if not has_values(lost) or not bool(stored(lost).any()):
        return problem, []
    function = problem.function
    while isinstance(function, _OfInstances):
        lost, function = lost.unflatten(-1, (function.size, -1)), function.function
    return dataclasses.replace(problem, function=_guarded(problem.function)), [lost]


def _guarded(function: PureMap) -> PureMap:
    if isinstance(function, _OfInstances):
        return _OfInstances(_guarded(function.function), function.size, (0, *function.in_dims))

    def guarded(z: Tensor, lost: Tensor, *captured: Tensor) -> Tensor:
        with guard_rows(lost):
            return function(z, *captured)

    return guarded


def _solve_linear(linear: LinearProblem, z: Tensor, captured: list[Tensor], b: Tensor) -> Tensor:
    """Return x of each sample, (B, D), or what one contributes whose solve fails."""
    x, _, result, *_ = implicit_function(linear, b, b, z, *captured)
    if linear.adjoint.failed == "keep" or not linear.some_failed:
        return x
    # A right side that is not finite shows in the gradient.
    failed = has_failed(result)[:, None] & b.isfinite().all(1, keepdim=True)
    return torch.where(failed, b if linear.adjoint.failed == "phantom" else 0.0, x)


def _of_some(function: PureMap, z: Tensor, captured: list[Tensor], places: list[int]) -> PureMap:
    """Return f as a function of those captured tensors alone."""

    def of_some(*values: Tensor) -> Tensor:
        full = list(captured)
        for place, value in zip(places, values, strict=True):
            full[place] = value
        return function(z, *full)

    return of_some


def _gradients(
    problem: ImplicitProblem, z: Tensor, captured: list[Tensor], g: Tensor
) -> Sequence[Tensor | None]:
    """Return gradients of the captured tensors, differentiable in any way."""
    linear = linear_problem(problem, problem.function, transposed=True)
    u = _solve_linear(linear, z, captured, g)
    if problem.graph is not None and not (torch.is_grad_enabled() or inside_transform()):
        return _gradients_by_graph(*problem.graph, u, problem.opaque)
    places = [i for i, x in enumerate(captured) if is_differentiable(x)]
    if problem.opaque:
        z = _view(z)  # at which the gradient of opaque tensors can stop
    function = _of_some(problem.function, z, captured, places)
    found = pullback(function, [captured[i] for i in places], u, opaque=problem.opaque, constant=z)
    by_place = dict(zip(places, found, strict=True))
    return [by_place.get(i) for i in range(len(captured))]


def _gradients_by_graph(
    linearization: Linearization, leaves: list[Tensor], u: Tensor, opaque: int
) -> Sequence[Tensor | None]:
    """Return J^T u for the tensors that the leaves stand for, from the graph of the solution."""
    places = [i for i, x in enumerate(leaves) if x.requires_grad]
    fz = linearization.fz
    if not (fz.requires_grad and places):
        return [None] * len(leaves)
    with stop_gradient_at(leaves[len(leaves) - opaque :], fz):
        found = torch.autograd.grad(
            fz, [leaves[i] for i in places], u, retain_graph=True, allow_unused=True
        )
    by_place = dict(zip(places, found, strict=True))
    return [by_place.get(i) for i in range(len(leaves))]


def _gradients_of_instances(
    problem: ImplicitProblem, z: Tensor, lost: Tensor, captured: list[Tensor], g: Tensor
) -> list[Tensor | None]:
    """Return the gradients for each of several g, (N, B, D)."""
    places = [i for i, x in enumerate(captured) if is_differentiable(x)]

    def gradients(g: Tensor) -> list[Tensor]:
        found = _gradients(problem, z, captured, torch.where(lost, 0.0, g))
        zero = [torch.zeros_like(captured[i]) if found[i] is None else found[i] for i in places]
        return zero  # type: ignore[return-value]

    by_place = dict(zip(places, torch.func.vmap(gradients)(g), strict=True))
    return [by_place.get(i) for i in range(len(captured))]


def pullback(
    function: PureMap,
    primals: list[Tensor],
    u: Tensor,
    *,
    opaque: int = 0,
    constant: Tensor | None = None,
) -> Sequence[Tensor | None]:
    """Return the vector-Jacobian products J^T u of function(*primals), differentiable in any way.

    The last `opaque` of the primals are tensors that the function reaches by itself; they are not
    followed through the other primals, nor through the constant, and not through each other.
    """
    if inside_transform():
        # Not torch.func.vjp, whose product is computed outside of its level: there an
        # autograd.Function in the map finds its tensors dead.
        return torch.func.grad(
            lambda *values: (function(*values) * u).sum(), tuple(range(len(primals)))
        )(*primals)
    tracking = torch.is_grad_enabled()
    own = primals[: len(primals) - opaque]
    with torch.enable_grad():
        # Views, so that the derivative is partial where one primal depends on another.
        views = [_view(x) if x.requires_grad else x.detach().requires_grad_() for x in own]
        inputs = [*views, *primals[len(own) :]]
        out = function(*inputs)
    if not out.requires_grad:
        return [None] * len(inputs)
    stops = [*inputs, *([] if constant is None else [constant])]
    keep = tracking or opaque > 0  # the graph of the opaque tensors is not this one's to free
    with stop_gradient_at(stops if opaque else [], out):
        return torch.autograd.grad(
            out, inputs, u, retain_graph=keep, create_graph=tracking, allow_unused=True
        )


def push(function: PureMap, primals: list[Tensor], tangents: list[Tensor]) -> Tensor:
    """Return the Jacobian-vector product J v: the derivative of J^T u, which is linear in u."""

    def along(u: Tensor) -> Tensor:
        found = torch.func.grad(
            lambda *values: (function(*values) * u).sum(), tuple(range(len(primals)))
        )(*primals)
        products = [_inner_product(x, v) for x, v in zip(found, tangents, strict=True)]
        return sum(products)  # type: ignore[return-value]

    return torch.func.grad(along)(torch.zeros_like(function(*primals)))


def _view(x: Tensor) -> Tensor:
    return x.view_as(x) if x.layout == torch.strided else x.clone()


def _inner_product(x: Tensor, v: Tensor) -> Tensor:
    """Multiply real and imaginary parts, where they are complex."""
    return (x.conj() * v).sum().real if x.is_complex() else (x * v).sum()
