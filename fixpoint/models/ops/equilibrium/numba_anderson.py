"""One update of Anderson mixing of all rows, compiled by numba; see `fixpoint.solvers.Anderson`."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from fixpoint.models.ops.common.numba_blocks import widest_vectors
from fixpoint.models.ops.common.numba_cache import cached_njit
from fixpoint.solvers.anderson import GROWTH as _GROWTH
from fixpoint.solvers.anderson import RECOVERY as _RECOVERY

GROWTH_OF_SQUARE, RECOVERY = _GROWTH**2, _RECOVERY
LANES, WIDTH = 8, 32
"""Numbers of float64 in the widest vector, and in those that a sum keeps."""


class AndersonRows(NamedTuple):
    """The state of each row of a block, and work.

    f, g: where the next step starts, (rows, n). df, dg: differences, (rows, m, n). scalars: |g|^2,
    mixing, whether the last step was rejected and |dz|^2 of this one, (rows, 4). Rows last, in
    float64, enough to fill vectors: gram: dG^T dG, (m, m, rows); size: |phi(z)| where
    the next step starts, (rows,); r: (m, m, rows); small: (4, m, rows). gamma: (m, rows);
    inexact: where the Gram matrix does not serve, (rows,). q: (m + 1, n), r_of_row: (m, m),
    small_of_row: (2, m): work for one row. eps: of the dtype, and the least sine for which the
    Gram matrix serves. n of g, dg and q is rounded up, with zeros, to fill vectors.
    """

    f: np.ndarray
    g: np.ndarray
    df: np.ndarray
    dg: np.ndarray
    scalars: np.ndarray
    rejected: np.ndarray
    gram: np.ndarray
    size: np.ndarray
    r: np.ndarray
    small: np.ndarray
    gamma: np.ndarray
    inexact: np.ndarray
    q: np.ndarray
    r_of_row: np.ndarray
    small_of_row: np.ndarray
    eps: np.ndarray


def new_rows(rows: int, n: int, memory: int, dtype: torch.dtype) -> AndersonRows:
    width, lanes = (-(-size // fill) * fill for size, fill in ((n, WIDTH), (rows, LANES)))
    f = torch.empty(rows, n, dtype=dtype).numpy()
    df = torch.empty(rows, memory, n, dtype=dtype).numpy()
    g, eps = torch.zeros(rows, width, dtype=dtype).numpy(), torch.finfo(dtype).eps
    return AndersonRows(
        f,
        g,
        df,
        torch.zeros(rows, memory, width, dtype=dtype).numpy(),
        np.empty((rows, 4), f.dtype),
        np.zeros(rows, np.bool_),
        np.zeros((memory, memory, lanes)),
        np.zeros(lanes),
        np.zeros((memory, memory, lanes)),
        np.zeros((4, memory, lanes)),
        np.zeros((memory, lanes), f.dtype),
        np.zeros(lanes, np.bool_),
        np.empty((memory + 1, width), f.dtype),
        np.empty((memory, memory)),
        np.empty((2, memory)),
        np.array([eps, 0.0 if eps > 1e-10 else eps**0.0625]),
    )


@cached_njit()
def anderson_update(state, equation, order, active, k, z, f, new, beta):  # type: ignore[no-untyped-def]
    """Write the iterates after update k of the active places into new, from f = phi(z).

    Each part goes through all rows: a call of a row takes as long as its sums.
    """
    start, g, df, dg, scalars, rejected, gram, size, r, small, gamma, inexact = state[:12]
    rows, m = order[:active], df.shape[1]
    count, newest = min(k, m), (k - 1) % m
    if k == 0:
        for p in range(active):
            _begin(start, g, scalars, size, rows[p], z[p], f[p])
    else:
        _add_differences(start, g, df, dg, scalars, rejected, size, rows, newest, z, f)
        _multiply(g, dg, gram, small[0], rows, count, newest)
        _reduce_mixing(df, dg, scalars, rejected, gram, small[0], rows, count, newest)
        _solve_grams(gram, size, r, small, gamma, inexact, state.eps, count, newest)
        for i in rows:
            if inexact[i]:
                _solve_qr(state, i, count, newest)
    _move(start, g, df, dg, scalars, gamma, rows, count, new, beta)


@cached_njit()
def anderson_restart(state, i, z, f):  # type: ignore[no-untyped-def]
    """Forget the differences of row i, which has been put back to z with f = phi(z)."""
    _forget(state.df, state.dg, state.gram, state.small[0], i, state.df.shape[1])
    _begin(state.f, state.g, state.scalars, state.size, i, z, f)


@cached_njit()
def _forget(df, dg, gram, right, i, count):  # type: ignore[no-untyped-def]
    df[i, :count], dg[i, :count] = df.dtype.type(0), dg.dtype.type(0)
    gram[:count, :count, i], right[:count, i] = 0.0, 0.0


@cached_njit()
def _begin(start, g, scalars, size, i, z, f):  # type: ignore[no-untyped-def]
    merit, total = z.dtype.type(0), 0.0
    for j in range(z.size):
        d = f[j] - z[j]
        start[i, j], g[i, j] = f[j], d
        merit += d * d
        total += np.float64(f[j]) * np.float64(f[j])
    size[i] = math.sqrt(total)
    scalars[i, 0], scalars[i, 1], scalars[i, 2] = merit, z.dtype.type(1), z.dtype.type(0)


@cached_njit()
def _add_differences(start, g, df, dg, scalars, rejected, size, rows, newest, z, f):  # type: ignore[no-untyped-def]
    """Add what the last step of each row showed, and let the next one start there or again."""
    widest_vectors()
    one, zero, n = z.dtype.type(1), z.dtype.type(0), z.shape[1]
    for p in range(rows.size):
        i, merit, step, total = rows[p], zero, zero, 0.0
        for j in range(n):
            d = f[p, j] - z[p, j]
            a, b = f[p, j] - start[i, j], d - g[i, j]
            df[i, newest, j], dg[i, newest, j] = a, b
            merit += d * d
            step += (a - b) * (a - b)
        rejected[i] = not merit <= z.dtype.type(GROWTH_OF_SQUARE) * scalars[i, 0]
        scalars[i, 3] = step
        if rejected[i]:
            continue
        for j in range(n):
            start[i, j], g[i, j] = f[p, j], f[p, j] - z[p, j]
            total += np.float64(f[p, j]) * np.float64(f[p, j])
        size[i] = math.sqrt(total)
        scalars[i, 0], scalars[i, 2] = merit, zero
        scalars[i, 1] = min(one, z.dtype.type(RECOVERY) * scalars[i, 1])


@cached_njit()
def _multiply(g, dg, gram, right, rows, count, newest):  # type: ignore[no-untyped-def]
    """Compute the newest row of dG^T dG, and dG^T g, in float64."""
    widest_vectors()
    for i in rows:
        for c in range(count):
            square, inner = 0.0, 0.0
            for j in range(g.shape[1]):
                d = np.float64(dg[i, c, j])
                square += np.float64(dg[i, newest, j]) * d
                inner += np.float64(g[i, j]) * d
            gram[newest, c, i], gram[c, newest, i], right[c, i] = square, square, inner


@cached_njit()
def _reduce_mixing(df, dg, scalars, rejected, gram, right, rows, count, newest):  # type: ignore[no-untyped-def]
    """Reduce the mixing of rejected steps; after two in a row forget the differences."""
    one, zero = scalars.dtype.type(1), scalars.dtype.type(0)
    for i in rows:
        if rejected[i]:
            inverse_slope = math.sqrt(scalars[i, 3]) / math.sqrt(gram[newest, newest, i])
            reduced = min(scalars[i, 1], scalars.dtype.type(inverse_slope))
            if scalars[i, 2] > zero:
                reduced = min(reduced, scalars[i, 1] / 2)
                _forget(df, dg, gram, right, i, count)
            scalars[i, 1], scalars[i, 2] = reduced, one


@cached_njit()
def _move(start, g, df, dg, scalars, gamma, rows, count, new, beta):  # type: ignore[no-untyped-def]
    """Compute z + mixing g - (dZ + mixing dG) gamma, dZ = dF - dG, from its value at mixing = 1."""
    widest_vectors()
    zero, one, n = new.dtype.type(0), new.dtype.type(1), new.shape[1]
    for p in range(rows.size):
        i, finite = rows[p], True
        rest = one - beta * scalars[i, 1]
        for c in range(count):
            finite = finite and abs(gamma[c, i]) < np.inf
        for j in range(n):
            new[p, j] = start[i, j] - rest * g[i, j]
        for c in range(count if finite else 0):
            weight = gamma[c, i]
            if rest == zero:
                for j in range(n):
                    new[p, j] -= weight * df[i, c, j]
            else:
                for j in range(n):
                    new[p, j] -= weight * (df[i, c, j] - rest * dg[i, c, j])


@cached_njit()
def _solve_grams(gram, size, r, small, gamma, inexact, eps, count, newest):  # type: ignore[no-untyped-def]
    """Find the weights that minimize |g - dG gamma|, from a Cholesky factor of dG^T dG, of all
    rows.

    In float64 that matrix keeps all digits of float32 differences. For float64 ones it serves
    where each sine, between a difference and the newer ones, is above eps[1]; else `inexact`.
    A difference whose part orthogonal to the newer ones is not longer than the rounding of phi(z)
    gets weight 0. The loops over rows vectorise: rows that have ended take part, and do no harm.
    """
    widest_vectors()
    right, scale, y, entry = small[0], small[1], small[2], small[3, 0]
    noise, least, rows = eps[0], eps[1], inexact.size
    for i in range(rows):
        inexact[i] = False
    for c in range(count):
        here = newest - c if c <= newest else newest - c + count
        square, scale_c, y_c, inverse = gram[here, here], scale[c], y[c], r[c, c]
        for i in range(rows):
            scale_c[i] = 1 / math.sqrt(square[i] if square[i] > 0 else 1.0)
            y_c[i] = right[here, i] * scale_c[i]
            entry[i] = square[i] * scale_c[i] * scale_c[i]
        for b in range(c):
            there = newest - b if b <= newest else newest - b + count
            given, r_bc, r_bb, y_b, scale_b = gram[here, there], r[b, c], r[b, b], y[b], scale[b]
            for i in range(rows):
                r_bc[i] = given[i] * scale_c[i] * scale_b[i]
            for j in range(b):
                left, above = r[j, c], r[j, b]
                for i in range(rows):
                    r_bc[i] -= left[i] * above[i]
            for i in range(rows):
                product = r_bc[i] * r_bb[i]  # the diagonal holds inverses, 0 of what is left out
                r_bc[i] = product
                entry[i] -= product * product
                y_c[i] -= product * y_b[i]
        for i in range(rows):
            sine = math.sqrt(max(entry[i], 0.0))
            kept = (sine > least) & (sine > noise * size[i] * scale_c[i])
            inexact[i] |= (not kept) & (least > 0) & (square[i] > 0)
            inverse[i] = 1 / (sine if kept else 1.0) if kept else 0.0
            y_c[i] *= inverse[i]
    for c in range(count - 1, -1, -1):
        here = newest - c if c <= newest else newest - c + count
        y_c, inverse, scale_c, weights = y[c], r[c, c], scale[c], gamma[here]
        for b in range(c + 1, count):
            r_cb, y_b = r[c, b], y[b]
            for i in range(rows):
                y_c[i] -= r_cb[i] * y_b[i]
        for i in range(rows):
            y_c[i] *= inverse[i]
            weights[i] = y_c[i] * scale_c[i]


@cached_njit()
def _solve_qr(state, i, count, newest):  # type: ignore[no-untyped-def]
    """Solve by modified Gram-Schmidt on the scaled columns and g of row i, the newest first.

    A column whose part orthogonal to the newer ones is not longer than `noise` gets weight zero.
    """
    one, zero, noise = 1.0, 0.0, state.eps[0] * state.size[i]
    dg, g, q, r = state.dg[i], state.g[i], state.q, state.r_of_row
    length, y = state.small_of_row
    n, residual = g.size, q[count]
    for j in range(n):
        residual[j] = g[j]
    for c in range(count):
        given, column = dg[(newest - c) % count], q[c]
        size = math.sqrt(dot(given, given))
        length[c] = size if size > 0 else 1.0
        for j in range(n):
            column[j] = given[j] / length[c]
        for b in range(c):
            r[b, c] = zero
        # The second pass removes what rounding left of the newer columns.
        for _ in range(2):
            for b in range(c):
                inner = dot(q[b], column)
                r[b, c] += inner
                for j in range(n):
                    column[j] -= inner * q[b, j]
        pivot = math.sqrt(dot(column, column))
        if pivot * length[c] <= noise:
            r[c, c] = -one  # left out
            for j in range(n):
                column[j] = zero
        else:
            r[c, c] = pivot
            for j in range(n):
                column[j] /= pivot
        y[c] = dot(column, residual)
        for j in range(n):
            residual[j] -= y[c] * column[j]
    for c in range(count - 1, -1, -1):
        if r[c, c] < zero:
            y[c] = zero
        else:
            for j in range(c + 1, count):
                y[c] -= r[c, j] * y[j]
            y[c] /= r[c, c]
        state.gamma[(newest - c) % count, i] = y[c] / length[c]


@cached_njit()
def dot(a, b):  # type: ignore[no-untyped-def]
    """Sum products in float64."""
    total = 0.0
    for j in range(a.size):
        total += np.float64(a[j]) * np.float64(b[j])
    return total
