"""Differentiation by the implicit function theorem."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from fixpoint._modes import unrecorded
from fixpoint._torch import (
    inside_forward_mode,
    inside_vmap,
    is_readable,
    level_zero,
    primal,
    transform_level,
)
from fixpoint.backward._adjoint import (
    AdjointSolve,
    ImplicitProblem,
    Preconditioner,
    implicit_function,
)
from fixpoint.backward._evaluation import solve_without_gradient
from fixpoint.backward._repetition import check_repetition
from fixpoint.backward._vmap import solve_in_vmap
from fixpoint.backward.base import IN_GRAPH, Backward, refuse_learned_eta
from fixpoint.backward.graph import adjoint_in_graph, solve_implicitly_in_graph
from fixpoint.derivatives import Linearization, MatrixMap
from fixpoint.failure import (
    FailedRows,
    NonConvergenceHandler,
    OnFailure,
    checked_failed,
    some_failed,
    unsafe_rows,
)
from fixpoint.solution import Result, Solution
from fixpoint.solvers import Anderson, Broyden, Newton, Solver, make_solver
from fixpoint.solvers.base import ALONE, IterativeSolver
from fixpoint.solvers.broyden import BroydenState
from fixpoint.solvers.newton import NewtonState
from fixpoint.tracing import Closure, at_level_zero, closure_convert

Factored = BroydenState | NewtonState
"""A solver's state that has factors of I - J."""
ADJOINTS = 2**16
"""Most results of adjoint solves that a layer keeps."""


class Implicit(Backward):
    """The implicit function theorem: dz* = (I - J)^-1 (d phi), J = d phi / d z at z*.

    One recorded evaluation of phi at z* finds every tensor that phi closes over and carries the
    gradient to it: the incoming g is replaced by u, which solves the adjoint u = J^T u + g for
    each sample to a tolerance relative to its u. The adjoint is differentiated by the same rule,
    so derivatives of any order are exact, in reverse and forward mode, under torch.func and in
    batched backward passes. Memory does not grow with the number of updates, and the time of an
    adjoint does not depend on what the captured tensors were computed from. Where samples depend
    on each other, as by batch normalization, the gradient is that of the batch as a whole.

    Exact only at an equilibrium, so samples that failed, in the solve or in the adjoint solve,
    contribute what `failed` says. z0 gets no gradient, since z* does not depend on it. Second
    derivatives repeat the recorded operations, so a random phi must repeat itself; see
    `fixpoint.models.frozen`. The first derivative is that of the recorded evaluation, and it is
    reported where this has another residual than the solve. Where torch.func.vmap hides an axis
    of phi the branches that phi takes are those taken at z0.

    Args:
        solver: solves the adjoint. None takes the forward solver with atol = 0, or Anderson at
            a tolerance tied to the dtype where the forward solver has no tolerance.
        reuse_factors: start the adjoint from the factors of a `Broyden` forward solve, which are
            then kept until the backward pass, 2 * memory states; or precondition it by those of the
            last Jacobian of `Newton(linear="direct")`, D states: a few products of J^T in place of
            D.
        failed: the gradient of samples whose solve or adjoint solve does not converge: "zero",
            "keep" as if they had, "phantom" that of one plain update, or "raise". Samples that
            are NONFINITE have none.
        adjoint_preconditioner: of an adjoint solved by `Newton(linear="gmres")`: (z*, v) -> an
            estimate of (I - J^T)^-1 v, (B, D) each. That of the forward solver, which estimates
            (I - J)^-1 v, serves forward mode alone.
        on_failure: "warn" (once), "raise" or "ignore" where an adjoint does not converge, and
            where phi does not repeat itself.

    Attributes:
        adjoint: `Solution` of the last adjoint solve, its z the u of each sample, (B, D); None
            before the first backward pass.
        adjoints: the `Solution` of each adjoint solve since the last forward solve, without z;
            the backward pass through T time steps leaves T of them, the last time step first.

    Raises:
        RuntimeError: inside a torch.func transform or in forward mode phi holds an operation that
            these cannot see, such as an `autograd.Function` without `setup_context`.

    Source: Bai, Kolter, Koltun (2019), Deep equilibrium models, Theorem 1.

    Example:
        >>> import torch
        >>> from fixpoint import Anderson, FixedPoint, Implicit
        >>> a = torch.tensor([[0.5]], requires_grad=True)
        >>> FixedPoint(Anderson(), Implicit())(lambda z: a * z + 1, torch.zeros(1, 1)).z.backward()
        >>> a.grad.round(decimals=3)  # z* = 1 / (1 - a)
        tensor([[4.]])
    """

    def __init__(
        self,
        solver: Solver | str | None = None,
        *,
        reuse_factors: bool = False,
        failed: FailedRows = "zero",
        adjoint_preconditioner: Preconditioner | None = None,
        on_failure: OnFailure = "warn",
    ) -> None:
        super().__init__()
        self.solver = None if solver is None else make_solver(solver)
        self.reuse_factors = reuse_factors
        self.failed = checked_failed(failed)
        self.adjoint_preconditioner = adjoint_preconditioner
        self.non_convergence = NonConvergenceHandler("the adjoint solve", on_failure)
        self.repetition = NonConvergenceHandler("the evaluation at the solution", on_failure)
        self.adjoint: Solution | None = None
        self.adjoints: deque[Solution] = deque(maxlen=ADJOINTS)
        if self.solver is not None and not self.solver.has_tolerance:
            raise ValueError(
                "the adjoint must be solved to a tolerance; "
                f"{type(self.solver).__name__} has rtol = atol = 0: set rtol"
            )

    def check(self, solver: Solver) -> None:
        refuse_learned_eta(solver, "Implicit")
        if self.reuse_factors and not _has_factors(solver):
            raise ValueError(
                f'reuse_factors needs a forward solve by Broyden or Newton(linear="direct"); got '
                f"{type(solver).__name__}: leave it out"
            )
        given = self.solver is not None or self.adjoint_preconditioner is not None
        if self.reuse_factors and given and isinstance(solver, Newton):
            raise ValueError(
                "reuse_factors solves the adjoint of Newton by GMRES with the factors: leave out "
                "solver and adjoint_preconditioner"
            )

    def compiles(self, solver: Solver) -> bool:
        if self.failed not in IN_GRAPH or self.reuse_factors or not solver.compiles:
            return False
        # A copy with steps of its own cannot be made in a graph.
        own = not solver.has_tolerance or solver.as_adjoint() is solver
        return own if self.solver is None else self.solver.compiles

    def solve(self, solver: Solver, phi: MatrixMap, z0: Tensor, t: int | None) -> Solution:
        if torch.compiler.is_compiling():
            adjoint = adjoint_in_graph(self.solver, solver, z0.dtype)
            keep = self.failed == "keep"
            return solve_implicitly_in_graph(solver, adjoint, phi, z0, t, keep_failed=keep)
        self.adjoints.clear()
        if inside_forward_mode():
            return self._solve_in_transform(solver, phi, z0, t)
        solution, last = self._run(solver, phi, z0, t)
        if not torch.is_grad_enabled():
            return solution
        seen = _with_lost_rows(solution, solver)
        with unrecorded():
            closure, z = _closure_at(seen, phi, z0)
            captured = [*closure.captured, *closure.opaque]
            if not captured:
                return solution
            # Unseen from outside too: z is a leaf of this solve alone.
            check_repetition(self.repetition, solver, solution, z, closure.fz)
        problem = ImplicitProblem(
            function=closure.function,
            solver=solver,
            adjoint=self._adjoint_solve(solver, z0.dtype, last),
            t=t,
            opaque=len(closure.opaque),
            solution=seen,
            graph=(Linearization(closure.fz, z), [*closure.twins, *closure.opaque]),
        )
        return replace(solution, z=implicit_function(problem, solution.z.detach(), *captured)[0])

    def _run(
        self, solver: Solver, phi: MatrixMap, z0: Tensor, t: int | None
    ) -> tuple[Solution, Factored | None]:
        """Return the solution, and the solver's last state where the adjoint uses its factors."""
        states: list[Factored | None] = [None]

        def run(phi: MatrixMap) -> Solution:
            if not (self.reuse_factors and _has_factors(solver)):
                return solver.run(phi, z0, t)
            keeping = copy.copy(solver)
            vars(keeping)["keeps_jacobian"] = True
            solution, state = cast(IterativeSolver, keeping).run_with_state(phi, z0, t)
            states.append(state)
            return solution

        solution = solve_without_gradient(run, phi)
        return solution, states[-1]

    def _solve_in_transform(
        self, solver: Solver, phi: MatrixMap, z0: Tensor, t: int | None
    ) -> Solution:
        """Return the same where torch.func or forward mode differentiates: one operation for them
        all.
        """
        with unrecorded():
            fz = phi(z0)  # what phi makes once and keeps has its derivatives
            if transform_level() and (inside_vmap(z0) or inside_vmap(fz)):
                adjoint = self._adjoint_solve(solver, z0.dtype)
                return solve_in_vmap(solver, adjoint, phi, z0, t)
            solution = at_level_zero(lambda phi: solver.run(phi, primal(z0), t), phi)
            seen = _with_lost_rows(solution, solver)
            closure, z = _closure_at(seen, phi, primal(z0))
        graph = Linearization(closure.fz, z), closure.twins
        problem = ImplicitProblem(
            function=closure.function,
            solver=solver,
            adjoint=self._adjoint_solve(solver, z0.dtype),
            t=t,
            solution=seen,
            graph=graph if closure.fz.requires_grad else None,  # torch.no_grad lets both pass
        )
        return replace(solution, z=implicit_function(problem, solution.z, *closure.captured)[0])

    def _adjoint_solve(
        self, solver: Solver, dtype: torch.dtype, last: Factored | None = None
    ) -> AdjointSolve:
        if isinstance(last, NewtonState):
            return self._adjoint_by_factors(solver, last)
        own = getattr(self.solver, "preconditioner", None)
        forward = getattr(solver, "preconditioner", None)
        return AdjointSolve(
            solver=self.solver or _default_adjoint(solver, dtype),
            finish=self._finish,
            failed=self.failed,
            preconditioners=(forward, self.adjoint_preconditioner or own),
            start=None if last is None else last.transpose_solve,
        )

    def _adjoint_by_factors(self, solver: Solver, last: NewtonState) -> AdjointSolve:
        """Solve by GMRES with the factors of the last Jacobian, that of a state near z*."""
        factors, pivots = last.transposed_factors()

        def precondition(_: Tensor, v: Tensor) -> Tensor:
            right = v.to(factors.dtype).unsqueeze(2)
            return torch.linalg.lu_solve(factors, pivots, right).squeeze(2).to(v.dtype)

        rtol = solver.rtol or solver.atol or 100 * torch.finfo(factors.dtype).eps
        return AdjointSolve(
            solver=Newton(linear="gmres", rtol=rtol, atol=0.0, max_iter=max(solver.max_iter, 50)),
            finish=self._finish,
            failed=self.failed,
            preconditioners=(None, precondition),
        )

    def _finish(self, adjoint: Solution) -> bool:
        self.adjoint = replace(adjoint, z=adjoint.z.detach())
        self.adjoints.append(replace(adjoint, z=None))
        failed = some_failed(adjoint.result)
        if failed and self.failed == "raise":
            adjoint.check()
        if failed:
            self.non_convergence.report(adjoint)
        return failed

    def extra_repr(self) -> str:
        return "reuse_factors=True" if self.reuse_factors else ""


def _has_factors(solver: Solver) -> bool:
    return isinstance(solver, Broyden) or (isinstance(solver, Newton) and solver.linear == "direct")


def _with_lost_rows(solution: Solution, solver: Solver) -> Solution:
    """Return the solution whose samples that are not finite are NONFINITE, where a fixed number of
    steps has not looked at them.
    """
    z = solution.z
    if solver.has_tolerance or not is_readable(z):
        return solution
    lost = ~z.isfinite().all(1)
    if not bool(lost.any()):
        return solution
    result = torch.where(lost, Result.NONFINITE.value, solution.result)
    return replace(solution, result=result.to(solution.result.dtype))


def _closure_at(solution: Solution, phi: MatrixMap, z0: Tensor) -> tuple[Closure, Tensor]:
    """Return phi evaluated at the solution, and the leaf that stands for it there."""
    unsafe = unsafe_rows(solution)
    with level_zero():
        z = solution.z.detach()
        if unsafe is not None:
            # A lost sample has no gradient; phi may not be differentiable where it was lost.
            nonfinite = (solution.result == Result.NONFINITE.value)[:, None]
            z = torch.where(nonfinite, z0.detach(), z)
        z.requires_grad_()
    return closure_convert(phi, z, lost=unsafe), z


def _default_adjoint(solver: Solver, dtype: torch.dtype) -> Solver:
    if solver.has_tolerance:
        quiet: dict[str, Any] = {"leaf_atol": None}
        quiet |= {"record": None} if hasattr(solver, "record") else {}
        solver = solver.as_adjoint()
        quiet |= ALONE if isinstance(solver, IterativeSolver) else {}
        return solver.with_options(atol=0.0, rtol=solver.rtol or solver.atol, **quiet)
    return Anderson(max_iter=100, rtol=100 * torch.finfo(dtype).eps, atol=0.0)
