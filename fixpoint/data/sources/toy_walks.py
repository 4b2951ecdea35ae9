"""Toy walks: random walks in the plane of two step sizes, made on the fly.

Source: Zhang, Kag, Sullivan, Saligrama, 2019, Equilibrated Recurrent Neural Network: "Validation of
Proposed Method on Toy Data".
"""

from __future__ import annotations

import math

import numpy as np
import torch

from fixpoint.data.dataset import Dataset

VARIANCES = (0.1, 1.0)  # of a step along each axis
LICENSE = "made by this package: no terms"
CITATION = (
    "Z. Zhang, A. Kag, A. Sullivan, V. Saligrama. Equilibrated Recurrent Neural Network: Neuronal "
    "Time-Delayed Self-Feedback Improves Accuracy and Stability. 2019"
)


def toy_walks(*, walks: int = 10_000, steps: int = 100, seed: int = 0) -> Dataset:
    """Return walks X_t ~ N(X_{t-1}, sigma I) from 0; the class says whether sigma is 0.1 or 1.

    sigma is the variance of a step. Each step is a draw of its own, so that a model has to look at
    many of them: read as a s.d., 0.1 and 1 would lie ten times apart and be told apart at once.

    Args:
        walks: of each class; one half is train, the other test.
        steps: length of a walk, X_1 to X_T.
        seed: of the draw.

    Raises:
        ValueError: fewer than two walks or one step.

    >>> toy_walks(walks=10)
    Dataset(toy-walks: 10 train + 10 test windows of 100 steps x 2 channels, 2 classes)
    """
    if walks < 2 or steps < 1:
        raise ValueError(f"at least 2 walks of 1 step are needed, got {walks} of {steps}")
    draw = np.random.RandomState(seed)  # the same in every version of NumPy
    paths = [
        torch.from_numpy(draw.normal(0, math.sqrt(variance), (walks, steps, 2))).cumsum(1).float()
        for variance in VARIANCES
    ]
    half = walks // 2
    counts = torch.tensor([half] * 2), torch.tensor([walks - half] * 2)
    labels = torch.arange(2)
    return Dataset(
        name="toy-walks",
        x_train=torch.cat([path[:half] for path in paths]),
        y_train=labels.repeat_interleave(counts[0]),
        x_test=torch.cat([path[half:] for path in paths]),
        y_test=labels.repeat_interleave(counts[1]),
        classes=tuple(f"variance {variance:g}" for variance in VARIANCES),
        license=LICENSE,
        citation=CITATION,
    )
