"""One recurrent layer in integers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fixpoint.export.calibration import QuantizedMatrix
from fixpoint.export.integers import (
    SIGMA_LIMIT,
    STATE_LIMIT,
    SUM_LIMIT,
    VALUE_LIMIT,
    Factor,
    Integers,
    clamp,
    product,
    round_shift,
    sigmoid_q16,
    tanh_q16,
)
from fixpoint.export.recurrence import Recurrence

INPUT_OF = {"V": "h", "W": "x", "U": "g"}
"""Name of the value that a matrix multiplies."""


@dataclass(frozen=True, kw_only=True, eq=False)
class IntegerLayer:
    """A `Recurrence` whose weights have 8 or 16 bits, with all arithmetic on integers.

    What a matrix multiplies has 16 bits and a scale of its own; the state keeps 16 more bits below,
    so that small steps are not lost. Sums and biases have 32 bits and a power of two as scale. All
    saturates and rounds to nearest.

    Args:
        layer: in float32.
        matrices: by name, V, W, U (or their factors V1, V2, ...).
        scales: of 16 bit values by name: x, h, g, V2, ...
        p_bits: bits after the point of the argument of sigma.
        c_bits: of c of an LSTM.
        step_bits: of leak and gain.
    """

    layer: Recurrence
    matrices: dict[str, QuantizedMatrix]
    scales: dict[str, float]
    p_bits: int
    c_bits: int
    step_bits: int

    def factor(self, name: str) -> Factor:
        """Return the factor by which the product with a matrix gets the unit of its use."""
        if name[1:] == "2":
            source, target = INPUT_OF[name[0]], self.scales[name]
        else:
            source = name[0] + "2" if name[1:] else INPUT_OF[name]
            target = math.ldexp(1.0, -self.p_bits)
        return matrix_factor(self.matrices[name], self.scales[source], target)

    @property
    def feedback_factor(self) -> Factor:
        """From the argument of sigma to what U multiplies."""
        return Factor.of(math.ldexp(1.0, -self.p_bits) / self.scales["g"], 1 << 31)

    @property
    def sigma_factor(self) -> Factor:
        """From the value of sigma to the state."""
        linear = self.layer.kind in ("leaky", "mixed") and is_linear(self.layer.nonlinearity)
        unit = self.p_bits if linear else 16
        return Factor.of(math.ldexp(1.0, 16 - unit) / self.scales["h"], 1 << 31)

    @property
    def bias(self) -> Integers:
        """(blocks, n) with `p_bits` after the point."""
        return fixed(self.layer.bias, self.p_bits, SUM_LIMIT)

    @property
    def recurrent_bias(self) -> Integers:
        """(1, n) of a GRU, with `p_bits` after the point."""
        assert self.layer.recurrent_bias is not None
        return fixed(self.layer.recurrent_bias, self.p_bits, SUM_LIMIT)

    def steps(self, name: str) -> Integers:
        """Return leak or gain, (T, K) or (1, K), with `step_bits` after the point."""
        return fixed(getattr(self.layer, name), self.step_bits, VALUE_LIMIT)

    @property
    def mix(self) -> Integers:
        """zeta and nu, times 65536."""
        assert self.layer.mix is not None
        return fixed(self.layer.mix, 16, 1 << 16)

    def step(self, x: Integers, state: Integers, t: int) -> Integers:
        """Return the state, (B, state_size), after x_t, (B, d) of 16 bits, and the state before."""
        n, kind = self.layer.size, self.layer.kind
        h = state[:, :n]
        driven = self._apply("W", x)
        if kind == "leaky":
            return self._leaky(driven, h, t)
        r = self._apply("V", round_shift(h, 16))
        if kind == "mixed":
            return self._mixed(driven + r, h)
        if kind == "gru":
            return self._gru(driven, r, h)
        return self._lstm(driven + r, state[:, n:])

    def _leaky(self, driven: Integers, h: Integers, t: int) -> Integers:
        leaks, gains = self.steps("leak"), self.steps("gain")
        for k in range(self.layer.updates):
            p = self._apply("V", round_shift(h, 16)) + driven + self.bias[0]
            if self.layer.feedback:
                g = clamp(self.feedback_factor.times(p), VALUE_LIMIT)
                p = p + self._apply("U", g)
            leak, gain = leaks[t % len(leaks), k], gains[t % len(gains), k]
            change = round_shift(gain * self._sigma(p) - leak * h, self.step_bits)
            h = clamp(h + change, STATE_LIMIT)
        return h

    def _mixed(self, p: Integers, h: Integers) -> Integers:
        bias, (zeta, nu), n = self.bias, self.mix, self.layer.size
        z = sigmoid_q16(p[:, :n] + bias[0], self.p_bits)
        weight = round_shift(zeta * (65536 - z), 16) + nu
        c = self._sigma(p[:, -n:] + bias[1])
        return clamp(round_shift(z * h + weight * c, 16), STATE_LIMIT)

    def _gru(self, q: Integers, r: Integers, h: Integers) -> Integers:
        bias, n = self.bias, self.layer.size
        s = sigmoid_q16(q[:, :n] + r[:, :n] + bias[0], self.p_bits)
        z = sigmoid_q16(q[:, n : 2 * n] + r[:, n : 2 * n] + bias[1], self.p_bits)
        inner = round_shift(s * (r[:, 2 * n :] + self.recurrent_bias), 16)
        c = self._units(tanh_q16(q[:, 2 * n :] + bias[2] + inner, self.p_bits))
        return clamp(round_shift(z * h + (65536 - z) * c, 16), STATE_LIMIT)

    def _lstm(self, p: Integers, c: Integers) -> Integers:
        i, f, g, o = np.split(p + self.bias.ravel(), 4, 1)
        i, f, o = (sigmoid_q16(gate, self.p_bits) for gate in (i, f, o))
        new = round_shift(i * tanh_q16(g, self.p_bits), 32 - self.c_bits)
        c = clamp(round_shift(f * c, 16) + new, SUM_LIMIT)
        h = round_shift(o * self._units(tanh_q16(c, self.c_bits)), 16)
        return np.concatenate([clamp(h, STATE_LIMIT), c], 1)

    def _sigma(self, p: Integers) -> Integers:
        """Return sigma in the units of the state."""
        nonlinearity = self.layer.nonlinearity
        if nonlinearity == "relu":
            p = np.maximum(p, 0)
        elif nonlinearity != "identity":
            p = (tanh_q16 if nonlinearity == "tanh" else sigmoid_q16)(p, self.p_bits)
        return self._units(p)

    def _units(self, value: Integers) -> Integers:
        """Return the value of sigma in the units of the state."""
        return clamp(self.sigma_factor.times(value), SIGMA_LIMIT)

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
        layer = self.layer
        arrays: list[tuple[str, str, np.ndarray]] = [
            (name, f"times {matrix.scale:.6g}, row by row", matrix.integers)
            for name, matrix in self.matrices.items()
        ]
        arrays.append(("bias", f"b times 2^{self.p_bits}", self.bias.astype(np.int32)))
        if layer.recurrent_bias is not None:
            what = f"of the state, times 2^{self.p_bits}"
            arrays.append(("recurrent_bias", what, self.recurrent_bias.astype(np.int32)))
        if layer.mix is not None:
            arrays.append(("mix", "zeta and nu times 2^16", self.mix.astype(np.int32)))
        if layer.gain is not None:
            names = ("gain",) if layer.leak is layer.gain else ("gain", "leak")
            what = f"times 2^{self.step_bits}"
            arrays += [(name, what, self.steps(name).astype(np.int16)) for name in names]
        return arrays

    @property
    def template_values(self) -> dict[str, Any]:
        """Values for the template of the program, besides the sizes."""
        return {
            "factors": {name: self.factor(name) for name in self.matrices},
            "sigma_factor": self.sigma_factor,
            "feedback_factor": self.feedback_factor if self.layer.feedback else None,
            "p_bits": self.p_bits,
            "c_bits": self.c_bits,
            "step_bits": self.step_bits,
        }


def is_linear(nonlinearity: str) -> bool:
    """Tell whether a function needs no number of bits after the point."""
    return nonlinearity in ("relu", "identity")


def matrix_factor(matrix: QuantizedMatrix, source: float, target: float) -> Factor:
    """Convert the sum of products with a matrix to a unit `target`, of values in units `source`."""
    return Factor.of(matrix.scale * source / target, max(1, largest_sum(matrix)))


def largest_sum(matrix: QuantizedMatrix) -> int:
    """Return the largest absolute sum of products with a matrix, whatever it multiplies."""
    return int(np.abs(matrix.integers.astype(np.int64)).sum(1).max()) * VALUE_LIMIT


def fixed(values: Tensor | None, bits: int, limit: int) -> Integers:
    """Return values as integers with this many bits after the point."""
    assert values is not None
    scaled = np.rint(np.ldexp(values.detach().double().numpy(), bits))
    return clamp(scaled.astype(np.int64), limit)
