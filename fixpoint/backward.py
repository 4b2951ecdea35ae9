"""How z* is differentiated: through the updates, or by the implicit function theorem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fixpoint.solution import Result, Solution
from fixpoint.solvers import Anderson, InexactNewton, IterativeSolver, Picard, make_solver
from fixpoint.solvers.base import MatrixMap
from fixpoint.solvers.checks import at_least


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

    One tracked application of phi at z* carries the gradient to every tensor that phi closes
    over; the incoming g is replaced by u, which solves the adjoint u = J^T u + g for each sample
    to a tolerance relative to its g. Memory does not grow with the number of updates. Exact only
    at an equilibrium: samples that are NONFINITE get no gradient, for others that failed it is
    as good as their z. z0 gets none, since z* does not depend on it.

    Args:
        solver: solves the adjoint. None takes the forward solver with atol = 0, or Anderson at
            a tolerance tied to the dtype where the forward solver has no tolerance.

    Attributes:
        adjoint: `Solution` of the last adjoint solve, its z the u of each sample, (B, D),
            divided by max |g|; None before the first backward pass.

    Source: Bai, Kolter, Koltun (2019), Deep equilibrium models, Theorem 1.

    Example:
        >>> import torch
        >>> from fixpoint import Anderson, FixedPoint, Implicit
        >>> a = torch.tensor([[0.5]], requires_grad=True)
        >>> FixedPoint(Anderson(), Implicit())(lambda z: a * z + 1, torch.zeros(1, 1)).z.backward()
        >>> a.grad.round(decimals=3)  # z* = 1 / (1 - a)
        tensor([[4.]])
    """

    def __init__(self, solver: IterativeSolver | str | None = None) -> None:
        super().__init__()
        self.solver = None if solver is None else make_solver(solver)
        self.adjoint: Solution | None = None
        if self.solver is not None and not self.solver.has_tolerance:
            raise ValueError(
                "the adjoint must be solved to a tolerance; "
                f"{type(self.solver).__name__} has rtol = atol = 0: set rtol"
            )

    def check(self, solver: IterativeSolver) -> None:
        _refuse_learned_eta(solver, "Implicit")

    def solve(self, solver: IterativeSolver, phi: MatrixMap, z0: Tensor, t: int | None) -> Solution:
        with torch.no_grad():
            solution = solver.run(phi, z0, t)
        if not torch.is_grad_enabled():
            return solution
        z = solution.z.detach().requires_grad_()
        fz = phi(z)
        if not fz.requires_grad:
            return solution
        adjoint = self.solver or _default_adjoint(solver, z.dtype)
        lost = (solution.result == Result.NONFINITE)[:, None]
        return solution._replace(z=_Equilibrium.apply(fz, z, lost, adjoint, self._keep))

    def _keep(self, adjoint: Solution) -> None:
        self.adjoint = adjoint


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


class _Equilibrium(torch.autograd.Function):
    """z* with the gradient of fz = phi(z): passes u = J^T u + g on to fz in place of g."""

    @staticmethod
    def forward(
        ctx: Any,
        fz: Tensor,
        z: Tensor,
        lost: Tensor,
        solver: IterativeSolver,
        keep: Callable[[Solution], None],
    ) -> Tensor:
        # fz and z are inputs, so ctx holds no reference to the output and no cycle arises.
        ctx.fz, ctx.z, ctx.lost, ctx.solver, ctx.keep = fz, z, lost, solver, keep
        return z.detach().clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None]:
        g = torch.where(ctx.lost, 0.0, g)
        size = g.abs().amax(1, keepdim=True) if g.shape[1] else g
        # With max |g| = 1 neither tiny nor huge cotangents leave the range of the dtype.
        unit = g / torch.where(size > 0, size, 1.0)

        def adjoint_map(u: Tensor) -> Tensor:
            (jtu,) = torch.autograd.grad(ctx.fz, ctx.z, u, retain_graph=True, allow_unused=True)
            return unit if jtu is None else jtu + unit

        adjoint = ctx.solver.run(adjoint_map, unit)
        ctx.keep(adjoint)
        return adjoint.z * size, None, None, None, None


def _tracked_updates(
    solution: Solution, solver: IterativeSolver, phi: MatrixMap, t: int | None
) -> Solution:
    """The solution with the gradient of `solver`'s updates made from it; its value stays."""
    moved = solver.run(phi, solution.z, t).z
    lost = (solution.result == Result.NONFINITE)[:, None]
    z = torch.where(lost, solution.z, solution.z + (moved - moved.detach()))
    return solution._replace(z=z, evaluations=solution.evaluations + solver.max_iter)
