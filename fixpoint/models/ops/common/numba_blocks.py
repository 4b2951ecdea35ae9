"""Parts common to the kernels compiled by numba: blocks of rows, threads, activations."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import imputils
from numba.extending import intrinsic
from numba.np import arrayobj

from fixpoint._denormals import rounds_to_zero, with_rounding
from fixpoint.models.ops.common import numba_pointwise as numba_pointwise  # `sigma` within kernels
from fixpoint.models.ops.common.numba_cache import cached_njit
from fixpoint.models.ops.common.pointwise import sigma

# OpenBLAS keeps up to 2^18 multiplications on the calling thread; 32 rows reach its full speed.
PRODUCT, ROWS = 2**18, 32


@functools.lru_cache(maxsize=1024)
def split(B: int, weights: int, threads: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return rows in a block, and for each thread its first and last (exclusive) block."""
    per_thread = max(1, -(-B // threads))
    rows = -(-per_thread // -(-per_thread // min(ROWS, max(1, PRODUCT // weights))))
    blocks = -(-B // rows)
    threads = max(1, min(threads, blocks))
    edges = [i * blocks // threads for i in range(threads + 1)]
    return rows, tuple(itertools.pairwise(edges))


openmp: Any = None
with contextlib.suppress(AttributeError, OSError):  # torch's own, where it is the GNU one
    openmp = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY).GOMP_parallel
_Region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run(work: Callable[[int, int], None], ranges: tuple[tuple[int, int], ...]) -> None:
    """Call `work(first, last)` for all ranges of blocks, on threads of torch's pool where possible.

    After each parallel operation the threads of torch spin for milliseconds: other threads would
    have to fight them for the cores. No product of the work may take more than `PRODUCT`
    multiplications: OpenBLAS would spread it over threads, and warn within those of torch.
    """
    if len(ranges) == 1:
        return work(*ranges[0])
    work(0, 0)  # compile here: threads may have small stacks
    each = with_rounding(work, rounds_to_zero())  # as this thread does
    if openmp is None:
        with ThreadPoolExecutor(len(ranges)) as pool:
            list(pool.map(each, *zip(*ranges, strict=True)))
    else:
        todo, errors = iter(ranges), []

        def region(_: int) -> None:
            try:
                for blocks in todo:
                    each(*blocks)
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


@intrinsic
def no_alias(typing_context):  # type: ignore[no-untyped-def]
    """Say that no two arrays given to the calling function overlap where one is written.

    LLVM gives up on a loop over many arrays that it would have to compare at run time.
    """

    def mark(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        for argument in builder.function.args:
            if isinstance(argument.type, ir.PointerType):
                argument.attributes.add("noalias")
        return context.get_dummy_value()

    return types.none(), mark


@cached_njit()
def activate(code, c, u, bias):  # type: ignore[no-untyped-def]
    """Write c <- sigma(c + u + bias)."""
    widest_vectors()
    for j in range(c.size):
        c[j] = sigma(code, c[j] + (u[j] + bias[j]))


@intrinsic
def as_vector(typing_context, X):  # type: ignore[no-untyped-def]
    """View a block (rows, n) as one vector, whose loops leave no remainder in each row."""
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
    """Write out <- a b."""
    np.dot(a, b, out)
