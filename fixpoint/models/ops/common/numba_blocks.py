"""What the kernels compiled by numba share: blocks of rows, threads, activations."""

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
from numba import types
from numba.core import imputils
from numba.extending import intrinsic, overload
from numba.np import arrayobj

from fixpoint.models.ops.common.numba_cache import FAST, cached_njit

CODES = {"identity": 0, "relu": 1, "tanh": 2, "sigmoid": 3}
# OpenBLAS keeps up to 2^18 multiplications on the calling thread; 32 rows reach its full speed.
PRODUCT, ROWS = 2**18, 32


def split(B: int, weights: int) -> tuple[int, list[tuple[int, int]]]:
    """Rows in a block, and for each thread its first and last (exclusive) block."""
    threads = torch.get_num_threads()
    per_thread = max(1, -(-B // threads))
    rows = -(-per_thread // -(-per_thread // min(ROWS, max(1, PRODUCT // weights))))
    blocks = -(-B // rows)
    threads = max(1, min(threads, blocks))
    edges = [i * blocks // threads for i in range(threads + 1)]
    return rows, list(itertools.pairwise(edges))


openmp: Any = None
with contextlib.suppress(AttributeError, OSError):  # torch's own, where it is the GNU one
    openmp = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY).GOMP_parallel
_Region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run(work: Callable[[int, int], None], ranges: list[tuple[int, int]]) -> None:
    """Call `work(first, last)` for all ranges of blocks, on threads of torch's pool where possible.

    After each parallel operation the threads of torch spin for milliseconds: other threads would
    have to fight them for the cores. No product of the work may take more than `PRODUCT`
    multiplications: OpenBLAS would spread it over threads, and warn within those of torch.
    """
    if len(ranges) == 1:
        return work(*ranges[0])
    work(0, 0)  # compile here: threads may have small stacks
    if openmp is None:
        with ThreadPoolExecutor(len(ranges)) as pool:
            list(pool.map(work, *zip(*ranges, strict=True)))
    else:
        todo, errors = iter(ranges), []

        def region(_: int) -> None:
            try:
                for blocks in todo:
                    work(*blocks)
            except BaseException as error:  # it cannot pass through OpenMP
                errors.append(error)

        openmp(_Region(region), None, len(ranges), 0)
        if errors:
            raise errors[0]


@intrinsic
def widest_vectors(typing_context):  # type: ignore[no-untyped-def]
    """Let the loops of the calling function use all bits of a vector register.

    LLVM prefers half of them on most processors with 512, which were slowed down by their use.
    """

    def mark(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        # llvmlite's own `add` takes names alone, not those with a value.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), mark


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
# Beyond the edge exactly 1, so that a gate held open for many steps does not leak.
_EDGE, _ONE = np.float32(7.90531110763549805), np.float32(1)


@overload(_tanh, jit_options=FAST)
def _tanh_of_type(x):  # type: ignore[no-untyped-def]
    if str(x) == "float64":
        return lambda x: math.tanh(x)

    def rational(x):  # type: ignore[no-untyped-def]
        s = x * x
        p = _P[5] + s * _P[6]
        p = _P[3] + s * (_P[4] + s * p)
        p = x * (_P[0] + s * (_P[1] + s * (_P[2] + s * p)))
        y = p / (_Q[0] + s * (_Q[1] + s * (_Q[2] + s * _Q[3])))
        return _ONE if x > _EDGE else (-_ONE if x < -_EDGE else y)

    return rational


@cached_njit()
def activate(code, c, u, bias):  # type: ignore[no-untyped-def]
    """c <- sigma(c + u + bias)."""
    widest_vectors()
    zero, half = c.dtype.type(0), c.dtype.type(0.5)
    if code == 0:
        for j in range(c.size):
            c[j] += u[j] + bias[j]
    elif code == 1:
        for j in range(c.size):
            x = c[j] + (u[j] + bias[j])
            c[j] = zero if x <= zero else x
    elif code == 2:
        for j in range(c.size):
            c[j] = _tanh(c[j] + (u[j] + bias[j]))
    else:
        for j in range(c.size):
            c[j] = half + half * _tanh(half * (c[j] + (u[j] + bias[j])))


@cached_njit()
def activation_grad(code, d, c, zero, one):  # type: ignore[no-untyped-def]
    """d sigma'(.) from c = sigma(.), all of them numbers; the loop around it vectorises."""
    if code == 0:
        return d
    if code == 1:
        return zero if c <= zero else d
    if code == 2:
        return d * (one - c * c)
    return d * (c * (one - c))


@intrinsic
def as_vector(typing_context, X):  # type: ignore[no-untyped-def]
    """A block (rows, n) as one vector, whose loops leave no remainder in each row."""
    vector = X.copy(ndim=1)

    def view(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        block = arrayobj.make_array(X)(context, builder, *arguments)
        out = arrayobj.make_array(vector)(context, builder)
        arrayobj.populate_array(
            out,
            data=block.data,
            shape=[block.nitems],
            strides=[block.itemsize],
            itemsize=block.itemsize,
            meminfo=block.meminfo,
            parent=block.parent,
        )
        return imputils.impl_ret_borrowed(context, builder, vector, out._getvalue())

    return vector(X), view


@cached_njit(allocates=True)
def product(a, b, out):  # type: ignore[no-untyped-def]
    """out <- a b."""
    np.dot(a, b, out)
