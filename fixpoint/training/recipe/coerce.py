"""Values of the types that dataclasses declare, out of TOML or the command line."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fixpoint._messages import unknown_name

_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def coerce(name: str, value: Any, kind: type, key: str) -> Any:
    """Return `value` as the type of the field `key` of the dataclass `kind`.

    Raises:
        TypeError: it has another type.
        ValueError: it is none of the choices; the nearest is named.
    """
    return _convert(name, value, get_type_hints(kind)[key])


def _convert(name: str, value: Any, hint: Any) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (inner,) = [part for part in get_args(hint) if part is not type(None)]
        return _convert(name, value, inner)
    if origin is Literal:
        if value not in get_args(hint):
            raise ValueError(unknown_name(f"value of {name}", value, get_args(hint)))
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError(f"{name} must be a list, as [1, 2]; got {value!r}")
        return tuple(_convert(name, part, get_args(hint)[0]) for part in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    # bool is a kind of int, but true is not a number
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise TypeError(f"{name} must be {_WORDS[hint]}; got {value!r}")
    return value


def check_value(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    """Refuse a number, or a number of a tuple, outside low <= value < below.

    Raises:
        ValueError: with the range.
    """
    low, below = metadata["low"], metadata["below"]
    for number in value if isinstance(value, tuple) else (value,):
        if low is None or number is None:
            continue
        if not (number >= low and (below is None or number < below) and math.isfinite(number)):
            least = "above 0" if 0 < low < 1 else f"at least {low}"
            end = f" and below {below}" if below is not None else " and finite"
            raise ValueError(f"{name} must be {least}{end}; got {number}")
