"""The solver loop on a block of rows, inside a Triton kernel; see `numba_solvers`.

One block solves z = sigma(z M + q), or the affine z = (z * slope) M + q of an adjoint. Each row is
measured after each evaluation, and frozen once it is done; the loop ends with its last row. The
stalls RUNAWAY and ROUNDING are not looked for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fixpoint.models.ops.common.triton_blocks import activate, product_in_registers
from fixpoint.models.ops.equilibrium.triton_anderson import anderson_update
from fixpoint.solution import Result

CONVERGED = tl.constexpr(int(Result.CONVERGED))
MAX_ITER = tl.constexpr(int(Result.MAX_ITER))
STALLED = tl.constexpr(int(Result.STALLED))
NONFINITE = tl.constexpr(int(Result.NONFINITE))
# Squares of numbers whose norm is above sqrt(tiny / eps) of float32 keep all digits.
SAFE = tl.constexpr(2.0**-103)
TINY, TINY_64 = tl.constexpr(2.0**-126), tl.constexpr(2.0**-1022)


@triton.jit
def solve_block(  # type: ignore[no-untyped-def]
    z, M, slope, q, exists, inside, steps, max_iter, rtol, atol,
    ACTIVATION: tl.constexpr, AFFINE: tl.constexpr, MEMORY: tl.constexpr,
):  # fmt: skip
    """The solution, phi there, and iterations, scaled residual and result of each row.

    z: start, (ROWS, SIZE); M: (SIZE, SIZE), None for the identity; slope, q: (ROWS, SIZE); exists:
    (ROWS,), and inside, (ROWS, SIZE), say what is not padding. steps: max_iter weights of phi(z),
    or beta where MEMORY > 0 and the updates are those of Anderson mixing. atol: for 2-norms.
    """
    ROWS: tl.constexpr = z.shape[0]
    SIZE: tl.constexpr = z.shape[1]
    best, final = z, tl.zeros((ROWS, SIZE), tl.float32)
    best_r, best_k = tl.full((ROWS,), float("inf"), tl.float64), tl.zeros((ROWS,), tl.int32)
    iterations, result = best_k, tl.full((ROWS,), NONFINITE, tl.int32)
    running = exists.to(tl.int32)
    if MEMORY > 0:
        SLOTS: tl.constexpr = triton.next_power_of_2(MEMORY)
        start, g = final, final
        df = tl.zeros((ROWS, SLOTS, SIZE), tl.float32)
        dg = df
        gram = tl.zeros((ROWS, SLOTS, SLOTS), tl.float64)
        merit = tl.full((ROWS,), float("inf"), tl.float32)
        mixing, rejected = tl.full((ROWS,), 1.0, tl.float32), best_k
    k = 0
    left = tl.max(running, 0)
    while left > 0:
        f = evaluate(z, M, slope, q, inside, ACTIVATION, AFFINE)
        r = scaled_residual(z, f, rtol, atol)
        ended_well = (running > 0) & (r <= 1)
        going = (running > 0) & (r > 1) & (r < float("inf"))
        better = going & (r < best_r)
        best_k = tl.where(better, k, best_k)
        best_r = tl.where(better | ended_well, r, best_r)
        best = tl.where(better[:, None], z, best)
        final = tl.where(ended_well[:, None], f, final)
        iterations = tl.where(running > 0, k, iterations)
        early = (max_iter >= 10) & (best_k <= max_iter // 2)
        result = tl.where(ended_well, CONVERGED, result)
        result = tl.where(going & (k == max_iter), tl.where(early, STALLED, MAX_ITER), result)
        running = (going & (k < max_iter)).to(tl.int32)
        weight = tl.load(steps + k, mask=k < max_iter, other=1.0)
        if MEMORY > 0:
            moved, start, g, df, dg, gram, merit, mixing, rejected = anderson_update(
                z, f, start, g, df, dg, gram, merit, mixing, rejected, k, weight, MEMORY
            )
        else:
            moved = lerp(z, f, weight)
        z = tl.where(running[:, None] > 0, moved, z)
        left = tl.max(running, 0)
        k += 1
    failed = exists & (result != CONVERGED)
    if tl.max(failed.to(tl.int32), 0) > 0:
        z = tl.where(failed[:, None], best, z)
        f = evaluate(z, M, slope, q, inside, ACTIVATION, AFFINE)
        final = tl.where(failed[:, None], f, final)
    return z, final, iterations, best_r, result


@triton.jit
def evaluate(z, M, slope, q, inside, ACTIVATION: tl.constexpr, AFFINE: tl.constexpr):  # type: ignore[no-untyped-def]
    """sigma(z M + q), or (z * slope) M + q."""
    f = z * slope if AFFINE else z
    if M is not None:
        f = product_in_registers(f, M)
    f += q
    if not AFFINE:
        f = tl.where(inside, activate(f, ACTIVATION), 0.0)  # sigmoid(0) is not 0
    return f


@triton.jit
def scaled_residual(z, f, rtol, atol):  # type: ignore[no-untyped-def]
    """|f - z| / (atol + rtol |f|) of each row in float64; inf where that is not finite."""
    change, size = tl.sum((f - z) * (f - z), 1), tl.sum(f * f, 1)
    scale = tl.sqrt_rn(size) * rtol + atol
    r = tl.div_rn(tl.sqrt_rn(change), tl.where(scale > 0, scale, 1.0)).to(tl.float64)
    unsafe = ~((scale * scale >= SAFE) & (change + size < float("inf")))
    if tl.max(unsafe.to(tl.int32), 0) > 0:
        r = tl.where(unsafe, _residual_in_float64(z, f, rtol, atol), r)
    return r


@triton.jit
def _residual_in_float64(z, f, rtol, atol):  # type: ignore[no-untyped-def]
    z, f = z.to(tl.float64), f.to(tl.float64)
    change, size = tl.sqrt(tl.sum((f - z) * (f - z), 1)), tl.sqrt(tl.sum(f * f, 1))
    scale = tl.maximum(size * rtol + atol, change * TINY)
    r = change / tl.maximum(scale, TINY_64)
    return tl.where(change + size < float("inf"), r, float("inf"))


@triton.jit
def lerp(z, f, weight):  # type: ignore[no-untyped-def]
    """z + weight (f - z), exactly f at weight 1; see `torch.lerp`."""
    return tl.where(weight < 0.5, z + weight * (f - z), f - (f - z) * (1 - weight))
