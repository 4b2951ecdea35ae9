"""The files of a C program, from a network."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jinja2 import Environment, FunctionLoader, StrictUndefined
from torch import Tensor

from fixpoint import __version__
from fixpoint.export.c.names import constant_names, string_literal
from fixpoint.export.integer_layer import IntegerLayer
from fixpoint.export.integer_network import IntegerNetwork, layer_prefix
from fixpoint.export.network import Network
from fixpoint.export.recurrence import Recurrence

PREFIX = "fixpoint"
"""Beginning of every public name and of two files of a program."""

_C_TYPES = {"float32": "float", "int8": "int8_t", "int16": "int16_t", "uint16": "uint16_t"}
_C_TYPES |= {"int32": "int32_t"}

_TABLES = ("offset", "scale", "mean", "tanh_nodes", "log_nodes")
"""Beginnings of the names of arrays that are not weights."""


class Array(NamedTuple):
    """A constant array of the program."""

    name: str
    what: str
    values: np.ndarray

    @property
    def bytes(self) -> int:
        """Size on the device."""
        return self.values.nbytes

    @property
    def is_table(self) -> bool:
        """True if it belongs to the normalization or to a function, not to the weights."""
        return self.name.startswith(_TABLES)


def write_c(
    network: Network | IntegerNetwork, folder: Path, *, title: str, prefix: str = PREFIX
) -> list[Path]:
    """Write PREFIX.h with the weights, PREFIX.c, main.c and selftest.c.

    Args:
        prefix: beginning of every public name, so that two networks fit into one firmware.

    Raises:
        ValueError: the prefix is not the beginning of a C name, or of another one in the program.
        OSError: the folder cannot be made or written; the message says what to do.
    """
    _check_prefix(prefix)
    values = _values(network, title) | _test_values(network)
    body = "integer.c.jinja" if isinstance(network, IntegerNetwork) else "float.c.jinja"
    templates = {
        f"{prefix}.h": "fixpoint.h.jinja",
        f"{prefix}.c": body,
        "main.c": "main.c.jinja",
        "selftest.c": "selftest.c.jinja",
    }
    files = {name: _render(template, values, prefix) for name, template in templates.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(
            f"--out must be a folder that can be written; {folder} cannot ({error.strerror}): give "
            "another one"
        ) from None
    return [folder / name for name in files]


def _check_prefix(prefix: str) -> None:
    if not re.fullmatch("[a-z][a-z0-9_]{0,30}", prefix):
        raise ValueError(
            f"--prefix must be lower case letters, digits and _, beginning with a letter; got "
            f"{prefix!r}"
        )
    taken = re.compile(rf"\b{prefix}(_|\.[ch]\b)", re.IGNORECASE)
    templates = (resources.files("fixpoint.export.c") / "templates").iterdir()
    if prefix != PREFIX and any(taken.search(place.read_text("utf-8")) for place in templates):
        raise ValueError(
            f"--prefix {prefix} begins names of the program itself, as of a file or a function: "
            "choose another"
        )


def constants(network: Network | IntegerNetwork) -> list[Array]:
    """Return the constant arrays of the program, weights and normalization."""
    if isinstance(network, IntegerNetwork):
        return [Array(*part) for part in network.arrays]
    arrays = [
        array._replace(name=layer_prefix(network, i) + array.name)
        for i, layer in enumerate(network.layers)
        for array in _of_layer(layer)
    ]
    arrays.append(Array("head", "weights of the scores", _numpy(network.head)))
    arrays.append(Array("head_bias", "biases of the scores", _numpy(network.head_bias)))
    if not network.inputs.is_identity:
        what = "x' = (x - offset - mean) scale"
        for name in ("offset", "mean", "scale"):
            arrays.append(Array(name, what, _numpy(getattr(network.inputs, name))))
    return arrays


_WHAT = {
    "V": "of the state, row by row",
    "W": "of the input, row by row",
    "U": "of the feedback, row by row",
}


def _of_layer(layer: Recurrence) -> list[Array]:
    arrays = [Array(name, _WHAT[name[0]], _numpy(m)) for name, m in layer.matrices.items()]
    arrays.append(Array("bias", "b", _numpy(layer.bias)))
    if layer.recurrent_bias is not None:
        arrays.append(Array("recurrent_bias", "of the state", _numpy(layer.recurrent_bias)))
    if layer.mix is not None:
        arrays.append(Array("mix", "zeta and nu, by which the gate mixes", _numpy(layer.mix)))
    if layer.leak is not None and layer.gain is not None:
        arrays.append(Array("gain", "factor of sigma, by time step and update", _numpy(layer.gain)))
        if layer.leak is not layer.gain:
            arrays.append(Array("leak", "1 - the factor of h", _numpy(layer.leak)))
    return arrays


def _values(network: Network | IntegerNetwork, title: str) -> dict[str, Any]:
    """Return what the templates take."""
    own: dict[str, Any] = {"bits": 32, "samples": "float"}
    source = network.network if isinstance(network, IntegerNetwork) else network
    if isinstance(network, IntegerNetwork):
        own = network.template_values
    layers = [_layer_values(network, i) for i in range(len(source.layers))]
    functions: set[str] = set().union(*(layer.functions for layer in source.layers))
    return {
        "title": title.replace("*/", "* /"),
        "version": __version__,
        "d": source.input_size,
        "S": source.state_size,
        "C": len(source.classes),
        "T": source.timesteps,
        "step": min(source.step or source.timesteps, source.timesteps),
        "constants": constant_names(source.classes),
        "class_names": [string_literal(name) for name in source.classes],
        "channels": [string_literal(name) for name in source.channels],
        "channel_list": string_literal(", ".join(source.channels))[1:-1].replace("%", "%%"),
        "bounded": " and ".join(source.own_steps),
        "normalized": not source.inputs.is_identity,
        "asinh": source.inputs.asinh,
        "functions": functions,
        "layers": layers,
        "widest": max(source.input_size, *(layer["n"] for layer in layers)),
        "by_time": source.inputs.rows > 1,
        "arrays": [_written(array) for array in constants(network)],
        **own,
    }


def _layer_values(network: Network | IntegerNetwork, index: int) -> dict[str, Any]:
    integers = network.layers[index] if isinstance(network, IntegerNetwork) else None
    source = network.network if isinstance(network, IntegerNetwork) else network
    layer, n = source.layers[index], source.layers[index].size
    factors = (layer.recurrent, layer.input, layer.feedback)
    return {
        "prefix": layer_prefix(source, index),
        "what": f"Layer {index + 1}: {n} units.",
        "kind": layer.kind,
        "n": n,
        "rows": layer.rows,
        "second": layer.rows - n,
        "start": sum(before.state_size for before in source.layers[:index]),
        "K": layer.updates,
        "sigma": layer.nonlinearity,
        "sigma_call": partial(_sigma_call, integers),
        "V": [tuple(factor.shape) for factor in layer.recurrent],
        "W": [tuple(factor.shape) for factor in layer.input],
        "feedback": [tuple(factor.shape) for factor in layer.feedback],
        "between": max((len(part[1]) for part in factors if len(part) == 2), default=0),
        "at_leak": _at(layer.leak, layer.updates),
        "at_gain": _at(layer.gain, layer.updates),
        "leak_of": "gain" if layer.leak is layer.gain else "leak",
        **(integers.template_values if integers else {}),
    }


def _sigma_call(layer: IntegerLayer | None, argument: str) -> str:
    """Return sigma of an integer argument as a C expression."""
    assert layer is not None
    sigma = layer.layer.nonlinearity
    if sigma == "identity":
        return argument
    if sigma == "relu":
        return f"{argument} < 0 ? 0 : {argument}"
    return f"{sigma}_of({argument}, {layer.p_bits})"


def _at(steps: Any, updates: int) -> str:
    """Return the index of an array (T, K) or (1, K) at time step state->t and update k."""
    if steps is None:
        return ""
    k = "k" if updates > 1 else "0"
    if len(steps) == 1:
        return k
    return "state->t" if updates == 1 else f"state->t * {updates} + k"


def _test_values(network: Network | IntegerNetwork) -> dict[str, Any]:
    """Return windows that a program tests itself with, and their scores."""
    source = network.network if isinstance(network, IntegerNetwork) else network
    counts = isinstance(network, IntegerNetwork) and network.inputs.samples == "int16"
    windows = example_windows(source)
    if counts:
        windows = windows.round().clamp(-32767, 32767)
    scores = network.scores(windows)
    if isinstance(network, IntegerNetwork) and counts:
        scores = (scores.double() / network.score_unit).round()
    kind = np.int16 if counts else np.float32
    of_scores = np.int32 if counts else np.float32
    spread = float(scores.abs().max()) if len(scores) else 0.0
    return {
        "windows": [_text(window.numpy().astype(kind).ravel()) for window in windows],
        "expected": [_text(row.numpy().astype(of_scores)) for row in scores],
        "tolerance": f"{1e-3 * max(spread, 1.0):.3g}f",
    }


def example_windows(network: Network) -> Tensor:
    """Return two windows of waves about the mean of each channel, (2, T, d) in the units of the
    sensor.
    """
    inputs = network.inputs
    t = torch.arange(network.timesteps, dtype=torch.float64)[:, None]
    channel = torch.arange(network.input_size, dtype=torch.float64)
    waves = torch.stack([torch.sin((0.1 + 0.05 * channel) * (i + 1) * t + i) for i in range(2)])
    center = inputs.offset.double() + inputs.mean.double()
    return (center + waves / inputs.scale.double()).float()


def _written(array: Array) -> dict[str, Any]:
    """Return an array as the header has it."""
    flat = array.values.ravel()
    return {
        "name": array.name,
        "what": array.what,
        "type": _C_TYPES[str(flat.dtype)],
        "size": len(flat),
        "text": _text(flat),
    }


def _text(flat: np.ndarray) -> str:
    """Return numbers as lines of C."""
    floats = flat.dtype == np.float32
    texts = [f"{v:.9g}" for v in flat] if floats else [str(v) for v in flat]
    if floats:
        texts = [(v if set(v) & set(".e") else v + ".0") + "f" for v in texts]
    width = 8 if floats else 16
    lines = [", ".join(texts[i : i + width]) for i in range(0, len(texts), width)]
    return "    " + ",\n    ".join(lines)


def _render(template: str, values: Mapping[str, Any], prefix: str) -> str:
    environment = Environment(
        loader=FunctionLoader(partial(_source, prefix)),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    named = {**values, "constants": [_renamed(name, prefix) for name in values["constants"]]}
    return environment.get_template(template).render(named)


def _source(prefix: str, template: str) -> str:
    """Return the text of a template whose names begin with a prefix."""
    place = resources.files("fixpoint.export.c") / "templates" / template
    text = place.read_text(encoding="utf-8")
    return _renamed(text, prefix)


def _renamed(text: str, prefix: str) -> str:
    text = re.sub(rf"\b{PREFIX}(?=[_.])", prefix, text)
    return re.sub(rf"\b{PREFIX.upper()}(?=_)", prefix.upper(), text)


def _numpy(value: Any) -> np.ndarray:
    array: np.ndarray = value.detach().numpy().astype(np.float32)
    return array
