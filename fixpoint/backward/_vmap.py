"""A solve inside torch.func.vmap: the axis that it hides becomes rows of one solve."""

from __future__ import annotations

import torch
from torch import Tensor

from fixpoint._groups import groups_of
from fixpoint._modes import unrecorded
from fixpoint._torch import inside_vmap, no_gradients, transform_level
from fixpoint.backward._adjoint import AdjointSolve, ImplicitProblem, implicit_function
from fixpoint.backward._evaluation import solve_without_gradient
from fixpoint.derivatives import MatrixMap
from fixpoint.solution import Solution
from fixpoint.solvers import Solver
from fixpoint.tracing import closure_convert_in_vmap


def run_without_gradient(solver: Solver, phi: MatrixMap, z0: Tensor, t: int | None) -> Solution:
    """Return the solution without gradient, of all instances that torch.func.vmap hides."""
    if solver.has_tolerance and not torch.compiler.is_compiling() and transform_level():
        with unrecorded():
            fz = phi(z0)  # what phi makes once and keeps has its derivatives
            if inside_vmap(z0) or inside_vmap(fz):
                adjoint = AdjointSolve(solver=solver, finish=lambda solution: False)
                with no_gradients():
                    return solve_in_vmap(solver, adjoint, phi, z0, t)
    return solve_without_gradient(lambda phi: solver.run(phi, z0, t), phi)


def solve_in_vmap(
    solver: Solver, adjoint: AdjointSolve, phi: MatrixMap, z0: Tensor, t: int | None
) -> Solution:
    """Return all instances as rows of one solve, differentiable where gradients are."""
    if groups_of(getattr(phi, "columns", ())) is not None:
        raise ValueError(
            "torch.func.vmap makes its axis the batch axis, and groups are samples of their own: "
            "number the groups of all instances in one batch"
        )
    closure = closure_convert_in_vmap(phi, z0.detach())
    solutions: list[Solution] = []
    problem = ImplicitProblem(
        function=closure.function, solver=solver, adjoint=adjoint, t=t, note=solutions.append
    )
    z, iterations, result, *measured = implicit_function(problem, z0.detach(), *closure.captured)
    last = solutions[-1]
    return Solution(
        z=z,
        residual=measured[0] if measured else None,
        iterations=iterations,
        evaluations=last.evaluations,
        result=result,
        products=last.products,
    )
