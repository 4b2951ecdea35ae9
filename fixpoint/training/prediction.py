"""Classes and scores of new windows by a trained model."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

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
    ends = [torch.as_tensor(lengths)] if lengths is not None else []
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

    Of a data frame with the names of the channels these columns are taken.
    """
    if hasattr(x, "columns"):
        named = list(form.channels) if set(form.channels) <= set(map(str, x.columns)) else []
        x = (x[named] if named else x).to_numpy()
    windows = torch.as_tensor(x, dtype=torch.float64)
    if windows.dim() == 2:
        windows = windows[None]
    T, d = form.timesteps, form.size
    fits = windows.dim() == 3 and windows.shape[2] == d
    if not fits or not (windows.shape[1] == T or (form.lengths and windows.shape[1] < T)):
        channels = f" ({', '.join(form.channels)})" if form.channels else ""
        raise ValueError(
            f"windows must be (B, {T}, {d}), {T} samples of {d} channels{channels}, or one "
            f"({T}, {d}); got {tuple(torch.as_tensor(x).shape)}: cut recordings into such windows"
        )
    return windows
