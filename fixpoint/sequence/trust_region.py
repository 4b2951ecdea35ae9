"""A trust region for recurrences that do not contract: each update is a scalar Kalman filter.

The linearized recurrence h_t = a_t h_{t-1} + c_t is the transition (variance 1), the current
iterate y_t an observation of variance s2 = 1 / strength: a large `strength` keeps h near y, 0 is
Newton's step. Each unit is filtered on its own.

Source: Gonzalez et al. (2024), Towards scalable and stable parallelization of nonlinear RNNs;
    the elements of the scan are those of Sarkka, Garcia-Fernandez (2021), Temporal
    parallelization of Bayesian smoothers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fixpoint.sequence.affine_scan import AffineScan


def kalman_filter(a: Tensor, c: Tensor, y: Tensor, first: Tensor, s2: float) -> Tensor:
    """Return filtered means of h_t = a_t h_{t-1} + c_t with y_t = h_t + noise, (T, ...), by a loop.

    Args:
        a, c, y: (T, ...); a and c of the first step are not read.
        first: the mean before the observation of the first step, (...), its variance being 1.
        s2: variance of the observations.
    """
    out, variance, predicted = torch.empty_like(y), torch.ones_like(first), first
    for t in range(len(y)):
        if t:
            predicted = torch.addcmul(c[t], a[t], out[t - 1])
            variance = a[t].square() * variance + 1
        gain = variance / (variance + s2)
        torch.lerp(predicted, y[t], gain, out=out[t])
        variance = gain * s2
    return out


class TrustRegionScan(AffineScan):
    """The update delta_t of a filter about the iterate: 0 is observed, r_t drives it.

    Args:
        a: diagonals, (T, B, n).
        s2: variance of the observations, 1 / strength.
    """

    def __init__(self, a: Tensor, s2: float) -> None:
        self.a, self.s2 = a, s2

    def forward(self, r: Tensor) -> Tensor:
        run = kalman_filter if r.device.type == "cpu" else kalman_scan
        return run(self.a, r, torch.zeros_like(r), r[0], self.s2)


class _Element(NamedTuple):
    """Map of a Gaussian state over a stretch of time: the element of the associative scan."""

    A: Tensor
    b: Tensor
    C: Tensor
    eta: Tensor
    J: Tensor

    def part(self, rows: slice) -> _Element:
        return _Element._make(value[rows] for value in self)


def kalman_scan(a: Tensor, c: Tensor, y: Tensor, first: Tensor, s2: float) -> Tensor:
    """Return the same as `kalman_filter`, by log2(T) rounds over all t at once."""
    g = 1 / (1 + s2)
    change = g * (y - c)
    zero = torch.zeros_like(a[:1])
    start = _Element(
        zero, (first + g * (y[0] - first)).unsqueeze(0), zero + (1 - g), zero.clone(), zero.clone()
    )
    later = _Element((1 - g) * a, c + change, torch.full_like(a, 1 - g), a * change, a * a * g)
    element = _Element._make(
        torch.cat([head, tail[1:]]) for head, tail in zip(start, later, strict=True)
    )
    step = 1
    while step < len(y):
        earlier, later = element.part(slice(None, -step)), element.part(slice(step, None))
        element = _Element._make(
            torch.cat([head[:step], tail])
            for head, tail in zip(element, _combine(earlier, later), strict=True)
        )
        step *= 2
    return element.b


def _combine(i: _Element, j: _Element) -> _Element:
    """Return element i, earlier, followed by element j."""
    q = 1 / (1 + i.C * j.J)
    return _Element(
        j.A * i.A * q,
        j.A * (i.b + i.C * j.eta) * q + j.b,
        i.C * j.A * j.A * q + j.C,
        i.A * (j.eta - j.J * i.b) * q + i.eta,
        i.A * i.A * j.J * q + i.J,
    )
