"""Backtracking of one row, compiled by numba; see `fixpoint.solvers.line_search`."""

from __future__ import annotations

from fixpoint.models.ops.common.numba_cache import cached_njit
from fixpoint.solvers.line_search import MIN_STEP_SIZE as _MIN_STEP_SIZE

MIN_STEP_SIZE = _MIN_STEP_SIZE


@cached_njit()
def shorter_step(like, step_size, start_merit, merit):  # type: ignore[no-untyped-def]
    """Step size after a refused trial, from |g|^2 at its start and its end; like: of its dtype."""
    kind = like.dtype.type
    parabola = start_merit * step_size * step_size
    parabola /= merit - start_merit + kind(2) * start_merit * step_size
    if parabola != parabola:  # NaN
        parabola = kind(0)
    shorter = min(max(parabola, kind(0.1) * step_size), kind(0.5) * step_size)
    return kind(0) if shorter < kind(MIN_STEP_SIZE) else shorter


@cached_njit(forceinline=True)
def dot(a, b):  # type: ignore[no-untyped-def]
    total = a.dtype.type(0)
    for j in range(a.size):
        total += a[j] * b[j]
    return total


@cached_njit(forceinline=True)
def write_difference(out, f, z):  # type: ignore[no-untyped-def]
    """Write out <- f - z; returns its square."""
    total = out.dtype.type(0)
    for j in range(out.size):
        d = f[j] - z[j]
        out[j] = d
        total += d * d
    return total
