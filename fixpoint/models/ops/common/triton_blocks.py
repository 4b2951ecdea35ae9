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
    A, n: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr, other: tl.constexpr = 0.0
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
    return tl.load(A + j * STRIDE + i, mask=(i < STRIDE) & (j < n), other=other)


@triton.jit
def product_in_registers(y, weights, n: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute y A^T, a sum in float32 without tensor cores, from `weights_in_registers`."""
    return product_with_inputs(inputs_of_weights(y, weights), weights, n)


@triton.jit
def inputs_of_weights(y, weights):  # type: ignore[no-untyped-def]
    """Return y, (ROWS, SIZE), as threads take it that have the weights: (ROWS, MANY, 4, UPPER, 4).

    Threads exchange y once; each warp then has all of it.
    """
    ROWS: tl.constexpr = y.shape[0]
    MANY: tl.constexpr = weights.shape[1]
    UPPER: tl.constexpr = weights.shape[5]
    return tl.permute(tl.reshape(y, (ROWS, MANY, UPPER, 4, 4)), (0, 1, 4, 2, 3))


@triton.jit
def padding_of_inputs(  # type: ignore[no-untyped-def]
    A, n: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr
):
    """Say of `inputs_of_weights` which are padding in each thread, (1, MANY, 4, UPPER, 4).

    Inputs chosen by it are laid out as the weights, so that sums over them remain within a warp:
    the compiler lays out a tensor as what it is first computed with. Hence the bits of weights,
    read again, that it finds to be unused only after it has chosen.
    """
    weights = weights_in_registers(A, n, SIZE, LANES, other=1.0)
    bits = weights.to(tl.int32, bitcast=True) & 1
    bits = tl.max(tl.max(tl.max(bits, 7), 4), 3)
    first = tl.arange(0, SIZE // (4 * LANES))[None, :, None, None, None] * (4 * LANES)
    return ((bits & 1) > 1) | (first >= n)


@triton.jit
def product_with_inputs(parts, weights, n: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute y A^T, (ROWS, SIZE), of `inputs_of_weights`.

    Threads add within a warp, and each thread keeps one output of its four.
    """
    ROWS: tl.constexpr = parts.shape[0]
    MANY: tl.constexpr = weights.shape[1]
    UPPER: tl.constexpr = weights.shape[5]
    SIZE: tl.constexpr = MANY * UPPER * 16
    terms = parts[:, :, :, None, None, :, :, None] * weights
    # Known when compiling, so that what is padding in each thread costs nothing: x + -0 is x.
    real = tl.arange(0, MANY)[None, :, None, None, None, None, None, None] * (16 * UPPER) < n
    terms = tl.where(real, terms, _minus_zero(8))
    # Over registers; then of its four outputs a thread passes two on, and one, to the threads that
    # add the others.
    W: tl.constexpr = weights.shape[4]
    J: tl.constexpr = weights.shape[7]
    sums = tl.sum(tl.reshape(terms, (ROWS, MANY * 4, 2, 2, W, UPPER, 2, 2, J)), 1)
    bit = tl.arange(0, 2)
    same = (bit[:, None] == bit[None, :]).to(tl.int32)
    half = tl.broadcast_to(tl.sum(sums, 5)[:, :, :, :, :, None], (ROWS, 2, 2, W, UPPER, 2, 2, J))
    half = _chosen(half, same[None, :, None, None, None, :, None, None], 1)
    mine = tl.broadcast_to(tl.sum(half, 5)[:, :, :, :, :, None], (ROWS, 2, W, UPPER, 2, 2, J))
    mine = _chosen(mine, same[None, :, None, None, None, :, None], 1)
    return tl.reshape(tl.sum(mine, 2), (ROWS, SIZE))


@triton.jit
def _chosen(x, here, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Take of each two along an axis the one with here = 1."""
    return tl.reduce((x, tl.broadcast_to(here, x.shape)), AXIS, _choose)[0]


@triton.jit
def _choose(x, here, x_other, here_other):  # type: ignore[no-untyped-def]
    return tl.where(here != 0, x, x_other), here | here_other


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
