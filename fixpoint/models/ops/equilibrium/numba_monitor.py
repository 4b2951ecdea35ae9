"""Status of each row of a block: the rules of `fixpoint.solvers.loop.rules`, compiled by numba."""

from __future__ import annotations

import math

import numpy as np

from fixpoint.models.ops.common.numba_blocks import widest_vectors
from fixpoint.models.ops.common.numba_cache import cached_njit
from fixpoint.models.ops.equilibrium.arguments import STALL as _STALL
from fixpoint.solution import Result, Stall
from fixpoint.solvers.loop import rules

FLOOR_CHECK, FLOOR_CHECKS, MIN_UPDATES = rules.FLOOR_CHECK, rules.FLOOR_CHECKS, rules.MIN_UPDATES
GROWN, MAX_GROWTH, MIN_FALL = rules.GROWN, rules.MAX_GROWTH, rules.MIN_FALL
CONVERGED, MAX_ITER = int(Result.CONVERGED), int(Result.MAX_ITER)
STALLED, NONFINITE = int(Result.STALLED), int(Result.NONFINITE)
FIXED_STEPS = int(Result.FIXED_STEPS)
NO_PROGRESS, STEP_REFUSED = int(Stall.NO_PROGRESS), int(Stall.STEP_REFUSED)
ROUNDING, RUNAWAY = int(Stall.ROUNDING), int(Stall.RUNAWAY)
STALL = _STALL
"""A row that is STALLED has the code STALLED + STALL * `Stall`."""
ACTIVE, RESTART = -1, -2

# Columns of the history of a row: the smallest residual and its update, the size of the start, the
# reach, checks at the rounding floor, the last restart, whether the last residual was the smallest.
BEST_R, BEST_UPDATE, START_SIZE, REACH, FLOOR, RESTARTED, IMPROVED = range(7)
COLUMNS = 7


@cached_njit()
def improves(row, k, measured, max_iter):  # type: ignore[no-untyped-def]
    """Note r after k updates where it is the smallest yet, and nothing else is to be examined.

    Whether it is: the common case of `observe`.
    """
    size, r = measured[1], measured[2]
    if 0 < k < max_iter and k % FLOOR_CHECK != 0 and size <= row[REACH] and 1 < r < row[BEST_R]:
        row[BEST_R], row[BEST_UPDATE], row[IMPROVED] = r, k, 1
        return True
    return False


@cached_njit()
def observe(history, i, k, measured, z, p, atol, eps, max_iter, backtracks, restarts):  # type: ignore[no-untyped-def]
    """Note |f - z|, |f| and r of row i after k updates: its code, or ACTIVE or RESTART.

    z: the states measured, that of the row at place p. RESTART: put it back where it was.
    """
    residual, size, r = measured[0], measured[1], measured[2]
    if k == 0:
        begin_row(history[i], z[p], residual, size)
    row = history[i]
    runaway = False
    if size > row[REACH] * (GROWN / MAX_GROWTH):
        if residual >= MIN_FALL * size:
            row[REACH] = max(row[REACH], MAX_GROWTH * (row[START_SIZE] + residual))
        scale = row[REACH] / MAX_GROWTH
        if size > row[REACH] * (GROWN / MAX_GROWTH) and r <= 1:
            if size > row[REACH]:
                limited = max(residual, 8 * eps * size) / (MIN_FALL * scale + atol)
            else:
                largest = scale - row[START_SIZE]
                limited = residual / (largest * (GROWN * scale / size) + atol)
            runaway, r = limited > r, max(r, limited)
    finite = r < np.inf
    if finite and r <= 1:
        row[BEST_R], row[BEST_UPDATE] = r, k
        return CONVERGED
    row[IMPROVED] = 0
    if r < row[BEST_R]:
        row[BEST_R], row[BEST_UPDATE], row[IMPROVED] = r, k, 1
    code = ACTIVE
    if not finite and not (backtracks and k > 0):
        if not restarts or k <= 1 or row[RESTARTED] == k - 1:
            return NONFINITE
        row[RESTARTED], code = k, RESTART
    if k == max_iter:
        return end_of_budget(row, k, residual, size, eps, runaway)
    if finite and k > 0 and k % FLOOR_CHECK == 0 and at_floor(row, k, residual, size, eps):
        return STALLED + STALL * (RUNAWAY if size > row[REACH] else ROUNDING)
    return code


@cached_njit()
def begin_row(row, z, residual, size):  # type: ignore[no-untyped-def]
    start = 0.0
    for j in range(z.size):
        start += np.float64(z[j]) * np.float64(z[j])
    start = math.sqrt(start)
    start = size if size > start or not start < np.inf else start
    row[:] = 0
    row[BEST_R], row[START_SIZE], row[RESTARTED] = np.inf, start, -1
    reach = MAX_GROWTH * (start + residual)
    row[REACH] = reach if reach < np.inf else np.inf


@cached_njit()
def at_floor(row, k, residual, size, eps):  # type: ignore[no-untyped-def]
    """Tell whether the residual is rounding noise."""
    level = residual / (eps * size) if size > 0 else np.inf
    if level <= 2:
        row[FLOOR] += 1
    return k - row[BEST_UPDATE] > 5 + level or row[FLOOR] > FLOOR_CHECKS


@cached_njit()
def end_of_budget(row, k, residual, size, eps, runaway):  # type: ignore[no-untyped-def]
    """Return the code of a row that is above its tolerance after all updates."""
    scale = row[REACH] / MAX_GROWTH
    grown = size > GROWN * scale and residual + 8 * eps * size >= scale - row[START_SIZE]
    if runaway or (grown and k >= MIN_UPDATES):
        return STALLED + STALL * RUNAWAY
    if k >= MIN_UPDATES and row[BEST_UPDATE] <= k // 2:
        return STALLED + STALL * NO_PROGRESS
    return MAX_ITER


@cached_njit()
def measure(z, f, active, rtol, atol, out):  # type: ignore[no-untyped-def]
    """Measure |f - z|, |f| and r = |f - z| / (atol + rtol |f|) of each active place; see `observe`.

    r is inf where one is not finite. All rows at once: a call a row takes longer than its sums.
    """
    widest_vectors()
    kind = z.dtype.type
    for p in range(active):
        change, size = kind(0), kind(0)
        for j in range(z.shape[1]):
            d = f[p, j] - z[p, j]
            change += d * d
            size += f[p, j] * f[p, j]
        out[p, 0], out[p, 1] = change, size
    # Squares within the range of the dtype keep all digits.
    safe = np.finfo(z.dtype).tiny / np.finfo(z.dtype).eps
    for p in range(active):
        residual, length = kind(math.sqrt(kind(out[p, 0]))), kind(math.sqrt(kind(out[p, 1])))
        scale = kind(length * rtol + atol)
        if scale * scale >= safe and out[p, 0] + out[p, 1] < np.inf:
            out[p, 0], out[p, 1], out[p, 2] = residual, length, kind(residual / scale)
        else:
            out[p, 0], out[p, 1], out[p, 2] = measure_in_float64(z[p], f[p], rtol, atol)


@cached_njit()
def measure_in_float64(z, f, rtol, atol):  # type: ignore[no-untyped-def]
    change, size = 0.0, 0.0
    for j in range(z.size):
        d = np.float64(f[j]) - np.float64(z[j])
        change += d * d
        size += np.float64(f[j]) * np.float64(f[j])
    if not change + size < np.inf:
        return math.sqrt(change), math.sqrt(size), np.inf
    change, size = math.sqrt(change), math.sqrt(size)
    tiny = np.float64(np.finfo(z.dtype).tiny)
    scale = max(size * np.float64(rtol) + np.float64(atol), tiny * change)
    return change, size, change / max(scale, 2.2250738585072014e-308)
