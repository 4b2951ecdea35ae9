"""Broyden's good method with limited memory."""

from __future__ import annotations

import functools
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
FACTOR_BYTES = 2**22
"""What the factors of one sample may take by default."""
MIN_FACTORS = 20
"""Factors kept by default, however large a state is."""
WINDOW = 5
"""Growth of |g| is measured from the largest of so many last accepted steps."""
MAX_GROWTH = 100.0
"""A rejected step that multiplies |g| by more than this is not used to update H."""
MAX_LENGTHENING = 4.0
"""Largest ratio of the lengths of a direction and the step before it."""
MAX_LEARNED = 5
"""So many rejected steps in a row update H; after them the direction is kept."""


class BroydenState(NamedTuple):
    """The step being tried, the factors (u_j, s_j) of H, (B, D) each, and -H g, (B, D).

    merits: |g|^2 of the last accepted steps, (B, 1) each.
    rejections: steps rejected in a row, (B, 1).
    """

    trial: LineSearchState
    factors: tuple[tuple[Tensor, Tensor], ...]
    full_direction: Tensor
    merits: tuple[Tensor, ...]
    rejections: Tensor

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
    damped towards H, so that H remains regular; directions are cut to |g| / sqrt(eps), and to four
    times the last step. After `memory` factors the last half of the secant pairs is kept, and H
    is rebuilt from them.

    A step to where phi is not finite, or |g| more than (1 + growth / k) times the largest of the
    last five accepted steps, is taken back, each sample by itself. Unless |g| grew by more than
    100, H is updated by that step too, and the next one is at most half as long; else the same
    direction is tried with a shorter step.

    Superlinear near a solution, also where phi is not a contraction. It stores 2 * memory + 4
    states.

    Args:
        memory: most factors kept. None: up to 6 D within 4 MiB a sample, or 20.
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
        self,
        *,
        memory: int | None = None,
        growth: float = 10.0,
        **options: Unpack[IterativeOptions],
    ) -> None:
        super().__init__(**options)
        self.memory = memory if memory is None else at_least(1, memory=memory)
        if not growth > 0:
            raise ValueError(f"growth must be > 0; got {growth}")
        self.growth = growth

    def update(
        self, k: int, z: Tensor, fz: Tensor, state: BroydenState | None
    ) -> tuple[Tensor, BroydenState]:
        may_sync = self.may_sync
        if state is None:
            new = accept_or_backtrack(None, z, fz, may_sync=may_sync)
            trial = LineSearchState(z, new.g, new.merit, new.g, new.step_size)
            merit = new.merit.detach()
            return fz, BroydenState(trial, (), new.g, (merit,), torch.zeros_like(merit))
        trial, factors, full_direction, merits, rejections = state
        max_merit = (1 + self.growth / k) ** 2 * functools.reduce(torch.maximum, merits)
        accepted, all_accepted, start, g, merit, step_size = accept_or_backtrack(
            trial, z, fz, may_sync=may_sync, max_merit=max_merit
        )
        if len(factors) >= self.most_factors(z.shape[1], z.dtype):
            factors = _keep_last_half(factors)
            full_direction = _apply(factors, trial.g)
        s = trial.step_size * trial.direction
        if all_accepted:
            p = after = _apply(factors, g)
            rejections = torch.zeros_like(rejections)
        else:
            end = at_least_float32(fz - z)
            learns = accepted | _is_near(end.detach(), trial.merit.detach(), rejections)
            # Elsewhere the trial is not used: s = q = 0.
            s = torch.where(learns, s, 0.0)
            p = torch.where(learns, _apply(factors, torch.where(learns, end, 0.0)), full_direction)
            after = torch.where(accepted, p, full_direction)
            rejections = torch.where(accepted, 0.0, rejections + 1)
        factors = (*factors, (_factor(s, full_direction - p, may_sync=may_sync), s))
        full_direction = _apply(factors[-1:], after)
        direction = _clip_direction(
            full_direction, s, merit, eps=torch.finfo(z.dtype).eps, may_sync=may_sync
        )
        if not all_accepted:
            half = _half_as_long(s, direction)
            step_size = torch.where(accepted | ~learns, step_size, half)
        new_trial = LineSearchState(start, g, merit, direction, step_size)
        moved = torch.addcmul(start, step_size, direction).to(z.dtype)
        merits = _shift(merits, merit.detach(), None if all_accepted else accepted)
        return moved, BroydenState(new_trial, factors, full_direction, merits, rejections)

    def most_factors(self, D: int, dtype: torch.dtype) -> int:
        """Factors kept for states of D numbers."""
        if self.memory is not None:
            return self.memory
        itemsize = torch.promote_types(dtype, torch.float32).itemsize
        within = max(FACTOR_BYTES // max(2 * D * itemsize, 1), MIN_FACTORS)
        return min(max(self.max_iter, 1), max(6 * D, MIN_FACTORS), within)

    def extra_repr(self) -> str:
        memory = "" if self.memory is None else f"memory={self.memory}, "
        return f"{memory}growth={self.growth:g}, {super().extra_repr()}"


def _apply(factors: tuple[tuple[Tensor, Tensor], ...], p: Tensor) -> Tensor:
    """The product of all (I + u s^T) with p, (B, D)."""
    for u, s in factors:
        p = torch.addcmul(p, u, dot(s, p))
    return p


def _apply_inverse(factors: tuple[tuple[Tensor, Tensor], ...], p: Tensor) -> Tensor:
    """The product of all (I + u s^T), inverted, with p, (B, D)."""
    for u, s in reversed(factors):
        p = torch.addcmul(p, u, dot(s, p) / (1 + dot(s, u)), value=-1)
    return p


def _keep_last_half(
    factors: tuple[tuple[Tensor, Tensor], ...],
) -> tuple[tuple[Tensor, Tensor], ...]:
    """The factors that the last half of the secant pairs gives from -I."""
    kept: tuple[tuple[Tensor, Tensor], ...] = ()
    for j in range(len(factors) - len(factors) // 2, len(factors)):
        u, s = factors[j]
        q = s - dot(s, s) / (1 + dot(s, u)) * u  # from u = (s - q) / (s . q)
        q = _apply(kept, _apply_inverse(factors[:j], q))  # of y = -(F_{j-1} ... F_1)^-1 q
        kept = (*kept, (_factor(s, q, may_sync=False), s))
    return kept


def _is_near(g: Tensor, merit: Tensor, rejections: Tensor) -> Tensor:
    """Whether a rejected step, which ended in g, is to update H, (B, 1); merit of its start."""
    grown = dot(g, g) <= MAX_GROWTH**2 * merit  # False where g is not finite
    return grown & (rejections < MAX_LEARNED)


def _shift(
    merits: tuple[Tensor, ...], merit: Tensor, accepted: Tensor | None
) -> tuple[Tensor, ...]:
    """The last merits with the new one where it was accepted; None: in all samples."""
    after = (*merits, merit)[-WINDOW:]
    if accepted is None:
        return after
    before = (*merits, merits[-1])[-WINDOW:] if len(merits) < WINDOW else merits
    return tuple(torch.where(accepted, a, b) for a, b in zip(after, before, strict=True))


def _half_as_long(s: Tensor, direction: Tensor) -> Tensor:
    """Step size along the direction, at most 1, that makes half the step s, (B, 1)."""
    with torch.no_grad():
        ratio = torch.linalg.vector_norm(s, dim=1, keepdim=True)
        ratio = ratio / torch.linalg.vector_norm(direction, dim=1, keepdim=True)
        return (0.5 * ratio).nan_to_num(0.0).clamp_max(1.0)


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


def _clip_direction(
    direction: Tensor, s: Tensor, merit: Tensor, *, eps: float, may_sync: bool
) -> Tensor:
    """The direction, cut to |g| / sqrt(eps) and to 4 |s|, where s is not 0; merit is |g|^2.

    Where phi has no fixed point, z + 1 say, secant steps would grow until phi(z) - z is lost in
    the rounding of z, with precision eps, and looks like a solution; where |g| is bounded, they
    would alternate with growing length.
    """
    with torch.no_grad():
        last = MAX_LENGTHENING**2 * dot(s, s)
        largest = torch.minimum(merit / eps, torch.where(last > 0, last, torch.inf))
        fraction = largest / dot(direction, direction)
        if may_sync and bool((fraction >= 1).all()):
            return direction
        tiny = torch.finfo(merit.dtype).tiny
        factor = fraction.sqrt().nan_to_num(nan=1.0).clamp(min=tiny, max=1.0)
    return factor * direction
