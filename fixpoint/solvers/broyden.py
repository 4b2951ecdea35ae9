"""Broyden's good method with limited memory."""

from __future__ import annotations

import functools
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
    constant,
)
from fixpoint.solvers._rowwise import at_least_float32
from fixpoint.solvers._weights import inner_products
from fixpoint.solvers.base import IterativeOptions, IterativeSolver
from fixpoint.solvers.line_search import MIN_STEP_SIZE

LEAST_PIVOT = 0.1
"""Least |s . q| / |s|^2 of an update, which keeps the approximate Jacobian regular."""
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


class Factors(NamedTuple):
    """P = (I + u_m s_m^T) ... (I + u_1 s_1^T) as I + U^T T S, with T lower triangular.

    U, S: (B, M, D); T: (B, M, M). Rows from the number of factors on are 0.
    """

    U: Tensor
    S: Tensor
    T: Tensor

    def apply(self, p: Tensor) -> Tensor:
        """Return P p, (B, D)."""
        if self.U.shape[1] == 0:
            return p
        c = (self.T * (self.S * p.unsqueeze(1)).sum(2).unsqueeze(1)).sum(2)
        return p + (self.U * c.unsqueeze(2)).sum(1)

    def apply_transpose(self, p: Tensor) -> Tensor:
        """Return P^T p, (B, D)."""
        c = (self.T * (self.U * p.unsqueeze(1)).sum(2).unsqueeze(2)).sum(1)
        return p + (self.S * c.unsqueeze(2)).sum(1)

    def append(self, u: Tensor, s: Tensor) -> Factors:
        """Add the factor I + u s^T on the left."""
        row = self._coefficients(s)
        column = torch.zeros_like(row).unsqueeze(2)
        last = torch.cat((row, s.new_ones(len(s), 1)), 1).unsqueeze(1)
        return Factors(
            torch.cat((self.U, u.unsqueeze(1)), 1),
            torch.cat((self.S, s.unsqueeze(1)), 1),
            torch.cat((torch.cat((self.T, column), 2), last), 1),
        )

    def put(self, place: Tensor, u: Tensor, s: Tensor) -> Factors:
        """Put the factor I + u s^T on the left, in a row that is 0; place: (B,)."""
        here = torch.arange(self.U.shape[1], device=u.device) == place.unsqueeze(1)
        row = torch.where(here, 1.0, self._coefficients(s))
        rows = here.unsqueeze(2)
        return Factors(
            torch.where(rows, u.unsqueeze(1), self.U),
            torch.where(rows, s.unsqueeze(1), self.S),
            torch.where(rows, row.unsqueeze(1), self.T),
        )

    def _coefficients(self, s: Tensor) -> Tensor:
        """Return s^T U^T T, (B, M)."""
        return ((self.U * s.unsqueeze(1)).sum(2).unsqueeze(2) * self.T).sum(1)


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
        U, S = (torch.zeros_like(state.g).unsqueeze(1).repeat(1, M, 1) for _ in range(2))
        T = torch.zeros_like(U[:, :, :1]).repeat(1, 1, M)
        count = torch.zeros_like(state.g[:, 0], dtype=torch.int64)
        direction = torch.zeros_like(state.g)
        return state._replace(factors=Factors(U, S, T), filled=count, direction=direction)

    def update_fixed(
        self, k: Tensor, z: Tensor, fz: Tensor, state: BroydenState
    ) -> tuple[Tensor, BroydenState]:
        return self.advance(k, z, fz, state, Evaluation(z, reads=False))

    def update(
        self, k: int, z: Tensor, fz: Tensor, state: BroydenState | None
    ) -> tuple[Tensor, BroydenState]:
        if state is None:
            return fz, _begin(z, fz)
        g = fz - z
        tracked = torch.is_grad_enabled() and (g.requires_grad or state.direction.requires_grad)
        on_host = computes_on_host(g) and not (tracked or carries_tangents())
        if on_host and not self.may_sync:
            return _advance_unseen(self, k, z, fz, state)
        return self.advance(k, z, fz, state, Evaluation(g, reads=on_host))

    def advance(
        self,
        k: int | Tensor,
        z: Tensor,
        fz: Tensor,
        state: BroydenState,
        evaluate: Evaluation,
    ) -> tuple[Tensor, BroydenState]:
        """Return `update` with numbers evaluated in this way."""
        end, last = at_least_float32(fz - z), evaluate.read(state.scalars.T)
        (merit,) = evaluate.read(inner_products(end.detach(), (end.detach(),)))
        accepted, learns, *new = evaluate(accept, [merit, *last], self._constants(k))
        factors, full_direction, count = self._with_room(state)
        s, start, g = evaluate.multiply(last[1], state.direction), z, end
        if evaluate.kind.all(accepted):
            p = after = factors.apply(end)
        else:
            at_end, used = (evaluate.column(x) > 0 for x in (accepted, learns))
            start, g = torch.where(at_end, z, state.z), torch.where(at_end, end, state.g)
            # Elsewhere the trial is not used: s = q = 0.
            s = torch.where(used, s, 0.0)
            p = torch.where(used, factors.apply(torch.where(used, end, 0.0)), full_direction)
            after = torch.where(at_end, p, full_direction)
        q = full_direction - p
        square, inner, along = evaluate.read(inner_products(s, (s, q, after)))
        (weight,) = evaluate(pair_weight, [square, inner], ())
        u = evaluate.multiply(weight, s - q)
        factors = factors.append(u, s) if isinstance(count, int) else factors.put(count, u, s)
        full_direction = evaluate.add(after, along, u)
        size = full_direction.detach()
        numbers = [*evaluate.read(inner_products(size, (size,))), constant(square), new[0], new[1]]
        clip_by = (torch.finfo(z.dtype).eps, torch.finfo(end.dtype).tiny)
        cut, new[1] = evaluate(clip, [*numbers, accepted, learns], clip_by)
        direction = evaluate.multiply(cut, full_direction)
        moved = evaluate.add(start, new[1], direction).to(z.dtype)
        scalars, count = evaluate.pack(new), count + 1 if isinstance(k, int) else count + (k > 0)
        return moved, BroydenState(start, g, direction, full_direction, factors, scalars, count)

    def _constants(self, k: int | Tensor) -> Sequence[Any]:
        """Return how much |g|^2 may grow, and whether fewer than `WINDOW` steps were accepted."""
        if isinstance(k, int):
            return (1 + self.growth / k) ** 2, float(k < WINDOW)
        return (1 + self.growth / k.clamp_min(1)) ** 2, k < WINDOW

    def _with_room(self, state: BroydenState) -> tuple[Factors, Tensor, int | Tensor]:
        """Return the factors with a place for one more, -H g by them, and how many they are."""
        factors, full_direction, count = state.factors, state.full_direction, state.filled
        if isinstance(count, int):
            if count >= self.most_factors(state.g.shape[1], state.z.dtype):
                factors = _keep_last_half(factors)
                full_direction, count = factors.apply(state.g), count // 2
            return factors, full_direction, count
        if self.memory is not None and self.memory >= self.max_iter:
            return factors, full_direction, count
        if is_exporting():
            raise ValueError(
                f"an exported graph holds Broyden with memory >= max_iter alone; got memory="
                f"{self.memory}, max_iter={self.max_iter}: raise memory, or take Anderson"
            )
        full = (count >= factors.U.shape[1]).any()  # of one sample, where they began one by one
        given = [*factors, full_direction, count, state.g]
        if torch.compiler.is_compiling():
            *factors_, full_direction, count = torch.cond(full, _halved, _as_they_are, given)
        else:
            pairs = zip(_halved(*given), given, strict=False)
            *factors_, full_direction, count = (torch.where(full, a, b) for a, b in pairs)
        return Factors(*factors_), full_direction, count

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
    U, T = g.new_zeros(len(g), 0, g.shape[1]), g.new_zeros(len(g), 0, 0)
    dtype = torch.float32 if g.device.type == "mps" else torch.float64
    merit = torch.linalg.vecdot(g.detach(), g.detach()).to(dtype).unsqueeze(1)
    scalars = torch.cat((merit, torch.ones_like(merit), torch.zeros_like(merit)), 1)
    scalars = torch.cat((scalars, merit.expand(-1, WINDOW)), 1)
    return BroydenState(z, g, g, g, Factors(U, U, T), scalars, 0)


def _halved(
    U: Tensor, S: Tensor, T: Tensor, full_direction: Tensor, count: Tensor, g: Tensor
) -> tuple[Tensor, ...]:
    """Return full factors with the last half of their secant pairs, -H g, and the counts."""
    M, given = U.shape[1], (U, S, T, full_direction, count)
    kept = _keep_last_half(Factors(U, S, T))
    pad = M - M // 2
    U, S = (torch.nn.functional.pad(x, (0, 0, 0, pad)) for x in kept[:2])
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


def _keep_last_half(factors: Factors) -> Factors:
    """Return the factors that the last half of the secant pairs gives from -I."""
    M, h = factors.U.shape[1], factors.U.shape[1] // 2
    u, s = factors.U[:, M - h :], factors.S[:, M - h :]
    ratio = (s * s).sum(2, keepdim=True) / (1 + (s * u).sum(2, keepdim=True))
    q = s - ratio * u  # from u = (s - q) / (s . q)
    y = _apply_inverses(factors, q)  # up to the sign
    B, D = len(s), s.shape[2]
    kept = Factors(s.new_zeros(B, 0, D), s.new_zeros(B, 0, D), s.new_zeros(B, 0, 0))
    for j in range(h):
        step, change = s[:, j], kept.apply(y[:, j])
        numbers = inner_products(step, (step, change)).to(torch.float64).unbind()
        (weight,) = pair_weight(TENSORS, numbers, ())
        kept = kept.append(weight.unsqueeze(1).to(step.dtype) * (step - change), step)
    return kept


def _apply_inverses(factors: Factors, q: Tensor) -> Tensor:
    """Apply for each of the last h factors those before it, inverted, to q_j, (B, h, D).

    The inverse of I + U^T T S is I - U^T R^-1 S, R the upper triangle of I + S U^T.
    """
    U, S = factors.U, factors.S
    M, h = U.shape[1], q.shape[1]
    K = torch.stack([(S * U[:, i : i + 1]).sum(2) for i in range(M)], 2)
    right = torch.stack([(S * q[:, j : j + 1]).sum(2) for j in range(h)], 2)
    index = torch.arange(M, device=q.device)
    right = right * (index.unsqueeze(1) < index[M - h :]).to(q.dtype)
    c = right.new_zeros(len(q), 0, h)
    for i in range(M - 1, -1, -1):
        rest = right[:, i] - (K[:, i, i + 1 :].unsqueeze(2) * c).sum(1)
        c = torch.cat(((rest / (1 + K[:, i, i : i + 1])).unsqueeze(1), c), 1)
        q = q - c[:, 0].unsqueeze(2) * U[:, i : i + 1]
    return q


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
    largest = window[0]
    for other in window[1:]:
        largest = kind.where(other > largest, other, largest)
    accepted = (merit <= growth * largest) & (step > 0)  # False where g is not finite
    if kind.all(accepted):
        zero = kind.zeros_like(merit)
        return [accepted, accepted, merit, zero + 1, zero, *window[1:], merit]
    near = (merit <= MAX_GROWTH**2 * last) & (rejections < MAX_LEARNED)
    # The minimiser of the parabola through the start, its slope and the end of the trial.
    below = merit - last + 2 * last * step
    shorter = last * step * step / (below + (below == 0))
    shorter = kind.where(shorter < 0.5 * step, shorter, 0.5 * step)
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


def pair_weight(
    kind: Arithmetic, numbers: Sequence[Number], constants: Sequence[Any]
) -> Sequence[Number]:
    """Return weight of u = weight (s - q), 1 / (s . q) with q damped towards s for a small pivot.

    numbers: s . s and s . q.
    """
    square, inner = numbers
    zero = kind.zeros_like(square)
    regular = kind.where(inner < 0, -inner, inner) > LEAST_PIVOT * square  # False for s = 0
    moved = square > 0  # s . s may vanish by underflow where s . q does not
    if kind is not TENSORS and kind.all(regular & moved):
        return [1 / inner]
    square = kind.where(moved, square, 1.0)
    # The inner `where` keeps inf, and 0 * inf in the gradient, away from regular samples.
    pivot = kind.where(regular, 2.0, inner / square)
    goal = kind.where(pivot < 0, zero - LEAST_PIVOT, zero + LEAST_PIVOT)
    theta = (1 - goal) / (1 - pivot)
    # s - q_theta = theta (s - q) and s . q_theta = |s|^2 (1 - theta + theta pivot).
    below = square * (1 - theta + theta * pivot)
    damped = theta / (below + (below == 0))
    weight = kind.where(regular, 1 / kind.where(regular, inner, 1.0), damped)
    return [kind.where(moved, weight, 0.0)]


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
    cut = kind.sqrt(largest / (size + (size == 0)))
    if kind is not TENSORS and kind.all((cut >= 1) & (accepted > 0)):
        return [kind.zeros_like(cut) + 1, step]
    cut = kind.where(cut < 1, cut, 1.0)
    cut = kind.where(cut > tiny, cut, tiny)
    length = cut * kind.sqrt(size)
    half = 0.5 * kind.sqrt(square) / (length + (length == 0))
    half = kind.where(half < 1, half, 1.0)
    return [cut, kind.where((accepted > 0) | ((learns > 0) ^ True), step, half)]


LIBRARY.define(
    "broyden(Tensor z, Tensor fz, Tensor[] state, int count, int k, int memory, float growth) "
    "-> Tensor[]"
)


def _advance_unseen(
    solver: Broyden, k: int, z: Tensor, fz: Tensor, state: BroydenState
) -> tuple[Tensor, BroydenState]:
    """Return `Broyden.advance` on the host as one operation, so that nothing in it counts as a
    read.
    """
    *given, factors, scalars, count = state
    memory = solver.most_factors(z.shape[1], z.dtype)
    tensors = [*given, *factors, scalars]
    result = torch.ops.fixpoint.broyden(z, fz, tensors, count, k, memory, solver.growth)
    moved, start, g, direction, full_direction, *factors, scalars = result
    count = factors[0].shape[1]
    new = BroydenState(start, g, direction, full_direction, Factors(*factors), scalars, count)
    return moved, new


def _operation(
    z: Tensor, fz: Tensor, state: list[Tensor], count: int, k: int, memory: int, growth: float
) -> list[Tensor]:
    *given, U, S, T, scalars = state
    z0, g, direction, full = given
    start = BroydenState(z0, g, direction, full, Factors(U, S, T), scalars, count)
    evaluate = Evaluation(z, reads=True)
    moved, new = _solver(memory, growth).advance(k, z, fz, start, evaluate)
    result = [moved, *new[:4], *new.factors, new.scalars]
    seen: set[int] = {id(z)}
    for i, x in enumerate(result):  # an operation returns new tensors, each once
        if id(x) in seen:
            result[i] = x.clone()
        seen.add(id(x))
    return result


@functools.cache
def _solver(memory: int, growth: float) -> Broyden:
    return Broyden(memory=memory, growth=growth)


LIBRARY.impl("broyden", _operation, "CPU")
