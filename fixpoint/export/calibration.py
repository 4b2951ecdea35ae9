"""The values that a network computes with on training windows, and scales found from them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fixpoint.export.network import Network

HEADROOM = 2.0
"""Values up to this many times the largest one of the training windows do not saturate."""


class Calibration:
    """Largest absolute value and second moments of each intermediate result.

    largest: by name: argument (a sample before asinh), scores, and of each layer, as 0.h: x, h, g
        (before the feedback), V2, W2, U2 (between two factors), c, p (all terms of the argument
        of sigma).
    moments: mean of v v^T over windows and time steps.
    """

    def __init__(self) -> None:
        self.largest: dict[str, float] = {}
        self.moments: dict[str, np.ndarray] = {}
        self._count: dict[str, int] = {}

    def watch(self, name: str, value: Tensor) -> Tensor:
        """Note a value, (B, size)."""
        if value.numel():
            self.largest[name] = max(self.largest.get(name, 0.0), value.abs().max().item())
        if name.rpartition(".")[2] not in ("p", "c", "scores", "argument"):
            v = value.double().numpy()
            self.moments[name] = self.moments.get(name, 0.0) + v.T @ v
            self._count[name] = self._count.get(name, 0) + len(v)
        return value

    def range_of(self, name: str) -> float:
        """Return the largest absolute value to represent."""
        return HEADROOM * max(self.largest.get(name, 0.0), 1e-6)

    def moment(self, name: str) -> np.ndarray:
        """Return E[v v^T]."""
        mean: np.ndarray = self.moments[name] / self._count[name]
        return mean


@torch.no_grad()
def calibrate(network: Network, windows: Tensor) -> Calibration:
    """Run a network on windows, (B, T, d), in the units of the sensor.

    Raises:
        ValueError: no window, or its states are not finite.
    """
    known = Calibration()
    finite = windows.isfinite().flatten(1).all(1)
    windows = windows[finite]
    if not len(windows):
        raise ValueError("scales are found on training windows, and there is none without NaN")
    last = f"{len(network.layers) - 1}.h"
    plain = replace(network.inputs, asinh=False)
    for part in windows.float().split(1024):
        state = part.new_zeros(len(part), network.state_size)
        for t, sample in enumerate(part.unbind(1)):
            known.watch("argument", plain.apply(sample, t))
            state = network.advance(sample, state, t, known.watch)
        h = known.watch(last, network.output(state))
        known.watch("scores", F.linear(h, network.head, network.head_bias))
        known.watch("scores", F.linear(h, network.head))
    if not all(np.isfinite(value) for value in known.largest.values()):
        raise ValueError("the states of this network leave float32 on training windows")
    return known


class QuantizedMatrix(NamedTuple):
    """A matrix as integers times a scale.

    clipped: fraction of the entries beyond the largest integer.
    error: root mean square of what rounding changes in the product, relative to the product.
    """

    integers: np.ndarray
    scale: float
    clipped: float
    error: float

    @property
    def bound(self) -> float:
        """The bound of the rounding error of an entry that is not clipped."""
        return self.scale / 2


def quantize(matrix: Tensor, bits: int, moment: np.ndarray) -> QuantizedMatrix:
    """Return the matrix in `bits` bits, with the scale that changes its product least.

    The square of the change is tr(E M E^T) with E the rounding error and M = E[v v^T] of what the
    matrix multiplies. Scales between 0.3 and 1 times that of the largest entry are tried: below 1
    large entries are clipped.

    >>> import numpy as np, torch
    >>> quantize(torch.tensor([[1.0, -0.5]]), 8, np.eye(2)).integers
    array([[127, -64]], dtype=int8)
    """
    W = matrix.detach().double().numpy()
    most = (1 << (bits - 1)) - 1
    largest = max(float(np.abs(W).max()), 1e-12)
    best: QuantizedMatrix | None = None
    power = max(float(np.sum(W @ moment * W)), 1e-300)
    for fraction in np.linspace(1.0, 0.3, 71):
        scale = float(fraction) * largest / most
        exact = W / scale
        integers = np.clip(np.copysign(np.floor(np.abs(exact) + 0.5), exact), -most, most)
        E = integers * scale - W
        error = float(np.sqrt(max(np.sum(E @ moment * E), 0.0) / power))
        if best is None or error < best.error:
            clipped = float((np.abs(exact) > most + 0.5).mean())
            kind = np.int8 if bits == 8 else np.int16
            best = QuantizedMatrix(integers.astype(kind), scale, clipped, error)
    assert best is not None
    return best
