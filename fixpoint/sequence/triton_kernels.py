"""The diagonal scan on a GPU by two levels: chunks of time, then what they hand on.

A program carries a block of columns (sample and unit) through one chunk of 64 steps, state in
float32. First launch: product and end of each chunk. Second: the recurrence of those, over all
chunks. Third: each chunk from the state that enters it. Two reads of a and r, one write.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64  # time steps of a program
BLOCK = 128  # columns of a program


def diagonal_scan(a: Tensor, r: Tensor, *, reverse: bool = False) -> Tensor:
    """Return delta_t = a_t delta_{t-1} + r_t, or with `reverse` delta_t = a_{t+1} delta_{t+1} +
    r_t.

    Args:
        a, r: (T, B, n), contiguous, float32 or bfloat16; sums are in float32.
    """
    T, columns = len(r), r[0].numel()
    delta = torch.empty_like(r)
    if not r.numel():
        return delta
    chunks, blocks = triton.cdiv(T, CHUNK), triton.cdiv(columns, BLOCK)
    carry = torch.empty(3, chunks, columns, dtype=torch.float32, device=r.device)
    sizes = {"REVERSE": reverse, "CHUNK": CHUNK, "BLOCK": BLOCK}
    a, r = a.detach().contiguous(), r.detach().contiguous()
    # Axis 0 of a grid may have 2^31 programs, the others 65,535: time has fewer chunks.
    with torch.cuda.device_of(r):
        _chunk_ends[(blocks, chunks)](a, r, carry, T, columns, chunks, **sizes)
        _carries[(blocks,)](carry, columns, chunks, REVERSE=reverse, BLOCK=BLOCK)
        _chunk_states[(blocks, chunks)](a, r, carry, delta, T, columns, chunks, **sizes)
    return delta


@triton.jit(do_not_specialize=["T", "columns", "chunks"])
def _chunk_ends(  # type: ignore[no-untyped-def]
    a,
    r,
    carry,
    T,
    columns,
    chunks,
    REVERSE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the product and the end of each chunk to carry[0], carry[1] (chunks, columns)."""
    chunk = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    product = tl.full((BLOCK,), 1.0, tl.float32)
    state = tl.zeros((BLOCK,), tl.float32)
    for i in range(CHUNK):
        t = chunk * CHUNK + (CHUNK - 1 - i if REVERSE else i)
        factor, offset = _step(a, r, t, T, columns, column, inside, REVERSE)
        state = factor * state + offset
        product *= factor
    tl.store(carry + chunk * columns + column, product, mask=inside)
    tl.store(carry + (chunks + chunk) * columns + column, state, mask=inside)


@triton.jit(do_not_specialize=["columns", "chunks"])
def _carries(carry, columns, chunks, REVERSE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write to carry[2] the state that enters each chunk."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    state = tl.zeros((BLOCK,), tl.float32)
    size = chunks.to(tl.int64) * columns
    place = carry + column
    if REVERSE:
        place += size - columns
    for _ in range(chunks):
        tl.store(place + 2 * size, state, mask=inside)
        product = tl.load(place, mask=inside, other=0.0)
        end = tl.load(place + size, mask=inside, other=0.0)
        state = product * state + end
        place += -columns if REVERSE else columns


@triton.jit(do_not_specialize=["T", "columns", "chunks"])
def _chunk_states(  # type: ignore[no-untyped-def]
    a,
    r,
    carry,
    delta,
    T,
    columns,
    chunks,
    REVERSE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    state = tl.load(carry + (2 * chunks + chunk) * columns + column, mask=inside, other=0.0)
    for i in range(CHUNK):
        t = chunk * CHUNK + (CHUNK - 1 - i if REVERSE else i)
        factor, offset = _step(a, r, t, T, columns, column, inside, REVERSE)
        state = factor * state + offset
        place = delta + t * columns + column
        tl.store(place, state.to(delta.dtype.element_ty), mask=inside & (t < T))


@triton.jit
def _step(a, r, t, T, columns, column, inside, REVERSE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the factor and offset of step t: 1 and 0 behind the end, so that the state passes."""
    source = t + 1 if REVERSE else t
    offset = tl.load(r + t * columns + column, mask=inside & (t < T), other=0.0)
    factor = tl.load(a + source * columns + column, mask=inside & (source < T), other=1.0)
    return factor.to(tl.float32), offset.to(tl.float32)
