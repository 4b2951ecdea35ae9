"""Columns of a table as numbers, names of classes or persons, and times."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np

_MISSING = ("", "nan", "na", "n/a", "null", "none", "?")


def read_numbers(column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return float64 with NaN for missing values and text, and the places of the texts."""
    if column.dtype.kind in "biuf":
        values, texts = column.astype(np.float64), np.zeros(0, int)
    else:
        cells = [_number(str(cell).strip()) for cell in column]
        values = np.array([np.nan if v is None else v for v in cells], np.float64)
        texts = np.flatnonzero([v is None for v in cells])
    return values, texts


def _number(cell: str) -> float | None:
    """Return a number, NaN for a missing one, None for text."""
    if cell.lower() in _MISSING:
        return np.nan
    try:
        return float(cell)
    except ValueError:
        return None


def read_classes(column: np.ndarray, key: str, name: str) -> np.ndarray:
    """Return names of classes.

    Raises:
        ValueError: they are real numbers.
    """
    values, texts = read_numbers(column)
    real = values[np.isfinite(values) & (values != np.rint(values))]
    if len(real) and not len(texts):
        raise ValueError(
            f"{name}: the column {key!r} holds real numbers, as {real[0]:.4g}, and regression is "
            "not offered: name a column of classes by --label"
        )
    return read_names(column)


def read_names(column: np.ndarray) -> np.ndarray:
    """Return names, "" for missing ones; whole numbers without a point."""
    cells = ["" if _is_missing(c) else str(c).strip() for c in column]
    if any("." in c for c in cells) and all(re.fullmatch(r"-?\d+(\.0*)?|", c) for c in cells):
        cells = [c.partition(".")[0] for c in cells]
    return np.array(cells)


def _is_missing(cell: Any) -> bool:
    return cell is None or str(cell).strip().lower() in ("", "nan", "na", "n/a", "nat", "<na>")


def read_times(column: np.ndarray, name: str) -> np.ndarray:
    """Return times as float64; of dates in seconds."""
    values, texts = read_numbers(column) if column.dtype.kind != "M" else (column, column)
    if len(texts):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a time zone: taken into account
                dates = np.array(column, "datetime64[ns]")
        except ValueError:
            raise ValueError(
                f"{name} holds neither numbers nor dates, as 2026-01-31T12:00:00.25"
            ) from None
        values = np.where(np.isnat(dates), np.nan, dates.astype(np.int64) / 1e9)
    lost = ~np.isfinite(values)
    if lost.any():
        raise ValueError(f"{name} has no time in {int(lost.sum())} lines")
    return values
