"""Roots of F(z) = 0: the function `solve_root` and the differentiable layer `Root`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fixpoint._roots import Known, RootMap, hides_axis, scale_at, solve_scaled
from fixpoint._torch import outside_graph
from fixpoint._tree import Map, Packing, Tree
from fixpoint._validation import names_options
from fixpoint.backward import Backward, Reversible, Unrolled
from fixpoint.derivatives import MatrixMap
from fixpoint.failure import FailedRows, OnFailure
from fixpoint.fixed_point import FixedPoint, split_aux, unpacked, with_aux
from fixpoint.solution import Solution
from fixpoint.solvers import Newton, Solver, make_solver

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fixpoint.solvers.base import IterativeOptions


@names_options
def solve_root(
    F: Map,
    z0: Tree,
    solver: str | Solver = "newton",
    *,
    t: int | None = None,
    batched: bool = True,
    groups: Tensor | None = None,
    has_aux: bool = False,
) -> Solution:
    """Solve F(z) = 0 from z0, without gradient.

    Any solver of fixed points takes it as phi(z) = z - c F(z), with a c for each sample and each
    tensor of a tree: 1 / c is the slope of F along the direction of F itself, at z0 and, where the
    slope is another one there, at the solution. So a tolerance is a distance in units of z: a
    sample has converged when c rms(F(z)) <= atol + rtol rms(z). F times any positive number gives
    the same solution by the same updates.

    Args:
        F: map of a tree like z0 to one of the same structure, shapes and dtype; each batch row on
            its own.
        z0, t, batched, groups: see `solve`.
        solver: a solver or its name; see `SOLVERS`. `Newton(linear="gmres")` for samples of more
            than some hundred numbers.
        has_aux: see `solve`.

    Raises:
        ValueError, TypeError: as `solve`.

    Example:
        >>> import torch
        >>> from fixpoint import solve_root
        >>> solution = solve_root(lambda z: z**2 - 2, torch.ones(1, 1).double())
        >>> solution.converged.tolist(), round(solution.z.item(), 4)
        ([True], 1.4142)
    """
    solver = make_solver(solver)
    return outside_graph(_solve_root, F, z0, solver, t, batched, groups, has_aux)


def _solve_root(
    F: Map,
    z0: Tree,
    solver: Solver,
    t: int | None,
    batched: bool,
    groups: Tensor | None,
    has_aux: bool,
) -> Solution:
    packing = Packing(z0, batched=batched, groups=groups, name="F")
    with torch.no_grad():
        mapped = packing.wrap(split_aux(F, "F") if has_aux else F)
        solution, _ = solve_scaled(solver, mapped, packing.start(z0), t)
        solution = unpacked(solution, packing)
        return with_aux(solution, F) if has_aux else solution


class Root(FixedPoint):
    """The layer z* with F(z*) = 0: a solver and a way to differentiate its solution.

    It takes what `FixedPoint` takes, and gives the same `Solution`; `solve_root` says in which
    units its tolerances and residuals are. With `torch.func.grad(E)` for F it finds stationary
    points of an energy E(z), the sum of those of all samples, with its hypergradients.

    Args:
        solver: a solver or its name, `Newton()` if not given: it takes `Newton(linear="gmres")`
            for samples of more than some hundred numbers.
        backward: see `FixedPoint`. The updates of `Unrolled` have the c of z0.
        failed, on_failure: see `FixedPoint`.

    Raises:
        ValueError: the pair makes no sense (a learned eta with `Implicit`).

    Example:
        >>> import torch
        >>> from fixpoint import Root
        >>> theta = torch.tensor([[3.0]], dtype=torch.float64, requires_grad=True)
        >>> E = lambda z: (0.5 * theta * z**2 - z).sum()
        >>> z = Root()(torch.func.grad(E), torch.ones(1, 1, dtype=torch.float64)).z  # 1 / theta
        >>> torch.autograd.grad(z.sum(), theta)[0].round(decimals=6)  # -1 / theta^2
        tensor([[-0.1111]], dtype=torch.float64)
    """

    map_name = "F"

    def __init__(
        self,
        solver: str | Solver | None = None,
        backward: Backward | str | None = None,
        *,
        failed: FailedRows | None = None,
        on_failure: OnFailure = "warn",
    ) -> None:
        solver = Newton() if solver is None else solver
        super().__init__(solver, backward, failed=failed, on_failure=on_failure)

    def forward(
        self,
        F: Map,
        z0: Tree,
        *,
        t: int | None = None,
        batched: bool = True,
        groups: Tensor | None = None,
        has_aux: bool = False,
        **options: Unpack[IterativeOptions],
    ) -> Solution:
        """Return the differentiable solution; arguments and errors as for `solve_root`.

        `options` of the solver, `max_iter`, `rtol`, ..., hold for this call alone.
        """
        return outside_graph(self._solve, F, z0, t, batched, groups, has_aux, dict(options))

    def _run(
        self, solver: Solver, F: MatrixMap, z: Tensor, t: int | None
    ) -> tuple[Solution, MatrixMap]:
        if isinstance(self.backward, (Unrolled, Reversible)) or hides_axis(F, z):
            root = RootMap(F, scale_at(F, z))
            return self.backward.solve(solver, root, z, t), root
        solution, root = solve_scaled(solver, F, z, t)
        return self.backward.solve(Known(solver, solution), root, solution.z, t), root
