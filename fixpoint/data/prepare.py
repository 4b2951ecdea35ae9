"""What is done to sequences of vectors before training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from fixpoint.data.dataset import Dataset
from fixpoint.data.splits import take

_CHUNK = 1024  # windows converted to float64 at a time


def drop_nonfinite(dataset: Dataset) -> tuple[Dataset, int]:
    """Leave out the training windows that hold NaN or inf, and say how many they were.

    Test windows stay: a model has to answer for each of them.

    >>> from fixpoint.data import load_dataset
    >>> drop_nonfinite(load_dataset("har2-sample"))[1]
    0
    """
    if not dataset.x_train.is_floating_point():
        return dataset, 0
    keep = _finite(dataset.x_train)
    return take(dataset, "train", keep), int((~keep).sum())


def normalise(dataset: Dataset, per: Literal["column", "channel"] = "column") -> Dataset:
    """Shift and scale all parts to zero mean and unit (population) s.d. on train.

    The statistics come from the finite training windows alone, in float64. A s.d. below 1e-6
    counts as 1, so a constant column becomes 0. Data that are stored as float32 are changed; of
    others `scale` and `shift` are, and the numbers stay as small as they were.

    Args:
        dataset: sequences of vectors, in their own units.
        per: "column" takes one mean and s.d. for each (time step, channel), as FastGRNN does;
            "channel" takes one for each channel, over time and windows, which keeps the shape of
            a window in time.

    Raises:
        ValueError: another `per`, no finite training window, or tokens, which have no units.

    Source: Kusupati et al., 2018, FastGRNN: A Fast, Accurate, Stable and Tiny Kilobyte Sized Gated
    Recurrent Neural Network ("zero mean - unit variance"); columns and floor as in its EdgeML code.

    >>> from fixpoint.data import load_dataset
    >>> x = normalise(load_dataset("har2-sample")).x_train
    >>> bool((x.mean(0).abs() < 1e-5).all())
    True
    """
    if per not in ("column", "channel"):
        raise ValueError(f"per must be 'column' or 'channel', got {per!r}")
    if dataset.kind != "classification":
        raise ValueError(f"{dataset.name} holds tokens, which are not normalised: leave it out")
    x = dataset.x_train
    if x.is_floating_point():
        x = x[_finite(x)]
    if len(x) == 0:
        raise ValueError(
            f"{dataset.name}: at least one training window without NaN or inf is needed, "
            f"got none of {len(dataset.x_train)}; check the file it was read from"
        )
    mean, std = _statistics(dataset, x, over=(0,) if per == "column" else (0, 1))
    if dataset.x_train.dtype != torch.float32:
        old_scale = 1.0 if dataset.scale is None else dataset.scale.double()
        old_shift = 0.0 if dataset.shift is None else dataset.shift.double()
        return replace(
            dataset, scale=(old_scale / std).float(), shift=((old_shift - mean) / std).float()
        )
    shift, scale = mean.float(), std.float()
    changed: dict[str, Any] = {
        f"x_{part}": (dataset.inputs(getattr(dataset, f"x_{part}")) - shift) / scale
        for part in dataset.parts
    }
    return replace(dataset, scale=None, shift=None, **changed)


def _statistics(dataset: Dataset, x: Tensor, over: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Mean and s.d. of the values of x, in float64; a s.d. below 1e-6 is 1."""
    count = len(x) if over == (0,) else len(x) * x.shape[1]
    chunks = x.split(_CHUNK)

    def total(centre: Tensor | float, power: int) -> Tensor:
        parts = [(dataset.inputs(c).double() - centre).pow(power).sum(over) for c in chunks]
        return torch.stack(parts).sum(0)

    mean = total(0.0, 1) / count
    std = (total(mean, 2) / count).sqrt()
    return mean, torch.where(std < 1e-6, 1.0, std)


def _finite(x: Tensor) -> Tensor:
    """Which windows of x (N, T, d) hold neither NaN nor inf, (N,) bool."""
    return x.isfinite().flatten(1).all(1)
