"""Integer arithmetic of the generated programs, on NumPy arrays: equal to the C bit by bit."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

Integers = np.ndarray
"""int64."""

VALUE_LIMIT = 32767
"""Largest absolute value of what a matrix is multiplied by, 16 bits."""
STATE_LIMIT = 32767 << 16
"""Of the state, 32 bits; the upper 16 are multiplied."""
SUM_LIMIT = 1 << 28
"""Of each term of a sum: seven of them fit in 32 bits."""
SIGMA_LIMIT = 1 << 44
"""Of sigma in the units of the state, which it may exceed by far where steps are small."""
SEGMENTS = 256
"""Pieces of tanh over [0, 8)."""
TANH = np.minimum(np.rint(65536 * np.tanh(np.arange(SEGMENTS + 1) / 32)), 65535).astype(np.uint16)
"""65536 tanh(i / 32)."""
LOG = np.rint(32768 * np.log2(1 + np.arange(65) / 64)).astype(np.uint16)
"""32768 log2(1 + i / 64)."""


def round_shift(value: Integers, shift: int) -> Integers:
    """Return value / 2^shift to the nearest integer, halves away from 0."""
    half = 1 << shift >> 1
    rounded: Integers = np.where(value < 0, -((half - value) >> shift), (value + half) >> shift)
    return rounded


def clamp(value: Integers, limit: int) -> Integers:
    """Return the value, or the limit that it passes."""
    return np.clip(value, -limit, limit)


class Factor(NamedTuple):
    """A positive factor mantissa / 2^shift by which integers are multiplied."""

    mantissa: int
    shift: int

    @classmethod
    def of(cls, factor: float, largest: int) -> Factor:
        """Return the nearest factor with which values up to `largest` are below 2^62.

        >>> Factor.of(0.75, 1000)
        Factor(mantissa=805306368, shift=30)
        """
        bits = max(1, min(30, 62 - int(largest).bit_length()))
        shift = min(62, bits - math.frexp(factor)[1])
        if shift < 0:
            raise ValueError(
                f"the scales of this network differ by a factor of {factor:g}, which fixed point "
                "cannot express: export it with --bits 32"
            )
        return cls(min(round(math.ldexp(factor, shift)), (1 << bits) - 1), shift)

    def times(self, value: Integers) -> Integers:
        """Return the product with an integer, to the nearest."""
        return round_shift(value * self.mantissa, self.shift)


def tanh_q16(value: Integers, fraction_bits: int) -> Integers:
    """Return 65536 tanh(value / 2^fraction_bits), linear between the nodes of `TANH`; at least 5
    bits.
    """
    size, shift = np.abs(value), fraction_bits - 5
    index = np.minimum(size >> shift, SEGMENTS - 1)
    inside = size - (index << shift)
    nodes = TANH.astype(np.int64)
    low, rise = nodes[index], nodes[index + 1] - nodes[index]
    result = np.where(size >> shift >= SEGMENTS, nodes[-1], low + round_shift(rise * inside, shift))
    return np.where(value < 0, -result, result)


def sigmoid_q16(value: Integers, fraction_bits: int) -> Integers:
    """Return 65536 sigmoid(value / 2^fraction_bits), by (1 + tanh(value / 2)) / 2."""
    return 32768 + round_shift(tanh_q16(value, fraction_bits + 1), 1)


def log2_asinh_q16(value: Integers) -> Integers:
    """Return 65536 asinh(value / 65536) / ln 2, values up to 2^30, by log2(v + sqrt(v^2 + 1))."""
    size = np.abs(value)
    total = size + _square_root(size * size + (1 << 32))
    exponent = np.frexp(total.astype(np.float64))[1].astype(np.int64) - 1
    mantissa = total << (31 - exponent)
    index, inside = (mantissa >> 25) & 63, (mantissa >> 9) & 0xFFFF
    nodes = LOG.astype(np.int64)
    part = 2 * nodes[index] + round_shift((nodes[index + 1] - nodes[index]) * inside, 15)
    result = ((exponent - 16) << 16) + part
    return np.where(value < 0, -result, result)


def _square_root(value: Integers) -> Integers:
    """Return the largest integer whose square is at most the value."""
    root = np.sqrt(value.astype(np.float64)).astype(np.int64)
    root -= root * root > value
    return root + ((root + 1) * (root + 1) <= value)


def product(matrix: Integers, value: Integers) -> Integers:
    """Return value (B, columns) times the transpose of matrix (rows, columns), exact below 2^53."""
    return (value.astype(np.float64) @ matrix.T.astype(np.float64)).astype(np.int64)


def function_bound(name: str) -> float:
    """Return the bound of the error of tanh, sigmoid or asinh, rounding included.

    Between nodes a distance s apart linear interpolation is wrong by at most s^2 / 8 max |f''|:
    max |tanh''| = 4 / (3 sqrt(3)) with s = 1 / 32, max |log2''| = 1 / ln 2 with s = 1 / 64. Nodes
    and results are rounded by half a unit each, beyond 8 tanh is 1 - 2^-16, and the square root is
    low by less than a unit.
    """
    unit = 2.0**-16
    tanh = (1 / 32) ** 2 / 8 * 4 / (3 * math.sqrt(3)) + 2 * unit
    if name == "asinh":
        log2 = (1 / 64) ** 2 / 8 / math.log(2) + 3 * unit
        return log2 * math.log(2) + 2 * unit
    return tanh if name == "tanh" else tanh / 2 + unit
