"""Checks of the arrays of a file: names, dtypes, shapes, class counts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Arrays = Mapping[str, np.ndarray]
Schema = Mapping[str, tuple[str, tuple[int | None, ...]]]
"""Dtype and shape of each array; None is any size, "str" is a string of any length."""


def check_schema(arrays: Arrays, schema: Schema, title: str, remedy: str) -> None:
    """Raise if an array is missing or has another dtype or shape.

    Args:
        title: name of the file in the message.
        remedy: the remedy in the message.

    Raises:
        ValueError: one line that names the array.

    >>> check_schema({"x": np.zeros(3)}, {"x": ("float64", (None,))}, "a.npz", "replace it")
    """
    missing = [key for key in schema if key not in arrays]
    if missing:
        raise ValueError(f"{title} lacks {', '.join(missing)}; {remedy}")
    for key, (dtype, shape) in schema.items():
        array = arrays[key]
        same_type = array.dtype.kind == "U" if dtype == "str" else array.dtype == dtype
        same_shape = array.ndim == len(shape) and all(
            size in (None, given) for size, given in zip(shape, array.shape, strict=True)
        )
        if not same_type or not same_shape:
            raise ValueError(
                f"{title}: {key} must be {dtype} {str(shape).replace('None', 'N')}, "
                f"got {array.dtype} {array.shape}; {remedy}"
            )


def check_counts(arrays: Arrays, counts: Mapping[str, list[int]], title: str, remedy: str) -> None:
    """Raise if the number of sequences of a class differs from the expected one.

    Args:
        counts: the number of sequences of class 0, 1, ... for each array of labels.

    Raises:
        ValueError: one line that names the array.

    >>> check_counts({"y": np.array([0, 1, 1])}, {"y": [1, 2]}, "a.npz", "replace it")
    """
    for key, expected in counts.items():
        got = np.bincount(arrays[key]).tolist()
        if got != expected:
            raise ValueError(
                f"{title}: the classes of {key} must have {expected} windows, got {got}; {remedy}"
            )
