"""What a file of arrays must hold."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Arrays = Mapping[str, np.ndarray]
Schema = Mapping[str, tuple[str, tuple[int | None, ...]]]
"""Of each array its dtype and shape; None is any length, "str" are strings of any length."""


def check_schema(arrays: Arrays, schema: Schema, title: str, remedy: str) -> None:
    """Refuse arrays of which one is missing or has another dtype or shape.

    Args:
        title: what the message calls the file.
        remedy: what to do about it.

    Raises:
        ValueError: one line, which names the array.

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
    """Refuse labels whose classes have other numbers of sequences.

    Args:
        counts: of each array of labels the number of sequences of class 0, 1, ...

    Raises:
        ValueError: one line, which names the array.

    >>> check_counts({"y": np.array([0, 1, 1])}, {"y": [1, 2]}, "a.npz", "replace it")
    """
    for key, expected in counts.items():
        got = np.bincount(arrays[key]).tolist()
        if got != expected:
            raise ValueError(
                f"{title}: the classes of {key} must have {expected} windows, got {got}; {remedy}"
            )
