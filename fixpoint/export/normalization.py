"""The normalization of a network in float32, without cancellation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fixpoint.data import Normalization
from fixpoint.export.recurrence import row

_EPS = 2.0**-24
"""Relative rounding error of float32."""

_COARSE = 0.1
"""Largest rounding error of a sample, in units of the spread, with which a program makes sense."""


@dataclass(frozen=True, kw_only=True, eq=False)
class InputScale:
    """x' = ((x - offset) - mean) * scale of samples in the units of the sensor, then asinh if set.

    The offset is that of a whole channel. A difference of two near numbers is exact in float32, so
    the mean of a channel costs no digit, and no product is added to anything: fused
    multiply-add units change nothing.

    Args:
        offset: (d,). mean, scale: (T, d), or (1, d) where all time steps have the same. float32.
        asinh: whether x' is the inverse hyperbolic sine.
    """

    offset: Tensor
    mean: Tensor
    scale: Tensor
    asinh: bool = False

    @classmethod
    def of(cls, normalization: Normalization) -> InputScale:
        """Read off the statistics in float64.

        Raises:
            ValueError: float32 cannot hold them, or resolves no difference between samples.
        """
        center, spread = (
            torch.atleast_2d(part.double()) for part in (normalization.center, normalization.spread)
        )
        offset = ((center.amax(0) + center.amin(0)) / 2).float()
        scale = 1 / spread
        _check(offset, center, scale)
        # A column that does not vary has the scale 1: its samples are 0 as floats too.
        center = torch.where(scale == 1, center.float().double(), center)
        mean = (center - offset.double()).float()
        return cls(offset=offset, mean=mean, scale=scale.float(), asinh=normalization.asinh)

    @classmethod
    def identity(cls, channels: int) -> InputScale:
        """Leave samples of this many channels as they are."""
        zero = torch.zeros(channels)
        return cls(offset=zero, mean=zero[None], scale=zero[None] + 1)

    @property
    def rows(self) -> int:
        """Time steps with a mean and scale of their own."""
        return len(self.scale)

    @property
    def channels(self) -> int:
        """Values d of a sample."""
        return len(self.offset)

    @property
    def is_identity(self) -> bool:
        """True if samples are unchanged."""
        zero = not bool(self.offset.any() or self.mean.any() or self.asinh)
        return zero and bool((self.scale == 1).all())

    def apply(self, x: Tensor, t: int | Tensor) -> Tensor:
        """Return x' (B, d) of x (B, d) at time step t."""
        x = (x.to(self.scale.dtype) - self.offset - row(self.mean, t)) * row(self.scale, t)
        return x.asinh() if self.asinh else x

    def to(self, dtype: torch.dtype) -> InputScale:
        """Return the same in another precision."""
        parts = (part.to(dtype) for part in (self.offset, self.mean, self.scale))
        offset, mean, scale = parts
        return InputScale(offset=offset, mean=mean, scale=scale, asinh=self.asinh)

    def rounding(self, largest: float) -> float:
        """Return the bound of the error of x' by float32, the rounding of the samples to it
        included.

        Args:
            largest: largest absolute value of x' before asinh.
        """
        size = (self.offset.double() + self.mean.double()).abs()
        of_sample = (size * self.scale.double()).max().item() + largest
        return _EPS * (of_sample + 4 * largest + (self.mean * self.scale).abs().max().item())


def _check(offset: Tensor, center: Tensor, scale: Tensor) -> None:
    small, huge = (float(v) for v in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
    fits = scale.isfinite() & (scale >= small) & (scale <= huge) & (center.abs() <= huge)
    if not bool(fits.all()):
        worst = (1 / scale[~fits])[0].item()
        raise ValueError(
            f"channel {_channel(~fits)} varies by {worst:.3g}, which a program in float32 cannot "
            "hold: train on other units, as by x / x.std()"
        )
    error = torch.where(scale == 1, 0.0, _EPS * center.abs() * scale)
    if bool((error > _COARSE).any()):
        at = _channel(error > _COARSE)
        raise ValueError(
            f"channel {at} varies by {1 / scale[:, at].max().item():.3g} about "
            f"{offset[at].item():.9g}, which the float samples of a device round away: subtract "
            "a constant from that channel, in training and on the device"
        )


def _channel(bad: Tensor) -> Any:
    return int(bad.any(0).int().argmax())
