"""The two passes of the gated recurrence, compiled by numba, in blocks of rows."""

from __future__ import annotations

import numpy as np
import torch
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
)
from fixpoint.models.ops.gated.arguments import BackwardArguments, ForwardArguments

_SIGMOID = CODES["sigmoid"]


def forward(arguments: ForwardArguments) -> None:
    X, W, bias, V, p, q, h, S, Z, C, activation = arguments
    if W is not None and not 0 < 8 * W[0].numel() <= PRODUCT:  # too wide for blocks of rows
        X, W = torch.stack([linear(X, w) for w in W]), None
    Wt = V[:0] if W is None else W.mT.contiguous()
    tensors = X if W is None else X.unsqueeze(0), Wt, bias, V.mT.contiguous(), h, S, Z, C
    arrays = [x.detach().numpy() for x in tensors]
    rows, ranges = split(len(h), max(x[0].numel() for x in (V, Wt) if len(x)))
    run(lambda lo, hi: _forward(*arrays, p, q, CODES[activation], rows, lo, hi), ranges)


def backward(arguments: BackwardArguments) -> tuple[Tensor, Tensor, Tensor]:
    G, V, p, q, g, S, Z, C, D, activation = arguments
    arrays = [x.detach().numpy() for x in (G, V, g, S, Z, C, D)]
    rows, ranges = split(len(g), V[0].numel())
    blocks = ranges[-1][1]
    sums, dbias = g.new_zeros(2, blocks, len(C)), g.new_zeros(blocks, 2, g.shape[1])
    arrays += [sums.numpy(), dbias.numpy()]
    run(lambda lo, hi: _backward(*arrays, p, q, CODES[activation], rows, lo, hi), ranges)
    dp, dq = sums.sum((1, 2))
    return dp, dq, dbias.sum(0)


@cached_njit(nogil=True, allocates=True)
def _forward(X, Wt, bias, Vt, h, S, Z, C, p, q, code, rows, first, last):  # type: ignore[no-untyped-def]
    (gates, n, _), T, B = Vt.shape, X.shape[1], len(h)
    p, q, one = Vt.dtype.type(p), Vt.dtype.type(q), Vt.dtype.type(1)
    gate, candidate = np.empty((rows, n), Vt.dtype), np.empty((rows, n), Vt.dtype)
    drives, biases = np.empty((gates, rows, n), Vt.dtype), np.empty((2, rows, n), Vt.dtype)
    unsaved = np.empty((rows, n), Vt.dtype)
    for i in range(rows):
        biases[:, i] = bias
    for lo in range(first * rows, min(last * rows, B), rows):
        hi = min(lo + rows, B)
        H = h[lo:hi]
        y = as_vector(H)
        for t in range(T):
            P = Z[t, lo:hi] if len(Z) > 0 else gate[: hi - lo]
            Q = C[t, lo:hi] if len(C) > 0 else candidate[: hi - lo]
            s = as_vector(S[t + 1, lo:hi] if len(S) > 1 else unsaved)
            z, c = as_vector(P), as_vector(Q)
            np.dot(H, Vt[gates - 1], Q)
            if gates == 1:
                z[:] = c
            else:
                np.dot(H, Vt[0], P)
            for k in range(len(Wt)):
                np.dot(X[0, t, lo:hi], Wt[k], drives[k, : hi - lo])
            first_drive = drives[0, : hi - lo] if len(Wt) > 0 else X[0, t, lo:hi]
            last_drive = drives[gates - 1, : hi - lo] if len(Wt) > 0 else X[gates - 1, t, lo:hi]
            activate(_SIGMOID, z, as_vector(first_drive), as_vector(biases[0]))
            activate(code, c, as_vector(last_drive), as_vector(biases[1]))
            for j in range(c.size):
                y[j] = z[j] * y[j] + (p * (one - z[j]) + q) * c[j]
                s[j] = y[j]


@cached_njit(nogil=True, allocates=True)
def _backward(G, V, g, S, Z, C, D, sums, dbias, p, q, code, rows, first, last):  # type: ignore[no-untyped-def]
    (gates, n, _), T, B = V.shape, len(C), len(g)
    p, q, zero, one = V.dtype.type(p), V.dtype.type(q), V.dtype.type(0), V.dtype.type(1)
    products, total = np.empty((2, rows, n), V.dtype), np.empty((2, rows, n), V.dtype)
    unused, nothing = np.empty((rows, n), V.dtype), np.zeros((rows, n), V.dtype)
    for block in range(first, last):
        lo, hi = block * rows, min(block * rows + rows, B)
        y, p0, p1 = as_vector(g[lo:hi]), as_vector(products[0]), as_vector(products[1])
        sum_z, sum_c = as_vector(total[0]), as_vector(total[1])
        products[:] = zero
        total[:] = zero
        for t in range(T - 1, -1, -1):
            s, z, c = as_vector(S[t, lo:hi]), as_vector(Z[t, lo:hi]), as_vector(C[t, lo:hi])
            dz = as_vector(D[0, t, lo:hi] if gates == 2 else unused)
            dc = as_vector(D[gates - 1, t, lo:hi])
            e = as_vector(G[t, lo:hi] if len(G) > 0 else nothing)
            sp, sq = zero, zero
            for j in range(y.size):
                x, rest = y[j] + p0[j] + p1[j] + e[j], one - z[j]
                sp += x * c[j] * rest
                sq += x * c[j]
                y[j] = x * z[j]
                gate = x * (s[j] - p * c[j]) * z[j] * rest
                candidate = activation_grad(code, x * (p * rest + q), c[j], zero, one)
                sum_z[j] += gate
                sum_c[j] += candidate
                dz[j] = gate
                dc[j] = candidate + gate if gates == 1 else candidate
            sums[0, block, t], sums[1, block, t] = sp, sq
            for k in range(gates):
                np.dot(D[k, t, lo:hi], V[k], products[k, : hi - lo])
        for j in range(y.size):
            y[j] += p0[j] + p1[j]
        for i in range(hi - lo):
            dbias[block] += total[:, i]
