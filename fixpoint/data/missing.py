"""Missing values of sequences."""

from __future__ import annotations

from typing import Literal

import numpy as np


def fill_missing(x: np.ndarray, how: Literal["hold", "linear"]) -> np.ndarray:
    """Fill NaN in sequences x (N, T, d) along their time.

    "hold" takes the last value before, "linear" a line between the neighbors; before the first and
    after the last value both hold that one.

    Raises:
        ValueError: a channel of a sequence has no value at all.

    >>> x = np.array([np.nan, 1.0, np.nan, 3.0]).reshape(1, 4, 1)
    >>> fill_missing(x, "hold").ravel().tolist(), fill_missing(x, "linear").ravel().tolist()
    ([1.0, 1.0, 1.0, 3.0], [1.0, 1.0, 2.0, 3.0])
    """
    filled = np.array(x, dtype=np.float64)
    missing = np.isnan(filled)
    for n, c in np.argwhere(missing.any(1)):
        known = np.flatnonzero(~missing[n, :, c])
        if not len(known):
            raise ValueError(
                f"channel {c} of sequence {n} has no value at all, so that nothing can fill it: "
                "leave that sequence out"
            )
        values = filled[n, known, c]
        steps = np.arange(x.shape[1])
        if how == "linear":
            filled[n, :, c] = np.interp(steps, known, values)
        else:
            before = np.searchsorted(known, steps, side="right") - 1
            filled[n, :, c] = values[np.maximum(before, 0)]
    return filled
