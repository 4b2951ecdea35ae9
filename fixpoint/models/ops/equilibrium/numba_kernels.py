"""The two passes of an equilibrium through time, compiled by numba, in blocks of rows.

A block runs through the whole sequence by itself: U, V and its states remain in the first cache
levels, and its updates end as soon as its own rows are done.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from fixpoint.models.ops.common.numba_blocks import (
    PRODUCT,
    as_vector,
    product,
    run,
    split,
    widest_vectors,
)
from fixpoint.models.ops.common.numba_cache import cached_njit
from fixpoint.models.ops.common.pointwise import CODES, slope
from fixpoint.models.ops.equilibrium.arguments import (
    BackwardArguments,
    ForwardArguments,
    IterationSettings,
)
from fixpoint.models.ops.equilibrium.numba_monitor import (
    BEST_R,
    BEST_UPDATE,
    CONVERGED,
    FIXED_STEPS,
)
from fixpoint.models.ops.equilibrium.numba_plain import AFFINE
from fixpoint.models.ops.equilibrium.numba_solvers import new_block, new_state, solve_block


def forward(arguments: ForwardArguments, counts: Tensor | None = None) -> None:
    """Solve all time steps; counts, (T, B), receives how many updates lead to each state."""
    x, W, bias, U, V, S, C, report, activation, iteration = arguments
    tensors = *input_tensors(x, W, bias, U, V), S, C, *report
    counts = report.iterations[:0] if counts is None else counts
    arrays = [v.detach().numpy() for v in tensors]
    options = iteration_options(iteration, V)
    rows, ranges = split(S.shape[1], max(V.numel(), arrays[1].size), torch.get_num_threads())

    def work(first: int, last: int) -> None:
        state = new_state(iteration, rows, len(V), V.dtype)
        block = new_block(rows, len(V), V.dtype)
        _forward(
            *arrays, counts.numpy(), CODES[activation], *options, block, state, rows, first, last
        )

    run(work, ranges)


def backward(arguments: BackwardArguments) -> None:
    G, U, V, g, C, result, D, adjoint, report, activation, iteration = arguments
    U = V.new_zeros(0, len(V)) if U is None else U
    tensors = G, U, V, g, C, result, D, adjoint, *report
    arrays = [v.detach().numpy() for v in tensors]
    options = iteration_options(iteration, V)
    rows, ranges = split(len(g), V.numel(), torch.get_num_threads())

    def work(first: int, last: int) -> None:
        state = new_state(iteration, rows, len(V), V.dtype)
        block = new_block(rows, len(V), V.dtype)
        _backward(*arrays, CODES[activation], *options, block, state, rows, first, last)

    run(work, ranges)


def input_tensors(
    x: Tensor, W: Tensor, bias: Tensor | None, U: Tensor | None, V: Tensor
) -> tuple[Tensor, ...]:
    """Return x, W^T, bias, U^T and V^T for the kernels: no W where x is W x + bias itself."""
    Wt, n = W.t().contiguous(), len(V)
    if not 0 < 8 * W.numel() <= PRODUCT:  # too wide for blocks of rows
        x, Wt, bias = linear(x, W, bias), Wt[:0], None
    bias = V.new_zeros(n) if bias is None else bias.contiguous()
    Ut = V.new_zeros(0, n) if U is None else U.t().contiguous()
    return x, Wt, bias, Ut, V.t().contiguous()


def iteration_options(iteration: IterationSettings, like: Tensor) -> tuple[Any, ...]:
    """Return steps and tolerances in the dtype of the state, atol for the 2-norm."""
    steps = iteration.steps.detach().to(like.dtype).contiguous().numpy()
    kind = steps.dtype.type
    return steps, kind(iteration.rtol), kind(iteration.atol * like.shape[1] ** 0.5)


@cached_njit(nogil=True, allocates=True)
def _forward(  # type: ignore[no-untyped-def]
    X, Wt, bias, Ut, Vt, S, C, iterations, residual, result, counts, code, steps, rtol, atol,
    block, state, rows, first, last,
):  # fmt: skip
    widest_vectors()
    T, (B, n), dtype = len(S) - 1, S.shape[1:], Vt.dtype
    unsaved, projection = np.empty((rows, n), dtype), np.empty((rows, n), dtype)
    for lo in range(first * rows, min(last * rows, B), rows):
        hi = min(lo + rows, B)
        m = hi - lo
        q, z, u = block.q[:m], block.z[:m], projection[:m]
        for t in range(T):
            H = S[t, lo:hi]
            write_q(q, H, X[t, lo:hi], Wt, bias, Vt, u)
            y, x = as_vector(z), as_vector(H)
            for j in range(y.size):
                y[j] = x[j]
            final = C[t, lo:hi] if len(C) > 0 else unsaved[:m]
            solve_block(
                block, S[t + 1, lo:hi], final, code, Ut, steps[min(t, len(steps) - 1)],
                state, rtol, atol,
            )  # fmt: skip
            for i in range(m):
                iterations[t, lo + i] = block.iterations[i]
                residual[t, lo + i] = block.history[i, BEST_R]
                result[t, lo + i] = block.codes[i]
                if len(counts) > 0:
                    counts[t, lo + i] = block.history[i, BEST_UPDATE]


@cached_njit()
def write_q(q, H, X, Wt, bias, Vt, projection):  # type: ignore[no-untyped-def]
    """Write q <- V h + W x + bias of all rows."""
    widest_vectors()
    product(H, Vt, q)
    u = X
    if len(Wt) > 0:
        u = projection
        product(X, Wt, u)
    for i in range(len(q)):
        for j in range(len(bias)):
            q[i, j] += u[i, j] + bias[j]


@cached_njit(nogil=True, allocates=True)
def _backward(  # type: ignore[no-untyped-def]
    G, U, V, g, C, ended, D, adjoint, iterations, residual, result, code, steps, rtol, atol, block,
    state, rows, first, last,
):  # fmt: skip
    widest_vectors()
    (T, B, n), dtype = C.shape, V.dtype
    zero, one = dtype.type(0), dtype.type(1)
    affine = np.int64(AFFINE)  # a constant would have another copy of the solver compiled for it
    size, slopes = np.empty(rows, dtype), np.empty((rows, n), dtype)
    final = np.empty((rows, n), dtype)
    for lo in range(first * rows, min(last * rows, B), rows):
        hi = min(lo + rows, B)
        m = hi - lo
        for t in range(T - 1, -1, -1):
            e, u, d = g[lo:hi], adjoint[lo:hi], D[t, lo:hi]
            s, c, y, incoming = (as_vector(slopes[:m]), as_vector(C[t, lo:hi]), as_vector(e),
                                 as_vector(G[t, lo:hi]))  # fmt: skip
            for j in range(s.size):
                s[j] = slope(code, one, c[j])
                y[j] += incoming[j]
            for i in range(m):
                if ended[t, lo + i] > FIXED_STEPS:  # a sample that failed has no gradient
                    e[i] = zero
                    slopes[i] = zero
                size[i] = scale_row(e[i], block.q[i])
            a, b, v = as_vector(block.slope[:m]), as_vector(block.z[:m]), as_vector(block.q[:m])
            for j in range(s.size):
                a[j] = s[j]
                b[j] = v[j]
            solve_block(
                block, u, final[:m], affine, U, steps[min(t, len(steps) - 1)], state, rtol, atol,
            )  # fmt: skip
            for i in range(m):
                solved = block.codes[i] == CONVERGED
                for j in range(n):
                    u[i, j] *= size[i]
                    d[i, j] = u[i, j] * slopes[i, j] if solved else zero
                iterations[t, lo + i] = block.iterations[i]
                residual[t, lo + i] = block.history[i, BEST_R]
                result[t, lo + i] = block.codes[i]
            product(d, V, e)


@cached_njit()
def scale_row(e, unit):  # type: ignore[no-untyped-def]
    """Write unit <- e / max |e|; returns the divisor."""
    zero = e.dtype.type(0)
    largest = zero
    for j in range(e.size):
        largest = max(largest, abs(e[j]))
    size = largest if largest > zero else e.dtype.type(1)
    for j in range(e.size):
        unit[j] = e[j] / size
    return size
