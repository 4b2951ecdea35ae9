"""The two passes of an equilibrium through time on a GPU, each one launch of one Triton kernel.

A program carries a block of rows through the whole sequence: U, V and its states are in registers,
and its loop over updates ends as soon as its own rows are done, without the host. At n = 128 U and
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
    multiprocessors,
    product_in_registers,
    rows_of_program,
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
from fixpoint.models.ops.equilibrium.triton_solver import solve_block

MAX_SIZE = MAX_SIZE_ON_CUDA
LANES = tl.constexpr(8)  # threads that share an output, so that a thread has 64 weights of U and V


class LaunchConfig(NamedTuple):
    """Sizes of a launch: n padded, rows of a program, warps."""

    size: int
    rows: int
    warps: int

    @property
    def options(self) -> dict[str, int]:
        """Options of the compiler; products and sums must fuse, whatever its default becomes."""
        return {"num_warps": self.warps, "num_stages": 1, "enable_fp_fusion": True}


def launch_config(n: int, B: int, memory: int, *, processors: int) -> LaunchConfig:
    """Choose the launch for a device with some number of multiprocessors.

    A row waits for the slowest row of its program. With Anderson mixing, whose differences take
    registers, V is read again at each time step.
    """
    size = max(32, triton.next_power_of_2(n))
    return LaunchConfig(size, 1 if memory else rows_of_program(B, processors), size // 16)


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
    config = launch_config(n, B, memory, processors=multiprocessors(h))
    arguments = [None if v is None else v.detach() for v in (*tensors, *report, steps)]
    sizes = {"n": n, "SIZE": config.size, "ROWS": config.rows}
    with torch.cuda.device_of(h):
        kernel[(triton.cdiv(B, config.rows),)](
            *arguments, B, T, stride, steps.shape[1], float(iteration.rtol),
            float(iteration.atol * n**0.5),
            ACTIVATION=activation, MEMORY=memory, **options, **sizes, **config.options,
        )  # fmt: skip


@triton.jit(do_not_specialize=["B", "T", "stride", "max_iter", "rtol", "atol"])
def _forward(  # type: ignore[no-untyped-def]
    X, U, V, S, C, iterations, residual, result, steps, B, T, stride, max_iter, rtol, atol,
    n: tl.constexpr, ACTIVATION: tl.constexpr, MEMORY: tl.constexpr, KEEP: tl.constexpr,
    SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, at, inside, block = block_of_rows(B, n, SIZE, ROWS)
    exists = row < B
    if U is not None:
        U = weights_in_registers(U, n, SIZE, LANES)
    W = weights_in_registers(V, n, SIZE, LANES)
    h, x = load_block(S, at, inside), load_block(X, at, inside)
    for t in range(T):
        # Read a step ahead, as memory takes longer than an update; the last one reads again.
        X += tl.where(t + 1 < T, block, 0)
        x_next = load_block(X, at, inside)
        if MEMORY > 0:
            W = weights_in_registers(V, n, SIZE, LANES)
        q = x + product_in_registers(h, W, n)
        h, c, count, r, code = solve_block(
            h, U, q, q, exists, inside, steps, max_iter, rtol, atol, n, ACTIVATION,
            False, MEMORY,
        )  # fmt: skip
        S += block
        tl.store(S + at, h, mask=inside)
        if KEEP:
            tl.store(C + at, c, mask=inside)
            C += block
        _store_report(iterations, residual, result, t, row, B, count, r, code)
        steps += stride
        x = x_next


@triton.jit(do_not_specialize=["B", "T", "stride", "max_iter", "rtol", "atol"])
def _backward(  # type: ignore[no-untyped-def]
    G, U, V, g, C, ended, D, adjoint, iterations, residual, result, steps, B, T, stride, max_iter,
    rtol, atol, n: tl.constexpr, ACTIVATION: tl.constexpr, MEMORY: tl.constexpr,
    SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, at, inside, block = block_of_rows(B, n, SIZE, ROWS)
    exists = row < B
    if U is not None:
        U = weights_in_registers(U, n, SIZE, LANES)
    W = weights_in_registers(V, n, SIZE, LANES)
    last = (T - 1) * block
    G, C, D = G + last, C + last, D + last
    e, incoming, c = load_block(g, at, inside), load_block(G, at, inside), load_block(C, at, inside)
    for i in range(T):
        t = T - 1 - i
        back = tl.where(t > 0, block, 0)
        G -= back
        C -= back
        incoming_next, c_next = load_block(G, at, inside), load_block(C, at, inside)
        lost = tl.load(ended + B.to(tl.int64) * t + row, mask=exists, other=0) > FIXED_STEPS
        e = tl.where(lost[:, None], 0.0, e + incoming)
        slope = tl.where(lost[:, None] | ~inside, 0.0, activation_slope(c, ACTIVATION))
        size = tl.max(tl.abs(e), 1)
        size = tl.where(size > 0, size, 1.0)[:, None]
        unit = tl.div_rn(e, tl.broadcast_to(size, (ROWS, SIZE)))
        u, _, count, r, code = solve_block(
            unit, U, slope, unit, exists, inside, steps, max_iter, rtol, atol, n, ACTIVATION,
            True, MEMORY,
        )  # fmt: skip
        u *= size
        d = tl.where((code == CONVERGED)[:, None], u * slope, 0.0)
        tl.store(D + at, d, mask=inside)
        D -= block
        tl.store(adjoint + at, u, mask=inside)
        _store_report(iterations, residual, result, t, row, B, count, r, code)
        if MEMORY > 0:
            W = weights_in_registers(V, n, SIZE, LANES)
        e = product_in_registers(d, W, n)
        incoming, c = incoming_next, c_next
    tl.store(g + at, e, mask=inside)


@triton.jit
def _store_report(iterations, residual, result, t, row, B, count, r, code):  # type: ignore[no-untyped-def]
    place, exists = B.to(tl.int64) * t + row, row < B
    tl.store(iterations + place, count.to(tl.int64), mask=exists)
    tl.store(residual + place, r.to(tl.float32), mask=exists)
    tl.store(result + place, code.to(tl.int8), mask=exists)
