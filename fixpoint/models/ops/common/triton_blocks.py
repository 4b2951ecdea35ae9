"""What the Triton kernels share: a block of rows, its weights, activations, and the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def device_limits(h: Tensor) -> tuple[int, int]:
    """Multiprocessors of the device of h, and bytes of shared memory that a block may have."""
    if h.device.type != "cuda":
        return 1, 2**20
    properties = torch.cuda.get_device_properties(h.device)
    # Missing from torch's stubs, and where the device is not NVIDIA's.
    shared = getattr(
        properties, "shared_memory_per_block_optin", properties.shared_memory_per_block
    )
    return properties.multi_processor_count, shared


def rows_of_program(B: int, processors: int) -> int:
    """Few, since the steps of a program wait for each other and programs do not."""
    per_processor = B // processors
    return 4 if per_processor >= 4 else max(1, min(per_processor, 2))


@triton.jit
def block_of_rows(B, n: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of this program, their places in a (B, n) array, which exist, and its length."""
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
def product_in_registers(y, weights):  # type: ignore[no-untyped-def]
    """y A, a sum in float32 without tensor cores."""
    return tl.sum(y[:, :, None] * weights[None, :, :], 1)


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
    """sigma' from c = sigma(.)."""
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
    """A rational function within a few units in the last place; NaN is kept.

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
