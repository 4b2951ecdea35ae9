"""A labelled set of sequences, and what is done to it before training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

_CHUNK = 1024  # windows converted to float64 at a time


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Dataset:
    """Sequences of equal length with one class each, split into train and test.

    Args:
        name: name in `fixpoint.data.DATASETS`.
        x_train, x_test: windows (N, T, d), float32.
        y_train, y_test: class of each window (N,), int64, in `range(len(classes))`.
        classes: name of each class.
        groups_train, groups_test: who produced each window (N,), int64, e.g. the subject; None
            where unknown. Windows of one group are not independent: split by group, not by window.
        licence: terms of use.
        citation: what to cite.

    Raises:
        ValueError: shapes, dtypes or labels do not fit together.

    >>> from fixpoint.data import load_dataset
    >>> load_dataset("har2-sample")
    Dataset(har2-sample: 756 train + 324 test windows of 128 steps x 9 channels, 2 classes)
    """

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: tuple[str, ...]
    groups_train: Tensor | None = None
    groups_test: Tensor | None = None
    licence: str
    citation: str

    def __post_init__(self) -> None:
        self._check("train", self.x_train, self.y_train, self.groups_train)
        self._check("test", self.x_test, self.y_test, self.groups_test)
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            raise ValueError(
                f"{self.name}: train and test windows must have one (T, d), "
                f"got {tuple(self.x_train.shape[1:])} and {tuple(self.x_test.shape[1:])}"
            )

    def _check(self, part: str, x: Tensor, y: Tensor, groups: Tensor | None) -> None:
        if x.ndim != 3 or x.dtype != torch.float32:
            raise ValueError(
                f"{self.name}: x_{part} must be float32 (N, T, d), got {x.dtype} {tuple(x.shape)}"
            )
        for key, ids in (("y", y), ("groups", groups)):
            if ids is not None and (ids.shape != x.shape[:1] or ids.dtype != torch.int64):
                raise ValueError(
                    f"{self.name}: {key}_{part} must be int64 ({len(x)},), one for each window, "
                    f"got {ids.dtype} {tuple(ids.shape)}"
                )
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < len(self.classes):
            raise ValueError(
                f"{self.name}: y_{part} must lie in 0..{len(self.classes) - 1} for "
                f"{len(self.classes)} classes, got {int(y.min())}..{int(y.max())}"
            )

    def __repr__(self) -> str:
        _, steps, channels = self.x_train.shape
        return (
            f"Dataset({self.name}: {len(self.x_train)} train + {len(self.x_test)} test windows of "
            f"{steps} steps x {channels} channels, {len(self.classes)} classes)"
        )


def drop_nonfinite(dataset: Dataset) -> tuple[Dataset, int]:
    """Leave out the training windows that hold NaN or inf, and say how many they were.

    Test windows stay: a model has to answer for each of them.
    """
    keep = _finite(dataset.x_train)
    groups = dataset.groups_train
    kept = replace(
        dataset,
        x_train=dataset.x_train[keep],
        y_train=dataset.y_train[keep],
        groups_train=None if groups is None else groups[keep],
    )
    return kept, int((~keep).sum())


def normalise(dataset: Dataset, per: Literal["column", "channel"] = "column") -> Dataset:
    """Shift and scale train and test to zero mean and unit (population) s.d. on train.

    The statistics come from the finite training windows alone, in float64. A s.d. below 1e-6
    counts as 1, so a constant column becomes 0.

    Args:
        dataset: the data, in its own units.
        per: "column" takes one mean and s.d. for each (time step, channel), as FastGRNN does;
            "channel" takes one for each channel, over time and windows, which keeps the shape of
            a window in time.

    Raises:
        ValueError: another `per`, or no finite training window.

    Source: Kusupati et al., 2018, FastGRNN: A Fast, Accurate, Stable and Tiny Kilobyte Sized Gated
    Recurrent Neural Network ("zero mean - unit variance"); columns and floor as in its EdgeML code.
    """
    if per not in ("column", "channel"):
        raise ValueError(f"per must be 'column' or 'channel', got {per!r}")
    x = dataset.x_train[_finite(dataset.x_train)]
    if len(x) == 0:
        raise ValueError(
            f"{dataset.name}: at least one training window without NaN or inf is needed, "
            f"got none of {len(dataset.x_train)}; check the file it was read from"
        )
    over = (0,) if per == "column" else (0, 1)
    count = len(x) if per == "column" else len(x) * x.shape[1]
    chunks = x.split(_CHUNK)
    mean = torch.stack([chunk.double().sum(over) for chunk in chunks]).sum(0) / count
    squares = torch.stack([(chunk.double() - mean).square().sum(over) for chunk in chunks]).sum(0)
    std = (squares / count).sqrt()
    shift, scale = mean.float(), torch.where(std < 1e-6, 1.0, std).float()
    return replace(
        dataset,
        x_train=(dataset.x_train - shift) / scale,
        x_test=(dataset.x_test - shift) / scale,
    )


def _finite(x: Tensor) -> Tensor:
    """Which windows of x (N, T, d) hold neither NaN nor inf, (N,) bool."""
    return x.isfinite().flatten(1).all(1)
