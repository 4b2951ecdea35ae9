"""The files of a C program, from a network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from fixpoint import __version__
from fixpoint.export.c.names import constant_names, string_literal
from fixpoint.export.fixed_point import FixedNetwork
from fixpoint.export.network import Network

_TEMPLATES = Environment(
    loader=PackageLoader("fixpoint.export.c"),
    undefined=StrictUndefined,
    keep_trailing_newline=True,
    autoescape=False,
)
_C_TYPES = {"float32": "float", "int8": "int8_t", "int16": "int16_t", "uint16": "uint16_t"}
_C_TYPES |= {"int32": "int32_t"}


class Array(NamedTuple):
    """A constant array of the program."""

    name: str
    what: str
    values: np.ndarray

    @property
    def bytes(self) -> int:
        """Size on the device."""
        return self.values.nbytes


def write_c(network: Network | FixedNetwork, folder: Path, *, title: str) -> list[Path]:
    """Write fixpoint.h with the weights, fixpoint.c and main.c.

    Raises:
        OSError: the folder cannot be made or written; the message says what to do.
    """
    fixed = isinstance(network, FixedNetwork)
    source = network.network if isinstance(network, FixedNetwork) else network
    values = {
        **_sizes(source, title),
        "arrays": [_written(array) for array in constants(network)],
        **(network.template_values if isinstance(network, FixedNetwork) else {"bits": 32}),
    }
    files = {
        "fixpoint.h": _render("fixpoint.h.jinja", values),
        "fixpoint.c": _render("fixed.c.jinja" if fixed else "float.c.jinja", values),
        "main.c": _render("main.c.jinja", values),
    }
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


def constants(network: Network | FixedNetwork) -> list[Array]:
    """The constant arrays of the program, weights and normalization."""
    if isinstance(network, FixedNetwork):
        return [Array(*part) for part in network.arrays]
    parts = network.recurrence
    arrays = [Array(name, _WHAT[name[0]], _numpy(m)) for name, m in parts.matrices.items()]
    arrays.append(Array("bias", "b", _numpy(parts.bias)))
    if parts.mix is not None:
        arrays.append(Array("mix", "zeta and nu, by which the gate mixes", _numpy(parts.mix)))
    elif parts.leak is not None and parts.gain is not None:
        arrays.append(Array("gain", "factor of sigma, by time step and update", _numpy(parts.gain)))
        if parts.leak is not parts.gain:
            arrays.append(Array("leak", "1 - the factor of h", _numpy(parts.leak)))
    arrays.append(Array("head", "weights of the scores", _numpy(network.head)))
    arrays.append(Array("head_bias", "biases of the scores", _numpy(network.head_bias)))
    if network.normalizes:
        arrays.append(Array("scale", "x' = scale x + shift", _numpy(network.scale)))
        arrays.append(Array("shift", "x' = scale x + shift", _numpy(network.shift)))
    return arrays


_WHAT = {
    "V": "of the state, row by row",
    "W": "of the input, row by row",
    "U": "of the feedback, row by row",
}


def _sizes(network: Network, title: str) -> dict[str, Any]:
    """What every template takes."""
    parts = network.recurrence
    own = {"normalization": len(network.scale) > 1, "step sizes": parts.timesteps > 1}
    factors = (parts.recurrent, parts.input, parts.feedback)
    return {
        "title": title.replace("*/", "* /"),
        "version": __version__,
        "d": network.input_size,
        "n": network.hidden_size,
        "C": len(network.classes),
        "T": network.timesteps,
        "K": parts.updates,
        "constants": constant_names(network.classes),
        "class_names": [string_literal(name) for name in network.classes],
        "bounded": " and ".join(name for name, is_own in own.items() if is_own),
        "normalized": network.normalizes,
        "asinh": network.asinh,
        "gated": parts.mix is not None,
        "sigma": parts.nonlinearity,
        "functions": {parts.nonlinearity} | ({"sigmoid"} if parts.mix is not None else set()),
        "V": [tuple(factor.shape) for factor in parts.recurrent],
        "W": [tuple(factor.shape) for factor in parts.input],
        "feedback": [tuple(factor.shape) for factor in parts.feedback],
        "between": max((len(part[1]) for part in factors if len(part) == 2), default=0),
        "at_input": "state->t * FIXPOINT_INPUTS + i" if len(network.scale) > 1 else "i",
        **{f"at_{name}": _at(value, parts.updates) for name, value in _steps(network).items()},
        "leak_of": "gain" if parts.leak is parts.gain else "leak",
    }


def _steps(network: Network) -> dict[str, Any]:
    return {"leak": network.recurrence.leak, "gain": network.recurrence.gain}


def _at(steps: Any, updates: int) -> str:
    """The index of an array (T, K) or (1, K) at time step state->t and update k."""
    if steps is None:
        return ""
    k = "k" if updates > 1 else "0"
    if len(steps) == 1:
        return k
    return "state->t" if updates == 1 else f"state->t * {updates} + k"


def _written(array: Array) -> dict[str, Any]:
    """An array as the header has it."""
    flat = array.values.ravel()
    texts = [f"{v:.9g}" for v in flat] if flat.dtype == np.float32 else [str(v) for v in flat]
    if flat.dtype == np.float32:
        texts = [(v if set(v) & set(".e") else v + ".0") + "f" for v in texts]
    width = 8 if flat.dtype == np.float32 else 16
    lines = [", ".join(texts[i : i + width]) for i in range(0, len(texts), width)]
    return {
        "name": array.name,
        "what": array.what,
        "type": _C_TYPES[str(flat.dtype)],
        "size": len(flat),
        "text": "    " + ",\n    ".join(lines),
    }


def _render(template: str, values: Mapping[str, Any]) -> str:
    return _TEMPLATES.get_template(template).render(values)


def _numpy(value: Any) -> np.ndarray:
    array: np.ndarray = value.detach().numpy().astype(np.float32)
    return array
