"""Values of a user as float32, without rounding away the differences between sequences."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

SMALL = (np.float32, np.float16, np.int16, np.uint8)
"""Types that a data set holds as they are."""

NEEDS_NORMALIZATION = "differences between sequences are below the resolution of float32: normalize"
_ROUNDING = 2.0**-24  # of float32, relative
_ALLOWED = 2.0**-10  # rounding, relative to the s.d. of a column
_SMALLEST = 1e-30  # below it float32 loses digits


class Float32(NamedTuple):
    """Sequences of each part as a data set holds them.

    Attributes:
        x: (N, T, d) of each part; `x + shift` are the values.
        shift: float32 (T, d), the means of the columns, or None.
        notes: what a user should know of them.
    """

    x: dict[str, torch.Tensor]
    shift: torch.Tensor | None
    notes: tuple[str, ...]


def to_float32(parts: Mapping[str, np.ndarray], lengths: np.ndarray | None, path: Path) -> Float32:
    """Convert the sequences of all parts, x (N, T, d) of numbers.

    Small types are kept. Of others, the mean over the training sequences is subtracted from each
    column (time step, channel) where rounding to float32 would exceed 0.1 % of its s.d.

    Args:
        parts: the sequences of "train" and of other parts.
        lengths: the steps of each training sequence (N,), or None.
        path: name of the file in messages.

    Raises:
        ValueError: the values, or what is left after that, are beyond float32.

    >>> x = 1e9 + np.array([0.0, 0.5, 1.0]).reshape(3, 1, 1)
    >>> to_float32({"train": x}, None, Path("a.npz")).x["train"].flatten().tolist()
    [0.0, 0.5, 1.0]
    """
    if all(x.dtype.newbyteorder("=") in SMALL for x in parts.values()):
        return Float32({part: _tensor(x, x.dtype) for part, x in parts.items()}, None, ())
    train = parts["train"].astype(np.float64)
    real = np.ones((len(train), train.shape[1], 1), bool)
    if lengths is not None:
        real = (np.arange(train.shape[1]) < lengths[:, None])[..., None]
    count = real.sum(0).clip(1)
    mean = (train * real).sum(0) / count
    deviation = np.sqrt((((train - mean) * real) ** 2).sum(0) / count)
    size = np.abs(train * real).max(0)
    varies = deviation > 4 * np.finfo(np.float64).eps * size
    if (varies & (deviation < _SMALLEST)).any():
        raise ValueError(
            f"{path}: x varies by less than {_SMALLEST:g}, which float32 cannot hold: multiply it, "
            "as by x / x.std()"
        )
    lost = varies & (size * _ROUNDING > _ALLOWED * deviation)
    if not lost.any():
        return Float32({part: _tensor(x, np.float32) for part, x in parts.items()}, None, ())
    shift = np.where(lost, mean, 0.0).astype(np.float32)
    # What rounding leaves of the mean is in the stored values.
    if (lost & (np.abs(mean - shift) * _ROUNDING > _ALLOWED * deviation)).any():
        raise ValueError(
            f"{path}: x varies by less than a part in 1e11 of its mean: subtract that before "
            "saving, as by x - x.mean(0)"
        )
    x = {part: _tensor(x - shift.astype(np.float64), np.float32) for part, x in parts.items()}
    return Float32(x, torch.from_numpy(shift), (NEEDS_NORMALIZATION,))


def _tensor(x: np.ndarray, dtype: object) -> torch.Tensor:
    native = np.dtype(dtype).newbyteorder("=")  # type: ignore[call-overload]
    return torch.from_numpy(np.ascontiguousarray(x.astype(native, copy=False)))
