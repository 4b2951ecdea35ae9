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


def normalize(
    dataset: Dataset, per: Literal["column", "channel", "asinh"] = "column", *, late: bool = False
) -> Dataset:
    """Shift and scale all parts, by statistics of train alone.

    The statistics come from the finite training windows, in float64. A spread below 1e-6 counts as
    1, so a constant column becomes 0. Data that are stored as float32 are changed, unless `late`;
    of others `scale` and `shift` are, and the numbers stay as small as they were.

    Args:
        dataset: sequences of vectors, in their own units.
        per: "column" gives zero mean and unit (population) s.d. for each (time step, channel), as
            FastGRNN does; "channel" for each channel, over time and windows, which keeps the shape
            of a window in time. "asinh" is asinh((x - median) / (1.4826 MAD)) for each channel,
            with MAD the median distance from the median: linear near the median, logarithmic far
            from it, so that the small movements of someone who sits still are seen beside large
            ones. 1.4826 MAD is the s.d. of normal values, and few large ones do not change it.
        late: leave the stored numbers in their units, and have `inputs` normalize them, so that
            they can be turned by `rotate` first.

    Raises:
        ValueError: another `per`, no finite training window, tokens, which have no units, or data
            normalized by asinh already.

    Source: Kusupati et al., 2018, FastGRNN: A Fast, Accurate, Stable and Tiny Kilobyte Sized Gated
    Recurrent Neural Network ("zero mean - unit variance"); columns and floor as in its EdgeML code.
    Burbidge, Magee, Robb, 1988, Alternative Transformations to Handle Extreme Values of the
    Dependent Variable (asinh).

    >>> from fixpoint.data import load_dataset
    >>> x = normalize(load_dataset("har2-sample")).x_train
    >>> bool((x.mean(0).abs() < 1e-5).all())
    True
    """
    if per not in ("column", "channel", "asinh"):
        raise ValueError(f"per must be 'column', 'channel' or 'asinh', got {per!r}")
    if dataset.kind != "classification":
        raise ValueError(f"{dataset.name} holds tokens, which are not normalized: leave it out")
    if dataset.asinh:
        raise ValueError(f"{dataset.name} is normalized by asinh already: load it again")
    x = dataset.x_train
    if x.is_floating_point():
        x = x[_finite(x)]
    if len(x) == 0:
        raise ValueError(
            f"{dataset.name}: at least one training window without NaN or inf is needed, "
            f"got none of {len(dataset.x_train)}; check the file it was read from"
        )
    if per == "asinh":
        centre, spread = _robust(dataset, x)
    else:
        centre, spread = _statistics(dataset, x, over=(0,) if per == "column" else (0, 1))
    if late or dataset.x_train.dtype != torch.float32:
        old_scale = 1.0 if dataset.scale is None else dataset.scale.double()
        old_shift = 0.0 if dataset.shift is None else dataset.shift.double()
        scale, shift = old_scale / spread, (old_shift - centre) / spread
        return replace(dataset, scale=scale.float(), shift=shift.float(), asinh=per == "asinh")
    shift, scale = centre.float(), spread.float()

    def changed(x: Tensor) -> Tensor:
        x = (dataset.inputs(x) - shift) / scale
        return x.asinh() if per == "asinh" else x

    stored: dict[str, Any] = {
        f"x_{part}": changed(getattr(dataset, f"x_{part}")) for part in dataset.parts
    }
    # What is normalized channel by channel is no vector any more.
    return replace(dataset, scale=None, shift=None, vectors=(), **stored)


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


def _robust(dataset: Dataset, x: Tensor) -> tuple[Tensor, Tensor]:
    """Median and 1.4826 MAD of each channel of x, in float64; a spread below 1e-6 is 1."""
    channels = torch.cat([dataset.inputs(c).flatten(0, 1).mT for c in x.split(_CHUNK)], 1)
    medians = torch.stack([values.median() for values in channels])
    mad = torch.stack([(v - m).abs().median() for v, m in zip(channels, medians, strict=True)])
    spread = 1.4826 * mad.double()
    return medians.double(), torch.where(spread < 1e-6, 1.0, spread)


def _finite(x: Tensor) -> Tensor:
    """Which windows of x (N, T, d) hold neither NaN nor inf, (N,) bool."""
    return x.isfinite().flatten(1).all(1)
