"""A network in fixed point: the constants of its program, and the program itself on arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fixpoint.export.calibration import Calibration, QuantizedMatrix, calibrate, quantize
from fixpoint.export.integers import (
    LOG,
    SIGMA_LIMIT,
    STATE_LIMIT,
    SUM_LIMIT,
    TANH,
    VALUE_LIMIT,
    Factor,
    Integers,
    clamp,
    function_bound,
    log2_asinh_q16,
    product,
    round_shift,
    sigmoid_q16,
    tanh_q16,
)
from fixpoint.export.layers import Recurrence
from fixpoint.export.network import Network

_INPUT_OF = {"V": "h", "W": "x", "U": "g"}


@dataclass(frozen=True, kw_only=True, eq=False)
class FixedNetwork:
    """A `Network` whose weights have 8 or 16 bits, with all arithmetic on integers.

    What a matrix multiplies has 16 bits and a scale of its own; the state keeps 16 more bits below,
    so that small steps are not lost. Sums, biases and scores have 32 bits and a power of two as
    scale. All saturates and rounds to nearest.

    Args:
        network: in float32.
        bits: of the weights.
        matrices: by name, V, W, U (or their factors V1, V2, ...) and head.
        scales: of 16 bit values by name: x, h, g, V2, ...
        p_bits, score_bits: bits after the point of the argument of sigma, and of scores.
        step_bits: of leak and gain.
    """

    network: Network
    bits: int
    matrices: dict[str, QuantizedMatrix]
    scales: dict[str, float]
    p_bits: int
    score_bits: int
    step_bits: int

    def factor(self, name: str) -> Factor:
        """By which the product with a matrix becomes what it is used as."""
        if name == "head":
            source, target = "h", math.ldexp(1.0, -self.score_bits)
        elif name[1:] == "2":
            source, target = _INPUT_OF[name[0]], self.scales[name]
        else:
            source = name[0] + "2" if name[1:] else _INPUT_OF[name]
            target = math.ldexp(1.0, -self.p_bits)
        matrix = self.matrices[name]
        row_sums = np.abs(matrix.integers.astype(np.int64)).sum(1)
        largest = max(1, int(row_sums.max()) * VALUE_LIMIT)
        return Factor.of(matrix.scale * self.scales[source] / target, largest)

    @property
    def feedback_factor(self) -> Factor:
        """From the argument of sigma to what U multiplies."""
        return Factor.of(math.ldexp(1.0, -self.p_bits) / self.scales["g"], 1 << 31)

    @property
    def sigma_factor(self) -> Factor:
        """From the value of sigma to the state."""
        parts = self.network.recurrence
        unit = self.p_bits if parts.nonlinearity in ("relu", "identity") else 16
        return Factor.of(math.ldexp(1.0, 16 - unit) / self.scales["h"], 1 << 31)

    @property
    def asinh_factor(self) -> Factor:
        """From 65536 asinh / ln 2 to x."""
        return Factor.of(math.log(2) / 65536 / self.scales["x"], 1 << 21)

    @property
    def bias(self) -> Integers:
        """(1, n), or (2, n) of a gated recurrence, with `p_bits` after the point."""
        return _fixed(self.network.recurrence.bias, self.p_bits, SUM_LIMIT)

    @property
    def head_bias(self) -> Integers:
        """(C,)."""
        return _fixed(self.network.head_bias, self.score_bits, SUM_LIMIT)

    def steps(self, name: str) -> Integers:
        """leak or gain, (T, K) or (1, K), with `step_bits` after the point."""
        return _fixed(getattr(self.network.recurrence, name), self.step_bits, VALUE_LIMIT)

    @property
    def mix(self) -> Integers:
        """zeta and nu of a gated recurrence, times 65536."""
        assert self.network.recurrence.mix is not None
        return _fixed(self.network.recurrence.mix, 16, 1 << 16)

    def input_arrays(self) -> dict[str, np.ndarray]:
        """scale and shift to x, float32; of many time steps 16 bits and a unit for each channel."""
        network = self.network
        unit = 1.0 if network.asinh else self.scales["x"]
        arrays = {}
        for name in ("scale", "shift"):
            values = getattr(network, name).double().numpy() / unit
            if len(values) == 1:
                arrays[name] = values.astype(np.float32)
                continue
            units = (np.maximum(np.abs(values).max(0), 1e-30) / VALUE_LIMIT).astype(np.float32)
            arrays[name] = np.rint(values / units).astype(np.int16)
            arrays[f"{name}_unit"] = units
        return arrays

    def quantized_input(self, x: np.ndarray, t: int, arrays: dict[str, np.ndarray]) -> Integers:
        """x (B, d) float32 of time step t as 16 bits."""
        scale, shift = (
            arrays[name][t] * arrays[f"{name}_unit"]
            if f"{name}_unit" in arrays
            else arrays[name][0]
            for name in ("scale", "shift")
        )
        with np.errstate(over="ignore", invalid="ignore"):
            y = x * scale.astype(np.float32) + shift.astype(np.float32)
        if self.network.asinh:
            y = np.clip(y, np.float32(-16384), np.float32(16384)) * np.float32(65536)
            return clamp(self.asinh_factor.times(log2_asinh_q16(_nearest(y))), VALUE_LIMIT)
        return _nearest(np.clip(y, np.float32(-VALUE_LIMIT), np.float32(VALUE_LIMIT)))

    def scores(self, x: Tensor) -> Tensor:
        """Scores, (B, C) float32, of windows x, (B, T, d): what the C program computes.

        Windows with NaN or inf, also after normalization, have NaN scores.
        """
        h = np.zeros((len(x), self.network.hidden_size), np.int64)
        arrays = self.input_arrays()
        good = self._good(x)
        for t, x_t in enumerate(torch.where(good[:, None, None], x.float(), 0.0).unbind(1)):
            h = self._step(self.quantized_input(x_t.numpy(), t, arrays), h, t)
        sums = product(self.matrices["head"].integers, round_shift(h, 16))
        scores = clamp(self.factor("head").times(sums), SUM_LIMIT) + self.head_bias
        unit = math.ldexp(1.0, -self.score_bits)
        result = torch.from_numpy(scores.astype(np.float32) * np.float32(unit))
        return torch.where(good[:, None], result, torch.nan)

    def _good(self, x: Tensor) -> Tensor:
        scale, shift = self.network.scale, self.network.shift
        return (x.float() * scale + shift).isfinite().flatten(1).all(1)

    def _step(self, x: Integers, h: Integers, t: int) -> Integers:
        parts = self.network.recurrence
        driven = self._apply("W", x)
        for k in range(parts.updates):
            p = self._apply("V", round_shift(h, 16)) + driven
            if parts.mix is not None:
                h = self._gated(p, h)
                continue
            p = p + self.bias[0]
            if parts.feedback:
                g = clamp(self.feedback_factor.times(p), VALUE_LIMIT)
                p = p + self._apply("U", g)
            leak, gain = (self.steps(n)[t % len(self.steps(n)), k] for n in ("leak", "gain"))
            change = round_shift(gain * self._sigma(p) - leak * h, self.step_bits)
            h = clamp(h + change, STATE_LIMIT)
        return h

    def _gated(self, p: Integers, h: Integers) -> Integers:
        bias, (zeta, nu) = self.bias, self.mix
        z = sigmoid_q16(p + bias[0], self.p_bits)
        weight = round_shift(zeta * (65536 - z), 16) + nu
        return clamp(round_shift(z * h + weight * self._sigma(p + bias[1]), 16), STATE_LIMIT)

    def _sigma(self, p: Integers) -> Integers:
        """sigma in the units of the state."""
        nonlinearity = self.network.recurrence.nonlinearity
        if nonlinearity == "relu":
            p = np.maximum(p, 0)
        elif nonlinearity != "identity":
            p = (tanh_q16 if nonlinearity == "tanh" else sigmoid_q16)(p, self.p_bits)
        return clamp(self.sigma_factor.times(p), SIGMA_LIMIT)

    def _apply(self, name: str, value: Integers) -> Integers:
        if name in self.matrices:
            sums = product(self.matrices[name].integers, value)
            return clamp(self.factor(name).times(sums), SUM_LIMIT)
        right = product(self.matrices[name + "2"].integers, value)
        between = clamp(self.factor(name + "2").times(right), VALUE_LIMIT)
        left = product(self.matrices[name + "1"].integers, between)
        return clamp(self.factor(name + "1").times(left), SUM_LIMIT)

    @property
    def arrays(self) -> list[tuple[str, str, np.ndarray]]:
        """Name, meaning and values of the constant arrays of the program."""
        parts = self.network.recurrence
        arrays: list[tuple[str, str, np.ndarray]] = [
            (name, f"times {matrix.scale:.6g}, row by row", matrix.integers)
            for name, matrix in self.matrices.items()
        ]
        arrays.append(("bias", f"b times 2^{self.p_bits}", self.bias.astype(np.int32)))
        arrays.append(("head_bias", f"times 2^{self.score_bits}", self.head_bias.astype(np.int32)))
        if parts.mix is not None:
            arrays.append(("mix", "zeta and nu times 2^16", self.mix.astype(np.int32)))
        else:
            names = ("gain",) if parts.leak is parts.gain else ("gain", "leak")
            arrays += [(n, f"times 2^{self.step_bits}", _int16(self.steps(n))) for n in names]
        arrays += [(n, "of the input", values) for n, values in self.input_arrays().items()]
        if parts.mix is not None or parts.nonlinearity in ("tanh", "sigmoid"):
            arrays.append(("tanh_nodes", "65536 tanh(i / 32)", TANH))
        if self.network.asinh:
            arrays.append(("log_nodes", "32768 log2(1 + i / 64)", LOG))
        return arrays

    @property
    def function_bounds(self) -> list[tuple[str, float]]:
        """Each function that is approximated, with the bound of its error."""
        parts = self.network.recurrence
        names = {parts.nonlinearity} & {"tanh", "sigmoid"}
        names |= {"sigmoid"} if parts.mix is not None else set()
        names |= {"asinh"} if self.network.asinh else set()
        return [(name, function_bound(name)) for name in sorted(names)]

    @property
    def template_values(self) -> dict[str, Any]:
        """What the template of the program takes beside the sizes."""
        parts = self.network.recurrence
        values: dict[str, Any] = {
            "bits": self.bits,
            "factors": {name: self.factor(name) for name in self.matrices},
            "sigma_factor": self.sigma_factor,
            "feedback_factor": self.feedback_factor if parts.feedback else None,
            "asinh_factor": self.asinh_factor if self.network.asinh else None,
            "p_bits": self.p_bits,
            "score_bits": self.score_bits,
            "step_bits": self.step_bits,
            "score_unit": f"{math.ldexp(1.0, -self.score_bits):.9g}f",
            "many_inputs": len(self.network.scale) > 1,
            "sum_type": "int32_t" if self._sums_fit() else "int64_t",
        }
        return values

    def _sums_fit(self) -> bool:
        """Whether the products with every matrix fit in 32 bits, whatever they multiply."""
        return all(
            int(np.abs(m.integers.astype(np.int64)).sum(1).max()) * VALUE_LIMIT < 1 << 31
            for m in self.matrices.values()
        )


def to_fixed_point(network: Network, windows: Tensor, *, bits: int) -> FixedNetwork:
    """A network with weights of 8 or 16 bits.

    Args:
        windows: training windows, (B, T, d), in the units of the sensor, on which the scales are
            found.

    Raises:
        ValueError: other bits, or no scale can be found.
    """
    if bits not in (8, 16):
        raise ValueError(f"bits must be 8 or 16 in fixed point, or 32 for float; got {bits}")
    known = calibrate(network, windows)
    parts = network.recurrence
    matrices = {
        name: quantize(matrix, bits, known.moment(_multiplied(name)))
        for name, matrix in (*parts.matrices.items(), ("head", network.head))
    }
    names = {_multiplied(name) for name in matrices}
    largest_step = max(
        (float(v.abs().max()) for v in (parts.leak, parts.gain) if v is not None), default=1.0
    )
    return FixedNetwork(
        network=network,
        bits=bits,
        matrices=matrices,
        scales={name: known.range_of(name) / VALUE_LIMIT for name in names},
        p_bits=_bits_after_point(known, "p", least=-60 if _is_linear(parts) else 5),
        score_bits=_bits_after_point(known, "scores", least=-60),
        step_bits=min(30, math.floor(math.log2(VALUE_LIMIT / max(largest_step, 1e-4)))),
    )


def _is_linear(parts: Recurrence) -> bool:
    """Whether no function needs a number of bits after the point."""
    return parts.mix is None and parts.nonlinearity in ("relu", "identity")


def _multiplied(name: str) -> str:
    """Name of what a matrix multiplies."""
    if name == "head":
        return "h"
    return name[0] + "2" if name[1:] == "1" else _INPUT_OF[name[0]]


def _bits_after_point(known: Calibration, name: str, *, least: int) -> int:
    """As many as leave room for the range, at most 24; negative ones stand for powers of two."""
    return max(least, min(24, math.floor(math.log2(SUM_LIMIT / known.range_of(name)))))


def _nearest(values: np.ndarray) -> Integers:
    """float32 to the nearest integers, halves away from 0."""
    half = np.where(values < 0, np.float32(-0.5), np.float32(0.5))
    return np.trunc(values + half).astype(np.int64)


def _fixed(values: Tensor | None, bits: int, limit: int) -> Integers:
    assert values is not None
    scaled = np.rint(np.ldexp(values.detach().double().numpy(), bits))
    return clamp(scaled.astype(np.int64), limit)


def _int16(values: Integers) -> np.ndarray:
    return values.astype(np.int16)
