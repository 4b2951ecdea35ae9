"""Broyden's good method with limited memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from fixpoint._torch import carries_tangents, is_exporting
from fixpoint._validation import at_least
from fixpoint.solvers._numbers import (
    LIBRARY,
    TENSORS,
    Arithmetic,
    Evaluation,
    Number,
    computes_on_host,
)
from fixpoint.solvers._rowwise import at_least_float32
from fixpoint.solvers._secant_factors import Factors, pair_weight
from fixpoint.solvers._weights import inner_products
from fixpoint.solvers.base import IterativeOptions, IterativeSolver
from fixpoint.solvers.line_search import MIN_STEP_SIZE

FACTOR_BYTES = 2**22
"""What the factors of one sample may take by default."""
MIN_FACTORS = 20
"""Factors kept by default, however large a state is."""
WINDOW = 5
"""Growth of |g| is measured from the largest of the last accepted steps, this many."""
MAX_GROWTH = 100.0
"""A rejected step that multiplies |g| by more than this is not used to update H."""
MAX_LENGTHENING = 4.0
"""Largest ratio of the lengths of a direction and the step before it."""
MAX_LEARNED = 5
"""This many rejected steps in a row update H; after them the direction is kept."""


class BroydenState(NamedTuple):
    """The step being tried from z, and H = -P.

    g: phi(z) - z. direction: of the step. full_direction: -H g, (B, D) each, all but z in at least
    float32. scalars: |g|^2, the step size, rejections in a row and |g|^2 of the last accepted
    steps, (B, 3 + `WINDOW`). filled: number of factors; (B,) where the state has a fixed shape.
    """

    z: Tensor
    g: Tensor
    direction: Tensor
    full_direction: Tensor
    factors: Factors
    scalars: Tensor
    filled: int | Tensor

    def transpose_solve(self, g: Tensor) -> Tensor:
        """Return -H^T g, an estimate of the adjoint (I - J^T)^-1 g, (B, D)."""
        return self.factors.apply_transpose(at_least_float32(g)).to(g.dtype)


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
    states. A state of fixed shape (`init_fixed`) needs its `memory`, and each of its updates
    takes as long as one with all factors.

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

    @property
    def compiles(self) -> bool:
        """As of other solvers; a solve to a tolerance needs its memory."""
        return super().compiles and (self.memory is not None or not self.has_tolerance)

    def init_fixed(self, z: Tensor, fz: Tensor, t: int | None = None) -> BroydenState:
        if self.memory is None:
            raise ValueError(
                "Broyden needs its memory for a state of fixed shape; got memory=None: pass "
                "memory=m, the most factors kept"
            )
        state, M = _begin(z, fz), self.memory
        factors = Factors.none(state.g, M)
        count = torch.zeros_like(state.g[:, 0], dtype=torch.int64)
        direction = torch.zeros_like(state.g)
        return state._replace(factors=factors, filled=count, direction=direction)

    def update_fixed(
        self, k: Tensor, z: Tensor, fz: Tensor, state: BroydenState
    ) -> tuple[Tensor, BroydenState]:
        return self.advance(k, z, fz, state, Evaluation(z, reads=False))

    def update(
        self, k: int, z: Tensor, fz: Tensor, state: BroydenState | None
    ) -> tuple[Tensor, BroydenState]:
        if state is None:
            return fz, _begin(z, fz)
        on_host = computes_on_host(fz) and not _is_tracked(z, fz, state.direction)
        return self.advance(k, z, fz, state, Evaluation(z, reads=on_host))

    def advance(
        self,
        k: int | Tensor,
        z: Tensor,
        fz: Tensor,
        state: BroydenState,
        evaluate: Evaluation,
    ) -> tuple[Tensor, BroydenState]:
        """Return `update` with numbers evaluated in this way."""
        state, constants = self._with_room(state), self._constants(k)
        if evaluate.kind is TENSORS or self.may_sync:
            moved, *new, u, s = step(z, fz, state, constants, evaluate)
        else:
            moved, *new, u, s = _step_unseen(z, fz, state, constants)
        start, g, direction, full_direction, scalars = new
        factors, count = state.factors, state.filled
        factors = factors.append(u, s) if isinstance(count, int) else factors.put(count, u, s)
        count = count + 1 if isinstance(k, int) else count + (k > 0)
        return moved, BroydenState(start, g, direction, full_direction, factors, scalars, count)

    def _constants(self, k: int | Tensor) -> Sequence[Any]:
        """Return how much |g|^2 may grow, and whether fewer than `WINDOW` steps were accepted."""
        if isinstance(k, int):
            return (1 + self.growth / k) ** 2, float(k < WINDOW)
        return (1 + self.growth / k.clamp_min(1)) ** 2, k < WINDOW

    def _with_room(self, state: BroydenState) -> BroydenState:
        """Return the state with a place for one factor more, and -H g by those that it has."""
        factors, count = state.factors, state.filled
        if isinstance(count, int):
            if count < self.most_factors(state.g.shape[1], state.z.dtype):
                return state
            factors = factors.last_half()
            after = factors.apply(state.g)
            return state._replace(factors=factors, full_direction=after, filled=count // 2)
        if self.memory is not None and self.memory >= self.max_iter:
            return state
        if is_exporting():
            raise ValueError(
                f"an exported graph holds Broyden with memory >= max_iter alone; got memory="
                f"{self.memory}, max_iter={self.max_iter}: raise memory, or take Anderson"
            )
        full = (count >= factors.U.shape[1]).any()  # of one sample, where they began one by one
        given = [*factors[:3], state.full_direction, count, state.g]
        if torch.compiler.is_compiling():
            *kept, after, count = torch.cond(full, _halved, _as_they_are, given)
        else:
            pairs = zip(_halved(*given), given, strict=False)
            *kept, after, count = (torch.where(full, a, b) for a, b in pairs)
        return state._replace(factors=Factors(*kept), full_direction=after, filled=count)

    def most_factors(self, D: int, dtype: torch.dtype) -> int:
        """Return factors kept for states of D numbers."""
        if self.memory is not None:
            return self.memory
        itemsize = torch.promote_types(dtype, torch.float32).itemsize
        within = max(FACTOR_BYTES // max(2 * D * itemsize, 1), MIN_FACTORS)
        return min(max(self.max_iter, 1), max(6 * D, MIN_FACTORS), within)

    def extra_repr(self) -> str:
        memory = "" if self.memory is None else f"memory={self.memory}, "
        return f"{memory}growth={self.growth:g}, {super().extra_repr()}"


def _begin(z: Tensor, fz: Tensor) -> BroydenState:
    """Return the state after a plain step."""
    g = at_least_float32(fz - z)
    evaluate = Evaluation(z, reads=False)
    merit = _squared_size(g, evaluate).unsqueeze(1)
    scalars = torch.cat((merit, torch.ones_like(merit), torch.zeros_like(merit)), 1)
    scalars = torch.cat((scalars, merit.expand(-1, WINDOW)), 1)
    return BroydenState(z, g, g, g, Factors.none(g), scalars, 0)


def _halved(
    U: Tensor, S: Tensor, T: Tensor, full_direction: Tensor, count: Tensor, g: Tensor
) -> tuple[Tensor, ...]:
    """Return full factors with the last half of their secant pairs, -H g, and the counts."""
    M, given = U.shape[1], (U, S, T, full_direction, count)
    kept = Factors(U, S, T).last_half().joined()
    pad = M - M // 2
    U, S = (torch.nn.functional.pad(x, (0, 0, 0, pad)) for x in (kept.U, kept.S))
    T = torch.nn.functional.pad(kept.T, (0, pad, 0, pad))
    new, full = (U, S, T, kept.apply(g), torch.full_like(count, M // 2)), count >= M
    return tuple(
        torch.where(full.view(-1, *(1,) * (x.dim() - 1)), x, y)
        for x, y in zip(new, given, strict=True)
    )


def _as_they_are(
    U: Tensor, S: Tensor, T: Tensor, full_direction: Tensor, count: Tensor, g: Tensor
) -> tuple[Tensor, ...]:
    return U.clone(), S.clone(), T.clone(), full_direction.clone(), count.clone()


def accept(
    kind: Arithmetic, numbers: Sequence[Number], constants: Sequence[Any]
) -> Sequence[Number]:
    """Tell whether a trial is accepted and whether H learns from it, and `BroydenState.scalars`
    after.

    numbers: |g|^2 at its end, and the scalars before. constants: how much the largest of the last
    |g|^2 may grow, and whether fewer than `WINDOW` steps were accepted.
    """
    merit, last, step, rejections, *window = numbers
    growth, early = constants
    accepted = (merit <= growth * kind.largest(window)) & (step > 0)  # False where g is not finite
    if kind.all(accepted):
        zero = kind.zeros_like(merit)
        return [accepted, accepted, merit, zero + 1, zero, *window[1:], merit]
    near = (merit <= MAX_GROWTH**2 * last) & (rejections < MAX_LEARNED)
    # The minimiser of the parabola through the start, its slope and the end of the trial.
    below, known = merit - last + 2 * last * step, merit == merit
    # The inner `where` keeps inf and NaN away from the gradient of what is not chosen.
    shorter = last * step * step / kind.where(accepted | (known ^ True), 1.0, below + (below == 0))
    shorter = kind.where((shorter < 0.5 * step) & known, shorter, 0.5 * step)
    shorter = kind.where(shorter > 0.1 * step, shorter, 0.1 * step)
    shorter = kind.where(shorter < MIN_STEP_SIZE, 0.0, shorter)
    newest = kind.where(accepted, merit, window[-1])
    shifts = accepted | (early > 0)
    return [
        accepted,
        accepted | near,
        kind.where(accepted, merit, last),
        kind.where(accepted, 1.0, shorter),
        kind.where(accepted, 0.0, rejections + 1),
        *(kind.where(shifts, a, b) for a, b in zip([*window[1:], newest], window, strict=True)),
    ]


def clip(kind: Arithmetic, numbers: Sequence[Number], constants: Sequence[Any]) -> Sequence[Number]:
    """Return the factor, at most 1, that cuts a direction to |g| / sqrt(eps) and to 4 |s|, where s
    is not 0, and the size of the next step along it.

    Where phi has no fixed point, z + 1 say, secant steps would grow until phi(z) - z is lost in
    the rounding of z, with precision eps, and looks like a solution; where |g| is bounded, they
    would alternate with growing length. After a rejected step from which H has learned the next
    one is at most half as long.
    """
    size, square, merit, step, accepted, learns = numbers
    eps, tiny = constants
    last = MAX_LENGTHENING**2 * square
    largest = kind.least(kind.where(last > 0, last, math.inf), merit / eps)
    if kind is not TENSORS and kind.all((largest >= size) & (accepted > 0)):
        return [kind.zeros_like(size) + 1, step]
    # The inner `where` keeps the root of 0 out of the gradient.
    below = size + (size == 0)
    ratio = largest / below
    cut = kind.sqrt(kind.where((ratio > 0) & (ratio < 1), ratio, 1.0))
    cut = kind.where(cut > tiny, cut, tiny)
    halves = (learns > accepted) & (square > 0)
    half = 0.5 * kind.sqrt(kind.where(halves, square / below, 1.0)) / cut
    half = kind.where(half < 1, half, 1.0)
    return [cut, kind.where(halves, half, step)]


def step(
    z: Tensor, fz: Tensor, state: BroydenState, constants: Sequence[Any], evaluate: Evaluation
) -> list[Tensor]:
    """Return the next iterate, what `BroydenState` is to hold of it, and the new factor.

    Args:
        z, fz: where the step that was tried has led, and phi of it.
        state: before.
        constants: of `accept`.
        evaluate: how numbers are evaluated.

    Returns:
        The next iterate, start, g, direction, full_direction and scalars; u and s.
    """
    full_direction = state.full_direction
    end, last = at_least_float32(fz - z), evaluate.read(state.scalars.T)
    merit = _squared_size(end, evaluate)
    accepted, learns, *new = evaluate(accept, [merit, *last], constants)
    s, start, g = evaluate.multiply(last[1], state.direction), z, end
    if evaluate.kind.all(accepted):
        p = after = state.factors.apply(end)
    else:
        at_end, used = (evaluate.column(x) > 0 for x in (accepted, learns))
        start, g = torch.where(at_end, z, state.z), torch.where(at_end, end, state.g)
        # Elsewhere the trial is not used: s = q = 0.
        s = torch.where(used, s, 0.0)
        p = torch.where(used, state.factors.apply(torch.where(used, end, 0.0)), full_direction)
        after = torch.where(at_end, p, full_direction)
    q = full_direction - p
    square, inner, along = evaluate.read(inner_products(s, (s, q, after)))
    (weight,) = evaluate(pair_weight, [square, inner], ())
    u = evaluate.multiply(weight, s - q)
    full_direction = evaluate.add(after, along, u)
    numbers = [_squared_size(full_direction, evaluate), square, new[0], new[1]]
    clip_by = (torch.finfo(z.dtype).eps, torch.finfo(end.dtype).tiny)
    cut, new[1] = evaluate(clip, [*numbers, accepted, learns], clip_by)
    direction = evaluate.multiply(cut, full_direction)
    moved = evaluate.add(start, new[1], direction).to(z.dtype)
    return [moved, start, g, direction, full_direction, evaluate.pack(new), u, s]


def _squared_size(x: Tensor, evaluate: Evaluation) -> Number:
    """Return |x|^2 of each sample, a constant where it is not finite."""
    (size,) = evaluate.read(inner_products(x.detach(), (x.detach(),)))
    if evaluate.kind is not TENSORS or not _is_tracked(x):
        return size
    finite = size < math.inf
    x = torch.where(finite.unsqueeze(1), x, 0.0)
    return torch.where(finite, inner_products(x, (x,))[0].to(size.dtype), size)


def _is_tracked(*tensors: Tensor) -> bool:
    """Tell whether derivatives of one of the tensors may be asked for."""
    reverse = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return reverse or carries_tangents()


LIBRARY.define(
    "broyden_step(Tensor z, Tensor fz, Tensor[] state, float growth, float early) -> Tensor[]"
)


def _step_unseen(
    z: Tensor, fz: Tensor, state: BroydenState, constants: Sequence[float]
) -> list[Tensor]:
    """Return `step` on the host as one operation, so that nothing in it counts as a read."""
    *given, (U, S, T, pending), scalars, _ = state
    tensors = [*given, scalars, U, S, T, *(x for pair in pending for x in pair)]
    result: list[Tensor] = torch.ops.fixpoint.broyden_step(z, fz, tensors, *constants)
    return result


def _operation(
    z: Tensor, fz: Tensor, state: list[Tensor], growth: float, early: float
) -> list[Tensor]:
    z0, g, direction, full, scalars, U, S, T, *pending = state
    factors = Factors(U, S, T, tuple(zip(pending[::2], pending[1::2], strict=True)))
    start = BroydenState(z0, g, direction, full, factors, scalars, 0)
    result = step(z, fz, start, (growth, early), Evaluation(z, reads=True))
    seen = {id(x) for x in (z, fz, *state)}
    for i, x in enumerate(result):  # an operation returns new tensors, each once
        if id(x) in seen:
            result[i] = x.clone()
        seen.add(id(x))
    return result


LIBRARY.impl("broyden_step", _operation, "CPU")
