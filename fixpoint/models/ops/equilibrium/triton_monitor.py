"""Status of a row, inside a Triton kernel: the rules of `numba_monitor`."""

from __future__ import annotations

import triton
import triton.language as tl

from fixpoint.models.ops.common.triton_blocks import add_both
from fixpoint.models.ops.equilibrium.arguments import STALL as _STALL
from fixpoint.solution import Result, Stall
from fixpoint.solvers.loop import rules

CONVERGED = tl.constexpr(int(Result.CONVERGED))
FIXED_STEPS = tl.constexpr(int(Result.FIXED_STEPS))
MAX_ITER = tl.constexpr(int(Result.MAX_ITER))
NONFINITE = tl.constexpr(int(Result.NONFINITE))
NO_PROGRESS = tl.constexpr(int(Result.STALLED) + _STALL * int(Stall.NO_PROGRESS))
ROUNDING = tl.constexpr(int(Result.STALLED) + _STALL * int(Stall.ROUNDING))
RUNAWAY = tl.constexpr(int(Result.STALLED) + _STALL * int(Stall.RUNAWAY))
ACTIVE, RESTART = tl.constexpr(-1), tl.constexpr(-2)
FLOOR_CHECK, FLOOR_CHECKS = tl.constexpr(rules.FLOOR_CHECK), tl.constexpr(rules.FLOOR_CHECKS)
GROWN, MAX_GROWTH = tl.constexpr(rules.GROWN), tl.constexpr(rules.MAX_GROWTH)
MIN_FALL, MIN_UPDATES = tl.constexpr(rules.MIN_FALL), tl.constexpr(rules.MIN_UPDATES)
EPS = tl.constexpr(2.0**-23)  # of float32
# Squares of numbers whose norm is above sqrt(tiny / eps) of float32 keep all digits.
SAFE = tl.constexpr(2.0**-103)
TINY, TINY_64 = tl.constexpr(2.0**-126), tl.constexpr(2.0**-1022)


@triton.jit
def begin(z):  # type: ignore[no-untyped-def]
    """Return the record of a row before its first residual.

    The smallest residual, its update, the size of the start, the reach, checks at the rounding
    floor, and the last restart.
    """
    wide = z.to(tl.float64)
    zero = tl.full((), 0, tl.int32)
    inf = tl.full((), float("inf"), tl.float64)
    return inf, zero, tl.sqrt(_total(wide * wide)), inf, zero, zero - 1


@triton.jit
def observe(  # type: ignore[no-untyped-def]
    history, k, z, f, change, square, rtol, atol, max_iter, RESTARTS: tl.constexpr
):
    """Return new history and status of a row from f = phi(z), |f - z|^2 and |f|^2 at update k.

    Nearly always the residual is the smallest yet, and above rounding, and nothing else is to be
    examined.
    """
    best_r, best_k, start, reach, floor, restarted = history
    residual, size = tl.sqrt(change), tl.sqrt(square)
    scale = size * rtol + atol
    r = residual / tl.where(scale > 0, scale, 1.0)
    usual = (scale * scale >= SAFE) & (change + square < float("inf")) & (r > 1)
    usual = usual & (r < best_r.to(tl.float32)) & (size < reach.to(tl.float32))
    usual = usual & ((k % FLOOR_CHECK != 0) | (residual > size * (3 * EPS)))
    usual = usual & (k > 0) & (k < max_iter)
    status = tl.full((), ACTIVE, tl.int32)
    if usual:
        best_r, best_k = r.to(tl.float64), k
    else:
        residual_64, size_64, r_64 = _measure(z, f, change, square, rtol, atol)
        best_r, best_k, start, reach, floor, restarted, status = _look(
            best_r, best_k, start, reach, floor, restarted, k, residual_64, size_64, r_64,
            atol, max_iter, RESTARTS,
        )  # fmt: skip
    return (best_r, best_k, start, reach, floor, restarted), status


@triton.jit
def _look(  # type: ignore[no-untyped-def]
    best_r, best_k, start, reach, floor, restarted, k, residual, size, r, atol, max_iter,
    RESTARTS: tl.constexpr,
):  # fmt: skip
    if k == 0:
        start = tl.where((size > start) | ~(start < float("inf")), size, start)
        reach = (start + residual) * MAX_GROWTH
        reach = tl.where(reach < float("inf"), reach, float("inf"))
    grown = size > reach * (GROWN / MAX_GROWTH)
    further = grown & (residual >= size * MIN_FALL)
    reach = tl.where(further, tl.maximum(reach, (start + residual) * MAX_GROWTH), reach)
    scale = reach / MAX_GROWTH
    judged = grown & (size > reach * (GROWN / MAX_GROWTH)) & (r <= 1)
    noise = size * (8 * EPS)
    far = size > reach
    largest = (scale - start) * (scale * GROWN / tl.where(judged, size, 1.0))
    allowed = tl.where(far, scale * MIN_FALL, largest) + atol
    limited = tl.where(far, tl.maximum(residual, noise), residual) / tl.where(judged, allowed, 1.0)
    runaway = judged & (limited > r)
    r = tl.where(runaway, limited, r)

    finite = r < float("inf")
    converged = finite & (r <= 1)
    better = converged | (r < best_r)
    best_r, best_k = tl.where(better, r, best_r), tl.where(better, k, best_k)
    status = tl.full((), ACTIVE, tl.int32)
    lost = ~finite
    if RESTARTS:
        again = lost & (k > 1) & (restarted != k - 1)
        lost = lost & ~again
        restarted = tl.where(again, k, restarted)
        status = tl.where(again, RESTART, status)
    if k > 0 and k % FLOOR_CHECK == 0:
        level = tl.where(size > 0, residual / (tl.where(size > 0, size, 1.0) * EPS), float("inf"))
        floor += (finite & ~converged & (level <= 2)).to(tl.int32)
        stuck = finite & ((k - best_k > 5 + level) | (floor > FLOOR_CHECKS))
        status = tl.where(stuck, tl.where(size > reach, RUNAWAY, ROUNDING), status)
    if k == max_iter:
        grown = (size > scale * GROWN) & (residual + noise >= scale - start)
        runaway = runaway | (grown & (k >= MIN_UPDATES))
        early = (k >= MIN_UPDATES) & (best_k <= k // 2)
        status = tl.where(runaway, RUNAWAY, tl.where(early, NO_PROGRESS, MAX_ITER))
    status = tl.where(lost, NONFINITE, status)
    status = tl.where(converged, CONVERGED, status)
    return best_r, best_k, start, reach, floor, restarted, status


@triton.jit
def squares(z, f):  # type: ignore[no-untyped-def]
    """Compute |f - z|^2 and |f|^2, of all axes."""
    if len(z.shape) == 5:
        shape: tl.constexpr = (z.shape[1] * 4, z.shape[3], 4)
        z, f = tl.reshape(z, shape), tl.reshape(f, shape)
    change, square = (f - z) * (f - z), f * f
    for _ in tl.static_range(len(z.shape)):
        change, square = tl.reduce((change, square), 0, add_both)
    return change, square


@triton.jit
def _total(x):  # type: ignore[no-untyped-def]
    for _ in tl.static_range(len(x.shape)):
        x = tl.sum(x, 0)
    return x


@triton.jit
def _measure(z, f, change, square, rtol, atol):  # type: ignore[no-untyped-def]
    """Measure |f - z|, |f|, |f - z| / (atol + rtol |f|), inf if not finite, in float64."""
    residual, size = tl.sqrt_rn(change), tl.sqrt_rn(square)
    scale = size * rtol + atol
    if (scale * scale >= SAFE) & (change + square < float("inf")):
        r = tl.div_rn(residual, scale).to(tl.float64)
        residual_64, size_64 = residual.to(tl.float64), size.to(tl.float64)
    else:
        residual_64, size_64, r = _measure_in_float64(z, f, rtol, atol)
    return residual_64, size_64, r


@triton.jit
def _measure_in_float64(z, f, rtol, atol):  # type: ignore[no-untyped-def]
    z, f = z.to(tl.float64), f.to(tl.float64)
    change, size = tl.sqrt(_total((f - z) * (f - z))), tl.sqrt(_total(f * f))
    scale = tl.maximum(size * rtol + atol, change * TINY)
    r = change / tl.maximum(scale, TINY_64)
    return change, size, tl.where(change + size < float("inf"), r, float("inf"))
