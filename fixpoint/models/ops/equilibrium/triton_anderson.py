"""One update of Anderson mixing of a block of rows, in a Triton kernel; see `numba_anderson`.

The differences remain in registers. Their Gram matrix is kept in float64, which holds all digits of
the products of float32 differences; it is eliminated newest difference first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fixpoint.solvers.anderson import GROWTH as _GROWTH
from fixpoint.solvers.anderson import RECOVERY as _RECOVERY

GROWTH_OF_SQUARE, RECOVERY = tl.constexpr(_GROWTH**2), tl.constexpr(_RECOVERY)
EPS = tl.constexpr(2.0**-23)  # of float32


@triton.jit
def anderson_begin(z, MEMORY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the state of each row before its first step.

    start, g: phi and the residual where the next step starts, (ROWS, SIZE). df, dg: differences,
    (ROWS, SLOTS, SIZE); gram: dG^T dG, (ROWS, SLOTS, SLOTS). merit, mixing, rejected: |g|^2, the
    mixing, and whether the last step was rejected, (ROWS,).
    """
    ROWS: tl.constexpr = z.shape[0]
    SLOTS: tl.constexpr = triton.next_power_of_2(MEMORY)
    df = tl.zeros((ROWS, SLOTS, z.shape[1]), tl.float32)
    gram = tl.zeros((ROWS, SLOTS, SLOTS), tl.float64)
    merit = tl.full((ROWS,), float("inf"), tl.float32)
    mixing, rejected = tl.full((ROWS,), 1.0, tl.float32), tl.zeros((ROWS,), tl.int32)
    return z, z, df, df, gram, merit, mixing, rejected


@triton.jit
def anderson_restart(state, again, z, f):  # type: ignore[no-untyped-def]
    """Forget the differences, if `again`, of a row that has been put back to z with f = phi(z)."""
    start, g, df, dg, gram, merit, mixing, rejected = state
    if again:
        start, g, merit = f, f - z, tl.sum((f - z) * (f - z), 1)
        df, dg, gram = tl.zeros_like(df), tl.zeros_like(dg), tl.zeros_like(gram)
        mixing, rejected = tl.full(mixing.shape, 1.0, tl.float32), tl.zeros_like(rejected)
    return start, g, df, dg, gram, merit, mixing, rejected


@triton.jit
def anderson_update(z, f, state, k, beta, MEMORY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the next iterates from f = phi(z) at update k, and the new state."""
    start, g, df, dg, gram, merit, mixing, rejected = state
    SLOTS: tl.constexpr = df.shape[1]
    slots = tl.arange(0, SLOTS)
    newest = (k + MEMORY - 1) % MEMORY
    is_new = (slots == newest) & (k > 0)
    residual = f - z
    new_df, new_dg = f - start, residual - g
    df = tl.where(is_new[None, :, None], new_df[:, None, :], df)
    dg = tl.where(is_new[None, :, None], new_dg[:, None, :], dg)
    products = _products(new_dg, dg)
    gram = tl.where(is_new[None, :, None], products[:, None, :], gram)
    gram = tl.where(is_new[None, None, :], products[:, :, None], gram)

    new_merit = tl.sum(residual * residual, 1)
    accepted = (k == 0) | (new_merit <= merit * GROWTH_OF_SQUARE)
    step = new_df - new_dg
    square = tl.sum(tl.where(is_new[None, :], products, 0.0), 1)
    moved = tl.sqrt(tl.sum(step * step, 1)).to(tl.float64)
    inverse_slope = moved / tl.sqrt(tl.where(square > 0, square, 1.0))
    shorter = (square > 0) & (inverse_slope < mixing)
    reduced = tl.where(shorter, inverse_slope.to(tl.float32), mixing)
    again = ~accepted & (rejected > 0)
    reduced = tl.where(again, tl.minimum(reduced, mixing / 2), reduced)
    start = tl.where(accepted[:, None], f, start)
    g = tl.where(accepted[:, None], residual, g)
    merit = tl.where(accepted, new_merit, merit)
    mixing = tl.where(accepted, tl.minimum(1.0, mixing * RECOVERY), reduced)
    rejected = tl.where(accepted, 0, 1)
    df, dg = tl.where(again[:, None, None], 0.0, df), tl.where(again[:, None, None], 0.0, dg)
    gram = tl.where(again[:, None, None], 0.0, gram)

    noise = tl.sqrt(tl.sum(start.to(tl.float64) * start.to(tl.float64), 1)) * EPS
    count = tl.minimum(k, MEMORY)
    gamma = _weights(gram, _products(g, dg), noise, newest, count, MEMORY).to(tl.float32)
    rest = 1 - beta * mixing
    combined = tl.sum(gamma[:, :, None] * (df - rest[:, None, None] * dg), 1)
    moved = start - rest[:, None] * g - combined
    return moved, (start, g, df, dg, gram, merit, mixing, rejected)


@triton.jit
def _products(y, dg):  # type: ignore[no-untyped-def]
    """Compute dG^T y in float64, (ROWS, SLOTS)."""
    return tl.sum(y.to(tl.float64)[:, None, :] * dg.to(tl.float64), 2)


@triton.jit
def _weights(gram, b, noise, newest, count, MEMORY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find the gamma that minimizes |g - dG gamma|, (ROWS, SLOTS), from dG^T dG and b = dG^T g.

    A difference whose part orthogonal to the newer ones is not longer than `noise` gets weight 0;
    so do all where a weight is not finite.
    """
    ROWS: tl.constexpr = gram.shape[0]
    SLOTS: tl.constexpr = gram.shape[1]
    slots = tl.arange(0, SLOTS)
    diagonal = slots[:, None] == slots[None, :]
    squares = tl.sum(tl.where(diagonal[None, :, :], gram, 0.0), 2)
    scale = 1 / tl.sqrt(tl.where(squares > 0, squares, 1.0))
    A, b = gram * scale[:, :, None] * scale[:, None, :], b * scale
    later = slots < count
    inverses = tl.zeros((ROWS, SLOTS), tl.float64)
    for c in tl.static_range(MEMORY):
        here = (slots == (newest - c + MEMORY) % MEMORY) & (c < count)
        later = later & ~here
        row = tl.sum(tl.where(here[None, :, None], A, 0.0), 1)
        pivot = tl.sum(tl.where(here[None, :], row, 0.0), 1)
        b_here = tl.sum(tl.where(here[None, :], b, 0.0), 1)
        length = tl.sum(tl.where(here[None, :], scale, 0.0), 1) * noise
        pivot = tl.where(pivot > 0, pivot, 0.0)
        kept = tl.sqrt(pivot) > length
        inverse = tl.where(kept, 1 / tl.where(kept, pivot, 1.0), 0.0)
        inverses = tl.where(here[None, :], inverse[:, None], inverses)
        row = tl.where(later[None, :], row, 0.0)
        A -= inverse[:, None, None] * row[:, :, None] * row[:, None, :]
        b -= (inverse * b_here)[:, None] * row
    gamma = tl.zeros((ROWS, SLOTS), tl.float64)
    for c in tl.static_range(MEMORY - 1, -1, -1):
        here = (slots == (newest - c + MEMORY) % MEMORY) & (c < count)
        row = tl.sum(tl.where(here[None, :, None], A, 0.0), 1)
        rest = b - tl.sum(row * gamma, 1)[:, None]
        gamma = tl.where(here[None, :], inverses * rest, gamma)
    gamma *= scale
    finite = tl.sum((tl.abs(gamma) < float("inf")).to(tl.int32), 1) == SLOTS
    return tl.where(finite[:, None], gamma, 0.0)
