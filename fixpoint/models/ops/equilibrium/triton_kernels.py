"""The two passes of an equilibrium through time on a GPU, each one launch of one Triton kernel.

A program carries one row through the whole sequence: U, V and its state are in registers, and its
loop over updates ends as soon as its row is done, without the host. At n = 128 U and
V take 128 of the 255 registers that a thread of 8 warps may have; float64 or a larger n would not
fit. Products go to the next multiple of 32 units. Each n is compiled for itself, at its first use.

Anderson mixing keeps its differences in registers too, up to 8 of them: see `MAX_MEMORY_ON_CUDA`.
Broyden's method is not here: its factors grow by two states an update.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from fixpoint.models.ops.common.triton_blocks import (
    activation_slope,
    block_of_rows,
    in_vectors,
    load_block,
    padding_of_inputs,
    product_in_registers,
    weights_in_registers,
)
from fixpoint.models.ops.equilibrium.arguments import (
    MAX_SIZE_ON_CUDA,
    BackwardArguments,
    ForwardArguments,
    IterationSettings,
    Report,
)
from fixpoint.models.ops.equilibrium.triton_monitor import CONVERGED, FIXED_STEPS
from fixpoint.models.ops.equilibrium.triton_solver import solve_row

MAX_SIZE = MAX_SIZE_ON_CUDA
LANES = tl.constexpr(8)  # threads that share an output, so that a thread has 64 weights of U and V


class LaunchConfig(NamedTuple):
    """Sizes of a launch: n padded, warps."""

    size: int
    warps: int

    @property
    def options(self) -> dict[str, int]:
        """Options of the compiler; products and sums must fuse, whatever its default becomes."""
        return {"num_warps": self.warps, "num_stages": 1, "enable_fp_fusion": True}


def launch_config(n: int) -> LaunchConfig:
    size = max(32, triton.next_power_of_2(n))
    return LaunchConfig(size, size // 16)


def forward(arguments: ForwardArguments) -> None:
    x, W, bias, U, V, S, C, report, activation, iteration = arguments
    tensors = linear(x, W, bias), None if U is None else in_vectors(U), in_vectors(V), S, C
    _launch(_forward, S[0], len(x), tensors, report, activation, iteration, KEEP=len(C) > 0)


def backward(arguments: BackwardArguments) -> None:
    G, U, V, g, C, result, D, adjoint, report, activation, iteration = arguments
    Ut = None if U is None else in_vectors(U.t())
    tensors = G, Ut, in_vectors(V.t()), g, C, result, D, adjoint
    _launch(_backward, g, len(G), tensors, report, activation, iteration)


def _launch(
    kernel: triton.JITFunction,
    h: Tensor,
    T: int,
    tensors: tuple[Tensor | None, ...],
    report: Report,
    activation: str,
    iteration: IterationSettings,
    **options: object,
) -> None:
    if not h.numel() or not T:
        return
    B, n = h.shape
    memory = min(iteration.memory, n)
    steps = iteration.steps.to(h).contiguous()
    stride = steps.shape[1] if len(steps) > 1 else 0
    config = launch_config(n)
    arguments = [None if v is None else v.detach() for v in (*tensors, *report, steps)]
    sizes = {"n": n, "SIZE": config.size}
    with torch.cuda.device_of(h):
        kernel[(B,)](
            *arguments, B, T, stride, steps.shape[1], float(iteration.rtol),
            float(iteration.atol * n**0.5),
            ACTIVATION=activation, MEMORY=memory, UNDAMPED=iteration.undamped, **options, **sizes,
            **config.options,
        )  # fmt: skip


@triton.jit(do_not_specialize=["B", "T", "stride", "max_iter", "rtol", "atol"])
def _forward(  # type: ignore[no-untyped-def]
    X, U, V, S, C, iterations, residual, result, steps, B, T, stride, max_iter, rtol, atol,
    n: tl.constexpr, ACTIVATION: tl.constexpr, MEMORY: tl.constexpr,
    UNDAMPED: tl.constexpr, KEEP: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    _row, at, inside, block = block_of_rows(B, n, SIZE, 1)
    padding, matrix = False, U
    if U is not None:
        U = weights_in_registers(matrix, n, SIZE, LANES)
    W = weights_in_registers(V, n, SIZE, LANES)
    if U is not None and MEMORY == 0:  # after the weights: the compiler looks at the last first
        padding = padding_of_inputs(matrix, n, SIZE, LANES)
    h, x = load_block(S, at, inside), load_block(X, at, inside)
    for t in range(T):
        # Read a step ahead, as memory takes longer than an update; the last one reads again.
        X += tl.where(t + 1 < T, block, 0)
        x_next = load_block(X, at, inside)
        if MEMORY > 0:
            W = weights_in_registers(V, n, SIZE, LANES)
        q = x + product_in_registers(h, W, n)
        h, c, count, r, code = solve_row(
            h, U, padding, q, q, inside, steps, max_iter, rtol, atol, n, ACTIVATION,
            False, MEMORY, UNDAMPED,
        )  # fmt: skip
        S += block
        tl.store(S + at, h, mask=inside)
        if KEEP:
            tl.store(C + at, c, mask=inside)
            C += block
        _store_report(iterations, residual, result, t, B, count, r, code)
        steps += stride
        x = x_next


@triton.jit(do_not_specialize=["B", "T", "stride", "max_iter", "rtol", "atol"])
def _backward(  # type: ignore[no-untyped-def]
    G, U, V, g, C, ended, D, adjoint, iterations, residual, result, steps, B, T, stride, max_iter,
    rtol, atol, n: tl.constexpr, ACTIVATION: tl.constexpr, MEMORY: tl.constexpr,
    UNDAMPED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    _row, at, inside, block = block_of_rows(B, n, SIZE, 1)
    padding, matrix = False, U
    if U is not None:
        U = weights_in_registers(matrix, n, SIZE, LANES)
    W = weights_in_registers(V, n, SIZE, LANES)
    if U is not None and MEMORY == 0:  # after the weights: the compiler looks at the last first
        padding = padding_of_inputs(matrix, n, SIZE, LANES)
    last = (T - 1) * block
    G, C, D = G + last, C + last, D + last
    e, incoming, c = load_block(g, at, inside), load_block(G, at, inside), load_block(C, at, inside)
    for i in range(T):
        t = T - 1 - i
        back = tl.where(t > 0, block, 0)
        G -= back
        C -= back
        incoming_next, c_next = load_block(G, at, inside), load_block(C, at, inside)
        lost = tl.load(ended + B.to(tl.int64) * t + tl.program_id(0)) > FIXED_STEPS
        e = tl.where(lost, 0.0, e + incoming)
        slope = tl.where(inside & ~lost, activation_slope(c, ACTIVATION), 0.0)
        size = tl.max(tl.max(tl.abs(e), 1), 0)
        size = tl.where(size > 0, size, 1.0)
        unit = tl.div_rn(e, tl.full(e.shape, 1.0, tl.float32) * size)
        u, _, count, r, code = solve_row(
            unit, U, padding, slope, unit, inside, steps, max_iter, rtol, atol, n, ACTIVATION,
            True, MEMORY, UNDAMPED,
        )  # fmt: skip
        u *= size
        d = tl.where(code == CONVERGED, u * slope, 0.0)
        tl.store(D + at, d, mask=inside)
        D -= block
        tl.store(adjoint + at, u, mask=inside)
        _store_report(iterations, residual, result, t, B, count, r, code)
        if MEMORY > 0:
            W = weights_in_registers(V, n, SIZE, LANES)
        e = product_in_registers(d, W, n)
        incoming, c = incoming_next, c_next
    tl.store(g + at, e, mask=inside)


@triton.jit
def _store_report(iterations, residual, result, t, B, count, r, code):  # type: ignore[no-untyped-def]
    place = B.to(tl.int64) * t + tl.program_id(0)
    tl.store(iterations + place, count.to(tl.int64))
    tl.store(residual + place, r.to(tl.float32))
    tl.store(result + place, code.to(tl.int8))
