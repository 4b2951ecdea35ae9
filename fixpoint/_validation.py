"""Checks of constructor values: each returns the value or says what was expected."""

from __future__ import annotations

import math


def at_least(least: int, **named: int) -> int:
    """The one named value, an integer >= least."""
    ((name, value),) = named.items()
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer; got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}; got {value}")
    return value


def non_negative(**named: float) -> float:
    """The one named value, a finite number >= 0."""
    ((name, value),) = named.items()
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number >= 0; got {value}")
    return float(value)


def positive(**named: float) -> float:
    """The one named value, a finite number > 0."""
    ((name, value),) = named.items()
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a finite number > 0; got {value}")
    return float(value)
