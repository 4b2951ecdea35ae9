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

from fixpoint._torch import batched, inside_transform, unbatched
from fixpoint.captured import stop_gradient_at
from fixpoint.derivatives import Derivatives, Linearization, MatrixMap
from fixpoint.solution import Result, Solution
from fixpoint.solvers import Solver

PureMap = Callable[..., Tensor]
"""f(z, *captured), (B, D) like z."""


@dataclasses.dataclass(kw_only=True)
class Problem:
    """z = f(z, *captured), and how to solve and to differentiate it.

    function: f; rows of z are independent.
    solver: of this problem, at time t.
    adjoint: the solver of the linear problems of its derivatives; `finish` takes each
        `Solution`.
    leaves: how many of the captured tensors, the last ones, f reaches by itself, and not as
        arguments.
    solution: the first solution, where it is known.
    graph: f evaluated there, and the leaves that stand for the captured tensors.
    start: a start for the adjoint as a function of its right side.
    note: takes each `Solution` of this problem.
    """

    function: PureMap
    solver: Solver
    adjoint: Solver
    finish: Callable[[Solution], None]
    t: int | None = None
    leaves: int = 0
    solution: Solution | None = None
    graph: tuple[Linearization, list[Tensor]] | None = None
    start: Callable[[Tensor], Tensor] | None = None
    note: Callable[[Solution], None] | None = None

    def solve(self, z0: Tensor, captured: Sequence[Tensor]) -> Solution:
        """The solution for these tensors, started at z0."""
        solution, self.solution = self.solution, None
        if solution is None:
            phi, derivatives = self.bind(captured)
            solution = self.solver.run(phi, z0, self.t, derivatives=derivatives)
        if self.note is not None:
            self.note(solution)
        return solution

    def bind(self, captured: Sequence[Tensor]) -> tuple[MatrixMap, Derivatives | None]:
        """f as a map of z, and what has better derivatives than autograd."""
        return lambda z: self.function(z, *captured), None

    def of_instances(self, size: int, in_dims: Sequence[int | None]) -> Problem:
        """The problem of `size` of its instances at once, as so many more rows."""
        function = _of_instances(self.function, size, in_dims)
        return dataclasses.replace(self, function=function, graph=None, start=None)


@dataclasses.dataclass(kw_only=True)
class LinearProblem(Problem):
    """x = A x + b with A = J^T, or J itself: f(x, b, z, *captured), J that of `of`(z, *captured).

    The derivative of the solution of `of`: in reverse mode with J^T, in forward mode with J.
    """

    of: PureMap
    transposed: bool

    def bind(self, captured: Sequence[Tensor]) -> tuple[MatrixMap, Derivatives | None]:
        if inside_transform():
            return Problem.bind(self, captured)
        b, z, *others = captured
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            fz = self.of(z, *(x.detach() for x in others))
        return bind_linear(Linearization(fz, z), b.detach(), transposed=self.transposed)

    def of_instances(self, size: int, in_dims: Sequence[int | None]) -> Problem:
        # b and z have rows as x has; they come with all instances as rows.
        return linear_problem(
            self, _of_instances(self.of, size, in_dims[2:]), transposed=self.transposed
        )


def linear_problem(problem: Problem, of: PureMap, *, transposed: bool) -> LinearProblem:
    """That of a derivative of a problem whose map is `of`."""

    def function(x: Tensor, b: Tensor, z: Tensor, *captured: Tensor) -> Tensor:
        def at(z: Tensor) -> Tensor:
            return of(z, *captured)

        if transposed:
            (product,) = pullback(at, [z], x)
        else:
            product = push(at, [z], [x])
        return b if product is None else product + b

    return LinearProblem(
        function=function,
        of=of,
        transposed=transposed,
        solver=problem.adjoint,
        adjoint=problem.adjoint,
        finish=problem.finish,
        note=problem.finish,
        leaves=problem.leaves,
    )


def bind_linear(
    linearization: Linearization, b: Tensor, *, transposed: bool
) -> tuple[MatrixMap, Derivatives]:
    """x -> A x + b with A = J^T, or J, and its derivatives."""
    product = linearization.vjp if transposed else linearization.jvp

    def affine(x: Tensor) -> Tensor:
        return product(x) + b

    return affine, _LinearDerivatives(affine, linearization, transposed=transposed)


class _LinearDerivatives(Derivatives):
    """The Jacobian of x -> A x + b is A, whatever x is."""

    def __init__(self, phi: MatrixMap, linearization: Linearization, *, transposed: bool) -> None:
        super().__init__(phi)
        self.linearization, self.transposed = linearization, transposed

    def evaluate(self, z: Tensor) -> Tensor:
        return self.phi(z)

    def jacobian(self, z: Tensor) -> Tensor:
        self.products += z.shape[1]
        J = self.linearization.jacobian()
        return J.mT if self.transposed else J

    def jvp(self, z: Tensor, v: Tensor) -> Tensor:
        self.products += 1
        return self.linearization.vjp(v) if self.transposed else self.linearization.jvp(v)


def implicit_function(problem: Problem, z0: Tensor, *captured: Tensor) -> tuple[Tensor, ...]:
    """z, iterations, result and, where measured, the residual; one operation for a closure."""
    tensors = (z0, *captured)
    if has_torch_function(tensors):
        return handle_torch_function(implicit_function, tensors, problem, z0, *captured)
    return _ImplicitFunction.apply(problem, z0, *captured)


class _ImplicitFunction(torch.autograd.Function):
    """The derivative of z solves a linear problem with the J of f at z."""

    @staticmethod
    def forward(problem: Problem, z0: Tensor, *captured: Tensor) -> tuple[Tensor, ...]:
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
        problem: Problem = ctx.problem
        z, result, *captured = ctx.saved_tensors
        lost = (result == Result.NONFINITE.value)[:, None]
        instances = unbatched(g)
        if instances is not None:
            found = _gradients_of_instances(problem, z, lost, captured, instances)
            return None, None, *(None if x is None else batched(x) for x in found)
        g = torch.where(lost, 0.0, g)
        if problem.graph is None or torch.is_grad_enabled() or inside_transform():
            return None, None, *_gradients(problem, z, captured, g)
        return None, None, *_gradients_by_graph(problem, *problem.graph, g)

    @staticmethod
    def jvp(ctx: Any, _: None, z0: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        problem: Problem = ctx.problem
        z, result, *captured = ctx.saved_tensors
        places = [i for i, x in enumerate(tangents) if x is not None]
        given = [x for x in tangents if x is not None]
        lost = (result == Result.NONFINITE.value)[:, None]

        def tangent(*tangents: Tensor) -> Tensor:
            function = _of_some(problem.function, z, captured, places)
            b = push(function, [captured[i] for i in places], list(tangents))
            linear = linear_problem(problem, problem.function, transposed=False)
            return _solve_linear(linear, z, captured, torch.where(lost, 0.0, b))

        instances = [unbatched(x) for x in given]
        in_dims = tuple(None if x is None else 0 for x in instances)
        if any(x is not None for x in instances):
            parts = [x if y is None else y for x, y in zip(given, instances, strict=True)]
            dz = batched(torch.func.vmap(tangent, in_dims)(*parts))
        else:
            dz = tangent(*given)
        return dz, *(None,) * ctx.others

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], problem: Problem, z0: Tensor, *captured: Tensor
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


def _of_instances(function: PureMap, size: int, in_dims: Sequence[int | None]) -> PureMap:
    def of_instances(z: Tensor, *captured: Tensor) -> Tensor:
        instances = z.unflatten(0, (size, -1))
        return torch.func.vmap(function, (0, *in_dims))(instances, *captured).flatten(0, 1)

    return of_instances


def _scaled(g: Tensor) -> tuple[Tensor, Tensor]:
    """g with max |g| = 1 in each row, and what to multiply it with.

    So neither tiny nor huge right sides leave the range of the dtype.
    """
    size = g.detach().abs().amax(1, keepdim=True) if g.shape[1] else g.detach()
    size = torch.where(size > 0, size, 1.0)
    return g / size, size


def _solve_linear(linear: LinearProblem, z: Tensor, captured: list[Tensor], b: Tensor) -> Tensor:
    unit, size = _scaled(b)
    return implicit_function(linear, unit, unit, z, *captured)[0] * size


def _of_some(function: PureMap, z: Tensor, captured: list[Tensor], places: list[int]) -> PureMap:
    """f as a function of those captured tensors alone."""

    def of_some(*values: Tensor) -> Tensor:
        full = list(captured)
        for place, value in zip(places, values, strict=True):
            full[place] = value
        return function(z, *full)

    return of_some


def _gradients(
    problem: Problem, z: Tensor, captured: list[Tensor], g: Tensor
) -> list[Tensor | None]:
    """Gradients of the captured tensors, differentiable in any way."""
    linear = linear_problem(problem, problem.function, transposed=True)
    u = _solve_linear(linear, z, captured, g)
    places = [i for i, x in enumerate(captured) if _is_differentiable(x)]
    if problem.leaves:
        z = _view(z)  # at which the gradient of the leaves can stop
    function = _of_some(problem.function, z, captured, places)
    found = pullback(function, [captured[i] for i in places], u, leaves=problem.leaves, constant=z)
    by_place = dict(zip(places, found, strict=True))
    return [by_place.get(i) for i in range(len(captured))]


def _gradients_of_instances(
    problem: Problem, z: Tensor, lost: Tensor, captured: list[Tensor], g: Tensor
) -> list[Tensor | None]:
    """The gradients for each of several g, (N, B, D)."""
    places = [i for i, x in enumerate(captured) if _is_differentiable(x)]

    def gradients(g: Tensor) -> list[Tensor]:
        found = _gradients(problem, z, captured, torch.where(lost, 0.0, g))
        zero = [torch.zeros_like(captured[i]) if found[i] is None else found[i] for i in places]
        return zero  # type: ignore[return-value]

    by_place = dict(zip(places, torch.func.vmap(gradients)(g), strict=True))
    return [by_place.get(i) for i in range(len(captured))]


def _gradients_by_graph(
    problem: Problem, linearization: Linearization, leaves: list[Tensor], g: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of the captured tensors, not to be differentiated again."""
    unit, size = _scaled(g)
    affine, derivatives = bind_linear(linearization, unit, transposed=True)
    u0 = unit if problem.start is None else problem.start(unit)
    adjoint = problem.adjoint.run(affine, u0, derivatives=derivatives)
    problem.finish(adjoint)
    u = adjoint.z * size
    if not linearization.fz.requires_grad:
        return (None,) * len(leaves)
    return torch.autograd.grad(linearization.fz, leaves, u, retain_graph=True, allow_unused=True)


def pullback(
    function: PureMap,
    primals: list[Tensor],
    u: Tensor,
    *,
    leaves: int = 0,
    constant: Tensor | None = None,
) -> Sequence[Tensor | None]:
    """The vector-Jacobian products J^T u of function(*primals), differentiable in any way.

    The last `leaves` of the primals are leaves that the function reaches by itself; they are not
    followed through the other primals, nor through what else it holds constant.
    """
    if inside_transform():
        # Not torch.func.vjp, whose product is computed outside of its level: there an
        # autograd.Function in the map finds its tensors dead.
        return torch.func.grad(
            lambda *values: (function(*values) * u).sum(), tuple(range(len(primals)))
        )(*primals)
    tracking = torch.is_grad_enabled()
    own = primals[: len(primals) - leaves]
    with torch.enable_grad():
        # Views, so that the derivative is partial where one primal depends on another.
        views = [_view(x) if x.requires_grad else x.detach().requires_grad_() for x in own]
        inputs = [*views, *primals[len(own) :]]
        out = function(*inputs)
    if not out.requires_grad:
        return [None] * len(inputs)
    stops = views if constant is None else [*views, constant]
    # With other leaves the pass enters the graph of this node itself, which must outlive it.
    retain = tracking or leaves > 0
    with stop_gradient_at(stops if leaves else []):
        return torch.autograd.grad(
            out, inputs, u, retain_graph=retain, create_graph=tracking, allow_unused=True
        )


def push(function: PureMap, primals: list[Tensor], tangents: list[Tensor]) -> Tensor:
    """The Jacobian-vector product J v: the derivative of J^T u, which is linear in u."""

    def along(u: Tensor) -> Tensor:
        found = torch.func.grad(
            lambda *values: (function(*values) * u).sum(), tuple(range(len(primals)))
        )(*primals)
        products = [_inner_product(x, v) for x, v in zip(found, tangents, strict=True)]
        return sum(products)  # type: ignore[return-value]

    return torch.func.grad(along)(torch.zeros_like(function(*primals)))


def _view(x: Tensor) -> Tensor:
    return x.view_as(x) if x.layout == torch.strided else x.clone()


def _is_differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _inner_product(x: Tensor, v: Tensor) -> Tensor:
    """Of the real and imaginary parts, where they are complex."""
    return (x.conj() * v).sum().real if x.is_complex() else (x * v).sum()
