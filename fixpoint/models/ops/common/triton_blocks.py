"""Parts common to the Triton kernels: a block of rows, its weights, activations, and the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad


def shared_memory(h: Tensor) -> int:
    """Return bytes that a block may have on the device of h."""
    if h.device.type != "cuda":
        return 2**20
    properties = torch.cuda.get_device_properties(h.device)
    # Missing from torch's stubs, and where the device is not NVIDIA's.
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


def multiprocessors(h: Tensor) -> int:
    """Count the multiprocessors of the device of h."""
    if h.device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(h.device).multi_processor_count


def rows_of_program(B: int, processors: int) -> int:
    """Return the rows with which all programs end first, where a multiprocessor has one at a time.

    More rows take longer, as threads share their products, but a step waits once for all of them.
    """
    return min((1, 2, 4), key=lambda rows: -(-B // (rows * processors)) * (2 + rows))


def in_vectors(A: Tensor) -> Tensor:
    """Return a with rows that are read four at a time: zeros added up to a multiple."""
    return pad(A, (0, -A.shape[1] % 4)).contiguous()


@triton.jit
def block_of_rows(B, n: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return rows of this program, their places in a (B, n) array, which exist, and its length."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, SIZE)
    inside = (row < B)[:, None] & (col < n)[None, :]
    return row, row[:, None] * n + col[None, :], inside, B.to(tl.int64) * n


@triton.jit
def load_block(pointer, at, inside):  # type: ignore[no-untyped-def]
    return tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_weights(A, first, n: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    row, col = first + tl.arange(0, TILE)[:, None], tl.arange(0, SIZE)[None, :]
    return tl.load(A + row * n + col, mask=(row < n) & (col < n), other=0.0)


@triton.jit
def weights_in_registers(  # type: ignore[no-untyped-def]
    A, n: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr
):
    """Load A^T, of rows as `in_vectors` makes them, as `product_in_registers` takes it.

    A warp has the columns of 128 / LANES outputs j, a thread four of them, and of these the inputs
    i of one lane in LANES: (1, many, 4, 4, warps, LANES / 4, 4, 32 / LANES). The second, third
    and fourth axis are registers; i runs through axes (1, 5, 6, 2) and j through (4, 3, 7).
    """
    J: tl.constexpr = 32 // LANES
    STRIDE: tl.constexpr = (n + 3) // 4 * 4
    i1 = tl.arange(0, SIZE // (4 * LANES))[None, :, None, None, None, None, None, None]
    i2 = tl.arange(0, 4)[None, None, :, None, None, None, None, None]
    j1 = tl.arange(0, 4)[None, None, None, :, None, None, None, None]
    j0 = tl.arange(0, SIZE // (4 * J))[None, None, None, None, :, None, None, None]
    upper = tl.arange(0, LANES // 4)[None, None, None, None, None, :, None, None]
    lower = tl.arange(0, 4)[None, None, None, None, None, None, :, None]
    j2 = tl.arange(0, J)[None, None, None, None, None, None, None, :]
    i = (i1 * LANES + upper * 4 + lower) * 4 + i2
    j = (j0 * 4 + j1) * J + j2
    return tl.load(A + j * STRIDE + i, mask=(i < STRIDE) & (j < n), other=0.0)


@triton.jit
def product_in_registers(y, weights, n: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute y A^T, a sum in float32 without tensor cores, from `weights_in_registers`.

    Threads exchange y once, then add within a warp, and each thread keeps one output of its four.
    """
    ROWS: tl.constexpr = y.shape[0]
    MANY: tl.constexpr = weights.shape[1]
    UPPER: tl.constexpr = weights.shape[5]
    parts = tl.permute(tl.reshape(y, (ROWS, MANY, UPPER, 4, 4)), (0, 1, 4, 2, 3))
    terms = parts[:, :, :, None, None, :, :, None] * weights
    # Known when compiling, so that what is padding in each thread costs nothing: x + -0 is x.
    real = tl.arange(0, MANY)[None, :, None, None, None, None, None, None] * (16 * UPPER) < n
    terms = tl.where(real, terms, _minus_zero(8))
    sums = tl.sum(tl.sum(tl.sum(tl.sum(terms, 1), 1), 3), 3)
    mine = tl.arange(0, 4)[:, None] == tl.arange(0, 4)[None, :]
    sums = tl.where(mine[None, :, None, :, None], sums[:, :, :, None, :], _minus_zero(5))
    return tl.reshape(tl.sum(sums, 1), y.shape)


@triton.jit
def sums_of_parts(x, y, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum x and y at each column over its part of the columns."""
    shape: tl.constexpr = (x.shape[0], PARTS, x.shape[1] // PARTS)
    a, b = tl.reduce((tl.reshape(x, shape), tl.reshape(y, shape)), 2, add_both)
    a, b = tl.broadcast_to(a[:, :, None], shape), tl.broadcast_to(b[:, :, None], shape)
    return tl.reshape(a, x.shape), tl.reshape(b, x.shape)


@triton.jit
def add_both(x, y, x_other, y_other):  # type: ignore[no-untyped-def]
    return x + x_other, y + y_other


@triton.jit
def _minus_zero(AXES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Make -0, of one element on some number of axes; a literal becomes 0."""
    bits = tl.full((1,) * AXES, -(2**31), tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def activate(x, NAME: tl.constexpr):  # type: ignore[no-untyped-def]
    if NAME == "relu":
        x = tl.where(x <= 0, 0.0, x)  # NaN is kept
    elif NAME == "tanh":
        x = _tanh(x)
    elif NAME == "sigmoid":
        x = 0.5 + 0.5 * _tanh(0.5 * x)
    elif NAME == "quantTanh":
        x = tl.where(x <= -1, -1.0, tl.where(x >= 1, 1.0, x))
    elif NAME == "quantSigm":
        x = 0.5 * x + 0.5
        x = tl.where(x <= 0, 0.0, tl.where(x >= 1, 1.0, x))
    return x


@triton.jit
def activation_slope(c, NAME: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return sigma' from c = sigma(.)."""
    slope = tl.full(c.shape, 1.0, tl.float32)
    if NAME == "relu":
        slope = tl.where(c <= 0, 0.0, 1.0)
    elif NAME == "tanh":
        slope = 1 - c * c
    elif NAME == "sigmoid":
        slope = c * (1 - c)
    elif NAME == "quantTanh":
        slope = tl.where(tl.abs(c) < 1, 1.0, 0.0)
    elif NAME == "quantSigm":
        slope = tl.where((c > 0) & (c < 1), 0.5, 0.0)
    return slope


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """Compute tanh by a rational function within a few units in the last place; NaN is kept.

    Source: Eigen, generic_fast_tanh_float.
    """
    x = tl.where(x < -7.90531110763549805, -7.90531110763549805, x)
    x = tl.where(x > 7.90531110763549805, 7.90531110763549805, x)
    s = x * x
    p = 2.00018790482477e-13 + s * -2.76076847742355e-16
    p = 5.12229709037114e-08 + s * (-8.60467152213735e-11 + s * p)
    p = 4.89352455891786e-03 + s * (6.37261928875436e-04 + s * (1.48572235717979e-05 + s * p))
    q = 2.26843463243900e-03 + s * (1.18534705686654e-04 + s * 1.19825839466702e-06)
    return x * p / (4.89352518554385e-03 + s * q)
