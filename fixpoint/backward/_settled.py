"""The gradient of samples at their solution, where that of the updates is rounding noise."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from fixpoint._torch import has_values, is_recorded, is_traced_by_fx, tracks
from fixpoint.backward.graph import adjoint_in_graph, implicitly_in_graph
from fixpoint.backward.implicit import Implicit
from fixpoint.derivatives import Derivatives, MatrixMap
from fixpoint.solution import Solution
from fixpoint.solvers import Anderson, Broyden, Newton, Picard, Solver
from fixpoint.solvers.base import ALONE, IterativeSolver
from fixpoint.solvers.loop.eager import Problem, settle


def run_until_settled(
    solver: Solver, phi: MatrixMap, z0: Tensor, t: int | None, track_from: int = 0
) -> Solution:
    """Return a fixed number of updates; samples at their solution keep it and its implicit
    gradient.

    Where |phi(z) - z| / |phi(z)| = r, differences of iterates have a relative error of eps / r, and
    so has the gradient of updates made from them; the implicit gradient has one of r. So a sample
    takes the latter where r <= sqrt(eps).
    """
    problem = Problem(phi, Derivatives(phi), t, track_from)

    def at_solution(z: Tensor, rows: Tensor) -> Tensor:
        settled = phi if len(z) == 1 else _of_rows(phi, rows[:, None], z)
        return implicitly(solver, settled, z, t)

    solution, end = settle(cast(IterativeSolver, solver), problem, z0, at_solution)
    rows = end.settled[:, None]
    if not tracks():
        z = end.best
    elif is_traced_by_fx() or (is_recorded(z0) and not torch.compiler.is_compiling()):
        # Nothing can be solved for in a graph of make_fx or of CUDA.
        z = end.entered + (end.best - end.entered).detach()
    else:
        # Settled samples may depend on others, at the states that these have now.
        finite = solution.z.isfinite().all(1, keepdim=True)
        others = torch.where(finite, solution.z, z0)
        z = at_solution(torch.where(rows, end.best, others), end.settled)
    return replace(solution, z=torch.where(rows, z, solution.z))


def _of_rows(phi: MatrixMap, rows: Tensor, others: Tensor) -> MatrixMap:
    """Return phi as a map of some rows, (B, 1), beside others that are given, (B, D)."""

    def of_rows(z: Tensor) -> Tensor:
        return torch.where(rows, phi(torch.where(rows, z, others)), others)

    of_rows.columns = getattr(phi, "columns", ())  # type: ignore[attr-defined]
    return of_rows


def with_implicit_gradients(
    solution: Solution, solver: Solver, phi: MatrixMap, z0: Tensor, t: int | None
) -> Solution:
    """Return the solution with the implicit gradient of the samples that needed no update, and of
    those that were solved as one, whose first updates took them for independent.
    """
    coupled = solution.coupled and not solver.learns_steps
    warm = ((solution.iterations == 0) | coupled) & solution.converged
    if not (tracks() and has_values(warm)):
        return solution
    if len(warm) > 0 and not bool(warm.any()):
        return solution
    rows = warm[:, None]
    z = implicitly(solver, phi, torch.where(rows, solution.z, z0), t)
    return replace(solution, z=torch.where(rows, z, solution.z))


def implicitly(solver: Solver, phi: MatrixMap, z: Tensor, t: int | None) -> Tensor:
    """Return z as the solution that it is, with the gradient of the implicit function theorem."""
    if torch.compiler.is_compiling():
        return implicitly_in_graph(adjoint_in_graph(None, solver, z.dtype), phi, z)
    rtol = solver.rtol or solver.atol or 100 * torch.finfo(z.dtype).eps
    adjoint: Solver = Anderson(max_iter=100, rtol=rtol, atol=0.0)
    if isinstance(solver, (Broyden, Newton)):
        adjoint = solver.with_options(
            max_iter=max(100, solver.max_iter), rtol=rtol, atol=0.0, record=None, **ALONE
        )
    return cast(Tensor, Implicit(adjoint).solve(Picard(max_iter=0), phi, z.detach(), t).z)
