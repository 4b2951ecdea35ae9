"""The two passes of the leaky recurrence on a GPU, each one launch of one Triton kernel.

A program carries a block of rows through the whole sequence, its state in float32 in registers.
Where A is kept:

- float32, n <= 128: in registers, where a product is a sum in float32 without tensor cores.
- bfloat16: in shared memory, from where tensor cores multiply it, with sums in float32.
- float32, n > 128: not on the chip. At n = 256 it is 256 KiB, all registers of a multiprocessor and
  more than its shared memory. Each step reads A again by tiles, from the second cache level, which
  must take several times longer. So does bfloat16, n > 128, with under 160 KiB of shared memory.

n is padded to a power of two: n = 80 costs the products of n = 128. Rows are read in vectors where
4 (bfloat16: 8) divides n; an odd n above 128 in bfloat16 spills some registers. Each n is compiled
for itself, at its first use.

Tensors are float32 or bfloat16; a and b may be float32 beside bfloat16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.models.ops.common.triton_blocks import (
    activate,
    activation_slope,
    block_of_rows,
    device_limits,
    load_block,
    load_weights,
    product_in_registers,
    rows_of_program,
)
from fixpoint.models.ops.recurrence.arguments import BackwardArguments, ForwardArguments

NAMES = tuple(ACTIVATIONS)
MAX_SIZE = 256  # units n; above, A fits on the chip in neither type


class LaunchConfig(NamedTuple):
    """How a kernel is launched: n padded, rows of a program, rows of A at a time, warps, stages."""

    size: int
    rows: int
    tile: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """Options of the compiler; products and sums must fuse, whatever its default becomes."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


def launch_config(
    n: int, B: int, dtype: torch.dtype, *, processors: int, shared: int
) -> LaunchConfig:
    """For a device with so many multiprocessors and bytes of shared memory for a block.

    Rows: few, since the steps of a program wait for each other and programs do not: one where the
    batch does not fill the device twice. A tensor core takes 16 anyway. A tile of A from the cache
    serves 8 rows: with so many, the products take about as long as the reading.
    Warps: A in registers takes 64 of a thread, so that two programs share a multiprocessor; the
    rows of 256 units take 16 warps, as fewer spill.
    """
    size = max(16, triton.next_power_of_2(n))
    if dtype == torch.bfloat16:
        fits = size <= 128 or shared >= 160 * 1024
        return LaunchConfig(size, 16, size if fits else 64, max(4, size // 16), 1 if fits else 2)
    if size > 128:
        return LaunchConfig(size, 8, 16, 16, 3)
    return LaunchConfig(size, rows_of_program(B, processors), size, size // 16, 1)


def forward(arguments: ForwardArguments) -> None:
    step, problem, (h,), (S,), (O,), (C,), every = arguments
    U, (a, b) = problem.drives()[0] + problem.bias, problem.w
    tensors = U.contiguous(), problem.V[0].t().contiguous(), a, b, h, S, O, C
    options = {"KEEP": len(C) > 0, "HAS_S": len(S) > 0, "HAS_O": len(O) > 0}
    _launch(_forward, h, problem.K, tensors, (every,), ACTIVATION=NAMES[step.activation], **options)


def backward(arguments: BackwardArguments) -> tuple[Tensor, Tensor]:
    step, (G,), V, (a, b), K, _, (g,), (S,), (C,), (D,) = arguments
    sums = torch.zeros(2, len(a), len(g), dtype=torch.float32, device=g.device)
    tensors = G, V[0], a, b, g, S, C, D, sums
    _launch(_backward, g, K, tensors, (), ACTIVATION=NAMES[step.activation], HAS_G=len(G) > 0)
    return sums.sum(-1), D.sum((0, 1), dtype=torch.float32).to(D.dtype).unsqueeze(0)


def _launch(
    kernel: triton.JITFunction,
    h: Tensor,
    K: int,
    tensors: tuple[Tensor, ...],
    numbers: tuple[int, ...],
    **options: object,
) -> None:
    T = len(tensors[2]) // K
    if not h.numel() or not T:
        return
    B, n = h.shape
    processors, shared = device_limits(h)
    config = launch_config(n, B, h.dtype, processors=processors, shared=shared)
    sizes = {"n": n, "SIZE": config.size, "ROWS": config.rows, "TILE": config.tile}
    arguments = [x.detach() for x in tensors]
    with torch.cuda.device_of(h):
        kernel[(triton.cdiv(B, config.rows),)](
            *arguments, B, T, K, *numbers, **options, **sizes, **config.options
        )


@triton.jit(do_not_specialize=["B", "T", "K", "every"])
def _forward(  # type: ignore[no-untyped-def]
    U,
    At,
    a,
    b,
    h,
    S,
    O,
    C,
    B,
    T,
    K,
    every,
    n: tl.constexpr,
    ACTIVATION: tl.constexpr,
    KEEP: tl.constexpr,
    HAS_S: tl.constexpr,
    HAS_O: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    row, at, inside, step = block_of_rows(B, n, SIZE, ROWS)
    kind = h.dtype.element_ty
    weights = load_weights(At, 0, n, TILE, SIZE)
    y = load_block(h, at, inside)
    u = tl.load(U + at, mask=inside, other=0.0)
    for m in range(T * K):
        # Read a step ahead, as memory takes longer than a step; the last one reads again.
        if (m + 1) % K == 0 and m + 1 < T * K:
            U += step
        u_next = tl.load(U + at, mask=inside, other=0.0)
        a_m, b_m = tl.load(a + m).to(tl.float32), tl.load(b + m).to(tl.float32)
        z = _add_product(u.to(tl.float32), y, weights, At, h, at, inside, row, B, n, TILE)
        # Zero in the padding: it would grow where |a| > 1, and infinity times 0 is NaN.
        c = tl.where(inside, activate(z, ACTIVATION), 0.0)
        y = a_m * y + b_m * c
        if KEEP:
            tl.store(C + at, c.to(kind), mask=inside)
            C += step
        if HAS_S:  # noqa: SIM102  a constant, which takes the branch out of the kernel
            if (m + 1) % every == 0:
                S += step
                tl.store(S + at, y.to(kind), mask=inside)
        if HAS_O:  # noqa: SIM102
            if (m + 1) % K == 0:
                tl.store(O + at, y.to(kind), mask=inside)
                O += step
        u = u_next
    tl.store(h + at, y.to(kind), mask=inside)


@triton.jit(do_not_specialize=["B", "T", "K"])
def _backward(  # type: ignore[no-untyped-def]
    G,
    A,
    a,
    b,
    g,
    S,
    C,
    D,
    sums,
    B,
    T,
    K,
    n: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_G: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """`sums` (2, M, B) receives the terms of da and db, summed over units."""
    row, at, inside, step = block_of_rows(B, n, SIZE, ROWS)
    kind = g.dtype.element_ty
    weights = load_weights(A, 0, n, TILE, SIZE)
    y = load_block(g, at, inside)
    M = T * K
    G += (T - 1) * step
    S += (M - 1) * step
    C += (M - 1) * step
    D += (M - 1) * step
    s, c = tl.load(S + at, mask=inside, other=0.0), tl.load(C + at, mask=inside, other=0.0)
    if HAS_G:
        e = tl.load(G + at, mask=inside, other=0.0)
    for back in range(M):
        m = M - 1 - back
        a_m, b_m = tl.load(a + m).to(tl.float32), tl.load(b + m).to(tl.float32)
        if m > 0:
            S -= step
            C -= step
        s_next = tl.load(S + at, mask=inside, other=0.0)
        c_next = tl.load(C + at, mask=inside, other=0.0)
        if HAS_G:
            if m % K == K - 1:
                y += e.to(tl.float32)
            if m % K == 0 and m > 0:
                G -= step
            e = tl.load(G + at, mask=inside, other=0.0)
        s, c = s.to(tl.float32), c.to(tl.float32)
        sa, sb = tl.reduce((y * s, y * c), 1, _add_both)
        place = sums + m.to(tl.int64) * B + row
        tl.store(place, sa, mask=row < B)
        tl.store(place + M.to(tl.int64) * B, sb, mask=row < B)
        d = b_m * y * activation_slope(c, ACTIVATION)
        tl.store(D + at, d.to(kind), mask=inside)
        y = _add_product(a_m * y, d, weights, A, D, at, inside, row, B, n, TILE)
        D -= step
        s, c = s_next, c_next
    tl.store(g + at, y.to(kind), mask=inside)


@triton.jit
def _add_product(  # type: ignore[no-untyped-def]
    z, y, weights, A, scratch, at, inside, row, B, n: tl.constexpr, TILE: tl.constexpr
):
    """z + y A, from all of A in `weights`, or by tiles of A and of y by way of `scratch`."""
    SIZE: tl.constexpr = y.shape[1]
    if TILE < SIZE:
        tl.debug_barrier()  # all have read the last y
        tl.store(scratch + at, y.to(scratch.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # all have written this one
        for first in range(0, SIZE, TILE):
            col = first + tl.arange(0, TILE)[None, :]
            mask = (row < B)[:, None] & (col < n)
            part = tl.load(scratch + row[:, None] * n + col, mask=mask, other=0.0)
            z = tl.dot(part, load_weights(A, first, n, TILE, SIZE), z, input_precision="ieee")
    elif weights.dtype == tl.float32:
        z += product_in_registers(y, weights)
    else:
        z = tl.dot(y.to(weights.dtype), weights, z)
    return z


@triton.jit
def _add_both(x, y, x_other, y_other):  # type: ignore[no-untyped-def]
    return x + x_other, y + y_other
