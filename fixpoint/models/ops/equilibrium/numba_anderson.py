"""One update of Anderson mixing of one row, compiled by numba; see `fixpoint.solvers.Anderson`."""

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


class AndersonRows(NamedTuple):
    """The state of each row of a block, and work for one row.

    f, g: where the next step starts, (rows, n). df, dg: differences, (rows, m, n); gram: dG^T dG,
    (rows, m, m). scalars: |g|^2, mixing and whether the last step was rejected, (rows, 3).
    q: (m + 1, n), r: (m, m), small: (3, m), gamma: (m,), work. eps: of the
    dtype, and the least sine for which the Gram matrix serves. Small ones are in float64.
    """

    f: np.ndarray
    g: np.ndarray
    df: np.ndarray
    dg: np.ndarray
    gram: np.ndarray
    scalars: np.ndarray
    q: np.ndarray
    r: np.ndarray
    small: np.ndarray
    gamma: np.ndarray
    eps: np.ndarray


def new_rows(rows: int, n: int, memory: int, dtype: torch.dtype) -> AndersonRows:
    f, g = torch.empty(2, rows, n, dtype=dtype).numpy()
    df, dg = torch.empty(2, rows, memory, n, dtype=dtype).numpy()
    eps = torch.finfo(dtype).eps
    return AndersonRows(
        f,
        g,
        df,
        dg,
        np.empty((rows, memory, memory)),
        np.empty((rows, 3), f.dtype),
        np.empty((memory + 1, n), f.dtype),
        np.empty((memory, memory)),
        np.empty((3, memory)),
        np.empty(memory, f.dtype),
        np.array([eps, 0.0 if eps > 1e-10 else eps**0.0625]),
    )


@cached_njit()
def anderson_update(state, equation, order, active, k, z, f, new, beta):  # type: ignore[no-untyped-def]
    """Write the iterates after update k of the active places into new, from f = phi(z)."""
    widest_vectors()
    start, g, df, dg, gram, scalars, q, r, small, gamma, eps = state
    for p in range(active):
        i = order[p]
        count = _add_difference(start, g, df, dg, gram, scalars, k, i, z[p], f[p])
        newest = (k - 1) % df.shape[1]
        if count > 0:
            noise = eps[0] * _products_with_g(start, g, dg, small, count, i)
            if not _solve_gram(gram, r, small, gamma, eps[1], i, newest, count, noise):
                _solve_qr(dg[i], g[i], newest, count, noise, q, r, small, gamma)
        _move(start, g, df, dg, gamma, count, i, new[p], beta * scalars[i, 1])


@cached_njit()
def anderson_restart(state, i, z, f):  # type: ignore[no-untyped-def]
    """Forget the differences of row i, which has been put back to z with f = phi(z)."""
    start, g, df, dg, gram, scalars, _, _, _, _, _ = state
    df[i], dg[i], gram[i] = z.dtype.type(0), z.dtype.type(0), 0.0
    merit = z.dtype.type(0)
    for j in range(z.size):
        start[i, j], g[i, j] = f[j], f[j] - z[j]
        merit += g[i, j] * g[i, j]
    scalars[i, 0], scalars[i, 1], scalars[i, 2] = merit, z.dtype.type(1), z.dtype.type(0)


@cached_njit()
def _add_difference(start, g, df, dg, gram, scalars, k, i, z, f):  # type: ignore[no-untyped-def]
    """Add what the last step of row i showed; where the next one starts; the differences kept."""
    one, zero, n, m = z.dtype.type(1), z.dtype.type(0), z.size, df.shape[1]
    merit, step, place, count = zero, zero, (k - 1) % m, min(k, m)
    for j in range(n):
        d = f[j] - z[j]
        merit += d * d
    if k == 0:
        for j in range(n):
            start[i, j], g[i, j] = f[j], f[j] - z[j]
        scalars[i, 0], scalars[i, 1], scalars[i, 2] = merit, one, zero
        return 0
    for j in range(n):
        df[i, place, j] = f[j] - start[i, j]
        dg[i, place, j] = (f[j] - z[j]) - g[i, j]
        d = df[i, place, j] - dg[i, place, j]
        step += d * d
    for c in range(count):
        total = 0.0
        for j in range(n):
            total += np.float64(dg[i, place, j]) * np.float64(dg[i, c, j])
        gram[i, place, c] = total
        gram[i, c, place] = total
    if merit <= z.dtype.type(GROWTH_OF_SQUARE) * scalars[i, 0]:
        for j in range(n):
            start[i, j], g[i, j] = f[j], f[j] - z[j]
        scalars[i, 0], scalars[i, 2] = merit, zero
        scalars[i, 1] = min(one, z.dtype.type(RECOVERY) * scalars[i, 1])
    else:
        inverse_slope = math.sqrt(step) / math.sqrt(gram[i, place, place])
        reduced = min(scalars[i, 1], z.dtype.type(inverse_slope))
        if scalars[i, 2] > zero:
            reduced = min(reduced, scalars[i, 1] / 2)
            df[i, :count], dg[i, :count], gram[i, :count, :count] = zero, zero, 0
        scalars[i, 1], scalars[i, 2] = reduced, one
    return count


@cached_njit()
def _products_with_g(start, g, dg, small, count, i):  # type: ignore[no-untyped-def]
    """Write dG^T g of row i into small[0] and return |phi(z)|, both in float64."""
    for c in range(count):
        total = 0.0
        for j in range(g.shape[1]):
            total += np.float64(g[i, j]) * np.float64(dg[i, c, j])
        small[0, c] = total
    size = 0.0
    for j in range(g.shape[1]):
        size += np.float64(start[i, j]) * np.float64(start[i, j])
    return math.sqrt(size)


@cached_njit()
def _move(start, g, df, dg, gamma, count, i, z, mixing):  # type: ignore[no-untyped-def]
    """z + mixing g - (dZ + mixing dG) gamma with dZ = dF - dG, from its value at mixing = 1."""
    zero, n = z.dtype.type(0), z.size
    rest, finite = z.dtype.type(1) - mixing, True
    for c in range(count):
        finite = finite and abs(gamma[c]) < np.inf
    for j in range(n):
        z[j] = start[i, j] - rest * g[i, j]
    for c in range(count if finite else 0):
        weight = gamma[c]
        if rest == zero:
            for j in range(n):
                z[j] -= weight * df[i, c, j]
        else:
            for j in range(n):
                z[j] -= weight * (df[i, c, j] - rest * dg[i, c, j])


@cached_njit()
def _solve_gram(gram, r, small, gamma, least, i, newest, count, noise):  # type: ignore[no-untyped-def]
    """The weights that minimize |g - dG gamma| of row i, from a Cholesky factor of dG^T dG.

    In float64 that matrix keeps all digits of float32 differences. For float64 ones it serves
    where each sine, between a difference and the newer ones, is above `least`; else False.
    A difference whose part orthogonal to the newer ones is not longer than `noise` gets weight 0.
    """
    for c in range(count):
        here = newest - c if c <= newest else newest - c + count
        square = gram[i, here, here]
        small[1, c] = 1 / math.sqrt(square) if square > 0 else 1.0
        small[2, c] = small[0, here] * small[1, c]
        entry = square * small[1, c] * small[1, c]
        for b in range(c):
            there = newest - b if b <= newest else newest - b + count
            product = gram[i, here, there] * small[1, c] * small[1, b]
            for j in range(b):
                product -= r[j, c] * r[j, b]
            r[b, c] = product * r[b, b]  # the diagonal holds inverses, 0 of what is left out
            entry -= r[b, c] * r[b, c]
            small[2, c] -= r[b, c] * small[2, b]
        sine = math.sqrt(max(entry, 0.0))
        if sine > least and sine > noise * small[1, c]:
            r[c, c] = 1 / sine
        elif least > 0 and square > 0:
            return False
        else:
            r[c, c] = 0.0
        small[2, c] *= r[c, c]
    for c in range(count - 1, -1, -1):
        for j in range(c + 1, count):
            small[2, c] -= r[c, j] * small[2, j]
        small[2, c] *= r[c, c]
        here = newest - c if c <= newest else newest - c + count
        gamma[here] = small[2, c] * small[1, c]
    return True


@cached_njit()
def _solve_qr(dg, g, newest, count, noise, q, r, small, gamma):  # type: ignore[no-untyped-def]
    """By modified Gram-Schmidt on the scaled columns and g, the newest first.

    A column whose part orthogonal to the newer ones is not longer than `noise` gets weight zero.
    """
    one, zero = 1.0, 0.0
    length, y = small[1], small[2]
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
        gamma[(newest - c) % count] = y[c] / length[c]


@cached_njit()
def dot(a, b):  # type: ignore[no-untyped-def]
    """In float64."""
    total = 0.0
    for j in range(a.size):
        total += np.float64(a[j]) * np.float64(b[j])
    return total
