"""Differences between the scores of a program and of its network."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fixpoint.training import Trained


class Agreement(NamedTuple):
    """Scores of a program and of torch, over the same windows.

    windows: number of them.
    scored: windows whose scores by the program are finite.
    equal: windows with the same label.
    largest, median: largest and median absolute difference of scores.
    spread: standard deviation of torch's scores, in whose units a difference is judged.
    accuracy: of the program, in percent. reference: of torch.
    """

    windows: int
    scored: int
    equal: int
    largest: float
    median: float
    spread: float
    accuracy: float
    reference: float

    def __str__(self) -> str:
        percent = 100 * self.equal / self.windows
        return (
            f"{self.equal} of {self.windows} labels as torch ({percent:.2f} %), scores differ by "
            f"{self.largest:.2g} at most, {self.median:.2g} in the median (their s.d. is "
            f"{self.spread:.3g}); accuracy {self.accuracy:.2f} %, of torch {self.reference:.2f} %"
        )


@torch.no_grad()
def torch_scores(run: Trained, *, batch_size: int = 512) -> Tensor:
    """Return scores, (N, C), of the test windows by the trained model."""
    parts = run.data.x_test.split(batch_size)
    dtype = run.dtype
    return torch.cat([run.model(run.data.inputs(part).to(dtype)) for part in parts]).float()


def compare(scores: Tensor, reference: Tensor, labels: Tensor) -> Agreement:
    """Compare scores, (N, C), with torch's; a window whose scores are NaN has no label."""
    predicted, expected = label(scores), label(reference)
    difference = (scores - reference).abs()
    difference = difference[difference.isfinite()]
    if not len(difference):
        difference = torch.zeros(1)
    return Agreement(
        windows=len(scores),
        scored=int(scores.isfinite().all(1).sum()),
        equal=int((predicted == expected).sum()),
        largest=difference.max().item(),
        median=difference.median().item(),
        spread=reference[reference.isfinite()].std().item(),
        accuracy=100 * (predicted == labels).double().mean().item(),
        reference=100 * (expected == labels).double().mean().item(),
    )


def label(scores: Tensor) -> Tensor:
    """Return the class of each row of scores, (N,); -1 where one is NaN."""
    return torch.where(scores.isnan().any(1), -1, scores.argmax(1))
