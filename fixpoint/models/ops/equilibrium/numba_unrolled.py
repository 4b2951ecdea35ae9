"""Plain updates of a sequence of equilibria and backpropagation through them, compiled by numba.

The backward pass makes the updates of a time step again, as many for each row as lead to its
state, and then goes back through them: it keeps those of one block and one time step at a time.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fixpoint.models.ops.common.numba_blocks import (
    PRODUCT,
    ROWS,
    as_vector,
    product,
    run,
    split,
    widest_vectors,
)
from fixpoint.models.ops.common.numba_cache import cached_njit
from fixpoint.models.ops.common.pointwise import CODES, slope
from fixpoint.models.ops.equilibrium.arguments import (
    FixedStepsArguments,
    IterationSettings,
    UnrolledArguments,
)
from fixpoint.models.ops.equilibrium.numba_kernels import (
    input_tensors,
    iteration_options,
    scale_row,
    write_q,
)
from fixpoint.models.ops.equilibrium.numba_monitor import BEST_R
from fixpoint.models.ops.equilibrium.numba_plain import AFFINE, Equation, plain_update
from fixpoint.models.ops.equilibrium.numba_solvers import (
    copy_row,
    evaluate,
    new_block,
    new_state,
    solve_block,
)


def forward_fixed(arguments: FixedStepsArguments) -> None:
    """Make all updates of all rows and measure nothing."""
    x, W, bias, U, V, S, activation, steps = arguments
    arrays = [v.detach().numpy() for v in (*input_tensors(x, W, bias, U, V), S)]
    weights = steps.detach().to(V.dtype).contiguous().numpy()
    rows, ranges = split(S.shape[1], max(V.numel(), arrays[1].size), torch.get_num_threads())

    def work(first: int, last: int) -> None:
        block = new_block(rows, len(V), V.dtype)
        state = new_state(IterationSettings(torch.empty(0), 0, 0.0, 0.0), rows, len(V), V.dtype)
        _fixed(*arrays, CODES[activation], weights, block, state, rows, first, last)

    run(work, ranges)


def backward(arguments: UnrolledArguments) -> tuple[Tensor, Tensor]:
    """Return gradients of U, (n, n), and of the steps."""
    G, x, W, bias, U, V, g, S, counts, warm, D, report, activation, steps, adjoint = arguments
    U_or_none = V.new_zeros(0, len(V)) if U is None else U
    tensors = *input_tensors(x, W, bias, U, V), U_or_none, V, G, g, S, counts, warm, D, *report
    arrays = [v.detach().numpy() for v in tensors]
    (B, n), T, most = g.shape, len(G), int(counts.max()) if counts.numel() else 0
    rows, ranges = split(B, max(V.numel(), arrays[1].size), torch.get_num_threads())
    blocks = ranges[-1][1]
    dU = torch.zeros(blocks, len(U_or_none), n, dtype=V.dtype)
    dsteps = torch.zeros(blocks, T, max(steps.shape[1], 1), dtype=V.dtype)
    weights = steps.detach().to(V.dtype).contiguous().numpy()
    options = iteration_options(adjoint, V)

    def work(first: int, last: int) -> None:
        block, state = new_block(rows, n, V.dtype), new_state(adjoint, rows, n, V.dtype)
        stack = torch.empty(2, (most + 1) * rows, n, dtype=V.dtype).numpy()
        _backward(
            *arrays, dU.numpy(), dsteps.numpy(), CODES[activation], weights, *options, block,
            state, stack, rows, first, last,
        )  # fmt: skip

    run(work, ranges)
    total = dsteps.sum(0)[:, : steps.shape[1]]
    return dU.sum(0), total if len(steps) > 1 else total.sum(0, keepdim=True)


@cached_njit(nogil=True, allocates=True)
def _fixed(X, Wt, bias, Ut, Vt, S, code, steps, block, state, rows, first, last):  # type: ignore[no-untyped-def]
    T, (B, n) = len(S) - 1, S.shape[1:]
    projection, order = np.empty((rows, n), Vt.dtype), block.order
    equation = Equation(code, Ut, block.slope)
    for lo in range(first * rows, min(last * rows, B), rows):
        hi = min(lo + rows, B)
        m = hi - lo
        for t in range(T):
            z, f, new = block.z, block.f, block.z_before
            write_q(block.q[:m], S[t, lo:hi], X[t, lo:hi], Wt, bias, Vt, projection[:m])
            for i in range(m):
                copy_row(z[i], S[t, lo + i])
            weights = steps[min(t, len(steps) - 1)]
            for k in range(weights.size):
                evaluate(equation, block.q, block.nothing, z, f, block.scratch, m)
                plain_update(state, equation, order, m, k, z, f, new, weights[k])
                z, new = new, z
            for i in range(m):
                copy_row(S[t + 1, lo + i], z[i])


@cached_njit(nogil=True, allocates=True)
def _backward(  # type: ignore[no-untyped-def]
    X, Wt, bias, Ut, Vt, U, V, G, g, S, counts, warm, D, iterations, residual, result, dU, dsteps,
    code, steps, adjoint_steps, rtol, atol, block, state, stack, rows, first, last,
):  # fmt: skip
    widest_vectors()
    (T, B, n), dtype = D.shape, V.dtype
    projection, unpacked = np.empty((rows, n), dtype), np.empty((rows, n), dtype)
    e, dq = np.empty((rows, n), dtype), np.empty((rows, n), dtype)
    heights = np.empty(len(stack[0]) // rows + 1, np.int64)
    width = max(1, min(n, PRODUCT // (ROWS * n)))
    columns, part = np.empty((ROWS, width), dtype), np.empty((width, n), dtype)
    for b in range(first, last):
        lo, hi = b * rows, min(b * rows + rows, B)
        m = hi - lo
        for t in range(T - 1, -1, -1):
            y, incoming = as_vector(g[lo:hi]), as_vector(G[t, lo:hi])
            for j in range(y.size):
                y[j] += incoming[j]
            write_q(unpacked[:m], S[t, lo:hi], X[t, lo:hi], Wt, bias, Vt, projection[:m])
            weights = steps[min(t, len(steps) - 1)]
            end = 0
            if warm[t, lo:hi].any():
                end = add_warm_rows(
                    block, state, code, Ut, U, g[lo:hi], S[t, lo:hi], unpacked[:m], warm[t, lo:hi],
                    adjoint_steps[0], rtol, atol, stack, D[t, lo:hi], iterations[t, lo:hi],
                    residual[t, lo:hi], result[t, lo:hi],
                )  # fmt: skip
            else:
                D[t, lo:hi] = dtype.type(0)
            order, most = block.order, sort_rows(counts[t, lo:hi], block.order, heights)
            for p in range(m):
                copy_row(block.q[p], unpacked[order[p]])
                copy_row(block.z[p], S[t, lo + order[p]])
                copy_row(e[p], g[lo + order[p]])
            dq[:m] = dtype.type(0)
            last_row = repeat_updates(block, state, code, Ut, weights, heights, most, end, stack)
            go_back(
                code, U, weights, heights, most, end, last_row, stack, e, dq, block.f,
                dsteps[b, t],
            )  # fmt: skip
            for p in range(m):
                i = order[p]
                d, given = D[t, lo + i], dq[p]
                for j in range(n):
                    d[j] += given[j]
            product(D[t, lo:hi], V, unpacked[:m])
            for p in range(m):
                i = order[p]
                kept, at, out = e[p], unpacked[i], g[lo + i]
                for j in range(n):
                    out[j] = (dtype.type(0) if warm[t, lo + i] else kept[j]) + at[j]
            if len(U) > 0 and last_row > 0:
                add_products(stack[1, :last_row], stack[0, :last_row], columns, part, dU[b])


@cached_njit()
def add_products(d, z, columns, part, total):  # type: ignore[no-untyped-def]
    """Write total <- total + d^T z, in parts that `run` allows: some rows and columns of d."""
    widest_vectors()
    (rows, width), n = columns.shape, len(total)
    for lo in range(0, len(d), rows):
        k = min(rows, len(d) - lo)
        for at in range(0, n, width):
            count = min(width, n - at)
            for i in range(k):
                for j in range(count):
                    columns[i, j] = d[lo + i, at + j]
            product(columns[:k].T, z[lo : lo + k], part)
            for i in range(count):
                for j in range(n):
                    total[at + i, j] += part[i, j]


@cached_njit()
def sort_rows(counts, order, heights):  # type: ignore[no-untyped-def]
    """Sort rows, most updates first; heights[k] receives how many make update k.

    The most updates of a row.
    """
    most, place = 0, 0
    for i in range(len(counts)):
        most = max(most, counts[i])
    for k in range(most, -1, -1):
        heights[k] = place
        for i in range(len(counts)):
            if counts[i] == k:
                order[place] = i
                place += 1
    return most


@cached_njit()
def repeat_updates(block, state, code, Ut, weights, heights, most, end, stack):  # type: ignore[no-untyped-def]
    """Write z and phi(z) of each update, rows of one update after those of the one before."""
    z, f, new = block.z, block.f, block.z_before
    equation = Equation(code, Ut, block.slope)
    for k in range(most):
        m = heights[k]
        evaluate(equation, block.q, block.nothing, z, f, block.scratch, m)
        a, b = as_vector(stack[0, end : end + m]), as_vector(stack[1, end : end + m])
        x, y = as_vector(z[:m]), as_vector(f[:m])
        for j in range(x.size):
            a[j] = x[j]
            b[j] = y[j]
        plain_update(state, equation, block.order, m, k, z, f, new, weights[k])
        z, new = new, z
        end += m
    return end


@cached_njit()
def go_back(code, U, weights, heights, most, first, end, stack, e, dq, Ud, dsteps):  # type: ignore[no-untyped-def]
    """Carry e, gradients of the last states, to the first; phi(z) in the stack becomes d.

    d is the gradient of U z + q at each update, dq its sum over updates, by place.
    """
    widest_vectors()
    zero, one = e.dtype.type(0), e.dtype.type(1)
    for k in range(most - 1, -1, -1):
        m, weight, total = heights[k], weights[k], zero
        end -= m
        y, x, c = (
            as_vector(e[:m]),
            as_vector(stack[0, end : end + m]),
            as_vector(stack[1, end : end + m]),
        )
        s, p = as_vector(dq[:m]), as_vector(Ud[:m])
        for j in range(y.size):
            total += y[j] * (c[j] - x[j])
            d = slope(code, weight * y[j], c[j])
            c[j] = d
            s[j] += d
            p[j] = d
            y[j] = (one - weight) * y[j]
        dsteps[k] += total
        if len(U) > 0:
            product(stack[1, end : end + m], U, Ud[:m])
        for j in range(y.size):
            y[j] += p[j]


@cached_njit(allocates=True)
def add_warm_rows(  # type: ignore[no-untyped-def]
    block, state, code, Ut, U, g, H, q, warm, steps, rtol, atol, stack, D, iterations, residual,
    result,
):  # fmt: skip
    """Add the implicit gradient of rows that made no update: d in D, and (h, d) in the stack."""
    zero, one, m = H.dtype.type(0), H.dtype.type(1), len(H)
    for i in range(m):
        copy_row(block.z[i], H[i])
        copy_row(block.q[i], q[i])
    evaluate(Equation(code, Ut, block.slope), block.q, block.nothing, block.z, block.f,
             block.scratch, m)  # fmt: skip
    slopes, size, u = np.empty_like(H), np.empty(m, H.dtype), np.empty_like(H)
    for i in range(m):
        for j in range(H.shape[1]):
            slopes[i, j] = slope(code, one, block.f[i, j]) if warm[i] else zero
            D[i, j] = g[i, j] if warm[i] else zero
        size[i] = scale_row(D[i], block.q[i])
        copy_row(block.slope[i], slopes[i])
        copy_row(block.z[i], block.q[i])
    solve_block(block, u, np.empty_like(H), np.int64(AFFINE), U, steps, state, rtol, atol)
    end = 0
    for i in range(m):
        if warm[i]:
            iterations[i], residual[i] = block.iterations[i], block.history[i, BEST_R]
            result[i] = block.codes[i]
            for j in range(H.shape[1]):
                d = u[i, j] * size[i] * slopes[i, j]
                D[i, j] = d
                stack[0, end, j], stack[1, end, j] = H[i, j], d
            end += 1
    return end
