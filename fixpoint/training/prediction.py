"""Classes and scores of new windows by a trained model."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fixpoint._messages import no_channel
from fixpoint.training.engine.run_form import InputForm

_BATCH = 512


class Predictions(NamedTuple):
    """Scores of windows, and the classes that they stand for.

    scores: (B, C); NaN of a window with NaN or inf.
    classes: name of each of the C classes.
    """

    scores: Tensor
    classes: tuple[str, ...]

    @property
    def labels(self) -> Tensor:
        """Index of the class of each window, (B,); -1 where its scores are NaN."""
        return torch.where(self.scores.isnan().any(1), -1, self.scores.argmax(1))

    @property
    def names(self) -> list[str]:
        """Name of the class of each window, "" where its scores are NaN."""
        return ["" if i < 0 else self.classes[i] for i in self.labels.tolist()]

    @property
    def probabilities(self) -> Tensor:
        """Softmax of the scores, (B, C)."""
        return self.scores.softmax(1)


@torch.no_grad()
def predict(model: Any, form: InputForm, x: Any, lengths: Any = None) -> Predictions:
    """Classify windows in the units of the sensor; see `Trained.predict`."""
    if form.kind != "classification":
        raise ValueError(f"{form.name} holds words; predict takes windows of a sensor's values")
    windows = as_windows(form, x)
    steps = windows.shape[1]
    windows = F.pad(windows, (0, 0, 0, form.timesteps - steps))
    dtype = next(model.parameters()).dtype
    ends = [_as_lengths(lengths, windows)] if lengths is not None else []
    if form.lengths and not ends:
        ends = [torch.full((len(windows),), steps)]
    scores = []
    for rows, *some in zip(*(part.split(_BATCH) for part in (windows, *ends)), strict=True):
        scores.append(model(form.normalization.apply(rows).to(dtype), *some).float())
    found = torch.cat(scores) if scores else torch.zeros(0, len(form.classes))
    spoiled = ~windows.isfinite().flatten(1).all(1)
    found[spoiled | ~found.isfinite().all(1)] = torch.nan
    return Predictions(found, form.classes)


def as_windows(form: InputForm, x: Any) -> Tensor:
    """Return windows (B, T, d) float64 of a tensor, array or data frame, after a check of their
    shape.

    Of a data frame with names the columns of the channels are taken.
    """
    if hasattr(x, "columns"):
        columns = list(map(str, x.columns))
        lost = [name for name in form.channels if name not in columns]
        if lost and any(isinstance(name, str) for name in x.columns):
            raise ValueError(no_channel("the data frame", lost[0], columns))
        x = (x if lost or not form.channels else x[list(form.channels)]).to_numpy()
    T, d = form.timesteps, form.size
    channels = f" ({', '.join(form.channels)})" if form.channels else ""
    wanted = (
        f"windows must be (B, {T}, {d}), {T} samples of {d} channels{channels}, or one ({T}, {d})"
    )
    try:
        if np.iscomplexobj(x):
            raise TypeError
        values = x if isinstance(x, Tensor) else np.asarray(x, dtype=np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"{wanted}, of real numbers; got {type(x).__name__}") from None
    windows = torch.as_tensor(values, dtype=torch.float64)
    shape = tuple(windows.shape)
    windows = windows[None] if len(shape) == 2 else windows
    fits = windows.dim() == 3 and windows.shape[2] == d
    if not fits or not (windows.shape[1] == T or (form.lengths and windows.shape[1] < T)):
        raise ValueError(f"{wanted}; got {shape}: cut recordings into such windows")
    return windows


def _as_lengths(lengths: Any, windows: Tensor) -> Tensor:
    ends, (B, T, _) = torch.as_tensor(lengths), windows.shape
    whole = not (ends.is_floating_point() or ends.is_complex())
    if ends.shape != (B,) or not whole or (B and not 1 <= ends.min() <= ends.max() <= T):
        raise ValueError(
            f"lengths must be ({B},) whole numbers from 1 to {T}, the time steps of each window; "
            f"got {ends.dtype} {tuple(ends.shape)}"
            + (f" from {ends.min()} to {ends.max()}" if ends.numel() else "")
        )
    return ends
