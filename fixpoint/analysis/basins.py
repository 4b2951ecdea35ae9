"""Basins of attraction and trajectories of a map with D = 2."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fixpoint._validation import at_least
from fixpoint.derivatives import MatrixMap
from fixpoint.fixed_point import solve
from fixpoint.solvers import Solver


class Basins(NamedTuple):
    """The ends of a grid of starts; rows follow y, columns x.

    x, y: coordinates of the grid, (size,).
    roots: the fixed points that were found, (R, 2), most starts first; known ones before them.
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
    solver: Solver | str,
    *,
    lower: tuple[float, float] = (-2.0, -2.0),
    upper: tuple[float, float] = (2.0, 2.0),
    size: int = 100,
    same: float = 1e-3,
    roots: Tensor | None = None,
) -> Basins:
    """Find the fixed point that each start of a grid reaches, all in one batch in float64.

    Args:
        phi: map of (B, 2) states.
        solver: a solver with a tolerance, or its name.
        lower, upper: corners of the grid, as (x, y).
        size: starts along each axis.
        same: solutions nearer than this are one root.
        roots: known ones, (R, 2), which come first and in this order, so that two solvers share
            their colors.

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
    known = [] if roots is None else list(roots.double())
    centers = [*known, *_clusters(solution.z[solution.converged], known, same)]
    found = torch.stack(centers) if centers else z0.new_empty(0, 2)
    basin = torch.full((len(z0),), -1)
    if centers:
        distance, nearest = torch.cdist(solution.z, found).min(1)
        basin = torch.where(solution.converged & (distance <= same), nearest, basin)
    shape = (size, size)
    return Basins(x, y, found, basin.reshape(shape), solution.iterations.reshape(shape))


def _clusters(z: Tensor, known: list[Tensor], same: float) -> list[Tensor]:
    """Return one solution of each group of z, (N, 2), nearer than `same`, the largest first."""
    for root in known:
        z = z[(z - root).norm(dim=1) > same]
    groups = []
    while len(z):
        near = (z - z[0]).norm(dim=1) <= same
        groups.append((int(near.sum()), z[0]))
        z = z[~near]
    return [root for _, root in sorted(groups, key=lambda group: -group[0])]


def trajectories(phi: MatrixMap, z0: Tensor, solver: Solver, *, max_iter: int = 50) -> Tensor:
    """Return the iterates of a solver from each start, (n + 1, B, D), n at most `max_iter`.

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
