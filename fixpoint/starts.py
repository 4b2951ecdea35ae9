"""The best solution of each sample from several starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fixpoint._modes import unrecorded
from fixpoint._roots import Known
from fixpoint._torch import tracks, tree_leaves, tree_map
from fixpoint._tree import Map, Packing, Tree
from fixpoint._validation import names_options
from fixpoint.backward import Reversible, Unrolled
from fixpoint.fixed_point import FixedPoint, solve
from fixpoint.root import Root, solve_root
from fixpoint.solution import Solution

Select = Callable[[Tree, Tensor], Tensor]
"""Which solution each sample takes: tree of (n, B, ...), residuals, (n, B) -> numbers, (B,)."""


@names_options
def multi_start(
    phi: Map,
    starts: Tree,
    layer: FixedPoint | None = None,
    *,
    select: Select | None = None,
    batched: bool = True,
    groups: Tensor | None = None,
) -> Solution:
    """Solve z = phi(z) from several starts at once, and take for each sample the best solution.

    For maps with several fixed points, or starts from which a solve may fail. All starts are rows
    of one solve without gradient, phi under torch.func.vmap; the solutions that are taken then have
    the gradient of the layer.

    Args:
        phi: as for `FixedPoint`, or F(z) for a `Root`; a map of (B, ...) tensors that vmap takes.
        starts: n starts of each sample, a tensor or a tree of tensors, each (n, B, ...).
        layer: solver, backward, and what is done about samples that fail from every start;
            `FixedPoint()` if not given.
        select: the number of the start that each sample takes, by default that of the least
            residual; by a tree of solutions, each (n, B, ...), and their residuals, (n, B), as
            for that of least energy.
        batched, groups: of each start, as for `FixedPoint`.

    Returns:
        The solution of B samples; `Solution.start` is the number of the start of each.

    Raises:
        TypeError: the layer differentiates the updates of a solve.
        ValueError: the solver measures no residual.

    Example:
        >>> import torch
        >>> from fixpoint import FixedPoint, Picard, multi_start
        >>> layer = FixedPoint(Picard(max_iter=20))
        >>> solution = multi_start(lambda z: z**2, torch.tensor([[[2.0]], [[0.5]]]), layer)
        >>> solution.start.tolist(), round(solution.z.item(), 4)
        ([1], 0.0)
    """
    layer = FixedPoint() if layer is None else layer
    if isinstance(layer.backward, (Unrolled, Reversible)):
        raise TypeError(
            f"{type(layer.backward).__name__} differentiates the updates of one solve, and here "
            "each sample takes the best of several: take Implicit() or Phantom()"
        )
    count = len(tree_leaves(starts)[0])
    first = tree_map(lambda x: x[0], starts)
    if tracks():
        with unrecorded():
            phi(first)  # what phi makes once and keeps has its derivatives
    found = _solve_all(phi, starts, layer, count, batched, groups)
    if found.residual is None:
        raise ValueError(
            f"{layer.solver} measures no residual to choose by: set rtol, or record='residual'"
        )
    packing = Packing(first, batched=batched, groups=groups)
    z = tree_map(lambda x: x.view(count, -1, *x.shape[1:]) if batched else x, found.z)
    residual = found.residual.view(count, -1)
    index = residual.nan_to_num(nan=torch.inf).argmin(0) if select is None else select(z, residual)
    here = torch.arange(len(index), device=index.device)

    def chosen(x: Tensor) -> Tensor:
        return x.view(count, -1)[index, here]

    def rows(x: Tensor) -> Tensor:
        if not batched:
            return x[index[0]]
        number = index if packing.groups is None else index[packing.groups.number]
        return x[number, torch.arange(x.shape[1], device=x.device)]

    best = tree_map(rows, z)
    known = found.with_samples(packing.pack(best), chosen)
    solver = Known(layer.solver, known)
    solution = layer.solve_by(solver, phi, best, batched=batched, groups=groups)
    return replace(solution, start=index)


def _solve_all(
    phi: Map, starts: Tree, layer: FixedPoint, count: int, batched: bool, groups: Tensor | None
) -> Solution:
    """Solve from all starts, as further samples."""
    vmapped = torch.func.vmap(phi, randomness="same")

    def of_all(z: Tree) -> Tree:
        out = vmapped(tree_map(lambda x: x.unflatten(0, (count, -1)), z))
        return tree_map(lambda x: x.flatten(0, 1), out)

    if batched:
        starts = tree_map(lambda x: x.flatten(0, 1), starts)
    if groups is not None:
        groups = torch.cat([groups + i * (groups.amax() + 1) for i in range(count)])
    search = solve_root if isinstance(layer, Root) else solve
    return search(of_all if batched else vmapped, starts, layer.solver, groups=groups)
