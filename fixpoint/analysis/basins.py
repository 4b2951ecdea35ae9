"""Where starts in the plane end: basins of attraction and trajectories of a map with D = 2."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fixpoint.derivatives import MatrixMap
from fixpoint.fixed_point import solve
from fixpoint.solvers import IterativeSolver
from fixpoint.solvers.checks import at_least


class Basins(NamedTuple):
    """The ends of a grid of starts; rows follow y, columns x.

    x, y: coordinates of the grid, (size,).
    roots: the fixed points that were found, (R, 2), most starts first.
    basin: index of the root that each start reached, (size, size); -1 where it did not converge.
    iterations: updates that it took, (size, size).
    """

    x: Tensor
    y: Tensor
    roots: Tensor
    basin: Tensor
    iterations: Tensor


def basins(
    phi: MatrixMap,
    solver: IterativeSolver | str,
    *,
    lower: tuple[float, float] = (-2.0, -2.0),
    upper: tuple[float, float] = (2.0, 2.0),
    size: int = 100,
    same: float = 1e-3,
) -> Basins:
    """Which fixed point each start of a grid reaches, all in one batch in float64.

    Args:
        phi: map of (B, 2) states.
        solver: a solver with a tolerance, or its name.
        lower, upper: corners of the grid, as (x, y).
        size: starts along each axis.
        same: solutions nearer than this are one root.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import basins
        >>> ends = basins(lambda z: torch.tanh(2 * z), "picard", size=10)
        >>> ends.roots.abs().round(decimals=2)
        tensor([[0.9600, 0.9600],
                [0.9600, 0.9600],
                [0.9600, 0.9600],
                [0.9600, 0.9600]], dtype=torch.float64)
    """
    at_least(1, size=size)
    x, y = (torch.linspace(a, b, size).double() for a, b in zip(lower, upper, strict=True))
    z0 = torch.stack([x.expand(size, size), y[:, None].expand(size, size)], 2).reshape(-1, 2)
    solution = solve(phi, z0, solver)
    basin = torch.full((len(z0),), -1)
    roots: list[Tensor] = []
    left = solution.converged.clone()
    while bool(left.any()):
        root = solution.z[left][0]
        near = left & ((solution.z - root).norm(dim=1) <= same)
        basin[near] = len(roots)
        roots.append(root)
        left &= ~near
    counts = torch.bincount(basin[basin >= 0], minlength=len(roots))
    order = counts.argsort(descending=True, stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    basin = torch.where(basin >= 0, place[basin] if len(roots) else basin, basin)
    found = torch.stack(roots)[order] if roots else z0.new_empty(0, 2)
    shape = (size, size)
    return Basins(x, y, found, basin.reshape(shape), solution.iterations.reshape(shape))


def trajectories(
    phi: MatrixMap, z0: Tensor, solver: IterativeSolver, *, max_iter: int = 50
) -> Tensor:
    """The iterates of a solver from each start, (n + 1, B, D), n at most `max_iter`.

    Example:
        >>> import torch
        >>> from fixpoint import Picard
        >>> from fixpoint.analysis import trajectories
        >>> trajectories(torch.cos, torch.zeros(2, 2), Picard(rtol=1e-3)).shape
        torch.Size([19, 2, 2])
    """
    solution = solve(phi, z0, solver.with_options(max_iter=max_iter, record="iterates"))
    assert solution.trace is not None  # `record` asks for it
    assert solution.trace.iterates is not None
    return solution.trace.iterates
