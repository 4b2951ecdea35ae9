"""Solving z = phi(z): the function `solve` and the differentiable layer `FixedPoint`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fixpoint._messages import unknown_name
from fixpoint._torch import (
    floats_as_constants,
    inside_transform,
    no_gradients,
    outside_graph,
    tracks,
)
from fixpoint._tree import Map, Packing, Tree
from fixpoint._validation import names_options
from fixpoint._with_gradient import with_gradient_of
from fixpoint.backward import Backward, Implicit, Phantom, Reversible, Unrolled
from fixpoint.backward._vmap import run_without_gradient
from fixpoint.backward.base import IN_GRAPH, guarded_map
from fixpoint.derivatives import MatrixMap
from fixpoint.failure import (
    FailedRows,
    NonConvergenceHandler,
    OnFailure,
    checked_failed,
    some_failed,
)
from fixpoint.rows import check_rows
from fixpoint.solution import Result, Solution, has_failed
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
    groups: Tensor | None = None,
    has_aux: bool = False,
) -> Solution:
    """Solve z = phi(z) from z0, without gradient.

    It warns of nothing: `Solution.result` has the failures, and `Solution.check()` raises. A
    backward pass through `solve(...).z` is not possible: `FixedPoint` is the layer for that.

    Args:
        phi: map of a tree like z0 to one of the same structure, shapes and dtype; each batch row
            on its own.
        z0: tensor, or nested tuple, list or dict of tensors, each (B, ...), real or complex. Each
            tensor of a tree reaches the tolerance by itself; see `leaf_atol` of `Solver`.
        solver: a solver or its name; see `SOLVERS`.
        t: time index, for solvers with steps of their own at each time.
        batched: False where the tensors of z0 have no batch axis, or where all rows depend on each
            other; the solution's per-sample tensors then have B = 1.
        groups: a number 0 .. G - 1 for each row of z0, (N,), as the `batch` vector of graph
            libraries. All rows of a number are one sample, which phi may couple: they have one
            residual, tolerance, history and result, and `Solution` has a sample for each number.
        has_aux: whether phi returns (phi(z), aux). `Solution.aux` is that of one more evaluation,
            at z*; a layer differentiates it.

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
    if not torch.compiler.is_compiling():
        return _solve(phi, z0, solver, t, batched, groups, has_aux)
    if groups is not None or not _in_graph(solver):
        return outside_graph(_solve, phi, z0, solver, t, batched, groups, has_aux)
    with floats_as_constants():
        return _solve(phi, z0, solver, t, batched, groups, has_aux)


def _in_graph(solves: Solver | FixedPoint) -> bool:
    with floats_as_constants():
        return solves.compiles


def _ready(backward: Backward | str | None) -> Backward:
    if backward is None:
        return Implicit()
    if isinstance(backward, Backward):
        return backward
    if isinstance(backward, str):
        if backward in BACKWARDS:
            return BACKWARDS[backward]()
        raise ValueError(unknown_name("backward", backward, BACKWARDS))
    raise TypeError(
        f"backward must be a ready one, as Implicit(), Unrolled() or Phantom(); got {backward!r}"
    )


def _solve(
    phi: Map,
    z0: Tree,
    solver: Solver,
    t: int | None,
    batched: bool,
    groups: Tensor | None,
    has_aux: bool,
) -> Solution:
    packing = Packing(z0, batched=batched, groups=groups)
    with torch.no_grad():
        start, packed = packing.start(z0), packing.wrap(split_aux(phi) if has_aux else phi)
        solution = run_without_gradient(solver, packed, start, t)
        solution = unpacked(solution, packing)
        return with_aux(solution, phi) if has_aux else solution


def unpacked(solution: Solution, packing: Packing) -> Solution:
    """Return the solution of (B, D) matrices with trees in memory of their own.

    That of a matrix may be z0, or a tensor that phi returned and keeps.
    """
    trace = solution.trace
    if trace is not None and trace.iterates is not None:
        trace = trace._replace(iterates=packing.rows_of(trace.iterates))
    return replace(solution, z=packing.unpack(solution.z.clone()), trace=trace)


def split_aux(phi: Map, name: str = "phi") -> Map:
    """Return the first part of the pair that phi returns, as a map.

    Raises:
        TypeError: phi returns no pair.
    """

    def first(z: Tree) -> Tree:
        pair = phi(z)
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(
                f"with has_aux=True {name} must return a pair, ({name}(z), aux); it returned a "
                f"{type(pair).__name__}"
            )
        return pair[0]

    return first


def with_aux(solution: Solution, phi: Map) -> Solution:
    """Return the solution with the second part of phi(z*)."""
    return replace(solution, aux=phi(solution.z)[1], evaluations=solution.evaluations + 1)


BACKWARDS: dict[str, type[Backward]] = {
    "implicit": Implicit,
    "phantom": Phantom,
    "reversible": Reversible,
    "unrolled": Unrolled,
}
"""Ways to differentiate a solve that a layer takes by name."""


class FixedPoint(nn.Module):
    """The layer z* = phi(z*): a solver and a way to differentiate its solution.

    Gradients reach every tensor that phi closes over, and depend on grad mode alone, not on
    train or eval mode.

    Args:
        solver: a solver or its name, `Anderson()` if not given.
        backward: `Implicit()` if not given, `Unrolled`, or `Phantom`; or a name of `BACKWARDS`.
        failed: the gradient of samples that do not converge: "zero", "keep" as if they had,
            "phantom" that of one plain update from where they ended, or "raise". None takes that
            of the backward: "zero", or "keep" of `Unrolled`. Samples that are NONFINITE have none.
        on_failure: "warn" (once), "raise" or "ignore" where samples do not converge. Their
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
        backward: Backward | str | None = None,
        *,
        failed: FailedRows | None = None,
        on_failure: OnFailure = "warn",
    ) -> None:
        super().__init__()
        self.solver = Anderson() if solver is None else make_solver(solver)
        self.backward = _ready(backward)
        self.failed = self.backward.failed if failed is None else checked_failed(failed)
        self.backward.check(self.solver)
        self.non_convergence = NonConvergenceHandler("the solve", on_failure)

    map_name = "phi"
    """Name of the map in messages."""

    def forward(
        self,
        phi: Map,
        z0: Tree,
        *,
        t: int | None = None,
        batched: bool = True,
        groups: Tensor | None = None,
        has_aux: bool = False,
        **options: Unpack[IterativeOptions],
    ) -> Solution:
        """Return the differentiable solution; arguments and errors as for `solve`.

        `options` of the solver, `max_iter`, `rtol`, ..., hold for this call alone.
        """
        if not torch.compiler.is_compiling():
            return self._solve(phi, z0, t, batched, groups, has_aux, options)
        if options or groups is not None or not _in_graph(self):
            return outside_graph(self._solve, phi, z0, t, batched, groups, has_aux, dict(options))
        with floats_as_constants():
            return self._solve(phi, z0, t, batched, groups, has_aux, options)

    @property
    def compiles(self) -> bool:
        """True if torch.compile makes one graph of a solve; else it leaves it out."""
        solver, backward = self.solver, self.backward
        if not backward.compiles(solver):
            return False
        if isinstance(backward, Implicit) and backward.failed != self.failed:
            return False
        return self.failed in IN_GRAPH or not solver.has_tolerance

    def _solve(
        self,
        phi: Map,
        z0: Tree,
        t: int | None,
        batched: bool,
        groups: Tensor | None,
        has_aux: bool,
        options: IterativeOptions,
    ) -> Solution:
        solver = self.solver
        if options:
            solver = solver.with_options(**options)
            self.backward.check(solver)
        return self.solve_by(solver, phi, z0, t=t, batched=batched, groups=groups, has_aux=has_aux)

    def solve_by(
        self,
        solver: Solver,
        phi: Map,
        z0: Tree,
        *,
        t: int | None = None,
        batched: bool = True,
        groups: Tensor | None = None,
        has_aux: bool = False,
    ) -> Solution:
        """Return the solution by another solver than that of the layer."""
        packing = Packing(z0, batched=batched, groups=groups, name=self.map_name)
        packed: MatrixMap = packing.wrap(split_aux(phi, self.map_name) if has_aux else phi)
        solution, packed = self._run(solver, packed, packing.start(z0), t)
        if solver.has_tolerance:
            solution = self._after_failures(solution, packed, packing)
        solution = unpacked(solution, packing)
        return with_aux(solution, phi) if has_aux else solution

    def _run(
        self, solver: Solver, phi: MatrixMap, z: Tensor, t: int | None
    ) -> tuple[Solution, MatrixMap]:
        """Return the differentiable solution, and the map whose fixed point it is."""
        return self.backward.solve(solver, phi, z, t), phi

    def _after_failures(self, solution: Solution, phi: MatrixMap, packing: Packing) -> Solution:
        """Return the solution with the gradient that samples have which did not converge."""
        if torch.compiler.is_compiling():  # no value can be read, so nothing is said
            return with_failed_rows(solution, phi, self.failed)
        if not some_failed(solution.result):
            return solution
        if self.failed == "raise":
            solution.check()
        left_out = tracks() and self.failed == "zero"
        gradient = 'They contribute no gradient (failed="zero")' if left_out else ""
        coupled = "" if self.non_convergence.silent else _coupling(phi, solution)
        advice = ". ".join(part for part in (gradient, coupled, packing.advice) if part)
        self.non_convergence.report(solution, advice=advice)
        return with_failed_rows(solution, phi, self.failed)


def _coupling(phi: MatrixMap, solution: Solution) -> str:
    """Return the advice where samples failed since they depend on each other: each was solved
    alone.
    """
    if solution.coupled or len(solution.z) < 2 or inside_transform():
        return ""
    check = check_rows(phi, solution.z.detach())
    if not check.repeats or not bool(check.coupled.any()):
        return ""
    text = check.describe()
    return text[0].upper() + text[1:]


def with_failed_rows(solution: Solution, phi: MatrixMap, failed: FailedRows) -> Solution:
    """Return the solution with the gradient of `failed` in the samples that did not converge."""
    if not tracks() or failed == "keep":
        return solution
    rows, z = has_failed(solution.result)[:, None], solution.z
    with no_gradients():
        value = z.clone()
    if failed == "phantom":
        lost = solution.result == Result.NONFINITE.value
        moved = guarded_map(phi, lost)(value)
        value = torch.where(lost[:, None], value, with_gradient_of(value, moved))
    return replace(solution, z=torch.where(rows, value, z))
