"""The two passes of the leaky recurrence, compiled by numba.

A block of rows runs through the whole sequence by itself: its state and A remain in the first cache
levels, the product is one small `np.dot`, and everything elementwise is one pass over its result.
Threads get blocks, never parts of a product.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor
from torch.nn.functional import linear

from fixpoint.models.ops.common.numba_blocks import (
    CODES,
    PRODUCT,
    activate,
    activation_grad,
    as_vector,
    cached_njit,
    run,
    split,
    widest_vectors,
)
from fixpoint.models.ops.leaky.arguments import BackwardArguments, ForwardArguments


def forward(arguments: ForwardArguments) -> None:
    X, W, bias, A, a, b, h, S, C, activation, every = arguments
    n = len(A)
    if W is not None and not 0 < 8 * n * W.shape[1] <= PRODUCT:  # too wide for blocks of rows
        X, W, bias = linear(X, W, bias), None, None
    Wt = A[:0] if W is None else W.t().contiguous()
    bias = A.new_zeros(n) if bias is None else bias.contiguous()
    arrays = [x.detach().numpy() for x in (X, Wt, bias, A.t().contiguous(), a, b, h, S, C)]
    rows, ranges = split(len(h), max(A.numel(), Wt.numel()))
    run(lambda lo, hi: _forward(*arrays, CODES[activation], every, rows, lo, hi), ranges)


def backward(arguments: BackwardArguments) -> tuple[Tensor, Tensor]:
    G, A, a, b, g, S, C, D, V, activation = arguments
    arrays = [x.detach().numpy() for x in (G, A, a, b, g, S, C, D, V)]
    rows, ranges = split(len(g), A.numel())
    sums = a.new_zeros(2, ranges[-1][1], *a.shape)  # (da and db, block, T, K)
    da, db = sums.numpy()
    run(lambda lo, hi: _backward(*arrays, da, db, CODES[activation], rows, lo, hi), ranges)
    da_total, db_total = sums.sum(1)
    return da_total, db_total


@cached_njit(nogil=True, allocates=True)
def _forward(X, Wt, bias, At, a, b, h, S, C, code, every, rows, first, last):  # type: ignore[no-untyped-def]
    widest_vectors()
    (T, K), (B, n) = a.shape, h.shape
    products, drives = np.empty((rows, n), At.dtype), np.empty((rows, n), At.dtype)
    unsaved, biases = np.empty((rows, n), At.dtype), np.empty((rows, n), At.dtype)
    biases[:] = bias
    for lo in range(first * rows, min(last * rows, B), rows):
        hi = min(lo + rows, B)
        H = h[lo:hi]
        y = as_vector(H)
        for m in range(T * K):
            t, k = divmod(m, K)
            at, bt = a[t, k], b[t, k]
            U = drives[: hi - lo] if len(Wt) > 0 else X[t, lo:hi]
            P = C[m, lo:hi] if len(C) > 0 else products[: hi - lo]
            s = as_vector(S[(m + 1) // every, lo:hi] if (m + 1) % every == 0 else unsaved)
            if k == 0 and len(Wt) > 0:
                np.dot(X[t, lo:hi], Wt, U)
            np.dot(H, At, P)
            c = as_vector(P)
            activate(code, c, as_vector(U), as_vector(biases))
            for j in range(c.size):
                y[j] = at * y[j] + bt * c[j]
                s[j] = y[j]


@cached_njit(nogil=True, allocates=True)
def _backward(G, A, a, b, g, S, C, D, V, da, db, code, rows, first, last):  # type: ignore[no-untyped-def]
    widest_vectors()
    (T, K), (B, n) = a.shape, g.shape
    zero, one = A.dtype.type(0), A.dtype.type(1)
    products, nothing = np.empty((rows, n), A.dtype), np.zeros((rows, n), A.dtype)
    for block in range(first, last):
        lo, hi = block * rows, min(block * rows + rows, B)
        P = products[: hi - lo]
        y, p = as_vector(g[lo:hi]), as_vector(P)
        p[:] = zero
        for m in range(T * K - 1, -1, -1):
            t, k = divmod(m, K)
            at, bt, sa, sb = a[t, k], b[t, k], zero, zero
            s, c, d = as_vector(S[m, lo:hi]), as_vector(C[m, lo:hi]), as_vector(D[m, lo:hi])
            e = as_vector(G[t, lo:hi] if k == K - 1 and len(G) > 0 else nothing)
            for j in range(y.size):
                x = y[j] + p[j] + e[j]
                sa += x * s[j]
                sb += x * c[j]
                d[j] = activation_grad(code, bt * x, c[j], zero, one)
                y[j] = at * x
            da[block, t, k], db[block, t, k] = sa, sb
            if len(V) > 0:
                v = as_vector(V[t, lo:hi])
                for j in range(v.size):
                    v[j] = d[j] if k == K - 1 else v[j] + d[j]
            np.dot(D[m, lo:hi], A, P)
        for j in range(y.size):
            y[j] += p[j]
