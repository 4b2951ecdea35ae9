"""The two sweeps of the fused recurrence, compiled by numba.

A block of rows runs through the whole sequence by itself: its state and A stay in the first cache
levels, the product is one small `np.dot`, and everything elementwise is one pass over its result.
Threads get blocks, never parts of a product. Arguments: see `_fused_torch`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numba import njit
from numba.extending import overload
from torch import Tensor
from torch.nn.functional import linear

_CODES = {"identity": 0, "relu": 1, "tanh": 2, "sigmoid": 3}
# Loops vectorise where sums may be reordered and division does not raise; NaN and infinity keep
# their meaning.
_FAST: Any = {"fastmath": {"reassoc", "contract", "nsz"}, "error_model": "numpy"}
# OpenBLAS keeps up to 2^18 multiplications on the calling thread; 32 rows reach its full speed.
_PRODUCT, _ROWS = 2**18, 32
MAX_SIZE = 256  # units n; above, a block has too few rows and call overhead is no longer felt


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
    if W is not None and not 0 < 8 * n * W.shape[1] <= _PRODUCT:  # too wide for blocks of rows
        X, W, bias = linear(X, W, bias), None, None
    Wt = A[:0] if W is None else W.t().contiguous()
    shift = A.new_zeros(n) if bias is None else bias
    arrays = [x.detach().numpy() for x in (X, Wt, shift, A.t().contiguous(), a, b, h, S, C)]
    rows, shares = _split(len(h), max(A.numel(), Wt.numel()))
    _run(lambda lo, hi: _forward(*arrays, _CODES[activation], every, rows, lo, hi), shares)


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
    rows, shares = _split(len(g), A.numel())
    sums = a.new_zeros(2, shares[-1][1], *a.shape)  # (da and db, block, T, K)
    da, db = sums.numpy()
    _run(lambda lo, hi: _backward(*arrays, da, db, _CODES[activation], rows, lo, hi), shares)
    da_total, db_total = sums.sum(1)
    return da_total, db_total


def _split(B: int, weights: int) -> tuple[int, list[tuple[int, int]]]:
    """Rows in a block, and for each thread its first and last (exclusive) block."""
    threads = torch.get_num_threads()
    share = max(1, -(-B // threads))
    rows = -(-share // -(-share // min(_ROWS, max(1, _PRODUCT // weights))))
    blocks = -(-B // rows)
    threads = max(1, min(threads, blocks))
    edges = [i * blocks // threads for i in range(threads + 1)]
    return rows, list(itertools.pairwise(edges))


_openmp: Any = None
with contextlib.suppress(AttributeError, OSError):  # torch's own, where it is the GNU one
    _openmp = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY).GOMP_parallel
_Region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _run(work: Callable[[int, int], None], shares: list[tuple[int, int]]) -> None:
    """Call `work(*share)` for all shares, each on a thread of torch's own pool where possible.

    After each parallel operation the threads of torch spin for milliseconds: other threads would
    have to fight them for the cores.
    """
    if len(shares) == 1:
        return work(*shares[0])
    work(0, 0)  # compile here: threads may have small stacks
    if _openmp is None:
        with ThreadPoolExecutor(len(shares)) as pool:
            list(pool.map(work, *zip(*shares, strict=True)))
    else:
        todo, errors = iter(shares), []

        def region(_: int) -> None:
            try:
                for share in todo:
                    work(*share)
            except BaseException as error:  # it cannot pass through OpenMP
                errors.append(error)

        _openmp(_Region(region), None, len(shares), 0)
        if errors:
            raise errors[0]


def _tanh(x):  # type: ignore[no-untyped-def]
    """tanh(x): in float32 a rational function that vectorises."""
    raise NotImplementedError


# Coefficients of x, x^3, .. and of 1, x^2, .. within a few units in the last place on [-8, 8].
# Source: Eigen, generic_fast_tanh_float.
_P = tuple(
    np.float32(p)
    for p in (
        4.89352455891786e-03,
        6.37261928875436e-04,
        1.48572235717979e-05,
        5.12229709037114e-08,
        -8.60467152213735e-11,
        2.00018790482477e-13,
        -2.76076847742355e-16,
    )
)
_Q = tuple(
    np.float32(q)
    for q in (
        4.89352518554385e-03,
        2.26843463243900e-03,
        1.18534705686654e-04,
        1.19825839466702e-06,
    )
)
_EDGE = np.float32(7.90531110763549805)  # beyond, tanh is 1 in float32


@overload(_tanh, jit_options=_FAST)
def _tanh_of_type(x):  # type: ignore[no-untyped-def]
    if str(x) == "float64":
        return lambda x: math.tanh(x)

    def rational(x):  # type: ignore[no-untyped-def]
        x = -_EDGE if x < -_EDGE else (_EDGE if x > _EDGE else x)
        s = x * x
        p = _P[5] + s * _P[6]
        p = _P[3] + s * (_P[4] + s * p)
        p = x * (_P[0] + s * (_P[1] + s * (_P[2] + s * p)))
        return p / (_Q[0] + s * (_Q[1] + s * (_Q[2] + s * _Q[3])))

    return rational


@njit(cache=True, **_FAST)
def _sigma(code, c, u, shift):  # type: ignore[no-untyped-def]
    """c <- sigma(c + u + shift)."""
    zero, half = c.dtype.type(0), c.dtype.type(0.5)
    if code == 0:
        for j in range(c.size):
            c[j] += u[j] + shift[j]
    elif code == 1:
        for j in range(c.size):
            x = c[j] + (u[j] + shift[j])
            c[j] = zero if x <= zero else x
    elif code == 2:
        for j in range(c.size):
            c[j] = _tanh(c[j] + (u[j] + shift[j]))
    else:
        for j in range(c.size):
            c[j] = half + half * _tanh(half * (c[j] + (u[j] + shift[j])))


@njit(cache=True, **_FAST)
def _pull(code, d, c):  # type: ignore[no-untyped-def]
    """d <- d sigma'(.) from c = sigma(.)."""
    zero, one = d.dtype.type(0), d.dtype.type(1)
    if code == 1:
        for j in range(d.size):
            d[j] = zero if c[j] <= zero else d[j]
    elif code == 2:
        for j in range(d.size):
            d[j] *= one - c[j] * c[j]
    elif code == 3:
        for j in range(d.size):
            d[j] *= c[j] * (one - c[j])


@njit(cache=True, **_FAST)
def _flat(X):  # type: ignore[no-untyped-def]
    """A block (rows, n) as one vector, whose loops leave no remainder in each row."""
    return X.reshape(X.size)


@njit(nogil=True, cache=True, **_FAST)
def _forward(X, Wt, shift, At, a, b, h, S, C, code, every, rows, first, last):  # type: ignore[no-untyped-def]
    (T, K), (B, n) = a.shape, h.shape
    products, drives = np.empty((rows, n), At.dtype), np.empty((rows, n), At.dtype)
    unsaved, shifts = np.empty((rows, n), At.dtype), np.empty((rows, n), At.dtype)
    shifts[:] = shift
    for lo in range(first * rows, min(last * rows, B), rows):
        hi = min(lo + rows, B)
        H = h[lo:hi]
        y = _flat(H)
        for m in range(T * K):
            t, k = divmod(m, K)
            at, bt = a[t, k], b[t, k]
            U = drives[: hi - lo] if len(Wt) > 0 else X[t, lo:hi]
            P = C[m, lo:hi] if len(C) > 0 else products[: hi - lo]
            s = _flat(S[(m + 1) // every, lo:hi] if (m + 1) % every == 0 else unsaved)
            if k == 0 and len(Wt) > 0:
                np.dot(X[t, lo:hi], Wt, U)
            np.dot(H, At, P)
            c = _flat(P)
            _sigma(code, c, _flat(U), _flat(shifts))
            for j in range(c.size):
                y[j] = at * y[j] + bt * c[j]
                s[j] = y[j]


@njit(nogil=True, cache=True, **_FAST)
def _backward(G, A, a, b, g, S, C, D, V, da, db, code, rows, first, last):  # type: ignore[no-untyped-def]
    (T, K), (B, n) = a.shape, g.shape
    zero = A.dtype.type(0)
    products, nothing = np.empty((rows, n), A.dtype), np.zeros((rows, n), A.dtype)
    for block in range(first, last):
        lo, hi = block * rows, min(block * rows + rows, B)
        P = products[: hi - lo]
        y, p = _flat(g[lo:hi]), _flat(P)
        p[:] = zero
        for m in range(T * K - 1, -1, -1):
            t, k = divmod(m, K)
            at, bt, sa, sb = a[t, k], b[t, k], zero, zero
            s, c, d = _flat(S[m, lo:hi]), _flat(C[m, lo:hi]), _flat(D[m, lo:hi])
            e = _flat(G[t, lo:hi] if k == K - 1 and len(G) > 0 else nothing)
            for j in range(y.size):
                x = y[j] + p[j] + e[j]
                sa += x * s[j]
                sb += x * c[j]
                d[j] = bt * x
                y[j] = at * x
            da[block, t, k], db[block, t, k] = sa, sb
            _pull(code, d, c)
            if len(V) > 0:
                v = _flat(V[t, lo:hi])
                for j in range(v.size):
                    v[j] = d[j] if k == K - 1 else v[j] + d[j]
            np.dot(D[m, lo:hi], A, P)
        for j in range(y.size):
            y[j] += p[j]
