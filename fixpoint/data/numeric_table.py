"""Numeric tables in text files."""

from __future__ import annotations

import io
import warnings

import numpy as np

_NUMPY_HINT = "; use `usecols` to select a subset and avoid this error"


def numbers(
    data: bytes, name: str, *, columns: int | None = None, delimiter: str | None = None
) -> np.ndarray:
    """Return the numbers of a text file, (rows, columns) float64.

    Args:
        data: the file.
        name: name of the file in messages.
        columns: the required number of columns; None for any number.
        delimiter: separator of the columns; None for white space.

    Raises:
        ValueError: in one line: a cell is not a finite number, or lines are of unequal length.

    >>> numbers(b"1 2\\n3 4\\n", "a.txt")
    array([[1., 2.],
           [3., 4.]])
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # no data: said below
            table = np.loadtxt(
                io.BytesIO(data), delimiter=delimiter, comments=None, ndmin=2, encoding="utf-8"
            )
    except ValueError as error:
        reason = " ".join(str(error).split()).removesuffix(_NUMPY_HINT)
        raise ValueError(f"{name} is not a valid numeric table: {reason}") from error
    if table.size == 0:
        raise ValueError(f"{name} is empty: lines of numbers are needed")
    if columns not in (None, table.shape[1]):
        raise ValueError(f"{name} must have {columns} numbers a line, got {table.shape[1]}")
    bad = ~np.isfinite(table).all(1)
    if bad.any():
        line = int(bad.argmax()) + 1
        raise ValueError(f"{name} holds NaN or inf in {bad.sum()} lines, first in line {line}")
    return table
