"""F(z) = 0 as a fixed-point problem in units of z."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fixpoint._modes import unrecorded
from fixpoint._torch import inside_forward_mode, inside_transform, inside_vmap, primal
from fixpoint.backward._evaluation import solve_without_gradient
from fixpoint.derivatives import MatrixMap, linearize
from fixpoint.solution import Solution
from fixpoint.solvers import Solver
from fixpoint.tracing import at_level_zero

RESCALINGS = 3
"""Most further solves with the scale where the one before has ended."""
MAX_CHANGE = 4.0
"""A scale within this factor of the one before is kept."""


class RootMap:
    """phi(z) = z - c F(z), whose fixed points are the roots of F; c is of each sample and leaf.

    Args:
        F: map of (B, D) matrices.
        c: of `scale_at`, (B, D).
    """

    def __init__(self, F: MatrixMap, c: Tensor) -> None:
        self.F, self.c, self.columns = F, c, getattr(F, "columns", ())

    def __call__(self, z: Tensor) -> Tensor:
        return z - self.c * self.F(z)

    def rescale(self, z: Tensor) -> bool:
        """Take c as it is at z, for samples where it is another one; whether there are any."""
        c = _scale(self.F, z, list(self.columns or (z.shape[1],)))
        ratio = c / self.c
        other = (ratio > MAX_CHANGE) | (ratio < 1 / MAX_CHANGE)
        self.c = torch.where(other, c, self.c)
        return bool(other.any())


def scale_at(F: MatrixMap, z: Tensor) -> Tensor:
    """Return c of each sample and leaf, (B, D), without derivatives.

    1 / c is the slope of F at z, |J d| / |d| with J = d F / d z, along the direction d of F(z)
    itself. So c F(z) is a distance in units of z, whatever the units of F.
    """
    columns = list(getattr(F, "columns", ()) or (z.shape[1],))
    with unrecorded():
        if hides_axis(F, z):
            z = z.detach()
            value = F(z)
            d = _direction(value, columns)
            product = torch.func.jvp(F, (z,), (d,))[1]
            return _inverse_slope(z, value, d, product, columns).detach()
        if inside_forward_mode():
            return at_level_zero(lambda F: _scale(F, primal(z), columns), F)
        return _scale(F, z.detach(), columns)


def _scale(F: MatrixMap, z: Tensor, columns: list[int]) -> Tensor:
    linearization = linearize(F, z)
    value = linearization.fz.detach()
    d = _direction(value, columns)
    return _inverse_slope(z, value, d, linearization.jvp(d).detach(), columns)


def _sizes(x: Tensor, columns: list[int]) -> Tensor:
    """Return the largest number of each leaf, by which none leaves the range of the dtype; like x,
    (B, D).
    """
    leaves = [
        y.abs().amax(1, keepdim=True).expand_as(y) if y.numel() else y for y in x.split(columns, 1)
    ]
    return torch.cat(leaves, 1)


def _lengths(x: Tensor, columns: list[int]) -> Tensor:
    """Return the 2-norm of each leaf, like x, (B, D)."""
    leaves = x.split(columns, 1)
    return torch.cat(
        [torch.linalg.vector_norm(y, dim=1, keepdim=True).expand_as(y) for y in leaves], 1
    )


def _direction(F: Tensor, columns: list[int]) -> Tensor:
    """Return numbers of each leaf of F, with 1 for the largest; ones where all are 0, (B, D)."""
    size = _sizes(F, columns)
    usable = (size > 0) & (size < torch.inf)
    return torch.where(usable, F / torch.where(usable, size, 1.0), 1.0)


def _inverse_slope(z: Tensor, F: Tensor, d: Tensor, product: Tensor, columns: list[int]) -> Tensor:
    """Return |d| / |J d| of each leaf; |z| / |F| where there is no slope, and 1 where F is 0, (B,
    D).
    """
    size = _sizes(product, columns)
    usable = (size > 0) & (size < torch.inf)
    safe = torch.where(usable, size, 1.0)
    slope = safe * _lengths(torch.where(usable, product / safe, 1.0), columns)
    value, state = _sizes(F, columns), _sizes(z, columns)
    known = (value > 0) & (value < torch.inf)
    state = torch.where(state > 0, state, 1.0)
    without = torch.where(known, state / torch.where(known, value, 1.0), 1.0)
    return torch.where(usable, _lengths(d, columns) / slope, without)


class Known(Solver):
    """The solution that another solver has found, to be differentiated.

    Args:
        solver: the other one.
        solution: of (B, D) matrices.
    """

    record = None

    def __init__(self, solver: Solver, solution: Solution) -> None:
        super().__init__(
            max_iter=solver.max_iter,
            rtol=solver.rtol,
            atol=solver.atol,
            norm=solver.norm,
            leaf_atol=solver.leaf_atol,
        )
        self.solver, self.solution = solver, solution
        self.preconditioner = getattr(solver, "preconditioner", None)

    def as_adjoint(self) -> Solver:
        return self.solver.as_adjoint()

    def run(self, phi: MatrixMap, z: Tensor, t: int | None = None, **_: Any) -> Solution:
        return self.solution


def hides_axis(F: MatrixMap, z: Tensor) -> bool:
    """Tell whether torch.func.vmap hides an axis of z or of F(z)."""
    return inside_transform() and (inside_vmap(z) or inside_vmap(F(z)))


def solve_scaled(
    solver: Solver, F: MatrixMap, z: Tensor, t: int | None
) -> tuple[Solution, RootMap]:
    """Return the solution without gradient, and the map with c as it is there."""
    columns = list(getattr(F, "columns", ()) or (z.shape[1],))
    if inside_forward_mode():
        solution, c = at_level_zero(lambda F: _solve(solver, F, primal(z), t, columns), F)
    else:
        solution, c = _solve(solver, F, z, t, columns)
    return solution, RootMap(F, c)


def _solve(
    solver: Solver, F: MatrixMap, z: Tensor, t: int | None, columns: list[int]
) -> tuple[Solution, Tensor]:
    with unrecorded():
        root = RootMap(F, _scale(F, z.detach(), columns))

    def run(phi: MatrixMap) -> Solution:
        solution = solver.run(phi, z, t)
        for _ in range(RESCALINGS if solver.has_tolerance else 0):
            if not root.rescale(solution.z):
                break
            again = solver.run(phi, solution.z, t)
            solution = replace(
                again,
                iterations=solution.iterations + again.iterations,
                evaluations=solution.evaluations + again.evaluations + 1,
                products=solution.products + again.products + 1,
            )
        return replace(
            solution, evaluations=solution.evaluations + 1, products=solution.products + 1
        )

    return solve_without_gradient(run, root), root.c
