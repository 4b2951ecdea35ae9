"""Differentiation by the implicit function theorem."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fixpoint._torch import inside_forward_mode
from fixpoint.backward._adjoint import Problem, implicit_function
from fixpoint.backward.base import Backward, refuse_learned_eta
from fixpoint.derivatives import Linearization, MatrixMap
from fixpoint.failure import NonConvergenceHandler, OnFailure
from fixpoint.solution import Result, Solution
from fixpoint.solvers import Anderson, Broyden, Solver, make_solver
from fixpoint.tracing import closure_convert, closure_convert_in_transform, substitute, unrecorded

ADJOINTS = 2**16
"""Most results of adjoint solves that a layer keeps."""


class Implicit(Backward):
    """The implicit function theorem: dz* = (I - J)^-1 (d phi), J = d phi / d z at z*.

    One recorded evaluation of phi at z* finds every tensor that phi closes over and carries the
    gradient to it: the incoming g is replaced by u, which solves the adjoint u = J^T u + g for
    each sample to a tolerance relative to its u. The adjoint is differentiated by the same rule,
    so derivatives of any order are exact, in reverse and forward mode, under torch.func and in
    batched backward passes. Memory does not grow with the number of updates, and the time of an
    adjoint does not depend on what the captured tensors were computed from.

    Exact only at an equilibrium: samples that are NONFINITE get no gradient, for others that
    failed it is as good as their z. z0 gets none, since z* does not depend on it. Second
    derivatives repeat the recorded operations, so a random phi must repeat itself; see
    `fixpoint.models.frozen`. Under torch.func and in forward mode the branches that phi takes
    are those taken at z0.

    Args:
        solver: solves the adjoint. None takes the forward solver with atol = 0, or Anderson at
            a tolerance tied to the dtype where the forward solver has no tolerance.
        reuse_factors: start the adjoint from the factors of a `Broyden` forward solve, which are
            then kept until the backward pass: 2 * memory states.
        on_failure: "warn" (once), "raise" or "ignore" where an adjoint does not converge.

    Attributes:
        adjoint: `Solution` of the last adjoint solve, its z the u of each sample, (B, D),
            divided by max |g|; None before the first backward pass.
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
        on_failure: OnFailure = "warn",
    ) -> None:
        super().__init__()
        self.solver = None if solver is None else make_solver(solver)
        self.reuse_factors = reuse_factors
        self.alarm = NonConvergenceHandler("the adjoint solve", on_failure)
        self.adjoint: Solution | None = None
        self.adjoints: deque[Solution] = deque(maxlen=ADJOINTS)
        if self.solver is not None and not self.solver.has_tolerance:
            raise ValueError(
                "the adjoint must be solved to a tolerance; "
                f"{type(self.solver).__name__} has rtol = atol = 0: set rtol"
            )

    def check(self, solver: Solver) -> None:
        refuse_learned_eta(solver, "Implicit")
        if self.reuse_factors and not isinstance(solver, Broyden):
            raise ValueError(
                f"reuse_factors needs a Broyden forward solve; got {type(solver).__name__}: leave "
                "it out"
            )

    def compiles(self, solver: Solver) -> bool:
        return False

    def solve(self, solver: Solver, phi: MatrixMap, z0: Tensor, t: int | None) -> Solution:
        self.adjoints.clear()
        if inside_forward_mode():
            return self._solve_in_transform(solver, phi, z0, t)
        with unrecorded():
            start = None
            with torch.no_grad():
                if self.reuse_factors and isinstance(solver, Broyden):
                    solution, state = solver.run_with_state(phi, z0, t)
                    start = None if state is None else state.transpose_solve
                else:
                    solution = solver.run(phi, z0, t)
            if not torch.is_grad_enabled():
                return solution
            lost = (solution.result == Result.NONFINITE.value)[:, None]
            # A lost sample has no gradient; phi may not be differentiable where it was lost.
            z = torch.where(lost, z0.detach(), solution.z.detach()).requires_grad_()
            closure = closure_convert(phi, z)
        captured = [*closure.captured, *closure.leaves]
        if not captured:
            return solution
        problem = Problem(
            function=closure.replay or _substituted(phi, closure.captured),
            solver=solver,
            adjoint=self.solver or _default_adjoint(solver, z.dtype),
            finish=self._finish,
            t=t,
            leaves=len(closure.leaves),
            solution=solution,
            graph=(Linearization(closure.fz, z), [*closure.twins, *closure.leaves]),
            start=start,
        )
        return replace(solution, z=implicit_function(problem, solution.z.detach(), *captured)[0])

    def _solve_in_transform(
        self, solver: Solver, phi: MatrixMap, z0: Tensor, t: int | None
    ) -> Solution:
        """The same where torch.func or forward mode differentiates: one operation for them all."""
        with unrecorded():
            closure = closure_convert_in_transform(phi, z0.detach())
        if closure.replay is None:
            raise RuntimeError(
                "phi holds an operation that torch.func cannot see, such as an autograd.Function "
                "of its own: differentiate with torch.autograd.grad outside of torch.func and "
                "forward mode, or use Unrolled() with a fixed number of steps (rtol = atol = 0)"
            )
        solutions: list[Solution] = []
        problem = Problem(
            function=closure.replay,
            solver=solver,
            adjoint=self.solver or _default_adjoint(solver, z0.dtype),
            finish=self._finish,
            t=t,
            note=solutions.append,
        )
        z, iterations, result, *measured = implicit_function(
            problem, z0.detach(), *closure.captured
        )
        residual = measured[0] if measured else None
        last = solutions[-1]
        return Solution(z, residual, iterations, last.evaluations, result, products=last.products)

    def _finish(self, adjoint: Solution) -> None:
        self.adjoint = replace(adjoint, z=adjoint.z.detach())
        self.adjoints.append(replace(adjoint, z=None))
        self.alarm.check(adjoint)

    def extra_repr(self) -> str:
        return "reuse_factors=True" if self.reuse_factors else ""


def _substituted(phi: MatrixMap, captured: list[Tensor]) -> Callable[..., Tensor]:
    """phi as a function of z and the captured tensors, evaluated again each time."""

    def function(z: Tensor, *values: Tensor) -> Tensor:
        return substitute(phi, z, captured, list(values[: len(captured)]))

    return function


def _default_adjoint(solver: Solver, dtype: torch.dtype) -> Solver:
    if solver.has_tolerance:
        quiet = {"leaf_atol": None} | ({"record": None} if hasattr(solver, "record") else {})
        solver = solver.as_adjoint()
        return solver.with_options(atol=0.0, rtol=solver.rtol or solver.atol, **quiet)
    return Anderson(max_iter=100, rtol=100 * torch.finfo(dtype).eps, atol=0.0)
