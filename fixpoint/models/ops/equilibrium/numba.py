"""The two passes of an equilibrium through time, compiled by numba, in blocks of rows.

A block runs through the whole sequence by itself: U, V and its states remain in the first cache
levels, and its updates end as soon as its own rows are done.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.functional import linear

from fixpoint.models.ops.common.numba_blocks import (
    CODES,
    PRODUCT,
    activation_grad,
    as_vector,
    run,
    split,
)
from fixpoint.models.ops.common.numba_cache import cached_njit
from fixpoint.models.ops.equilibrium.arguments import (
    BackwardArguments,
    ForwardArguments,
    Iteration,
)
from fixpoint.models.ops.equilibrium.numba_anderson import new_anderson
from fixpoint.models.ops.equilibrium.numba_solvers import NONFINITE, solve_block


def forward(arguments: ForwardArguments) -> None:
    x, W, bias, U, V, S, C, report, activation, iteration = arguments
    n = len(V)
    Wt = W.t().contiguous()
    if not 0 < 8 * W.numel() <= PRODUCT:  # too wide for blocks of rows
        x, Wt, bias = linear(x, W, bias), Wt[:0], None
    bias = V.new_zeros(n) if bias is None else bias.contiguous()
    Ut = V.new_zeros(0, n) if U is None else U.t().contiguous()
    tensors = x, Wt, bias, Ut, V.t().contiguous(), S, C, *report
    arrays = [v.detach().numpy() for v in tensors]
    options = _options(iteration, V)
    rows, ranges = split(S.shape[1], max(V.numel(), Wt.numel()))
    run(
        lambda first, last: _forward(*arrays, CODES[activation], *options, rows, first, last),
        ranges,
    )


def backward(arguments: BackwardArguments) -> None:
    G, U, V, g, C, result, D, adjoint, report, activation, iteration = arguments
    U = V.new_zeros(0, len(V)) if U is None else U
    tensors = G, U, V, g, C, result, D, adjoint, *report
    arrays = [v.detach().numpy() for v in tensors]
    options = _options(iteration, V)
    rows, ranges = split(len(g), V.numel())
    run(
        lambda first, last: _backward(*arrays, CODES[activation], *options, rows, first, last),
        ranges,
    )


def _options(iteration: Iteration, like: Tensor) -> tuple[Any, ...]:
    """Steps, memory and tolerances in the dtype of the state, atol for the 2-norm."""
    steps = iteration.steps.detach().to(like.dtype).contiguous().numpy()
    kind = steps.dtype.type
    return (
        steps,
        min(iteration.memory, like.shape[1]),
        kind(iteration.rtol),
        kind(iteration.atol * like.shape[1] ** 0.5),
    )


@cached_njit(nogil=True)
def _forward(  # type: ignore[no-untyped-def]
    X, Wt, bias, Ut, Vt, S, C, iterations, residual, result, code, steps, memory, rtol, atol, rows,
    first, last,
):  # fmt: skip
    (T, B, n), dtype = C.shape if len(C) > 0 else (len(S) - 1, *S.shape[1:]), Vt.dtype
    work = np.empty((6, rows, n), dtype)
    nothing, biases = np.zeros(rows * n, dtype), np.empty((rows, n), dtype)
    all_marks, running, anderson = (
        np.empty((rows, 4)),
        np.empty(rows, np.bool_),
        new_anderson(rows if memory > 0 else 0, n, memory, work),
    )
    biases[:] = bias
    for lo in range(first * rows, min(last * rows, B), rows):
        hi = min(lo + rows, B)
        m = hi - lo
        q, u, f, scratch, best, unsaved = (work[0, :m], work[1, :m], work[2, :m], work[3, :m],
                                           work[4, :m], work[5, :m])  # fmt: skip
        marks, zeros, added = all_marks[:m], nothing[: m * n], as_vector(biases[:m])
        for t in range(T):
            H, z = S[t, lo:hi], S[t + 1, lo:hi]
            final = C[t, lo:hi] if len(C) > 0 else unsaved
            np.dot(H, Vt, q)
            if len(Wt) > 0:
                np.dot(X[t, lo:hi], Wt, u)
            else:
                u[:] = X[t, lo:hi]
            a, b, y, x = as_vector(q), as_vector(u), as_vector(z), as_vector(H)
            for j in range(a.size):
                a[j] += b[j] + added[j]
                y[j] = x[j]
            best[:] = z
            solve_block(
                code, False, len(Ut) > 0, Ut, q, q, zeros, z, f, scratch, best, final,
                steps[min(t, len(steps) - 1)], memory, anderson, rtol, atol, marks, running[:m],
            )  # fmt: skip
            for i in range(m):
                iterations[t, lo + i] = marks[i, 0]
                residual[t, lo + i] = marks[i, 1]
                result[t, lo + i] = marks[i, 2]


@cached_njit(nogil=True)
def _backward(  # type: ignore[no-untyped-def]
    G, U, V, g, C, ended, D, adjoint, iterations, residual, result, code, steps, memory, rtol, atol,
    rows, first, last,
):  # fmt: skip
    (T, B, n), dtype = C.shape, V.dtype
    zero, one = dtype.type(0), dtype.type(1)
    work = np.empty((6, rows, n), dtype)
    nothing = np.zeros(rows * n, dtype)
    all_marks, running, anderson = (
        np.empty((rows, 4)),
        np.empty(rows, np.bool_),
        new_anderson(rows if memory > 0 else 0, n, memory, work),
    )
    size = np.empty(rows, dtype)
    for lo in range(first * rows, min(last * rows, B), rows):
        hi = min(lo + rows, B)
        m = hi - lo
        slope, unit, f, scratch, best, final = (work[0, :m], work[1, :m], work[2, :m], work[3, :m],
                                                work[4, :m], work[5, :m])  # fmt: skip
        marks, zeros = all_marks[:m], nothing[: m * n]
        for t in range(T - 1, -1, -1):
            e, u, d = g[lo:hi], adjoint[lo:hi], D[t, lo:hi]
            s, c, y, incoming = (as_vector(slope), as_vector(C[t, lo:hi]), as_vector(e),
                                 as_vector(G[t, lo:hi]))  # fmt: skip
            for j in range(s.size):
                s[j] = activation_grad(code, one, c[j], zero, one)
                y[j] += incoming[j]
            for i in range(m):
                if ended[t, lo + i] == NONFINITE:
                    e[i] = zero
                    slope[i] = zero
                largest = zero
                for j in range(n):
                    largest = max(largest, abs(e[i, j]))
                size[i] = largest if largest > zero else one
                for j in range(n):
                    unit[i, j] = e[i, j] / size[i]
                    u[i, j] = unit[i, j]
                    best[i, j] = unit[i, j]
            solve_block(
                code, True, len(U) > 0, U, slope, unit, zeros, u, f, scratch, best, final,
                steps[min(t, len(steps) - 1)], memory, anderson, rtol, atol, marks, running[:m],
            )  # fmt: skip
            for i in range(m):
                for j in range(n):
                    d[i, j] = u[i, j] * size[i] * slope[i, j]
                iterations[t, lo + i] = marks[i, 0]
                residual[t, lo + i] = marks[i, 1]
                result[t, lo + i] = marks[i, 2]
            np.dot(d, V, e)
