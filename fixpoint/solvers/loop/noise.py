"""Noise in the updates of a solve."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class NoiseOptions(Protocol):
    """Options of noise; see `IterativeSolver`."""

    noise: float
    generator: torch.Generator | None


def with_noise(options: NoiseOptions, new: Tensor, z: Tensor) -> Tensor:
    """Add normal numbers of `noise` times the RMS of new - z to all that moves.

    What an update leaves as it is, as the zeros that end a group, has no noise.
    """
    step = (new - z).detach()
    moves = step != 0
    count = moves.sum(1, keepdim=True).clamp_min(1)
    size = options.noise * (step.square().sum(1, keepdim=True) / count).sqrt()
    normal = torch.empty_like(step).normal_(generator=options.generator)
    return new + torch.where(moves, size * normal, 0.0)
