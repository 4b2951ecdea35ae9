"""Broyden's good method with limited memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from fixpoint._validation import at_least
from fixpoint.solvers._rowwise import at_least_float32, dot
from fixpoint.solvers.base import IterativeOptions, IterativeSolver
from fixpoint.solvers.line_search import LineSearchState, accept_or_backtrack

LEAST_PIVOT = 0.1
"""Least |s . q| / |s|^2 of an update, which keeps the approximate Jacobian regular."""


class BroydenState(NamedTuple):
    """The step being tried, the factors (u_j, s_j) of H, (B, D) each, and -H g, (B, D)."""

    trial: LineSearchState
    factors: tuple[tuple[Tensor, Tensor], ...]
    full_direction: Tensor

    def transpose_solve(self, g: Tensor) -> Tensor:
        """-H^T g, an estimate of the adjoint (I - J^T)^-1 g, (B, D)."""
        wide = at_least_float32(g)
        for u, s in reversed(self.factors):
            wide = torch.addcmul(wide, s, dot(u, wide))
        return wide.to(g.dtype)


class Broyden(IterativeSolver):
    """Quasi-Newton on g(z) = phi(z) - z: z <- z - lambda H g, H the inverse of an estimated g'.

    H = (I + u_m s_m^T) ... (I + u_1 s_1^T)(-I), with s the last step and
    u = (s - q) / (s . q), q = H y, y the change of g. Where |s . q| < 0.1 |s|^2 the update is
    damped towards H, so that H stays regular; directions are cut to |g| / sqrt(eps). After
    `memory` factors it restarts from -I.

    A step to where phi is not finite, or |g| more than (1 + growth / k) times that of its start,
    is taken back and shortened, each sample by itself.

    Superlinear near a solution, also where phi is no contraction. It stores 2 * memory + 4
    states, however large `max_iter` is.

    Args:
        memory: most factors kept.
        growth: how much |g| may grow in an update; `math.inf` accepts every finite step.
        options: see `IterativeSolver`.

    Source: Broyden (1965), A class of methods for solving nonlinear simultaneous equations;
        product form: Kelley (1995), Iterative Methods for Linear and Nonlinear Equations,
        section 7.3; damping: More and Trangenstein (1976), On the global convergence of
        Broyden's method; derivative-free line search after Li and Fukushima (2000), A
        derivative-free line search and global convergence of Broyden-like method.

    Example:
        >>> import torch
        >>> from fixpoint import Broyden, solve
        >>> solution = solve(lambda z: z - (z**2 - 2), torch.ones(1, 1), Broyden())
        >>> round(solution.z.item(), 4)
        1.4142
    """

    backtracks = True

    def __init__(
        self, *, memory: int = 20, growth: float = 10.0, **options: Unpack[IterativeOptions]
    ) -> None:
        super().__init__(**options)
        self.memory = at_least(1, memory=memory)
        if not growth > 0:
            raise ValueError(f"growth must be > 0; got {growth}")
        self.growth = growth

    def update(
        self, k: int, z: Tensor, fz: Tensor, state: BroydenState | None
    ) -> tuple[Tensor, BroydenState]:
        may_sync = self.may_sync
        if state is None:
            new = accept_or_backtrack(None, z, fz, may_sync=may_sync)
            return fz, BroydenState(
                LineSearchState(z, new.g, new.merit, new.g, new.step_size), (), new.g
            )
        last, factors, last_uncut = state
        max_merit = (1 + self.growth / k) ** 2 * last.merit
        accepted, all_accepted, z, g, merit, step_size = accept_or_backtrack(
            last, z, fz, may_sync=may_sync, max_merit=max_merit
        )
        if len(factors) == self.memory:
            direction, full_direction, factors = g, g, ()
        else:
            p = _apply(factors, g)
            taken = last.step_size if all_accepted else torch.where(accepted, last.step_size, 0.0)
            s = taken * last.direction
            factors = (*factors, (_factor(s, last_uncut - p, may_sync=may_sync), s))
            full_direction = _apply(factors[-1:], p)
            direction = _clip_direction(
                full_direction, merit, eps=torch.finfo(z.dtype).eps, may_sync=may_sync
            )
            if not all_accepted:
                # Exact where the weight is 0 or 1, and faster than `where`.
                weight = accepted.to(g.dtype)
                full_direction = torch.lerp(last_uncut, full_direction, weight)
                direction = torch.lerp(last.direction, direction, weight)
        trial = LineSearchState(z, g, merit, direction, step_size)
        moved = torch.addcmul(z, step_size, direction).to(z.dtype)
        return moved, BroydenState(trial, factors, full_direction)

    def extra_repr(self) -> str:
        return f"memory={self.memory}, growth={self.growth:g}, {super().extra_repr()}"


def _apply(factors: tuple[tuple[Tensor, Tensor], ...], p: Tensor) -> Tensor:
    """The product of all (I + u s^T) with p, (B, D)."""
    for u, s in factors:
        p = torch.addcmul(p, u, dot(s, p))
    return p


def _factor(s: Tensor, q: Tensor, *, may_sync: bool) -> Tensor:
    """u = (s - q) / (s . q) with q damped towards s where the pivot is small, (B, D)."""
    square, inner = dot(s, s), dot(s, q)
    regular = inner.detach().abs() > LEAST_PIVOT * square.detach()  # False for s = 0
    if may_sync and bool(regular.all()):
        return inner.reciprocal() * (s - q)
    moved = square > 0
    square = torch.where(moved, square, 1.0)
    # The inner `where` keeps inf, and 0 * inf in the gradient, away from regular samples.
    pivot = torch.where(regular, 2.0, inner / square)
    goal = torch.copysign(torch.full_like(pivot, LEAST_PIVOT), pivot.detach())
    theta = (1 - goal) / (1 - pivot)
    # s - q_theta = theta (s - q) and s . q_theta = |s|^2 (1 - theta + theta pivot).
    damped = theta / (square * (1 - theta + theta * pivot))
    weight = torch.where(regular, torch.where(regular, inner, 1.0).reciprocal(), damped)
    return torch.where(moved, weight, 0.0) * (s - q)


def _clip_direction(direction: Tensor, merit: Tensor, *, eps: float, may_sync: bool) -> Tensor:
    """The direction, cut to |g| / sqrt(eps) where it is longer; merit is |g|^2, eps that of z.

    Where phi has no fixed point, z + 1 say, secant steps would grow until phi(z) - z is lost in
    the rounding of z and looks like a solution.
    """
    with torch.no_grad():
        share = merit / (eps * dot(direction, direction))
        if may_sync and bool((share >= 1).all()):
            return direction
        tiny = torch.finfo(merit.dtype).tiny
        factor = share.sqrt().nan_to_num(nan=1.0).clamp(min=tiny, max=1.0)
    return factor * direction
