"""Differentiation by the implicit function theorem."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fixpoint._torch import inside_transform
from fixpoint.backward._adjoint import AdjointProblem, Equilibrium
from fixpoint.backward.base import Backward, refuse_learned_eta
from fixpoint.captured import captured_tensors
from fixpoint.derivatives import MatrixMap
from fixpoint.failure import NonConvergenceHandler, OnFailure
from fixpoint.solution import Result, Solution
from fixpoint.solvers import Anderson, Broyden, Solver, make_solver


class Implicit(Backward):
    """The implicit function theorem: dz* = (I - J)^-1 (d phi), J = d phi / d z at z*.

    One tracked application of phi at z* finds every tensor that phi closes over and carries the
    gradient to it: the incoming g is replaced by u, which solves the adjoint u = J^T u + g for
    each sample to a tolerance relative to its g. The adjoint is differentiated by the same rule,
    so derivatives of any order are exact. Memory does not grow with the number of updates.

    Exact only at an equilibrium: samples that are NONFINITE get no gradient, for others that
    failed it is as good as their z. z0 gets none, since z* does not depend on it. Second
    derivatives evaluate phi again, so a random phi must repeat itself; see
    `fixpoint.models.frozen`.

    Args:
        solver: solves the adjoint. None takes the forward solver with atol = 0, or Anderson at
            a tolerance tied to the dtype where the forward solver has no tolerance.
        reuse_factors: start the adjoint from the factors of a `Broyden` forward solve, which are
            then kept until the backward pass: 2 * memory states.
        on_failure: "warn" (once), "raise" or "ignore" where an adjoint does not converge.

    Attributes:
        adjoint: `Solution` of the last adjoint solve, its z the u of each sample, (B, D),
            divided by max |g|; None before the first backward pass.

    Raises:
        RuntimeError: called inside a torch.func transform.

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

    def solve(self, solver: Solver, phi: MatrixMap, z0: Tensor, t: int | None) -> Solution:
        if inside_transform():
            raise RuntimeError(
                "torch.func transforms cannot pass through Implicit: use torch.autograd.grad or "
                "torch.autograd.functional.jacobian outside of them, or Unrolled() with a fixed "
                "number of steps (rtol = atol = 0), which jvp, vmap and jacrev do pass"
            )
        start = None
        with torch.no_grad():
            if self.reuse_factors and isinstance(solver, Broyden):
                solution, state = solver.run_with_state(phi, z0, t)
                start = None if state is None else state.transpose_solve
            else:
                solution = solver.run(phi, z0, t)
        if not torch.is_grad_enabled():
            return solution
        z = solution.z.detach().requires_grad_()
        fz, outer = captured_tensors(phi, z)
        if not outer:
            return solution
        problem = AdjointProblem(
            phi,
            fz,
            z,
            (solution.result == Result.NONFINITE)[:, None],
            self.solver or _default_adjoint(solver, z.dtype),
            start,
            self._finish,
        )
        return replace(solution, z=Equilibrium.apply(problem, fz, *outer))

    def _finish(self, adjoint: Solution) -> None:
        self.adjoint = replace(adjoint, z=adjoint.z.detach())
        self.alarm.check(adjoint)

    def extra_repr(self) -> str:
        return "reuse_factors=True" if self.reuse_factors else ""


def _default_adjoint(solver: Solver, dtype: torch.dtype) -> Solver:
    if solver.has_tolerance:
        quiet = {"record": None} if hasattr(solver, "record") else {}
        return solver.with_options(atol=0.0, rtol=solver.rtol or solver.atol, **quiet)
    return Anderson(max_iter=100, rtol=100 * torch.finfo(dtype).eps, atol=0.0)
