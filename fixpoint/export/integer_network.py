"""A network in fixed point: the constants of its program, and the program itself on arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fixpoint.export.calibration import Calibration, QuantizedMatrix, calibrate, quantize
from fixpoint.export.integer_input import IntegerInput, Samples
from fixpoint.export.integer_layer import (
    INPUT_OF,
    IntegerLayer,
    fixed,
    is_linear,
    largest_sum,
    matrix_factor,
)
from fixpoint.export.integers import (
    LOG,
    SUM_LIMIT,
    TANH,
    VALUE_LIMIT,
    Factor,
    Integers,
    clamp,
    function_bound,
    product,
    round_shift,
)
from fixpoint.export.network import Network
from fixpoint.export.recurrence import Recurrence


@dataclass(frozen=True, kw_only=True, eq=False)
class IntegerNetwork:
    """A `Network` whose weights have 8 or 16 bits, with all arithmetic on integers.

    Args:
        network: in float32.
        bits: of the weights.
        inputs: from samples to 16 bits.
        layers: see `IntegerLayer`.
        head: weights of the scores.
        score_bits: bits after the point of scores.
    """

    network: Network
    bits: int
    inputs: IntegerInput
    layers: tuple[IntegerLayer, ...]
    head: QuantizedMatrix
    score_bits: int

    @property
    def head_factor(self) -> Factor:
        """From sums of products to scores."""
        unit = math.ldexp(1.0, -self.score_bits)
        return matrix_factor(self.head, self.layers[-1].scales["h"], unit)

    @property
    def head_bias(self) -> Integers:
        """(C,)."""
        return fixed(self.network.head_bias, self.score_bits, SUM_LIMIT)

    @property
    def score_unit(self) -> float:
        """The unit of the integer scores."""
        return math.ldexp(1.0, -self.score_bits)

    def scores(self, x: Tensor) -> Tensor:
        """Return scores, (B, C) float32, of windows x, (B, T, d): equal to the C program's bit by
        bit.

        Windows with NaN or inf, also after normalization, have NaN scores.
        """
        state = np.zeros((len(x), self.network.state_size), np.int64)
        good = torch.from_numpy(self.inputs.is_good(x))
        for t, x_t in enumerate(torch.where(good[:, None, None], x.float(), 0.0).unbind(1)):
            state = self._advance(self.inputs.quantize(x_t.numpy(), t), state, t)
        n = self.layers[-1].layer.size
        start = self.network.state_size - self.layers[-1].layer.state_size
        sums = product(self.head.integers, round_shift(state[:, start : start + n], 16))
        scores = clamp(self.head_factor.times(sums), SUM_LIMIT) + self.head_bias
        result = torch.from_numpy(scores.astype(np.float32) * np.float32(self.score_unit))
        return torch.where(good[:, None], result, torch.nan)

    def _advance(self, x: Integers, state: Integers, t: int) -> Integers:
        states, start = [], 0
        for layer in self.layers:
            size = layer.layer.state_size
            states.append(layer.step(x, state[:, start : start + size], t))
            x, start = round_shift(states[-1][:, : layer.layer.size], 16), start + size
        return np.concatenate(states, 1)

    @property
    def matrices(self) -> dict[str, QuantizedMatrix]:
        """All matrices by name; those of several layers as layer2_V."""
        named = {
            f"{layer_prefix(self.network, i)}{name}": matrix
            for i, layer in enumerate(self.layers)
            for name, matrix in layer.matrices.items()
        }
        return named | {"head": self.head}

    @property
    def arrays(self) -> list[tuple[str, str, np.ndarray]]:
        """Name, meaning and values of the constant arrays of the program."""
        arrays = [
            (f"{layer_prefix(self.network, i)}{name}", what, values)
            for i, layer in enumerate(self.layers)
            for name, what, values in layer.arrays
        ]
        arrays.append(("head", f"times {self.head.scale:.6g}, row by row", self.head.integers))
        arrays.append(("head_bias", f"times 2^{self.score_bits}", self.head_bias.astype(np.int32)))
        arrays += self.inputs.arrays
        if self.functions & {"tanh", "sigmoid"}:
            arrays.append(("tanh_nodes", "65536 tanh(i / 32)", TANH))
        if self.network.inputs.asinh:
            arrays.append(("log_nodes", "32768 log2(1 + i / 64)", LOG))
        return arrays

    @property
    def functions(self) -> set[str]:
        """Functions that are approximated."""
        names = set().union(*(layer.layer.functions for layer in self.layers))
        names |= {"asinh"} if self.network.inputs.asinh else set()
        return {name for name in names if not is_linear(name)}

    @property
    def function_bounds(self) -> list[tuple[str, float]]:
        """Each function that is approximated, with the bound of its error."""
        return [(name, function_bound(name)) for name in sorted(self.functions)]

    @property
    def rounding(self) -> dict[str, float]:
        """Bound of the rounding of each 16 bit value but the samples, by name."""
        return {
            f"{layer_prefix(self.network, i)}{name}": scale / 2
            for i, layer in enumerate(self.layers)
            for name, scale in layer.scales.items()
            if name != "x"
        }

    @property
    def template_values(self) -> dict[str, Any]:
        """Values for the template of the program, besides the sizes."""
        return {
            "bits": self.bits,
            **self.inputs.template_values,
            "head_factor": self.head_factor,
            "score_bits": self.score_bits,
            "score_unit": f"{self.score_unit:.9g}f",
            "sum_type": "int32_t" if self._sums_fit() else "int64_t",
        }

    def _sums_fit(self) -> bool:
        """Tell whether the products with every matrix fit in 32 bits, whatever they multiply."""
        return all(largest_sum(matrix) < 1 << 31 for matrix in self.matrices.values())


def layer_prefix(network: Network, index: int) -> str:
    """Return the beginning of the names of a layer's arrays; empty where there is one layer."""
    return f"layer{index + 1}_" if len(network.layers) > 1 else ""


def to_integers(
    network: Network, windows: Tensor, *, bits: int, samples: Samples = "float"
) -> IntegerNetwork:
    """Return a network with weights of 8 or 16 bits.

    Args:
        windows: training windows, (B, T, d), in the units of the sensor, on which the scales are
            found.
        samples: type of the samples on the device.

    Raises:
        ValueError: other bits, no scale can be found, or the windows are not 16 bit integers where
            these are asked for.
    """
    if bits not in (8, 16):
        raise ValueError(f"bits must be 8 or 16 in fixed point, or 32 for float; got {bits}")
    if samples == "int16":
        _check_whole(windows)
    known = calibrate(network, windows)
    layers: list[IntegerLayer] = []
    for i, layer in enumerate(network.layers):
        layers.append(_layer(layer, known, i, bits, layers[-1] if layers else None))
    last = len(layers) - 1
    return IntegerNetwork(
        network=network,
        bits=bits,
        inputs=IntegerInput(
            inputs=network.inputs,
            unit=layers[0].scales["x"],
            largest=known.range_of("argument"),
            samples=samples,
        ),
        layers=tuple(layers),
        head=quantize(network.head, bits, known.moment(f"{last}.h")),
        score_bits=_bits_after_point(known, "scores", least=-60),
    )


def _layer(
    layer: Recurrence, known: Calibration, index: int, bits: int, before: IntegerLayer | None
) -> IntegerLayer:
    matrices = {
        name: quantize(matrix, bits, known.moment(f"{index}.{_multiplied(name)}"))
        for name, matrix in layer.matrices.items()
    }
    names = {_multiplied(name) for name in matrices}
    scales = {name: known.range_of(f"{index}.{name}") / VALUE_LIMIT for name in sorted(names)}
    if before is not None:
        scales["x"] = before.scales["h"]
    steps = [float(v.abs().max()) for v in (layer.leak, layer.gain) if v is not None]
    linear = layer.kind == "leaky" and is_linear(layer.nonlinearity)
    return IntegerLayer(
        layer=layer,
        matrices=matrices,
        scales=scales,
        p_bits=_bits_after_point(known, f"{index}.p", least=-60 if linear else 5),
        c_bits=_bits_after_point(known, f"{index}.c", least=5),
        step_bits=min(30, math.floor(math.log2(VALUE_LIMIT / max([*steps, 1e-4])))),
    )


def _multiplied(name: str) -> str:
    """Return the name of the value that a matrix multiplies."""
    return name[0] + "2" if name[1:] == "1" else INPUT_OF[name[0]]


def _bits_after_point(known: Calibration, name: str, *, least: int) -> int:
    """Return the bits that leave room for the range, at most 24; negative ones mean 2^n."""
    return max(least, min(24, math.floor(math.log2(SUM_LIMIT / known.range_of(name)))))


def _check_whole(windows: Tensor) -> None:
    finite = windows[windows.isfinite()]
    other = finite[(finite != finite.round()) | (finite.abs() > 32767)]
    if len(other):
        raise ValueError(
            f"--input int16 takes samples that are whole numbers from -32767 to 32767, as a sensor "
            f"counts; the training data have {other[0].item():g}: train on the counts, or leave "
            "--input out"
        )
