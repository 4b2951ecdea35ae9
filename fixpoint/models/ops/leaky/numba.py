"""The two sweeps of the fused recurrence, compiled by numba.

A block of rows runs through the whole sequence by itself: its state and A stay in the first cache
levels, the product is one small `np.dot`, and everything elementwise is one pass over its result.
Threads get blocks, never parts of a product. Arguments: see `_fused_torch`.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from torch import Tensor
from torch.nn.functional import linear

from fixpoint.models.ops.common.numba_blocks import (
    CODES,
    FAST,
    PRODUCT,
    flat,
    pull,
    run,
    sigma,
    split,
)


def forward(
    X: Tensor,
    W: Tensor | None,
    bias: Tensor | None,
    A: Tensor,
    a: Tensor,
    b: Tensor,
    h: Tensor,
    S: Tensor,
    C: Tensor,
    *,
    activation: str,
    every: int,
) -> None:
    n = len(A)
    if W is not None and not 0 < 8 * n * W.shape[1] <= PRODUCT:  # too wide for blocks of rows
        X, W, bias = linear(X, W, bias), None, None
    Wt = A[:0] if W is None else W.t().contiguous()
    shift = A.new_zeros(n) if bias is None else bias.contiguous()
    arrays = [x.detach().numpy() for x in (X, Wt, shift, A.t().contiguous(), a, b, h, S, C)]
    rows, shares = split(len(h), max(A.numel(), Wt.numel()))
    run(lambda lo, hi: _forward(*arrays, CODES[activation], every, rows, lo, hi), shares)


def backward(
    G: Tensor,
    A: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    S: Tensor,
    C: Tensor,
    D: Tensor,
    V: Tensor,
    *,
    activation: str,
) -> tuple[Tensor, Tensor]:
    arrays = [x.detach().numpy() for x in (G, A, a, b, g, S, C, D, V)]
    rows, shares = split(len(g), A.numel())
    sums = a.new_zeros(2, shares[-1][1], *a.shape)  # (da and db, block, T, K)
    da, db = sums.numpy()
    run(lambda lo, hi: _backward(*arrays, da, db, CODES[activation], rows, lo, hi), shares)
    da_total, db_total = sums.sum(1)
    return da_total, db_total


@njit(nogil=True, cache=True, **FAST)
def _forward(X, Wt, shift, At, a, b, h, S, C, code, every, rows, first, last):  # type: ignore[no-untyped-def]
    (T, K), (B, n) = a.shape, h.shape
    products, drives = np.empty((rows, n), At.dtype), np.empty((rows, n), At.dtype)
    unsaved, shifts = np.empty((rows, n), At.dtype), np.empty((rows, n), At.dtype)
    shifts[:] = shift
    for lo in range(first * rows, min(last * rows, B), rows):
        hi = min(lo + rows, B)
        H = h[lo:hi]
        y = flat(H)
        for m in range(T * K):
            t, k = divmod(m, K)
            at, bt = a[t, k], b[t, k]
            U = drives[: hi - lo] if len(Wt) > 0 else X[t, lo:hi]
            P = C[m, lo:hi] if len(C) > 0 else products[: hi - lo]
            s = flat(S[(m + 1) // every, lo:hi] if (m + 1) % every == 0 else unsaved)
            if k == 0 and len(Wt) > 0:
                np.dot(X[t, lo:hi], Wt, U)
            np.dot(H, At, P)
            c = flat(P)
            sigma(code, c, flat(U), flat(shifts))
            for j in range(c.size):
                y[j] = at * y[j] + bt * c[j]
                s[j] = y[j]


@njit(nogil=True, cache=True, **FAST)
def _backward(G, A, a, b, g, S, C, D, V, da, db, code, rows, first, last):  # type: ignore[no-untyped-def]
    (T, K), (B, n) = a.shape, g.shape
    zero, one = A.dtype.type(0), A.dtype.type(1)
    products, nothing = np.empty((rows, n), A.dtype), np.zeros((rows, n), A.dtype)
    for block in range(first, last):
        lo, hi = block * rows, min(block * rows + rows, B)
        P = products[: hi - lo]
        y, p = flat(g[lo:hi]), flat(P)
        p[:] = zero
        for m in range(T * K - 1, -1, -1):
            t, k = divmod(m, K)
            at, bt, sa, sb = a[t, k], b[t, k], zero, zero
            s, c, d = flat(S[m, lo:hi]), flat(C[m, lo:hi]), flat(D[m, lo:hi])
            e = flat(G[t, lo:hi] if k == K - 1 and len(G) > 0 else nothing)
            for j in range(y.size):
                x = y[j] + p[j] + e[j]
                sa += x * s[j]
                sb += x * c[j]
                d[j] = pull(code, bt * x, c[j], zero, one)
                y[j] = at * x
            da[block, t, k], db[block, t, k] = sa, sb
            if len(V) > 0:
                v = flat(V[t, lo:hi])
                for j in range(v.size):
                    v[j] = d[j] if k == K - 1 else v[j] + d[j]
            np.dot(D[m, lo:hi], A, P)
        for j in range(y.size):
            y[j] += p[j]
