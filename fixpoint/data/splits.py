"""Splits of a data set: by group if groups are given, else stratified by class."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fixpoint.data.dataset import Dataset

_OF_EACH_ROW = ("x", "y", "groups", "lengths")


def take(dataset: Dataset, part: str, rows: Tensor) -> Dataset:
    """Select rows of train, valid or test, by index or mask.

    >>> from fixpoint.data import load_dataset
    >>> len(take(load_dataset("har2-sample"), "test", torch.arange(10)).x_test)
    10
    """
    return replace(dataset, **_rows(dataset, part, rows, part))


def validation_split(dataset: Dataset, fraction: float = 0.2, *, seed: int = 0) -> Dataset:
    """Split a validation part off the training part.

    A data set with an official validation part is returned unchanged. If groups are given, no group
    is in both parts, so the validation score estimates the score on new people; else the split is
    stratified by class.

    Args:
        dataset: the data.
        fraction: fraction of the training sequences, above 0 and below 1. Whole groups are taken,
            in an order drawn from `seed`, so that their size is nearest to it.
        seed: of the random order.

    Raises:
        ValueError: `fraction` is out of range, the data are a stream, or there is one group only.

    >>> from fixpoint.data import load_dataset
    >>> validation_split(load_dataset("har2-sample"))
    Dataset(har2-sample (subset): 612 train + 144 valid + 324 test windows of 128 steps x 9 \
channels, 2 classes)
    """
    if dataset.x_valid is not None:
        return dataset
    if dataset.kind == "language-model":
        raise ValueError(
            f"{dataset.name} is one stream without a validation part, which cannot be split into "
            "sequences: give x_valid and y_valid"
        )
    mask = held_out(dataset.y_train, dataset.groups_train, fraction, seed=seed)
    valid = _rows(dataset, "train", mask, "valid")
    return replace(dataset, **_rows(dataset, "train", ~mask, "train"), **valid)


def held_out(y: Tensor, groups: Tensor | None, fraction: float, *, seed: int) -> Tensor:
    """Return mask of the sequences to hold out, (N,) bool; see `validation_split`.

    Args:
        y: class of each sequence, (N,).
        groups: group of each sequence, (N,), or None.

    >>> held_out(torch.tensor([0, 0, 1, 1]), None, 0.5, seed=0).sum().item()
    2
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must lie between 0 and 1, got {fraction}")
    draw = torch.Generator().manual_seed(seed)
    mask = torch.zeros(len(y), dtype=torch.bool)
    if groups is None:
        for label in y.unique():
            rows = (y == label).nonzero().flatten()
            rows = rows[torch.randperm(len(rows), generator=draw)]
            mask[rows[: round(fraction * len(rows))]] = True
        return mask
    ids, counts = groups.unique(return_counts=True)
    if len(ids) < 2:
        raise ValueError(
            f"all {len(y)} training sequences are of one group, which cannot be split: leave out "
            "the groups"
        )
    order = torch.randperm(len(ids), generator=draw)
    ends = counts[order].cumsum(0)[:-1]  # at least one group is left for training
    taken = int((ends - fraction * len(y)).abs().argmin()) + 1
    return torch.isin(groups, ids[order[:taken]])


def _rows(dataset: Dataset, part: str, rows: Tensor, name: str) -> dict[str, Any]:
    found = {key: getattr(dataset, f"{key}_{part}") for key in _OF_EACH_ROW}
    return {f"{key}_{name}": value[rows] for key, value in found.items() if value is not None}
