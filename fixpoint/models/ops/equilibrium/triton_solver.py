"""The solver loop on a row, inside a Triton kernel; see `numba_solvers`.

It solves z = sigma(z M + q), or the affine z = (z * slope) M + q of an adjoint.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fixpoint.models.ops.common.triton_blocks import (
    activate,
    inputs_of_weights,
    product_in_registers,
    product_with_inputs,
)
from fixpoint.models.ops.equilibrium.triton_anderson import (
    anderson_begin,
    anderson_restart,
    anderson_update,
)
from fixpoint.models.ops.equilibrium.triton_monitor import (
    ACTIVE,
    CONVERGED,
    RESTART,
    begin,
    observe,
    squares,
)


@triton.jit
def solve_row(  # type: ignore[no-untyped-def]
    z, M, padding, slope, q, inside, steps, max_iter, rtol, atol, n: tl.constexpr,
    ACTIVATION: tl.constexpr, AFFINE: tl.constexpr, MEMORY: tl.constexpr,
    UNDAMPED: tl.constexpr,
):  # fmt: skip
    """Solve: z, phi(z), and iterations, scaled residual and result.

    z: start, (1, SIZE); M: see `weights_in_registers`, None for the identity; padding: see
    `padding_of_inputs`; slope, q: (1, SIZE); inside, (1, SIZE), says what is not padding.
    steps: max_iter weights of phi(z), all 1 where UNDAMPED, or beta where MEMORY > 0 and the
    updates are those of Anderson mixing. atol: for 2-norms.
    """
    # Plain updates evaluate phi at the next z while the residual of this one is added and judged.
    AHEAD: tl.constexpr = MEMORY == 0
    # Its sums remain within a warp where this also has z and phi(z) as it takes them for products:
    # with a slope, at n = 128, these would not fit into registers.
    WITHIN: tl.constexpr = AHEAD and M is not None and not (AFFINE and n > 96)
    best, f = z, z
    k, status = tl.full((), 0, tl.int32), tl.full((), ACTIVE, tl.int32)
    if MEMORY > 0:
        state = anderson_begin(z, MEMORY)
        z_before, f_before = z, z
    weight = tl.load(steps, mask=max_iter > 0, other=1.0)
    if WITHIN:
        z_in = tl.where(padding, 0.0, inputs_of_weights(z, M))
        slope_in = tl.where(padding, 0.0, inputs_of_weights(slope, M)) if AFFINE else z_in
        history = begin(z if AFFINE else z_in)
        f = evaluate_inputs(z_in, M, slope_in, q, inside, n, ACTIVATION, AFFINE)
        f_in = tl.where(padding, 0.0, inputs_of_weights(f, M))
    else:
        history = begin(z)
        if AHEAD:
            f = evaluate(z, M, slope, q, inside, n, ACTIVATION, AFFINE)
    # Last: Triton mistakes what a loop carries for another where its condition comes before it.
    going = status == ACTIVE
    while going:
        # Read an update ahead, as memory takes longer than one.
        weight_next = tl.load(steps + k + 1, mask=k + 1 < max_iter, other=1.0)
        if WITHIN:
            change, square = squares(z_in, f_in)
            z_in = f_in if UNDAMPED else lerp(z_in, f_in, weight)
            f_next = evaluate_inputs(z_in, M, slope_in, q, inside, n, ACTIVATION, AFFINE)
            f_in = tl.where(padding, 0.0, inputs_of_weights(f_next, M))
        else:
            if not AHEAD:
                f = evaluate(z, M, slope, q, inside, n, ACTIVATION, AFFINE)
            change, square = squares(z, f)
        if AHEAD:
            z_next = f if UNDAMPED else lerp(z, f, weight)
            if not WITHIN:
                f_next = evaluate(z_next, M, slope, q, inside, n, ACTIVATION, AFFINE)
        history, status = observe(
            history, k, z, f, change, square, rtol, atol, max_iter, MEMORY > 0
        )
        best = tl.where(history[1] == k, z, best)
        going = (status == ACTIVE) | (status == RESTART)
        if MEMORY > 0:
            again = status == RESTART
            state = anderson_restart(state, again, z_before, f_before)
            z_before, f_before = tl.where(again, z_before, z), tl.where(again, f_before, f)
            z_next, state = anderson_update(z_before, f_before, state, k, weight, MEMORY)
        z = tl.where(going, z_next, z)
        if AHEAD:
            f = tl.where(going, f_next, f)
        weight = weight_next
        k += going.to(tl.int32)
    if status != CONVERGED:
        z = best
        f = evaluate(z, M, slope, q, inside, n, ACTIVATION, AFFINE)
    return z, f, k, history[0], status


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
def evaluate_inputs(  # type: ignore[no-untyped-def]
    z, M, slope, q, inside, n: tl.constexpr, ACTIVATION: tl.constexpr, AFFINE: tl.constexpr
):
    """Compute the same, z and slope as `inputs_of_weights`."""
    f = product_with_inputs(z * slope if AFFINE else z, M, n) + q
    if not AFFINE:
        f = tl.where(inside, activate(f, ACTIVATION), 0.0)
    return f


@triton.jit
def lerp(z, f, weight):  # type: ignore[no-untyped-def]
    """Compute z + weight (f - z), exactly f at weight 1; see `torch.lerp`."""
    near = weight < 0.5
    return tl.where(near, z, f) + tl.where(near, weight, weight - 1) * (f - z)
