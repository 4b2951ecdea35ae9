"""The solver loop on a block of rows, inside a Triton kernel; see `numba_solvers`.

One block solves z = sigma(z M + q), or the affine z = (z * slope) M + q of an adjoint. Each row is
measured after each evaluation, and frozen once it is done; the loop ends with its last row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fixpoint.models.ops.common.triton_blocks import activate, product_in_registers
from fixpoint.models.ops.equilibrium.triton_anderson import (
    anderson_begin,
    anderson_restart,
    anderson_update,
)
from fixpoint.models.ops.equilibrium.triton_monitor import (
    ACTIVE,
    CONVERGED,
    NONFINITE,
    RESTART,
    begin,
    observe,
    squares,
)


@triton.jit
def solve_block(  # type: ignore[no-untyped-def]
    z, M, slope, q, exists, inside, steps, max_iter, rtol, atol, n: tl.constexpr,
    ACTIVATION: tl.constexpr, AFFINE: tl.constexpr, MEMORY: tl.constexpr,
):  # fmt: skip
    """Solve: z, phi(z), and iterations, scaled residual and result of each row.

    z: start, (ROWS, SIZE); M: see `weights_in_registers`, None for the identity; slope, q:
    (ROWS, SIZE); exists: (ROWS,), and inside, (ROWS, SIZE), say what is not padding. steps:
    max_iter weights of phi(z), or beta where MEMORY > 0 and the updates are those of Anderson
    mixing. atol: for 2-norms.
    """
    ROWS: tl.constexpr = z.shape[0]
    SIZE: tl.constexpr = z.shape[1]
    best, final = z, tl.zeros((ROWS, SIZE), tl.float32)
    history, k = begin(z), tl.full((), 0, tl.int32)
    iterations, result = tl.zeros((ROWS,), tl.int32), tl.full((ROWS,), NONFINITE, tl.int32)
    running = exists.to(tl.int32)
    if MEMORY > 0:
        state = anderson_begin(z, MEMORY)
        z_before, f_before = z, z
    # Last: Triton mistakes what a loop carries for another where its condition comes before it.
    left = tl.max(running, 0)
    while left > 0:
        weight = tl.load(steps + k, mask=k < max_iter, other=1.0)
        f = evaluate(z, M, slope, q, inside, n, ACTIVATION, AFFINE)
        change, square = squares(z, f)
        history, status = observe(
            history, running, k, z, f, change, square, rtol, atol, max_iter, MEMORY > 0
        )
        status = tl.where(running > 0, status, result)
        improved = (running > 0) & (history[1] == k)
        best = tl.where(improved[:, None], z, best)
        iterations = tl.where(running > 0, k, iterations)
        going = (status == ACTIVE) | (status == RESTART)
        if tl.min(going.to(tl.int32), 0) == 0:
            final = tl.where((improved & (status == CONVERGED))[:, None], f, final)
        running = going.to(tl.int32)
        result = tl.where(going, result, status)
        if MEMORY > 0:
            again = (status == RESTART)[:, None]
            state = anderson_restart(state, status == RESTART, z_before, f_before)
            z_before, f_before = tl.where(again, z_before, z), tl.where(again, f_before, f)
            moved, state = anderson_update(z_before, f_before, state, k, weight, MEMORY)
        else:
            moved = lerp(z, f, weight)
        z = tl.where(going[:, None], moved, z)
        left = tl.max(running, 0)
        k += 1
    failed = exists & (result != CONVERGED)
    if tl.max(failed.to(tl.int32), 0) > 0:
        z = tl.where(failed[:, None], best, z)
        f = evaluate(z, M, slope, q, inside, n, ACTIVATION, AFFINE)
        final = tl.where(failed[:, None], f, final)
    return z, final, iterations, history[0], result


@triton.jit
def evaluate(  # type: ignore[no-untyped-def]
    z, M, slope, q, inside, n: tl.constexpr, ACTIVATION: tl.constexpr, AFFINE: tl.constexpr
):
    """Compute sigma(z M + q), or (z * slope) M + q."""
    f = z * slope if AFFINE else z
    if M is not None:
        f = product_in_registers(f, M, n)
    f += q
    if not AFFINE:
        f = tl.where(inside, activate(f, ACTIVATION), 0.0)  # sigmoid(0) is not 0
    return f


@triton.jit
def lerp(z, f, weight):  # type: ignore[no-untyped-def]
    """Compute z + weight (f - z), exactly f at weight 1; see `torch.lerp`."""
    return tl.where(weight < 0.5, z + weight * (f - z), f - (f - z) * (1 - weight))
