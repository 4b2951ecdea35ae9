"""Checks of arguments: each returns the value or says what was expected."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any, TypeVar, cast

from fixpoint._messages import refuse_unknown

F = TypeVar("F", bound=Callable[..., Any])


def names_options(function: F) -> F:
    """Return the function, which answers an unknown option by the known ones and the nearest.

    A constructor answers by the name of its class.

    >>> @names_options
    ... def solve(phi, *, max_iter=50): ...
    >>> solve(None, K=3)
    Traceback (most recent call last):
    TypeError: unknown solve option 'K': expected one of phi, max_iter; 'K' is 'max_iter' here
    """
    is_constructor = function.__name__ == "__init__"
    known = tuple(inspect.signature(function).parameters)[is_constructor:]

    @functools.wraps(function)
    def answering(*values: Any, **options: Any) -> Any:
        owner = type(values[0]).__name__ if is_constructor else function.__name__
        refuse_unknown(owner, options, known)
        return function(*values, **options)

    return cast(F, answering)


def at_least(least: int, **named: int) -> int:
    """Return the one named value, an integer >= least."""
    ((name, value),) = named.items()
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer; got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}; got {value}")
    return int(value)


def boolean(**named: bool) -> bool:
    """Return the one named value, True or False: a string, as "False", would count as true."""
    ((name, value),) = named.items()
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {value!r}")
    return value


def non_negative(**named: float) -> float:
    """Return the one named value, a finite number >= 0."""
    ((name, value),) = named.items()
    if not (_is_finite(name, value) and value >= 0):
        raise ValueError(f"{name} must be a finite number >= 0; got {value}")
    return float(value)


def positive(**named: float) -> float:
    """Return the one named value, a finite number > 0."""
    ((name, value),) = named.items()
    if not (_is_finite(name, value) and value > 0):
        raise ValueError(f"{name} must be a finite number > 0; got {value}")
    return float(value)


def _is_finite(name: str, value: float) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, RuntimeError):  # those of tensors of several numbers
        raise TypeError(f"{name} must be a number; got {value!r}") from None
