"""The paper's toy data: random walks of two step sizes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fixpoint.solvers.checks import at_least

VARIANCES = (0.1, 1.0)


class Walks(NamedTuple):
    """Random walks and their class: x (N, T, 2) float32, y (N,) int64."""

    x: Tensor
    y: Tensor


def toy_walks(count: int, *, timesteps: int = 100, seed: int = 0) -> Walks:
    """2-D random walks from 0 with Gaussian steps of variance 0.1 (class 0) or 1.0 (class 1).

    Args:
        count: walks of each class; the classes alternate.
        timesteps: T.
        seed: of the steps.

    Source: Zhang, Kag, Sullivan, Saligrama (2019), Equilibrated Recurrent Neural Network,
        section 1: X_t ~ N(X_{t-1}, sigma_i I), where sigma_i I is a covariance.

    Example:
        >>> from fixpoint.analysis import toy_walks
        >>> x, y = toy_walks(500)
        >>> [round(x[y == c].diff(dim=1).var().item(), 2) for c in (0, 1)]
        [0.1, 1.0]
    """
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(2).repeat(at_least(1, count=count))
    steps = torch.randn(2 * count, at_least(1, timesteps=timesteps), 2, generator=generator)
    return Walks((steps * torch.tensor(VARIANCES).sqrt()[y][:, None, None]).cumsum(1), y)
