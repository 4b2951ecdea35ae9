"""The implicit function theorem within a graph, for torch.compile: both solves are one operation.

phi is traced like any other function, so that what it closes over needs no search. First
derivatives in reverse mode; the compiler has no second ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fixpoint._with_gradient import with_gradient_of
from fixpoint.derivatives import MatrixMap
from fixpoint.solution import Result, Solution, has_failed
from fixpoint.solvers import Anderson, Solver
from fixpoint.solvers.base import IterativeSolver
from fixpoint.solvers.loop.graph import iterate_in_graph, own
from fixpoint.solvers.loop.norms import Tolerance

DEFAULT = Anderson(max_iter=100)
"""Solves the adjoint where the solve itself has no tolerance."""


class AdjointInGraph(NamedTuple):
    """The solver of the adjoint, and its tolerance."""

    solver: IterativeSolver
    tolerance: Tolerance


def adjoint_in_graph(given: Solver | None, solver: Solver, dtype: torch.dtype) -> AdjointInGraph:
    """Return the adjoint solve by a given solver, or by default by that of the problem."""
    if given is not None:
        return AdjointInGraph(cast(IterativeSolver, given), given.tolerance)
    if not solver.has_tolerance:
        return AdjointInGraph(DEFAULT, Tolerance(100 * torch.finfo(dtype).eps, 0.0))
    tolerance = Tolerance(solver.rtol or solver.atol, 0.0, solver.norm)
    return AdjointInGraph(cast(IterativeSolver, solver), tolerance)


def solve_implicitly_in_graph(
    solver: Solver,
    adjoint: AdjointInGraph,
    phi: MatrixMap,
    z0: Tensor,
    t: int | None,
    *,
    keep_failed: bool = False,
) -> Solution:
    """Return the solution, with the gradient of the implicit function theorem.

    Args:
        adjoint: solves u = J^T u + g for each sample.
        keep_failed: whether samples that did not converge have a gradient too, as good as their z.
    """
    with torch.no_grad():
        solution = solver.run(phi, z0, t)
    if not torch.is_grad_enabled():
        return solution
    lost = solution.result == Result.NONFINITE.value
    without = lost if keep_failed else has_failed(solution.result)
    # A lost sample has no gradient; phi may not be differentiable where it was lost.
    z = torch.where(without[:, None], z0.detach(), solution.z)
    z = implicitly_in_graph(adjoint, phi, z, keep_failed=keep_failed)
    return replace(solution, z=torch.where(without[:, None], solution.z, z))


def implicitly_in_graph(
    adjoint: AdjointInGraph, phi: MatrixMap, z: Tensor, *, keep_failed: bool = False
) -> Tensor:
    """Return z, (B, D), as the solution that it is, with its implicit gradient."""
    z = own(z.detach())  # phi may hold the original, and a loop takes no tensor twice
    return with_gradient_of(z, _Adjoint.apply(phi(z), z, phi, adjoint, keep_failed))


class _Adjoint(torch.autograd.Function):
    """fz with the adjoint of z = phi(z) for its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        fz: Tensor,
        z: Tensor,
        phi: MatrixMap,
        adjoint: AdjointInGraph,
        keep_failed: bool,
    ) -> Tensor:
        ctx.save_for_backward(z)
        ctx.phi, ctx.adjoint, ctx.keep_failed = phi, adjoint, keep_failed
        return fz.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (z,) = ctx.saved_tensors
        phi = ctx.phi
        size = g.abs().amax(1, keepdim=True)
        size = torch.where(size > 0, size, 1.0)
        unit = g / size

        def affine(u: Tensor) -> Tensor:
            # The product is made inside the loop, and u in the units of g: rows may be coupled.
            product = torch.func.vjp(phi, z)[1](u * size)[0]
            return product / size + unit

        solver, tolerance = ctx.adjoint
        solution = iterate_in_graph(solver, affine, unit, tolerance=tolerance, differentiates=True)
        u = solution.z * size
        if not ctx.keep_failed:
            u = torch.where(has_failed(solution.result)[:, None], 0.0, u)
        return u, None, None, None, None
