"""Numbers below the smallest normal one, with which most processors calculate many times slower.

A gradient that vanishes over time becomes such a number, and can remain one: 0.9 times the smallest
number of all is rounded to that number. On an Intel Xeon a backward pass then took 4 to 20 times as
long.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

GRAIN = 32768
"""Elements for which an operation of torch takes one more thread."""

_pools = threading.local()


def rounds_to_zero() -> bool:
    """Tell whether this thread rounds such results to 0."""
    return sys.float_info.min / 2 == 0


def with_rounding(function: Callable[P, R], to_zero: bool) -> Callable[P, R]:
    """Round such results to 0 within a function, or do not, in the thread that calls it.

    Nothing changes on a processor that cannot.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        before = rounds_to_zero()
        if before == to_zero:
            return function(*args, **kwargs)
        try:  # around the change as well: an interrupt can follow it at once
            torch.set_flush_denormal(to_zero)
            return function(*args, **kwargs)
        finally:
            torch.set_flush_denormal(before)

    return call


def without_denormals(function: Callable[P, R]) -> Callable[P, R]:
    """Round such results to 0 within a function, in the thread that calls it.

    Threads of torch that start within it keep this mode, so those that it has for this thread start
    before. Nothing happens while torch.compile traces.
    """
    rounded = with_rounding(function, True)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        _start_pool()
        return rounded(*args, **kwargs)

    return call


def _start_pool() -> None:
    """Start the threads that torch has for operations of this one, once for each number of them."""
    count = torch.get_num_threads()
    if getattr(_pools, "count", 1) != count:
        torch.zeros(GRAIN * count, device="cpu")
        _pools.count = count
