"""Samples of a sensor as 16 bit integers: offset, scale and mean, without a float sum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from torch import Tensor

from fixpoint.export.integers import (
    VALUE_LIMIT,
    Factor,
    Integers,
    clamp,
    function_bound,
    log2_asinh_q16,
)
from fixpoint.export.normalization import InputScale

Samples = Literal["float", "int16"]

INPUT_LIMIT = 1 << 29
"""Of a sample before its mean is subtracted."""

_TABLE_ERROR = 2.0**-10
"""Largest relative error of a scale that a table of 16 bits may have; else it has 32."""


@dataclass(frozen=True, kw_only=True, eq=False)
class IntegerInput:
    """x = nearest((sample - offset) * scale) - mean, all in units of x; asinh of it where set.

    The offset is subtracted first: as floats, which costs no digit, or as integers. What follows is
    a product that is rounded to an integer, and a difference of integers.

    Args:
        inputs: the normalization in float32.
        unit: of x.
        largest: largest absolute value of x' before asinh that does not saturate.
        samples: type of the samples, "float" or "int16".
    """

    inputs: InputScale
    unit: float
    largest: float
    samples: Samples = "float"

    @property
    def asinh_factor(self) -> Factor:
        """From 65536 asinh / ln 2 to x."""
        return Factor.of(math.log(2) / 65536 / self.unit, 1 << 21)

    @property
    def _target(self) -> float:
        """Unit of the result before asinh."""
        return 2.0**-16 if self.inputs.asinh else self.unit

    @cached_property
    def offset(self) -> np.ndarray:
        """(d,) float32, or whole numbers of 16 bit samples."""
        offset: np.ndarray = self.inputs.offset.numpy()
        return offset if self.samples == "float" else np.rint(offset).astype(np.int32)

    @cached_property
    def _table(self) -> tuple[np.ndarray, np.ndarray]:
        """The scale of each (time step, channel) as integers, and the unit of each channel."""
        scale = self.inputs.scale.double().numpy()
        varying = self.inputs.scale.numpy() != 1
        for most, kind in ((VALUE_LIMIT, np.int16), (1 << 24, np.int32)):
            units = (scale.max(0) / most).astype(np.float32)
            integers = np.rint(scale / units).astype(kind)
            error = np.abs(integers * units.astype(np.float64) / scale - 1)[varying]
            if error.max(initial=0.0) <= _TABLE_ERROR:
                break
        return integers, units

    @property
    def by_time(self) -> bool:
        """True if time steps have their own scale."""
        return self.inputs.rows > 1

    @cached_property
    def _scale(self) -> np.ndarray:
        """The scale that is computed with, float64 (T, d) or (1, d)."""
        if not self.by_time:
            return self.inputs.scale.double().numpy()
        integers, units = self._table
        scale: np.ndarray = integers * units.astype(np.float64)
        return scale

    @cached_property
    def mean(self) -> np.ndarray:
        """In units of the result before asinh, (T, d) or (1, d), 16 bits where they suffice."""
        inputs = self.inputs
        exact = inputs.offset.double().numpy() + inputs.mean.double().numpy()
        rest = (exact - self.offset) * self._scale / self._target
        mean = np.rint(np.clip(rest, -INPUT_LIMIT, INPUT_LIMIT))
        return mean.astype(np.int16 if np.abs(mean).max() <= VALUE_LIMIT else np.int32)

    @cached_property
    def float_units(self) -> np.ndarray:
        """Factors of a float difference besides the table: twice, in units of x, (d,)."""
        units = self._table[1].astype(np.float64) if self.by_time else self._scale[0]
        return (2 * units / self._target).astype(np.float32)

    @cached_property
    def factors(self) -> list[Factor]:
        """The same of 16 bit samples as a `Factor` for each channel."""
        most = 1 << 17
        if self.by_time:
            most *= int(np.abs(self._table[0]).max())
        return [Factor.of(float(unit) / 2, most) for unit in self.float_units.astype(np.float64)]

    def quantize(self, x: np.ndarray, t: int) -> Integers:
        """Return x (B, d) in 16 bits, of samples (B, d), float32, at time step t."""
        mean = self.mean[t % len(self.mean)].astype(np.int64)
        value = clamp(self._product(x, t), INPUT_LIMIT) - mean
        if self.inputs.asinh:
            value = self.asinh_factor.times(log2_asinh_q16(clamp(value, INPUT_LIMIT)))
        return clamp(value, VALUE_LIMIT)

    def _product(self, x: np.ndarray, t: int) -> Integers:
        row = self._table[0][t] if self.by_time else np.ones(x.shape[1], np.int64)
        if self.samples == "int16":
            difference = (x.astype(np.int64) - self.offset) * row.astype(np.int64)
            columns = zip(self.factors, difference.T, strict=True)
            return np.stack([factor.times(column) for factor, column in columns], 1)
        twice = np.clip(self._float_product(x, t), -(2.0**30), 2.0**30)
        return _half(np.trunc(twice).astype(np.int64))

    def _float_product(self, x: np.ndarray, t: int) -> np.ndarray:
        factor = self.float_units
        if self.by_time:
            factor = self._table[0][t].astype(np.float32) * factor
        with np.errstate(over="ignore", invalid="ignore"):
            product: np.ndarray = (x - self.offset) * factor
        return product

    def is_good(self, windows: Tensor) -> np.ndarray:
        """Return which windows (B, T, d) have values that are finite, also after normalization."""
        if self.samples == "int16":
            return np.ones(len(windows), bool)
        x = windows.float().numpy()
        steps = (np.isfinite(self._float_product(x[:, t], t)).all(1) for t in range(x.shape[1]))
        return np.logical_and.reduce(list(steps), dtype=bool)

    @property
    def bound(self) -> float:
        """The bound of the error of x, in units of x', where it does not saturate."""
        inputs, scale = self.inputs, self.inputs.scale.double().numpy()
        varying = self.inputs.scale.numpy() != 1
        relative = np.abs(self._scale / scale - 1)[varying].max(initial=0.0)
        exact = inputs.offset.double().numpy() + inputs.mean.double().numpy()
        swing = np.abs((exact - self.offset) * self._scale).max()
        rounding = inputs.rounding(self.largest) if self.samples == "float" else 0.0
        argument = self.largest * relative + rounding + 2.0**-22 * (self.largest + swing)
        if not inputs.asinh:
            return float(argument + self.unit)
        # asinh shrinks differences: by 1 / sqrt(1 + v^2) at v.
        near = 2.0**-16 + inputs.rounding(1.0) + relative + 2.0**-22 * (1 + swing)
        return float(near + function_bound("asinh") + self.unit / 2)

    @property
    def arrays(self) -> list[tuple[str, str, np.ndarray]]:
        """Name, meaning and values of the constant arrays of the program."""
        arrays = [("offset", "subtracted from a sample first", self.offset)]
        if self.by_time:
            arrays.append(("scale", "by time step and channel", self._table[0]))
        if self.samples == "float":
            arrays.append(("scale_unit", "of the scale, twice", self.float_units))
        else:
            arrays.append(("scale_mantissa", "of the scale", self._of_factors(0).astype(np.int32)))
            arrays.append(("scale_shift", "of the scale", self._of_factors(1).astype(np.int8)))
        arrays.append(("mean", "what is left of the mean after the offset", self.mean))
        return arrays

    def _of_factors(self, i: int) -> np.ndarray:
        return np.array([factor[i] for factor in self.factors])

    @property
    def template_values(self) -> dict[str, Any]:
        """Values for the template of the program."""
        return {
            "samples": self.samples,
            "asinh_factor": self.asinh_factor if self.inputs.asinh else None,
            "scale_by_time": self.by_time,
            "mean_by_time": len(self.mean) > 1,
        }


def _half(twice: Integers) -> Integers:
    """Return half of an integer, to the nearest, halves away from 0."""
    away = twice + np.sign(twice)
    half: Integers = np.sign(away) * (np.abs(away) >> 1)
    return half
