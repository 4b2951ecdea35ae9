"""How z* is differentiated: through the updates, or by the implicit function theorem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fixpoint._validation import at_least
from fixpoint.captured import stop_gradient_at, track
from fixpoint.derivatives import Derivatives, batch_vjp_of_units, inside_transform
from fixpoint.failure import NonConvergenceHandler, OnFailure
from fixpoint.solution import Result, Solution
from fixpoint.solvers import Anderson, Broyden, InexactNewton, IterativeSolver, Picard, make_solver
from fixpoint.solvers.base import MatrixMap


class Backward(nn.Module):
    """A way to differentiate a solve; works on (B, D) matrices."""

    def check(self, solver: IterativeSolver) -> None:
        """Refuse, with the remedy, a solver that this backward cannot serve."""

    def solve(self, solver: IterativeSolver, phi: MatrixMap, z0: Tensor, t: int | None) -> Solution:
        """The solution with a differentiable z."""
        raise NotImplementedError


class Unrolled(Backward):
    """Backpropagation through the updates themselves: exact for what was computed.

    Memory grows with the number of updates. Choose it for few updates (K up to about 5) and
    wherever the solver is learned; `Implicit` where an equilibrium is really reached.

    Args:
        last: only through the last so many updates; the state before them is detached. A solve
            to a tolerance runs first without gradient; so many further updates from its solution
            then give the gradient (not the value), so that each sample gets them all.

    Example:
        >>> import torch
        >>> from fixpoint import FixedPoint, InexactNewton, Unrolled
        >>> layer = FixedPoint(InexactNewton(max_iter=2, eta=0.5), Unrolled())
        >>> layer(torch.cos, torch.zeros(1, 1)).z.sum().backward()
        >>> layer.solver.eta.grad.shape
        torch.Size([2])
    """

    def __init__(self, last: int | None = None) -> None:
        super().__init__()
        self.last = last if last is None else at_least(1, last=last)

    def solve(self, solver: IterativeSolver, phi: MatrixMap, z0: Tensor, t: int | None) -> Solution:
        if self.last is None:
            return solver.run(phi, z0, t)
        if not solver.has_tolerance:
            return solver.run(phi, z0, t, track_from=solver.max_iter - self.last)
        with torch.no_grad():
            solution = solver.run(phi, z0, t)
        if not torch.is_grad_enabled():
            return solution
        updates = solver.with_options(max_iter=self.last, rtol=0.0, atol=0.0, record=None)
        return _tracked_updates(solution, updates, phi, t)

    def check(self, solver: IterativeSolver) -> None:
        if not solver.unrollable:
            raise ValueError(
                f"backpropagation through the updates of {solver} is not possible: use Implicit()"
            )
        if self.last is not None and self.last > solver.max_iter:
            raise ValueError(
                f"Unrolled(last={self.last}) asks for more updates than max_iter="
                f"{solver.max_iter}: lower last, or last=None for all"
            )

    def extra_repr(self) -> str:
        return "" if self.last is None else f"last={self.last}"


class Phantom(Backward):
    """Through a few damped updates z <- z + beta (phi(z) - z) made from z*: a cheap gradient.

    It is the Neumann series of (I - J)^-1 cut after `steps` terms; steps = 1 is Jacobian-free
    backpropagation. Biased, unless J is small; choose it where a descent direction is enough.
    The value of z stays z*.

    Args:
        steps: number of updates.
        beta: mixing, 1 = undamped.

    Source: Geng et al. (2021), On training implicit models; Fung et al. (2022), JFB:
        Jacobian-free backpropagation for implicit networks.

    Example:
        >>> import torch
        >>> from fixpoint import Anderson, FixedPoint, Phantom
        >>> a = torch.tensor([[0.5]], requires_grad=True)
        >>> layer = FixedPoint(Anderson(), Phantom(steps=2))
        >>> layer(lambda z: a * z + 1, torch.zeros(1, 1)).z.backward()
        >>> a.grad  # z* (1 + a)
        tensor([[3.]])
    """

    def __init__(self, steps: int = 1, *, beta: float = 1.0) -> None:
        super().__init__()
        self.updates = Picard(max_iter=at_least(1, steps=steps), beta=beta, rtol=0.0, atol=0.0)

    def check(self, solver: IterativeSolver) -> None:
        _refuse_learned_eta(solver, "Phantom")

    def solve(self, solver: IterativeSolver, phi: MatrixMap, z0: Tensor, t: int | None) -> Solution:
        with torch.no_grad():
            solution = solver.run(phi, z0, t)
        if not torch.is_grad_enabled():
            return solution
        return _tracked_updates(solution, self.updates, phi, t)


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
        solver: IterativeSolver | str | None = None,
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

    def check(self, solver: IterativeSolver) -> None:
        _refuse_learned_eta(solver, "Implicit")
        if self.reuse_factors and not isinstance(solver, Broyden):
            raise ValueError(
                f"reuse_factors needs a Broyden forward solve; got {type(solver).__name__}: leave "
                "it out"
            )

    def solve(self, solver: IterativeSolver, phi: MatrixMap, z0: Tensor, t: int | None) -> Solution:
        if inside_transform():
            raise RuntimeError(
                "torch.func transforms cannot pass through Implicit: use torch.autograd.grad or "
                "torch.autograd.functional.jacobian outside of them, or Unrolled() with a fixed "
                "number of steps (rtol = atol = 0), which jvp, vmap and jacrev do pass"
            )
        with torch.no_grad():
            solution = solver.run(phi, z0, t)
        if not torch.is_grad_enabled():
            return solution
        z = solution.z.detach().requires_grad_()
        fz, outer = track(phi, z)
        if not outer:
            return solution
        start = None
        if self.reuse_factors and solution.state is not None:
            start = solution.state.transpose_solve
        problem = _Problem(
            phi,
            fz,
            z,
            (solution.result == Result.NONFINITE)[:, None],
            self.solver or _default_adjoint(solver, z.dtype),
            start,
            self._finish,
        )
        return solution._replace(z=_Equilibrium.apply(problem, fz, *outer))

    def _finish(self, adjoint: Solution) -> None:
        self.adjoint = adjoint._replace(z=adjoint.z.detach(), state=None)
        self.alarm.check(adjoint)

    def extra_repr(self) -> str:
        return "reuse_factors=True" if self.reuse_factors else ""


def _refuse_learned_eta(solver: IterativeSolver, backward: str) -> None:
    if isinstance(solver, InexactNewton) and solver.learn:
        raise ValueError(
            f"eta receives no gradient under {backward}: use Unrolled(), or "
            "InexactNewton(..., learn=False)"
        )


def _default_adjoint(solver: IterativeSolver, dtype: torch.dtype) -> IterativeSolver:
    if solver.has_tolerance:
        return solver.with_options(atol=0.0, rtol=solver.rtol or solver.atol, record=None)
    return Anderson(max_iter=100, rtol=100 * torch.finfo(dtype).eps, atol=0.0)


class _Problem(NamedTuple):
    """What the backward pass of one solve needs.

    phi; z, (B, D), a detached z*; fz = phi(z) with its graph; which samples are lost, (B, 1); the
    solver of the adjoint; a start for it as a function of g, or None; what takes its `Solution`.
    """

    phi: MatrixMap
    fz: Tensor
    z: Tensor
    lost: Tensor
    solver: IterativeSolver
    start: Callable[[Tensor], Tensor] | None
    finish: Callable[[Solution], None]


class _Equilibrium(torch.autograd.Function):
    """z* as a function of fz = phi(z), or of the tensors that phi closes over.

    A first derivative passes u on to fz, whose graph carries it further. That graph holds z
    constant; so for a derivative that will be differentiated again, phi is evaluated at the z*
    that depends on `outer`, and the gradient goes to `outer` itself.
    """

    @staticmethod
    def forward(ctx: Any, problem: _Problem, fz: Tensor, *outer: Tensor) -> Tensor:
        z = problem.z.detach().clone()
        ctx.problem = problem  # its graph leads to `outer`, not to the output: no reference cycle
        ctx.save_for_backward(z, *outer)
        ctx.set_materialize_grads(False)
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * len(ctx.needs_input_grad)
        problem: _Problem = ctx.problem
        g = torch.where(problem.lost, 0.0, g)
        if not torch.is_grad_enabled():
            u = _adjoint(problem, problem.fz, problem.z, g)
            return None, u, *(None for _ in ctx.needs_input_grad[2:])
        z, *outer = ctx.saved_tensors
        fz = problem.phi(z)
        u = _adjoint(problem, fz, z, g)
        with stop_gradient_at([z, *outer]):
            return None, None, *_vjp(fz, outer, u)


def _adjoint(problem: _Problem, fz: Tensor, z: Tensor, g: Tensor) -> Tensor:
    """u = J^T u + g of each sample, (B, D), differentiable under grad mode."""
    # With max |g| = 1 neither tiny nor huge cotangents leave the range of the dtype.
    size = g.detach().abs().amax(1, keepdim=True) if g.shape[1] else g.detach()
    unit = g / torch.where(size > 0, size, 1.0)

    def adjoint_map(u: Tensor) -> Tensor:
        (jtu,) = _vjp(fz, [z], u)
        return unit if jtu is None else jtu + unit

    with torch.no_grad():
        u0 = unit.detach() if problem.start is None else problem.start(unit.detach())
        derivatives = _AdjointDerivatives(adjoint_map, fz, z)
        adjoint = problem.solver.run(adjoint_map, u0, derivatives=derivatives)
    problem.finish(adjoint)
    u = adjoint.z.detach()
    if torch.is_grad_enabled():
        # The adjoint is a fixed point too: its gradient follows from the same rule.
        u = u.requires_grad_()
        psi, outer = track(adjoint_map, u)
        if outer:
            again = problem._replace(phi=adjoint_map, fz=psi, z=u, start=None)
            u = _Equilibrium.apply(again, psi, *outer)
    return u * size


class _AdjointDerivatives(Derivatives):
    """The Jacobian of u -> J^T u + g is J^T, whatever u is."""

    def __init__(self, phi: MatrixMap, fz: Tensor, z: Tensor) -> None:
        super().__init__(phi)
        self.fz, self.z = fz, z

    def jacobian(self, z: Tensor) -> Tensor:
        self.products += z.shape[1]
        return batch_vjp_of_units(self.fz, self.z).mT

    def jvp(self, z: Tensor, v: Tensor) -> Tensor:
        self.products += 1
        (jtv,) = _vjp(self.fz, [self.z], v)
        return torch.zeros_like(v) if jtv is None else jtv


def _vjp(fz: Tensor, inputs: list[Tensor], u: Tensor) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(
        fz,
        inputs,
        u,
        retain_graph=True,
        create_graph=torch.is_grad_enabled(),
        allow_unused=True,
    )


def _tracked_updates(
    solution: Solution, solver: IterativeSolver, phi: MatrixMap, t: int | None
) -> Solution:
    """The solution with the gradient of `solver`'s updates made from it; its value stays."""
    moved = solver.run(phi, solution.z, t).z
    lost = (solution.result == Result.NONFINITE)[:, None]
    z = torch.where(lost, solution.z, solution.z + (moved - moved.detach()))
    return solution._replace(z=z, evaluations=solution.evaluations + solver.max_iter)
