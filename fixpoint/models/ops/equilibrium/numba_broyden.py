"""One update of Broyden's method, compiled by numba; see `fixpoint.solvers.Broyden`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from fixpoint.models.ops.common.numba_blocks import widest_vectors
from fixpoint.models.ops.common.numba_cache import cached_njit
from fixpoint.models.ops.equilibrium.numba_line_search import dot, shorter_step, write_difference
from fixpoint.solvers._secant_factors import LEAST_PIVOT as _LEAST_PIVOT
from fixpoint.solvers.broyden import MAX_GROWTH as _MAX_GROWTH
from fixpoint.solvers.broyden import MAX_LEARNED as _MAX_LEARNED
from fixpoint.solvers.broyden import MAX_LENGTHENING as _MAX_LENGTHENING
from fixpoint.solvers.broyden import WINDOW as _WINDOW

LEAST_PIVOT, MAX_GROWTH, MAX_LEARNED = _LEAST_PIVOT, _MAX_GROWTH, _MAX_LEARNED
MAX_LENGTHENING, WINDOW = _MAX_LENGTHENING, _WINDOW


class BroydenRows(NamedTuple):
    """The state of each row of a block, and work for one row.

    z, g, direction, full: start of the trial, phi(z) - z there, the direction of the trial, and
    -H g, (rows, n). u, s: factors, (rows, memory, n). scalars: |g|^2, step size, rejections and
    |g|^2 of the last accepted steps, (rows, 3 + `WINDOW`). count: of factors, (1,).
    end, step, p, q: (n,); kept: (memory, 2, n): work. growth: (1,).
    """

    z: Any
    g: Any
    direction: Any
    full: Any
    u: Any
    s: Any
    scalars: Any
    count: Any
    end: Any
    p: Any
    q: Any
    kept: Any
    growth: Any


def new_rows(rows: int, n: int, memory: int, growth: float, dtype: torch.dtype) -> BroydenRows:
    z, g, direction, full = torch.empty(4, rows, n, dtype=dtype).numpy()
    u, s = torch.empty(2, rows, memory, n, dtype=dtype).numpy()
    end, p, q = torch.empty(3, n, dtype=dtype).numpy()
    kept = np.empty((memory, 2, n), z.dtype)
    scalars, count = np.empty((rows, 3 + WINDOW), z.dtype), np.zeros(1, np.int64)
    return BroydenRows(
        z, g, direction, full, u, s, scalars, count, end, p, q, kept, np.array([growth])
    )


@cached_njit()
def broyden_update(state, equation, order, active, k, z, f, new, weight):  # type: ignore[no-untyped-def]
    """Write the iterates after update k of the active places into new, from f = phi(z)."""
    widest_vectors()
    kind = z.dtype.type
    if k == 0:
        state.count[0] = 0
        for p in range(active):
            begin(state, order[p], z[p], f[p], new[p])
        return
    count = state.count[0]
    full = count >= state.u.shape[1]
    kept = count // 2 if full else count
    factor = kind((1 + state.growth[0] / k) ** 2)
    for p in range(active):
        i = order[p]
        if full:
            keep_last_half(state, i, count)
            apply(state.u[i], state.s[i], kept, state.g[i], state.full[i])
        step_row(state, i, k, kept, factor, z[p], f[p], new[p])
    state.count[0] = kept + 1


@cached_njit(forceinline=True)
def begin(state, i, z, f, new):  # type: ignore[no-untyped-def]
    """Begin with a plain update."""
    merit = write_difference(state.g[i], f, z)
    kind = z.dtype.type
    for j in range(z.size):
        state.z[i, j] = z[j]
        state.direction[i, j] = state.full[i, j] = state.g[i, j]
        new[j] = f[j]
    scalars = state.scalars[i]
    scalars[0], scalars[1], scalars[2], scalars[3] = merit, kind(1), kind(0), merit


@cached_njit(forceinline=True)
def step_row(state, i, k, count, factor, z, f, new):  # type: ignore[no-untyped-def]
    """Accept the trial that ended in z or take it back, update H by it, and make the next one."""
    kind, n, scalars = z.dtype.type, z.size, state.scalars[i]
    g, start, direction, full = state.g[i], state.z[i], state.direction[i], state.full[i]
    end, s, u, p, q = state.end, state.s[i, count], state.u[i, count], state.p, state.q
    merit = write_difference(end, f, z)
    accepted = merit <= factor * largest_merit(scalars, k) and scalars[1] > 0
    note_merit(scalars, k, merit, accepted)
    learns = accepted or (
        merit <= kind(MAX_GROWTH) * kind(MAX_GROWTH) * scalars[0] and scalars[2] < MAX_LEARNED
    )
    if not learns:
        for j in range(n):
            s[j] = u[j] = kind(0)
        square, size = kind(0), dot(full, full)
    else:
        square = write_multiple(s, scalars[1], direction)
        apply(state.u[i], state.s[i], count, end, p)
        size = add_factor(u, s, square, p, q, full, accepted)
    if accepted:
        scalars[0], scalars[1], scalars[2] = merit, kind(1), kind(0)
        cut = clipped(z, size, square, merit)
        for j in range(n):
            start[j], g[j], direction[j] = z[j], end[j], cut * full[j]
            new[j] = z[j] + direction[j]
        return
    scalars[1] = shorter_step(z, scalars[1], scalars[0], merit)
    scalars[2] += kind(1)
    cut = clipped(z, size, square, scalars[0])
    size = write_multiple(direction, cut, full)
    if learns:
        scalars[1] = half_as_long(z, square, size)
    for j in range(n):
        new[j] = start[j] + scalars[1] * direction[j]


@cached_njit(forceinline=True)
def write_multiple(out, weight, given):  # type: ignore[no-untyped-def]
    """Write out <- weight given; returns its square."""
    total = out.dtype.type(0)
    for j in range(out.size):
        d = weight * given[j]
        out[j] = d
        total += d * d
    return total


@cached_njit(forceinline=True)
def add_factor(u, s, square, p, q, full, accepted):  # type: ignore[no-untyped-def]
    """Write the factor u of a step s, s . s = square, and apply it; the square of what comes out.

    p, full: -H g at the end of the step and at its start, H without the new factor. full receives
    that at the end where the step is accepted, else at its start, H with the new factor.
    """
    kind, base = u.dtype.type, p if accepted else full
    inner, along, size = kind(0), kind(0), kind(0)
    for j in range(u.size):
        d = full[j] - p[j]
        q[j] = d
        inner += s[j] * d
        along += s[j] * base[j]
    weight = factor_weight(square, inner)
    along *= weight
    for j in range(u.size):
        d = s[j] - q[j]
        u[j] = weight * d
        x = base[j] + along * d
        full[j] = x
        size += x * x
    return size


@cached_njit()
def largest_merit(scalars, k):  # type: ignore[no-untyped-def]
    """Find the largest merit of the last accepted steps before update k."""
    largest = scalars[3]
    for c in range(1, min(k, WINDOW)):
        largest = max(largest, scalars[3 + c])
    return largest


@cached_njit()
def note_merit(scalars, k, merit, accepted):  # type: ignore[no-untyped-def]
    """Add |g|^2 of an accepted step, in place of the oldest one; else, at first, the last again."""
    if k < WINDOW:
        scalars[3 + k] = merit if accepted else scalars[2 + k]
    elif accepted:
        for c in range(WINDOW - 1):
            scalars[3 + c] = scalars[4 + c]
        scalars[2 + WINDOW] = merit


@cached_njit(forceinline=True)
def add_weighted(a, b, weight):  # type: ignore[no-untyped-def]
    for j in range(a.size):
        a[j] += weight * b[j]


@cached_njit(forceinline=True)
def apply(u, s, count, given, out):  # type: ignore[no-untyped-def]
    """Write out <- the product of the first factors (I + u s^T) with a vector."""
    for j in range(out.size):
        out[j] = given[j]
    for c in range(count):
        add_weighted(out, u[c], dot(s[c], out))


@cached_njit()
def factor_weight(square, inner):  # type: ignore[no-untyped-def]
    """Return 1 / (s . q), s . s = square, s . q = inner, q damped towards s for a small pivot.

    The factor is u = weight (s - q) with q as it was given.
    """
    kind = type(square)
    if abs(inner) > kind(LEAST_PIVOT) * square:
        return kind(1) / inner
    if square > 0:
        pivot = inner / square
        goal = kind(math.copysign(LEAST_PIVOT, pivot))
        theta = (kind(1) - goal) / (kind(1) - pivot)
        return theta / (square * (kind(1) - theta + theta * pivot))
    return kind(0)


@cached_njit(forceinline=True)
def write_factor(u, s, q):  # type: ignore[no-untyped-def]
    """Write u <- (s - q) / (s . q) with q damped towards s where the pivot is small."""
    weight = factor_weight(dot(s, s), dot(s, q))
    for j in range(u.size):
        u[j] = weight * (s[j] - q[j])


@cached_njit()
def clipped(like, size, square, merit):  # type: ignore[no-untyped-def]
    """Return the factor, at most 1, that cuts a direction to |g| / sqrt(eps) and to 4 |s|.

    size, square, merit: |direction|^2, |s|^2 and |g|^2; like: of their dtype.
    """
    kind = like.dtype.type
    last = kind(MAX_LENGTHENING) * kind(MAX_LENGTHENING) * square
    largest = merit / np.finfo(like.dtype).eps
    if last > 0:
        largest = min(largest, last)
    fraction = math.sqrt(largest / size)
    if fraction != fraction:  # NaN
        return kind(1)
    return kind(min(max(fraction, np.finfo(like.dtype).tiny), kind(1)))


@cached_njit()
def half_as_long(like, square, size):  # type: ignore[no-untyped-def]
    """Step size along a direction, at most 1, that makes half the step s; see `clipped`."""
    kind = like.dtype.type
    ratio = kind(0.5) * kind(math.sqrt(square) / math.sqrt(size))
    return kind(0) if ratio != ratio else min(ratio, kind(1))


@cached_njit()
def keep_last_half(state, i, count):  # type: ignore[no-untyped-def]
    """Replace the factors of row i by those that the last half of its secant pairs gives."""
    kind, half = state.z.dtype.type, count // 2
    u, s, kept, q, p = state.u[i], state.s[i], state.kept, state.q, state.p
    for c in range(half):
        j = count - half + c
        inner, square = dot(s[j], u[j]), dot(s[j], s[j])
        ratio = square / (kind(1) + inner)
        for a in range(q.size):
            q[a] = s[j, a] - ratio * u[j, a]
        for b in range(j - 1, -1, -1):
            add_weighted(q, u[b], -dot(s[b], q) / (kind(1) + dot(s[b], u[b])))
        apply(kept[:, 0], kept[:, 1], c, q, p)
        write_factor(kept[c, 0], s[j], p)
        for a in range(q.size):
            kept[c, 1, a] = s[j, a]
    for c in range(half):
        for a in range(q.size):
            u[c, a], s[c, a] = kept[c, 0, a], kept[c, 1, a]
