"""The two passes of a recurrence on a GPU, each one launch of one Triton kernel.

One skeleton carries a block of rows through the whole sequence, its state in float32 in registers;
`_step` and `_pullback` are all that a recurrence has of its own: leaky (no gate), and gated with
one product for gate and candidate, or one for each. Where the matrices are kept:

- float32, n <= 128: in registers, where a product is a sum in float32 without tensor cores. One
  row: several programs share a multiprocessor, and one computes while others wait.
- bfloat16: in shared memory, from where tensor cores multiply them, with sums in float32.
- else not on the chip. In float32 at n = 256 a matrix is 256 KiB, all registers of a multiprocessor
  and more than its shared memory. Each step reads it again by tiles, from the second cache level,
  which must take several times longer.

Tiles are padded to a power of two; in registers, n = 80 costs the products of n = 80, to the next
multiple of 16 or 32. Each n is compiled for itself, at its first use.

Tensors are float32 or bfloat16; scalars of the steps may be float32 with bfloat16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fixpoint.models.ops.common.triton_blocks import (
    activate,
    activation_slope,
    block_of_rows,
    in_vectors,
    load_block,
    load_weights,
    product_in_registers,
    shared_memory,
    sums_of_parts,
    weights_in_registers,
)

MAX_SIZE = 256  # units n; above, a matrix fits on the chip in neither type


class LaunchConfig(NamedTuple):
    """Sizes of a launch: n padded, rows of a program, rows of a matrix at a time, and others.

    tile: 0 for all of a matrix in registers. lanes: threads that share the sum of an output there.
    """

    size: int
    rows: int
    tile: int
    lanes: int
    warps: int
    stages: int

    @property
    def parts(self) -> int:
        """Sums over units that a row writes: several, as one of all units takes long."""
        return self.size // 8 if self.tile == 0 else 1

    @property
    def options(self) -> dict[str, int]:
        """Options of the compiler; products and sums must fuse, whatever its default becomes."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


def launch_config(n: int, dtype: torch.dtype, products: int, *, shared: int) -> LaunchConfig:
    """Choose the launch for a device with some bytes of shared memory for a block.

    Rows: a tensor core takes 16. A tile of a matrix from the cache serves 8 rows: with these the
    products take about as long as the reading. Warps: of a matrix in registers, each has 32
    columns, of two 16; the rows of 256 units take 16 warps, as fewer spill.
    """
    size = max(16, triton.next_power_of_2(n))
    if dtype == torch.bfloat16:
        fits = size <= 128 or (products == 1 and shared >= 160 * 1024)
        tile, stages = (size, 1) if fits else (64, 2)
        return LaunchConfig(size, 16, tile, 0, max(4, size // 16), stages)
    if size > 128:
        return LaunchConfig(size, 8, 16, 0, 16, 3)
    size, lanes = max(32, size), 8 if products == 2 and n > 96 else 4
    return LaunchConfig(size, 1, 0, lanes, size * lanes // 128, 1)


class Forward(NamedTuple):
    """Arguments of a kernel that advances h, (B, n), in place by M inner steps, K in each time
    step.

    kind: 0 for a leaky recurrence, else gated, of this many products. u: drives, (T, B, n), and
    V: matrices, (n, n), of each product. w: two scalars of each inner step, (M,). bias: (2, n), or
    None. S: (M // every + 1, B, n) receives at i the state after i * every inner steps, or is
    empty. O: (T, B, n) receives those after each time step, or is empty. kept: what the pullback
    needs, (M, B, n) each, or empty.
    """

    kind: int
    activation: str
    u: tuple[Tensor, ...]
    V: tuple[Tensor, ...]
    w: tuple[Tensor, Tensor]
    bias: Tensor | None
    K: int
    h: Tensor
    S: Tensor
    O: Tensor
    kept: tuple[Tensor, ...]
    every: int


class Backward(NamedTuple):
    """Arguments of a kernel that carries g, the gradient of the last state, in place to the first.

    G: (T, B, n), gradients after each time step, or empty. S, kept: of the forward pass with
    every = 1. D: (M, B, n) of each product receives the gradient of it, and of its drive.
    """

    kind: int
    activation: str
    G: Tensor
    V: tuple[Tensor, ...]
    w: tuple[Tensor, Tensor]
    K: int
    g: Tensor
    S: Tensor
    kept: tuple[Tensor, ...]
    D: tuple[Tensor, ...]


def forward(given: Forward) -> None:
    kind, activation, u, V, w, bias, K, h, S, O, kept, every = given
    config = _config(h, len(V))
    matrices = [in_vectors(v) if config.tile == 0 else v.t().contiguous() for v in V]
    tensors = *_two(u), *_two(matrices), *w, h if bias is None else bias, h, S, O, *_two(kept)
    options = {"KIND": kind, "ACTIVATION": activation, "HAS_BIAS": bias is not None}
    has = {"HAS_S": len(S) > 1, "HAS_O": len(O) > 0, "KEEP": len(kept[0]) > 0}
    _launch(_forward, config, h, len(u[0]), tensors, (K, every), **options, **has)


def backward(given: Backward) -> tuple[Tensor, Tensor | None]:
    """Return gradients of the scalars, (2, M), and of the biases, (2, n), where there is a gate."""
    kind, activation, G, V, w, K, g, S, kept, D = given
    config, M, (B, n) = _config(g, len(V)), len(w[0]), g.shape
    matrices = [in_vectors(v.t()) if config.tile == 0 else v.contiguous() for v in V]
    dw = torch.zeros(2, M, B, config.parts, dtype=torch.float32, device=g.device)
    dbias = torch.zeros(2 if kind else 0, B, n, dtype=torch.float32, device=g.device)
    tensors = G, *_two(matrices), *w, g, S, *_two(kept), *_two(D), dw, dbias
    options = {"KIND": kind, "ACTIVATION": activation, "HAS_G": len(G) > 0, "PARTS": config.parts}
    _launch(_backward, config, g, M // K, tensors, (K,), **options)
    return dw.sum((2, 3)), dbias.sum(1) if kind else None


def _two(tensors: tuple[Tensor, ...] | list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the first and the last, which is the first again where there is one."""
    return tensors[0], tensors[-1]


def _config(h: Tensor, products: int) -> LaunchConfig:
    return launch_config(h.shape[1], h.dtype, products, shared=shared_memory(h))


def _launch(
    kernel: triton.JITFunction,
    config: LaunchConfig,
    h: Tensor,
    T: int,
    tensors: tuple[Tensor, ...],
    numbers: tuple[int, ...],
    **options: object,
) -> None:
    if not h.numel() or not T:
        return
    B, n = h.shape
    sizes = {"n": n, "SIZE": config.size, "ROWS": config.rows, "TILE": config.tile}
    arguments = [x.detach() for x in tensors]
    with torch.cuda.device_of(h):
        kernel[(triton.cdiv(B, config.rows),)](
            *arguments, B, T, *numbers, LANES=config.lanes, **options, **sizes, **config.options
        )


# K and `every` become constants where they are 1, as nearly always: the steps of a program wait
# for each other, and so for the arithmetic of counters.
@triton.jit(do_not_specialize=["B", "T"])
def _forward(  # type: ignore[no-untyped-def]
    U0, U1, V0, V1, w0, w1, bias, h, S, O, kept0, kept1, B, T, K, every, n: tl.constexpr,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_S: tl.constexpr,
    HAS_O: tl.constexpr, KEEP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row, at, inside, step = block_of_rows(B, n, SIZE, ROWS)
    kind = h.dtype.element_ty
    y, u0 = load_block(h, at, inside), tl.load(U0 + at, mask=inside, other=0.0)
    weights0, u1 = _weights(V0, n, SIZE, TILE, LANES), u0
    if KIND == 2:
        weights1, u1 = _weights(V1, n, SIZE, TILE, LANES), tl.load(U1 + at, mask=inside, other=0.0)
    if HAS_BIAS:
        col = tl.arange(0, SIZE)[None, :]
        b0 = load_block(bias, col, col < n)
        b1 = load_block(bias + n, col, col < n)
    a, b = tl.load(w0), tl.load(w1)
    M, k, since = T * K, 1, 1  # inner steps of this time step, and since a state was written
    U0 += tl.where((k == K) & (M > 1), step, 0)
    U1 += tl.where((k == K) & (M > 1), step, 0)
    w0 += tl.where(M > 1, 1, 0)
    w1 += tl.where(M > 1, 1, 0)
    for m in range(M):
        # Read a step ahead, as memory takes longer than a step; the last one reads again.
        u0_next, a_next, b_next = tl.load(U0 + at, mask=inside, other=0.0), tl.load(w0), tl.load(w1)
        u1_next = u0_next
        if KIND == 2:
            u1_next = tl.load(U1 + at, mask=inside, other=0.0)
        x0 = _add_product(u0.to(tl.float32), y, weights0, V0, h, at, inside, row, B, n, TILE)
        x1 = x0
        if KIND == 2:
            x1 = _add_product(u1.to(tl.float32), y, weights1, V1, h, at, inside, row, B, n, TILE)
        if HAS_BIAS:
            x0, x1 = x0 + b0, x1 + b1
        # Counters move here, where threads wait for sums of others, and not before the exchange.
        k_next = k
        if K != 1:
            k_next = tl.where(k == K, 1, k + 1)
        more = m + 2 < M
        move = tl.where((k_next == K) & more, step, 0)
        U0 += move
        U1 += move
        w0 += tl.where(more, 1, 0)
        w1 += tl.where(more, 1, 0)
        y, z, c = _step(y, x0, x1, a.to(tl.float32), b.to(tl.float32), inside, KIND, ACTIVATION)
        if KEEP:
            if KIND > 0:
                tl.store(kept0 + at, z.to(kind), mask=inside)
                kept0 += step
            tl.store(kept1 + at, c.to(kind), mask=inside)
            kept1 += step
        if HAS_S and since == every:
            S += step
            tl.store(S + at, y.to(kind), mask=inside)
        if HAS_O and k == K:
            tl.store(O + at, y.to(kind), mask=inside)
            O += step
        u0, u1, a, b = u0_next, u1_next, a_next, b_next
        k = k_next
        if every != 1:
            since = tl.where(since == every, 1, since + 1)
    tl.store(h + at, y.to(kind), mask=inside)


@triton.jit(do_not_specialize=["B", "T"])
def _backward(  # type: ignore[no-untyped-def]
    G, V0, V1, w0, w1, g, S, kept0, kept1, D0, D1, dw, dbias, B, T, K, n: tl.constexpr,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, HAS_G: tl.constexpr, PARTS: tl.constexpr,
    SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write to `dw` (2, M, B, PARTS) sums over parts of units, to `dbias` (2, B, n) over time."""
    row, at, inside, step = block_of_rows(B, n, SIZE, ROWS)
    kind = g.dtype.element_ty
    weights0, y = _weights(V0, n, SIZE, TILE, LANES), load_block(g, at, inside)
    if KIND == 2:
        weights1 = _weights(V1, n, SIZE, TILE, LANES)
    M = T * K
    last = (M - 1) * step
    G, S, kept0, kept1 = G + (T - 1) * step, S + last, kept0 + last, kept1 + last
    D0, D1, w0, w1 = D0 + last, D1 + last, w0 + (M - 1), w1 + (M - 1)
    col, line = tl.arange(0, SIZE)[None, :], B.to(tl.int64) * PARTS
    place = row[:, None] * PARTS + col // (SIZE // PARTS) + (M - 1) * line
    first = (row < B)[:, None] & (col % (SIZE // PARTS) == 0)
    s, c = tl.load(S + at, mask=inside, other=0.0), tl.load(kept1 + at, mask=inside, other=0.0)
    z, a, b = c, tl.load(w0), tl.load(w1)
    if KIND > 0:
        z = tl.load(kept0 + at, mask=inside, other=0.0)
        sum_z = tl.zeros((ROWS, SIZE), tl.float32)
        sum_c = sum_z
    if HAS_G:
        e = tl.load(G + at, mask=inside, other=0.0)
    k = K  # inner steps of this time step that are left
    back = tl.where(M > 1, step, 0)
    S -= back
    kept0 -= back
    kept1 -= back
    w0 -= tl.where(M > 1, 1, 0)
    w1 -= tl.where(M > 1, 1, 0)
    G -= tl.where((k == 1) & (M > 1), step, 0)
    for m in range(M):
        # As in the forward pass: read a step ahead, and move counters after the exchange.
        s_next = tl.load(S + at, mask=inside, other=0.0)
        c_next = tl.load(kept1 + at, mask=inside, other=0.0)
        z_next, a_next, b_next = c_next, tl.load(w0), tl.load(w1)
        if KIND > 0:
            z_next = tl.load(kept0 + at, mask=inside, other=0.0)
        if HAS_G:
            if k == K:
                y += e.to(tl.float32)
            e = tl.load(G + at, mask=inside, other=0.0)
        y, d0, d1, da, db = _pullback(
            y, s.to(tl.float32), z.to(tl.float32), c.to(tl.float32), a.to(tl.float32),
            b.to(tl.float32), KIND, ACTIVATION,
        )  # fmt: skip
        if KIND > 0:
            sum_z += d0
            sum_c += d1
        if KIND == 1:
            d0 += d1
        tl.store(D0 + at, d0.to(kind), mask=inside)
        if KIND == 2:
            tl.store(D1 + at, d1.to(kind), mask=inside)
        y = _add_product(y, d0, weights0, V0, D0, at, inside, row, B, n, TILE)
        if KIND == 2:
            y = _add_product(y, d1, weights1, V1, D1, at, inside, row, B, n, TILE)
            D1 -= step
        k_next = k
        if K != 1:
            k_next = tl.where(k == 1, K, k - 1)
        more = m + 2 < M
        back = tl.where(more, step, 0)
        S -= back
        kept0 -= back
        kept1 -= back
        w0 -= tl.where(more, 1, 0)
        w1 -= tl.where(more, 1, 0)
        G -= tl.where(k_next == 1, back, 0)
        # After the exchange of d, for which threads wait, and during its products.
        da, db = sums_of_parts(da, db, PARTS)
        tl.store(dw + place, da, mask=first)
        tl.store(dw + M * line + place, db, mask=first)
        D0 -= step
        place -= line
        s, z, c, a, b = s_next, z_next, c_next, a_next, b_next
        k = k_next
    tl.store(g + at, y.to(kind), mask=inside)
    if KIND > 0:
        tl.store(dbias + at, sum_z, mask=inside)
        tl.store(dbias + step + at, sum_c, mask=inside)


@triton.jit
def _step(y, x0, x1, a, b, inside, KIND: tl.constexpr, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute the new state, the gate and the candidate, from products with drives and biases.

    Zero in the padding: the candidate would grow where |a| > 1, and infinity times 0 is NaN.
    """
    c = tl.where(inside, activate(x1, ACTIVATION), 0.0)
    if KIND == 0:
        z = c
        y = a * y + b * c
    else:
        z = activate(x0, "sigmoid")
        y = z * y + (a * (1 - z) + b) * c
    return y, z, c


@triton.jit
def _pullback(y, s, z, c, a, b, KIND: tl.constexpr, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Carry back the gradient y of the new state: to s, gate and candidate, a and b."""
    slope = activation_slope(c, ACTIVATION)
    if KIND == 0:
        before, d0, da = a * y, b * y * slope, y * s
        d1 = d0
    else:
        before, da = y * z, y * c * (1 - z)
        d0, d1 = y * (s - a * c) * z * (1 - z), y * (a * (1 - z) + b) * slope
    return before, d0, d1, da, y * c


@triton.jit
def _weights(  # type: ignore[no-untyped-def]
    A, n: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr
):
    """Load all of A to registers or shared memory; unused where A is read by tiles."""
    if TILE == 0:
        weights = weights_in_registers(A, n, SIZE, LANES)
    else:
        weights = load_weights(A, 0, n, TILE, SIZE)
    return weights


@triton.jit
def _add_product(  # type: ignore[no-untyped-def]
    z, y, weights, A, scratch, at, inside, row, B, n: tl.constexpr, TILE: tl.constexpr
):
    """Compute z + y A, from all of A in `weights`, or by tiles of A and y by way of `scratch`."""
    SIZE: tl.constexpr = y.shape[1]
    if TILE == 0:
        z += product_in_registers(y, weights, n)
    elif TILE == SIZE:
        z = tl.dot(y.to(weights.dtype), weights, z)
    else:
        tl.debug_barrier()  # all have read the last y
        tl.store(scratch + at, y.to(scratch.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # all have written this one
        for first in range(0, SIZE, TILE):
            col = first + tl.arange(0, TILE)[None, :]
            mask = (row < B)[:, None] & (col < n)
            part = tl.load(scratch + row[:, None] * n + col, mask=mask, other=0.0)
            z = tl.dot(part, load_weights(A, first, n, TILE, SIZE), z, input_precision="ieee")
    return z
