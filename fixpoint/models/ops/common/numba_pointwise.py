"""The functions of `pointwise` for numbers within a kernel compiled by numba.

Each is inlined before its loop is optimized: the loop then vectorises, once for each activation.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba.extending import overload

from fixpoint.models.ops.common.numba_cache import FAST
from fixpoint.models.ops.common.pointwise import (
    IDENTITY,
    QUANT_TANH,
    RELU,
    SIGMOID,
    TANH,
    one_minus,
    sigma,
    slope,
    zero_like,
)

INLINED: Any = FAST | {"forceinline": True}


def _tanh(x):  # type: ignore[no-untyped-def]
    """Compute tanh(x), in float32 by a rational function that vectorizes."""
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


@overload(_tanh, jit_options=INLINED)
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


def _numbers(x):  # type: ignore[no-untyped-def]
    """Return 0, 1/2 and 1 in the type of x."""
    kind = getattr(np, str(x))
    return kind(0), kind(0.5), kind(1)


@overload(sigma, jit_options=INLINED)
def _sigma(code, x):  # type: ignore[no-untyped-def]
    zero, half, one = _numbers(x)

    def value(code, x):  # type: ignore[no-untyped-def]
        if code == IDENTITY:
            return x
        if code == RELU:
            return zero if x <= zero else x
        if code == TANH:
            return _tanh(x)
        if code == SIGMOID:
            return half + half * _tanh(half * x)
        least = zero - one
        if code != QUANT_TANH:
            x, least = half * x + half, zero
        return least if x <= least else (one if x >= one else x)

    return value


@overload(slope, jit_options=INLINED)
def _slope(code, d, c):  # type: ignore[no-untyped-def]
    zero, half, one = _numbers(c)

    def value(code, d, c):  # type: ignore[no-untyped-def]
        if code == IDENTITY:
            return d
        if code == RELU:
            return zero if c <= zero else d
        if code == TANH:
            return d * (one - c * c)
        if code == SIGMOID:
            return d * (c * (one - c))
        if code == QUANT_TANH:
            return d if abs(c) < one else zero
        return half * d if zero < c and c < one else zero

    return value


@overload(one_minus, jit_options=INLINED)
def _one_minus(x):  # type: ignore[no-untyped-def]
    _, _, one = _numbers(x)
    return lambda x: one - x


@overload(zero_like, jit_options=INLINED)
def _zero_like(x):  # type: ignore[no-untyped-def]
    zero, _, _ = _numbers(x)
    return lambda x: zero
