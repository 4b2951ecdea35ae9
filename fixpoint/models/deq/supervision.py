"""States along a solve, each with a gradient, and a loss on all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fixpoint._torch import tree_map
from fixpoint._tree import Map, Packing, Tree
from fixpoint._validation import positive
from fixpoint._with_gradient import with_gradient_of
from fixpoint.backward import Phantom
from fixpoint.fixed_point import FixedPoint
from fixpoint.solution import Result, Solution
from fixpoint.solvers import Auto, IterativeSolver
from fixpoint.solvers.base import IterativeOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


def supervised_states(
    layer: FixedPoint,
    phi: Map,
    z0: Tree,
    *,
    at: Sequence[int],
    gradient: Phantom | None = None,
    batched: bool = True,
    groups: Tensor | None = None,
    **options: Unpack[IterativeOptions],
) -> tuple[list[Tree], Solution]:
    """Return states of one solve after `at` updates, z* last, and the `Solution`.

    A loss on them trains phi to come near its equilibrium early, which keeps a solve short. The
    solve is the same as without; z* has the gradient of the layer, the others a phantom gradient
    at their state. A sample that has ended before repeats its solution. No other state is kept.

    Args:
        layer: solver, an `IterativeSolver`, and backward.
        phi, z0, batched, groups, options: as for `FixedPoint`.
        at: numbers of updates, increasing, from 1.
        gradient: of the states before z*; `Phantom()` if not given.

    Returns:
        len(at) + 1 trees like z0; the solution, its z detached.

    Raises:
        ValueError: `at` is not increasing, or beyond max_iter.
        TypeError: the solver runs a loop of its own, which keeps no states.

    Source: Bai, Geng, Savani, Kolter (2022), Deep equilibrium optical flow estimation.

    Example:
        >>> import torch
        >>> from fixpoint import FixedPoint
        >>> from fixpoint.models import supervised_states
        >>> a = torch.tensor(0.5, requires_grad=True)
        >>> states, _ = supervised_states(
        ...     FixedPoint("picard"), lambda z: a * z + 1, torch.zeros(1, 1), at=(1, 2)
        ... )
        >>> [round(z.item(), 3) for z in states]
        [1.0, 1.5, 2.0]
    """
    solver = layer.solver
    if not isinstance(solver, IterativeSolver):
        raise TypeError(
            f"{type(solver).__name__} runs a loop of its own and keeps no states: use a solver of "
            "fixpoint, such as Anderson"
        )
    updates = options.get("max_iter", solver.max_iter)
    if list(at) != sorted(set(at)) or (at and not 1 <= at[0] <= at[-1] <= updates):
        raise ValueError(
            f"at must be increasing numbers of updates between 1 and max_iter={updates}; got "
            f"{list(at)}"
        )
    gradient = Phantom() if gradient is None else gradient
    solver = solver.with_options(**options)
    layer.backward.check(solver)
    packing, kept = Packing(z0, batched=batched, groups=groups), dict[int, Tensor]()
    if isinstance(solver, Auto):  # its stages make the updates
        solver = solver.with_options(record="iterates")
    solution = layer.solve_by(_keeping(solver, at, kept), phi, z0, batched=batched, groups=groups)
    if solution.trace is not None and solution.trace.iterates is not None:
        kept.update(enumerate(packing.matrix_of(x) for x in solution.trace.iterates))
    end = replace(solution, z=tree_map(torch.detach, solution.z))
    last, packed = packing.pack(end.z), packing.wrap(phi)
    lost = (solution.result == Result.NONFINITE.value)[:, None]
    states = []
    for count in at:
        z = kept.get(count, last)
        if torch.is_grad_enabled():
            moved = gradient.updates.run(packed, z).z
            z = torch.where(lost, z, with_gradient_of(z, moved))
        states.append(packing.unpack(z))
    return [*states, solution.z], end


def _keeping(
    solver: IterativeSolver, at: Sequence[int], kept: dict[int, Tensor]
) -> IterativeSolver:
    """Return the solver, which keeps the states after these updates, and no other."""
    solver = copy.copy(solver)
    update = solver.update

    def keeping(k: int, z: Tensor, *given: Any, **options: Any) -> tuple[Tensor, Any]:
        if k in at:
            kept[k] = z.detach()
        return update(k, z, *given, **options)

    vars(solver)["update"] = keeping
    return solver


def correction_loss(
    loss: Callable[[Tree], Tensor], states: Sequence[Tree], *, gamma: float = 0.8
) -> Tensor:
    """Return sum_i gamma^(n - i) loss(z_i) over states z_1 .. z_n, the last with weight 1.

    The fixed-point correction: earlier states are pulled towards the target as well.

    Args:
        loss: of one state, a scalar.
        states: as from `DEQ.states`.
        gamma: factor from a state to the one before.

    Source: Bai, Geng, Savani, Kolter (2022), Deep equilibrium optical flow estimation.

    Example:
        >>> import torch
        >>> from fixpoint.models import correction_loss
        >>> states = [torch.tensor([3.0]), torch.tensor([1.0])]
        >>> correction_loss(lambda z: z.sum(), states, gamma=0.5)
        tensor(2.5000)
    """
    positive(gamma=gamma)
    losses = [gamma**i * loss(z) for i, z in enumerate(reversed(states))]
    return torch.stack(losses).sum()
