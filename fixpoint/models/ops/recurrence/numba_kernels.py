"""The two passes of any recurrence, compiled by numba.

A block of rows runs through the whole sequence by itself: its states and matrices remain in the
first cache levels, a product is one small `np.dot`, and everything elementwise is one loop over
its results, into which the step is inlined. Threads get blocks, never parts of a product.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit
from numba.extending import overload
from torch import Tensor

from fixpoint.models.ops.common.numba_blocks import (
    PRODUCT,
    no_alias,
    run,
    split,
    widest_vectors,
)
from fixpoint.models.ops.common.numba_cache import FAST, SOURCES, cached_njit
from fixpoint.models.ops.common.numba_pointwise import INLINED
from fixpoint.models.ops.recurrence.arguments import BackwardArguments, ForwardArguments, Operands
from fixpoint.models.ops.recurrence.numba_tuples import (
    add_entries,
    add_gradients,
    drives_at,
    entries,
    plus,
    put_entries,
    put_sums,
    rows_at,
    rows_at_or,
    rows_of,
    rows_of_each,
    zeros_of,
)


def forward(arguments: ForwardArguments) -> None:
    step, operands, y, S, O, kept, every = arguments
    X, Wt = _inputs(operands)
    bias = tuple(operands.bias.detach().numpy())
    Vt = tuple(operands.V.detach().mT.contiguous().numpy())
    tensors: Any = map(Tensor.detach, operands.w), y, S, O, kept
    w, *written = [tuple(map(Tensor.numpy, v)) for v in tensors]
    rows, ranges = split(len(y[0]), max(Vt[0].size, Wt[0].size), torch.get_num_threads())
    kernel = _compiled(type(step))[0]  # type: ignore[arg-type]
    arguments_ = step, X, Wt, bias, Vt, w, *written, operands.K, every, rows
    run(functools.partial(kernel, *arguments_), ranges)


def backward(arguments: BackwardArguments) -> tuple[Tensor, Tensor]:
    step, G, V, w, K, biases, g, S, kept, D = arguments
    rows, ranges = split(len(g[0]), V[0].numel(), torch.get_num_threads())
    blocks_, n = ranges[-1][1], V.shape[1]
    dw, dbias = g[0].new_zeros(len(w), blocks_, len(D[0])), g[0].new_zeros(biases, blocks_, n)
    tensors: Any = G, V.detach(), map(Tensor.detach, w), g, S, kept, D, dw, dbias
    arrays = [tuple(map(Tensor.numpy, v)) for v in tensors]
    kernel = _compiled(type(step))[1]  # type: ignore[arg-type]
    arguments_ = step, *arrays, K, rows
    run(functools.partial(kernel, *arguments_), ranges)
    return dw.sum(1), dbias.sum(1)


def _inputs(operands: Operands) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return for each product x and W^T, or u and no W where W is too wide for blocks of rows."""
    x, W, V = operands.x.detach(), operands.W, operands.V.detach()
    if W is not None and 0 < 8 * W[0].numel() <= PRODUCT:
        return (x.numpy(),) * len(V), tuple(W.detach().mT.contiguous().numpy())
    drives = tuple([u.detach().contiguous().numpy() for u in operands.drives()])
    return drives, (V[0, :0].numpy(),) * len(V)


@functools.cache
def _compiled(kind: Any) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return kernels for a kind of step, cached until its file or one of this package changes."""
    own = Path(inspect.getfile(kind))
    inside = any(folder in own.parents for folder in SOURCES)
    compiled = cached_njit(SOURCES if inside else (*SOURCES, own), nogil=True, allocates=True)
    return compiled(_forward), compiled(_backward)


def _take_step(kind, h, p, u, b, w):  # type: ignore[no-untyped-def]
    raise NotImplementedError


def _pull_back(kind, g, h, kept, w):  # type: ignore[no-untyped-def]
    raise NotImplementedError


def _places(kind):  # type: ignore[no-untyped-def]
    raise NotImplementedError


@overload(_take_step, jit_options=INLINED)
def _step_of_kind(kind, h, p, u, b, w):  # type: ignore[no-untyped-def]
    step = njit(**INLINED)(kind.instance_class.step)
    return lambda kind, h, p, u, b, w: step(kind, h, p, u, b, w)


@overload(_pull_back, jit_options=INLINED)
def _pullback_of_kind(kind, g, h, kept, w):  # type: ignore[no-untyped-def]
    pullback = njit(**INLINED)(kind.instance_class.pullback)
    return lambda kind, g, h, kept, w: pullback(kind, g, h, kept, w)


@overload(_places, jit_options=INLINED)
def _places_of_kind(kind):  # type: ignore[no-untyped-def]
    """Find the place of each product's gradient among the d of a pullback."""
    places = kind.instance_class.products
    return lambda kind: places


@njit(**FAST)
def _advance(kind, y, p, u, b, w, s, o, kept):  # type: ignore[no-untyped-def]
    """Advance a block by one step, its vectors taken apart entry by entry."""
    widest_vectors()
    no_alias()
    for j in range(y[0].size):
        new, values = _take_step(
            kind, entries(y, j), entries(p, j), entries(u, j), entries(b, j), w
        )
        put_entries(y, j, new)
        put_entries(s, j, new)
        put_entries(o, j, new)
        put_entries(kept, j, values)


@njit(**FAST)
def _retreat(kind, y, p, e, h, kept, w, d, total):  # type: ignore[no-untyped-def]
    """Pull back a block: y <- gradients of the states before; returns those of the scalars."""
    widest_vectors()
    no_alias()
    sums = zeros_of(w)
    for j in range(y[0].size):
        g = add_gradients(entries(y, j), entries(p, j), entries(e, j))
        dh, gradients, biases, scalars = _pull_back(kind, g, entries(h, j), entries(kept, j), w)
        put_entries(y, j, dh)
        put_entries(d, j, gradients)
        add_entries(total, j, biases)
        sums = plus(sums, scalars)
    return sums


@njit(**FAST)
def _add(y, p):  # type: ignore[no-untyped-def]
    for j in range(y.size):
        y[j] += p[j]


def _forward(kind, X, Wt, bias, Vt, w, y, S, O, kept, K, every, rows, first, last):  # type: ignore[no-untyped-def]
    widest_vectors()
    (B, n), G, dtype = y[0].shape, len(Vt), Vt[0].dtype
    P, U = np.empty((G, rows, n), dtype), np.empty((G, rows, n), dtype)
    unsaved, unseen = np.empty((len(y), rows, n), dtype), np.empty((len(y), rows, n), dtype)
    values, biases = np.empty((len(kept), rows, n), dtype), np.empty((len(bias), rows, n), dtype)
    for k in range(len(bias)):
        biases[k, :] = bias[k]
    for lo in range(first * rows, min(last * rows, B), rows):
        hi = min(lo + rows, B)
        H, count = y[0][lo:hi], hi - lo
        states, p = rows_of(y, lo, hi), rows_of_each(Vt, P, count)
        b = rows_of_each(bias, biases, count)
        for m in range(len(X[0]) * K):
            t, k = divmod(m, K)
            for g in range(G):
                np.dot(H, Vt[g], P[g, :count])
                if k == 0 and len(Wt[g]) > 0:
                    np.dot(X[g][t, lo:hi], Wt[g], U[g, :count])
            u = drives_at(X, Wt, t, lo, hi, U)
            s = rows_at_or(S, (m + 1) % every == 0, (m + 1) // every, lo, hi, unsaved)
            o = rows_at_or(O, k == K - 1, t, lo, hi, unseen)
            c = rows_at_or(kept, True, m, lo, hi, values)
            _advance(kind, states, p, u, b, entries(w, m), s, o, c)


def _backward(kind, G, V, w, g, S, kept, D, dw, dbias, K, rows, first, last):  # type: ignore[no-untyped-def]
    widest_vectors()
    (B, n), M, dtype, places = g[0].shape, len(D[0]), V[0].dtype, _places(kind)
    P, total = np.empty((len(V), rows, n), dtype), np.empty((len(dbias), rows, n), dtype)
    nothing = np.zeros((len(g), rows, n), dtype)
    for block in range(first, last):
        lo, hi = block * rows, min(block * rows + rows, B)
        count = hi - lo
        y, p = rows_of(g, lo, hi), rows_of_each(V, P, count)
        sums = rows_of_each(dbias, total, count)
        P[:] = dtype.type(0)
        total[:] = dtype.type(0)
        for m in range(M - 1, -1, -1):
            t, k = divmod(m, K)
            e = rows_at_or(G, k == K - 1, t, lo, hi, nothing)
            h, c, d = rows_at(S, m, lo, hi), rows_at(kept, m, lo, hi), rows_at(D, m, lo, hi)
            scalars = _retreat(kind, y, p, e, h, c, entries(w, m), d, sums)
            put_sums(dw, block, m, scalars)
            for i in range(len(V)):
                np.dot(D[places[i]][m, lo:hi], V[i], P[i, :count])
        for i in range(len(V)):
            _add(y[0], p[i])
        for k in range(len(dbias)):
            for i in range(count):
                dbias[k][block] += total[k, i]
