"""Solving z = phi(z): the function `solve` and the differentiable layer `FixedPoint`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from fixpoint._torch import outside_graph
from fixpoint._tree import Map, Packing, Tree
from fixpoint._validation import names_options
from fixpoint.backward import Backward, Implicit
from fixpoint.failure import NonConvergenceHandler, OnFailure
from fixpoint.solution import Solution
from fixpoint.solvers import Anderson, Solver, make_solver
from fixpoint.solvers.base import IterativeOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


@names_options
def solve(
    phi: Map,
    z0: Tree,
    solver: str | Solver = "anderson",
    *,
    t: int | None = None,
    batched: bool = True,
) -> Solution:
    """Solve z = phi(z) from z0, without gradient.

    Args:
        phi: map of a tree like z0 to one of the same structure, shapes and dtype; each batch row
            on its own.
        z0: tensor, or nested tuple, list or dict of tensors, each (B, ...), real or complex. Each
            tensor of a tree reaches the tolerance by itself; see `leaf_atol` of `Solver`.
        solver: a solver or its name; see `SOLVERS`.
        t: time index, for solvers with steps of their own at each time.
        batched: False where the tensors of z0 have no batch axis; the solution's per-sample
            tensors then have B = 1.

    Raises:
        ValueError: the solver's name is unknown, or phi returns another structure or shape.
        TypeError: z0 is not a tree of floating-point or complex tensors, or phi returns another
            dtype.

    Example:
        >>> import torch
        >>> from fixpoint import solve
        >>> solve(torch.cos, torch.zeros(2, 1)).check().z
        tensor([[0.7391],
                [0.7391]])
    """
    solver = make_solver(solver)
    if torch.compiler.is_compiling() and not solver.compiles:
        return outside_graph(_solve, phi, z0, solver, t, batched)
    return _solve(phi, z0, solver, t, batched)


def _ready(backward: Backward) -> Backward:
    if isinstance(backward, Backward):
        return backward
    raise TypeError(
        f"backward must be a ready one, as Implicit(), Unrolled() or Phantom(); got {backward!r}"
    )


def _solve(phi: Map, z0: Tree, solver: Solver, t: int | None, batched: bool) -> Solution:
    packing = Packing(z0, batched=batched)
    with torch.no_grad():
        solution = solver.run(packing.wrap(phi), packing.start(z0), t)
    return replace(solution, z=packing.unpack(solution.z))


class FixedPoint(nn.Module):
    """The layer z* = phi(z*): a solver and a way to differentiate its solution.

    Gradients reach every tensor that phi closes over, and depend on grad mode alone, not on
    train or eval mode.

    Args:
        solver: a solver or its name, `Anderson()` if not given.
        backward: `Implicit()` if not given, `Unrolled`, or `Phantom`.
        on_failure: "ignore", "warn" (once) or "raise" where samples do not converge. Their
            `Solution.result` says so in any case.

    Raises:
        ValueError: the pair makes no sense (a learned eta with `Implicit`); the message says
            what to use.

    Example:
        >>> import torch
        >>> from fixpoint import FixedPoint
        >>> linear, x = torch.nn.Linear(4, 4), torch.randn(3, 4)
        >>> solution = FixedPoint()(lambda z: torch.tanh(0.4 * linear(z) + x), torch.zeros(3, 4))
        >>> solution.z.sum().backward()
        >>> solution.converged.tolist()
        [True, True, True]
    """

    @names_options
    def __init__(
        self,
        solver: str | Solver | None = None,
        backward: Backward | None = None,
        *,
        on_failure: OnFailure = "ignore",
    ) -> None:
        super().__init__()
        self.solver = Anderson() if solver is None else make_solver(solver)
        self.backward = Implicit() if backward is None else _ready(backward)
        self.backward.check(self.solver)
        self.non_convergence = NonConvergenceHandler("the solve", on_failure)

    def forward(
        self,
        phi: Map,
        z0: Tree,
        *,
        t: int | None = None,
        batched: bool = True,
        **options: Unpack[IterativeOptions],
    ) -> Solution:
        """The differentiable solution; arguments and errors as for `solve`.

        `options` of the solver, `max_iter`, `rtol`, ..., hold for this call alone.
        """
        compiling = torch.compiler.is_compiling()
        if compiling and (options or not self.backward.compiles(self.solver)):
            return outside_graph(self._solve, phi, z0, t, batched, dict(options))
        return self._solve(phi, z0, t, batched, options)

    def _solve(
        self, phi: Map, z0: Tree, t: int | None, batched: bool, options: IterativeOptions
    ) -> Solution:
        packing = Packing(z0, batched=batched)
        solver = self.solver
        if options:
            solver = solver.with_options(**options)
            self.backward.check(solver)
        solution = self.backward.solve(solver, packing.wrap(phi), packing.start(z0), t)
        self.non_convergence.check(solution)
        return replace(solution, z=packing.unpack(solution.z))
