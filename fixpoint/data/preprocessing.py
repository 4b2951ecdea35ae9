"""Preprocessing of sequences of vectors: non-finite windows, normalization."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fixpoint.data.dataset import Dataset
from fixpoint.data.precision import NEEDS_NORMALIZATION
from fixpoint.data.splits import take

_CHUNK = 64  # windows converted to float64 at a time


def drop_nonfinite(dataset: Dataset) -> tuple[Dataset, int]:
    """Drop the training windows that hold NaN or inf, and return how many were dropped.

    Test windows are kept: the score counts each of them.

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
    """Shift and scale all parts by statistics of the training part.

    The statistics are computed in float64 from the finite training windows, without the padding of
    shorter ones. A column is constant if its spread is at most the rounding error of its stored
    values: it is shifted to 0 and not scaled, and the result's `notes` count such columns. Data
    stored as float32 are changed, unless `late`; for others `scale` and `shift` are changed, and
    the stored values are kept.

    Args:
        dataset: sequences of vectors, in their original units.
        per: "column" gives zero mean and unit (population) s.d. for each (time step, channel), as
            FastGRNN does; "channel" for each channel, over time and windows, which preserves the
            shape of a window in time. "asinh" is asinh((x - median) / (1.4826 MAD)) for each
            channel, with MAD the median distance from the median: linear near the median,
            logarithmic far from it, so that small movements are visible next to large ones.
            1.4826 MAD is the s.d. of a normal distribution, and outliers do not change it. If the
            MAD is 0, the s.d. takes its place.
        late: keep the stored values in their units and let `inputs` normalize them, so that
            `rotate` or `move` can change them before.

    Raises:
        ValueError: `per` is unknown, there is no finite training window, the data are tokens, which
            have no units, or were normalized by asinh before.

    Source: Kusupati et al., 2018, FastGRNN: A Fast, Accurate, Stable and Tiny Kilobyte Sized Gated
    Recurrent Neural Network ("zero mean - unit variance"); columns as in its EdgeML code.
    Burbidge, Magee, Robb, 1988, Alternative Transformations to Handle Extreme Values of the
    Dependent Variable (asinh).

    >>> from fixpoint.data import load_dataset
    >>> x = normalize(load_dataset("har2-sample")).x_train
    >>> bool((x.mean(0).abs() < 1e-5).all())
    True
    """
    if per not in ("column", "channel", "asinh"):
        raise ValueError(f"per must be 'column', 'channel' or 'asinh', got {per!r}")
    return normalize_by(dataset, find_normalization(dataset, per), late=late)


def normalize_by(dataset: Dataset, found: Normalization, *, late: bool = False) -> Dataset:
    """Shift and scale all parts by given statistics; see `normalize`.

    >>> from fixpoint.data import load_dataset
    >>> data = load_dataset("har2-sample")
    >>> normalize_by(data, find_normalization(data, "column")).x_train.mean().abs().item() < 1e-6
    True
    """
    notes = _notes(dataset, found)
    if late or dataset.x_train.dtype != torch.float32:
        scale, shift = _affine(dataset)
        scale, shift = scale / found.spread, (shift - found.center) / found.spread
        return replace(
            dataset, scale=scale.float(), shift=shift.float(), asinh=found.asinh, notes=notes
        )
    stored: dict[str, Any] = {}
    for part in dataset.parts:
        whole = _Windows(dataset, *(getattr(dataset, f"{k}_{part}") for k in ("x", "lengths")))
        changed = [
            _without_padding(found.apply(values), real).float() for values, real in whole.chunks()
        ]
        values = torch.cat(changed) if changed else getattr(dataset, f"x_{part}")
        stored[f"x_{part}"] = values
    # Channels normalized one by one are not the components of a vector; 0 is not the background.
    plain: dict[str, Any] = {"vectors": (), "sensors": (), "image": None}
    return replace(dataset, scale=None, shift=None, notes=notes, **plain, **stored)


def in_units(dataset: Dataset, x: Tensor) -> Tensor:
    """Convert stored rows of a data set, (B, T, d), to its units in float64.

    >>> from fixpoint.data import load_dataset
    >>> data = load_dataset("har2-sample")
    >>> in_units(data, data.x_test[:2]).dtype
    torch.float64
    """
    scale, shift = _affine(dataset)
    return x.double() * scale + shift


class Normalization(NamedTuple):
    """x' = (x - center) / spread of values x (B, T, d) in their units, and asinh where set.

    center, spread: float64 (T, d) or (d,).
    asinh: whether the inverse hyperbolic sine follows.
    constant: columns or channels that do not vary, whose spread is 1.
    """

    center: Tensor
    spread: Tensor
    asinh: bool = False
    constant: int = 0

    def apply(self, x: Tensor) -> Tensor:
        """Return x' in float64."""
        scaled = (x.double() - self.center) / self.spread
        return scaled.asinh() if self.asinh else scaled


def find_normalization(
    dataset: Dataset, per: Literal["column", "channel", "asinh", "none"]
) -> Normalization:
    """Compute the statistics by which `normalize` shifts and scales, from the training part.

    Raises:
        ValueError: see `normalize`.

    >>> from fixpoint.data import load_dataset
    >>> find_normalization(load_dataset("har2-sample"), "channel").center.shape
    torch.Size([9])
    """
    if dataset.kind != "classification":
        raise ValueError(f"{dataset.name} holds tokens, which are not normalized: leave it out")
    if dataset.asinh:
        raise ValueError(f"{dataset.name} is normalized by asinh already: load it again")
    x, lengths = dataset.x_train, dataset.lengths_train
    if per == "none":
        zero = torch.zeros(x.shape[2], dtype=torch.float64)
        return Normalization(zero, zero + 1)
    if x.is_floating_point():
        finite = _finite(x)
        x, lengths = x[finite], None if lengths is None else lengths[finite]
    if len(x) == 0:
        raise ValueError(
            f"{dataset.name}: at least one training window without NaN or inf is needed, "
            f"got none of {len(dataset.x_train)}; check the file it was read from"
        )
    windows = _Windows(dataset, x, lengths)
    if per == "asinh":
        center, spread, rounding = _robust(windows)
    else:
        center, spread, rounding = _mean_and_sd(windows, (0,) if per == "column" else (0, 1))
    constant = spread <= rounding
    spread = torch.where(constant, 1.0, spread)
    return Normalization(center, spread, per == "asinh", int(constant.sum()))


class _Windows(NamedTuple):
    """Stored windows x (N, T, d) of a data set, and their lengths (N,) or None."""

    dataset: Dataset
    x: Tensor
    lengths: Tensor | None

    def chunks(self, channels: slice = slice(None)) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield values (B, T, d) of some channels in float64, and which are not padding, (B, T, 1).

        None stands for no padding.
        """
        shape = self.x.shape[1:]
        scale, shift = (part.expand(shape)[:, channels] for part in _affine(self.dataset))
        steps = torch.arange(shape[0], device=self.x.device)[:, None]
        for rows in torch.arange(len(self.x), device=self.x.device).split(_CHUNK):
            real = None if self.lengths is None else steps < self.lengths[rows].view(-1, 1, 1)
            x = self.x[rows[0] : rows[-1] + 1, :, channels].double()
            if self.dataset.scale is not None:
                x = x * scale
            yield x if self.dataset.shift is None else x + shift, real

    def rounding(self, stored: Tensor, values: Tensor) -> Tensor:
        """Bound on the rounding error of values of a size, for that of their stored part."""
        dtype = self.x.dtype
        eps = torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0
        return eps * stored + 4 * torch.finfo(torch.float64).eps * values


def _without_padding(values: Tensor, real: Tensor | None) -> Tensor:
    """Return the values with 0 in the place of padding."""
    return values if real is None else torch.where(real, values, 0.0)


def _affine(dataset: Dataset) -> tuple[Tensor, Tensor]:
    """Scale and shift in float64."""
    one = torch.ones((), dtype=torch.float64, device=dataset.x_train.device)
    scale = one if dataset.scale is None else dataset.scale.double()
    return scale, 0 * one if dataset.shift is None else dataset.shift.double()


def _mean_and_sd(windows: _Windows, over: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean and s.d. over some axes, and the rounding error of the values."""
    shift = windows.dataset.shift
    sums, counts, stored, sizes = [], [], [], []
    for values, real in windows.chunks():
        values = _without_padding(values, real)
        sums.append(values.sum(over))
        whole = torch.ones(*values.shape[:2], 1) if real is None else real
        counts.append(whole.sum(over))
        sizes.append(values.abs().amax(over))
        if shift is not None:
            stored.append(_without_padding(values - shift, real).abs().amax(over))
    count = torch.stack(counts).sum(0).to(sums[0].device).clamp_min(1)
    mean = torch.stack(sums).sum(0) / count
    squares = [
        _without_padding(values - mean, real).square().sum(over)
        for values, real in windows.chunks()
    ]
    sd = (torch.stack(squares).sum(0) / count).sqrt()
    largest = torch.stack(stored or sizes).amax(0), torch.stack(sizes).amax(0)
    return mean, sd, windows.rounding(*largest)


def _robust(windows: _Windows) -> tuple[Tensor, Tensor, Tensor]:
    """Return median, 1.4826 MAD (the s.d. where it is 0), and rounding error of each channel."""
    _, sd, largest = _mean_and_sd(windows, (0, 1))
    shift = _affine(windows.dataset)[1].expand(windows.x.shape[1:])
    rows = []
    for c in range(windows.x.shape[-1]):
        chunks = [(v[..., 0], real) for v, real in windows.chunks(slice(c, c + 1))]
        values = torch.cat([v.flatten() if m is None else v[m[..., 0]] for v, m in chunks])
        median = values.median()
        mad = 1.4826 * (values - median).abs().median()
        size = (median - shift[:, c]).abs().amax() + mad
        rows.append(torch.stack([median, mad, windows.rounding(size, median.abs() + mad)]))
    median, mad, rounding = torch.stack(rows, 1)
    flat = mad <= rounding
    return median, torch.where(flat, sd, mad), torch.where(flat, largest, rounding)


def _notes(dataset: Dataset, found: Normalization) -> tuple[str, ...]:
    notes = tuple(note for note in dataset.notes if note != NEEDS_NORMALIZATION)
    if not found.constant:
        return notes
    what = "columns (time step, channel)" if found.center.dim() == 2 else "channels"
    return (*notes, f"{found.constant} of {found.spread.numel()} {what} are constant")


def _finite(x: Tensor) -> Tensor:
    """Return which windows of x (N, T, d) hold neither NaN nor inf, (N,) bool."""
    return x.isfinite().flatten(1).all(1)
