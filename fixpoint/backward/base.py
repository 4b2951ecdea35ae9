"""Interface of all ways of differentiating a solve, and the parts that several of them use."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from fixpoint._torch import no_gradients, tracks
from fixpoint._validation import names_options
from fixpoint._with_gradient import with_gradient_of
from fixpoint.backward._evaluation import run_with_gradients_in_phi
from fixpoint.backward._vmap import run_without_gradient
from fixpoint.derivatives import Derivatives, MatrixMap
from fixpoint.failure import FailedRows, unsafe_rows
from fixpoint.row_guard import guard_rows
from fixpoint.solution import Result, Solution
from fixpoint.solvers import Solver
from fixpoint.solvers.base import IterativeSolver
from fixpoint.solvers.loop.eager import Problem, make_first_updates

IN_GRAPH = ("zero", "keep")
"""Values of `failed` that need no look at the result, so that a graph has them."""


class Backward(nn.Module):
    """A way to differentiate a solve; works on (B, D) matrices.

    Attributes:
        failed: the gradient of samples whose solve does not converge; see `Implicit`.
    """

    failed: FailedRows = "zero"

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Answer an unknown option of a constructor by the known ones."""
        super().__init_subclass__(**arguments)
        if "__init__" in vars(cls) and not _passes_on_options(cls.__init__):
            cls.__init__ = names_options(cls.__init__)  # type: ignore[method-assign]

    def check(self, solver: Solver) -> None:
        """Refuse, with the remedy, a solver that this backward cannot serve."""

    def compiles(self, solver: Solver) -> bool:
        """Tell whether torch.compile makes one graph of such a solve; else it leaves it out."""
        return solver.compiles

    def solve(self, solver: Solver, phi: MatrixMap, z0: Tensor, t: int | None) -> Solution:
        """Return the solution with a differentiable z."""
        raise NotImplementedError


def _passes_on_options(function: Any) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def refuse_learned_eta(solver: Solver, backward: str) -> None:
    if solver.learns_steps:
        raise ValueError(
            f"eta receives no gradient under {backward}: use Unrolled(), or "
            "InexactNewton(..., learn=False)"
        )


def solve_then_track(
    solver: Solver,
    updates: Solver,
    count: int,
    phi: MatrixMap,
    z0: Tensor,
    t: int | None,
    *,
    last: bool = False,
) -> Solution:
    """Return the solution with the gradient of `count` first updates made from it.

    Its value is unchanged, or with `last` the state after them, in evaluation too.
    """
    solution = run_without_gradient(solver, phi, z0, t)
    if not (tracks() or last):
        return solution
    # A lost sample has no gradient; phi may not be differentiable where it was lost.
    lost = solution.result == Result.NONFINITE.value
    with no_gradients():
        start = torch.where(lost[:, None], z0, solution.z).clone()
    unsafe = None if torch.compiler.is_compiling() else unsafe_rows(solution)
    guarded = phi if unsafe is None else guarded_map(phi, unsafe)

    def make(phi: MatrixMap) -> Solution:
        problem = Problem(phi, Derivatives(phi), t)
        made = make_first_updates(cast(IterativeSolver, updates), problem, start, count, lost)
        return replace(
            solution,
            z=made[0] if last else with_gradient_of(solution.z, made[0]),
            evaluations=solution.evaluations + made[1],
            products=solution.products + problem.derivatives.products,
        )

    return run_with_gradients_in_phi(make, guarded)


def guarded_map(phi: MatrixMap, lost: Tensor) -> MatrixMap:
    """Return phi, in which what is not finite in the lost samples, (B,), touches no other one."""

    def guarded(z: Tensor) -> Tensor:
        with guard_rows(lost, columns):
            return phi(z)

    guarded.columns = columns = getattr(phi, "columns", ())  # type: ignore[attr-defined]
    return guarded
