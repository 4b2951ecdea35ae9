"""The gradient of samples at their solution, where that of the updates is rounding noise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from fixpoint.backward.implicit import Implicit
from fixpoint.derivatives import Derivatives, MatrixMap
from fixpoint.solution import Result, Solution
from fixpoint.solvers import Anderson, Broyden, Newton, Picard, Solver
from fixpoint.solvers.base import IterativeSolver
from fixpoint.solvers.loop.finished import stop_finished


def run_until_settled(solver: Solver, phi: MatrixMap, z0: Tensor, t: int | None) -> Solution:
    """A fixed number of updates; samples at their solution keep it and its implicit gradient.

    Where |phi(z) - z| / |phi(z)| = r, differences of iterates have a relative error of eps / r, and
    so has the gradient of updates made from them; the implicit gradient has one of r. So a sample
    takes the latter where r <= sqrt(eps). Of the updates after that it keeps the best state: later
    ones are made of noise, and may make the state worse.
    """
    solver = cast(IterativeSolver, solver)
    derivatives = Derivatives(phi)
    given: dict[str, Any] = {"derivatives": derivatives} if solver.needs_derivatives else {}
    z, state, settled = z0, None, torch.zeros(z0.shape[0], dtype=torch.bool, device=z0.device)
    best, least, scale = z0.detach(), _norm(z0) + torch.inf, _norm(z0)
    entered = z0
    tolerance = torch.finfo(z0.dtype).eps ** 0.5
    for k in range(solver.max_iter + 1):
        start = stop_finished(~settled, z)
        fz = phi(start)
        residual, scale = _norm(fz - z), torch.maximum(scale, _norm(fz))
        better = residual < least
        least = torch.where(better, residual, least)
        best = torch.where(better[:, None], z.detach(), best)
        entered = torch.where(settled[:, None], entered, z)
        settled = settled | (residual <= tolerance * scale)
        if k == solver.max_iter:
            break
        if k == 0:
            state = solver.init(z, t)
        start, fz, state = stop_finished(~settled, (start, fz, state))
        z, state = solver.update(k, start, fz, state, **given)
    rows = settled[:, None]
    if not torch.is_grad_enabled():
        z = torch.where(rows, best, z)
    elif torch.compiler.is_compiling():
        z = torch.where(rows, entered + (best - entered).detach(), z)
    else:
        z = torch.where(rows, implicitly(solver, phi, torch.where(rows, best, z0), t), z)
    iterations = torch.full((z.shape[0],), solver.max_iter, dtype=torch.int64, device=z.device)
    result = torch.full((z.shape[0],), Result.FIXED_STEPS.value, dtype=torch.int8, device=z.device)
    evaluations = solver.max_iter + 1 + derivatives.evaluations
    return Solution(z, None, iterations, evaluations, result, products=derivatives.products)


def with_gradient_of_warm_starts(
    solution: Solution, solver: Solver, phi: MatrixMap, z0: Tensor, t: int | None
) -> Solution:
    """The solution with the implicit gradient of the samples that needed no update."""
    warm = (solution.iterations == 0) & (solution.result == Result.CONVERGED.value)
    if not torch.is_grad_enabled() or (len(warm) > 0 and not bool(warm.any())):
        return solution
    rows = warm[:, None]
    z = implicitly(solver, phi, torch.where(rows, solution.z, z0), t)
    return replace(solution, z=torch.where(rows, z, solution.z))


def implicitly(solver: Solver, phi: MatrixMap, z: Tensor, t: int | None) -> Tensor:
    """z as the solution that it is, with the gradient of the implicit function theorem."""
    rtol = solver.rtol or solver.atol or 100 * torch.finfo(z.dtype).eps
    adjoint: Solver = Anderson(max_iter=100, rtol=rtol, atol=0.0)
    if isinstance(solver, (Broyden, Newton)):
        adjoint = solver.with_options(
            max_iter=max(100, solver.max_iter), rtol=rtol, atol=0.0, record=None
        )
    return cast(Tensor, Implicit(adjoint).solve(Picard(max_iter=0), phi, z.detach(), t).z)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(
        x.detach(), dim=1, dtype=torch.promote_types(x.dtype, torch.float32)
    )
