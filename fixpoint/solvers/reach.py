"""How far a state may run before its residual must have fallen: no solution is found at infinity.

A state that runs away, where z = phi(z) has no solution say, makes a residual that falls beside
its own size. Beyond its reach a state is judged by the size of the start as well.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from fixpoint.solvers.residual import ResidualNorm, Residuals, any_leaf

MAX_GROWTH = 30.0
"""How many times the size of its start and largest residual a state may grow before its residual
must have fallen as well."""
MIN_FALL = 1e-3
"""What a residual has to fall to, in units of the size of the start plus the largest residual."""


class Reach:
    """Largest size of each sample's phi(z) at which its residual is judged by that size alone.

    `MAX_GROWTH` times the size of the start plus its residual; it grows with the residual of
    states beyond it.

    Args:
        norm: measures the states.
        z: the start, (B, D).
        measured: of the start.
        least_size: a lower bound of all samples' |phi(z)| there. No tensor is made while no
            state is larger than the bound of all reaches that follows from it.
    """

    def __init__(
        self, norm: ResidualNorm, z: Tensor, measured: Residuals, least_size: float
    ) -> None:
        self._norm, self._z, self._first = norm, z.detach(), measured
        self._least = MAX_GROWTH * least_size  # a lower bound of all values
        self._bounded = False  # whether it is their minimum

    @cached_property
    def start_size(self) -> Tensor:
        """That of z or phi(z), (B,) or (B, leaves)."""
        return torch.fmax(self._norm.size(self._z), self._first.size)

    @cached_property
    def values(self) -> Tensor:
        """(B,) or (B, leaves)."""
        reach = MAX_GROWTH * (self.start_size + self._first.residual)
        # A leaf that rests at 0 until others have moved shows no size of its own.
        return torch.where(reach > 0, reach, torch.inf) if reach.dim() == 2 else reach

    def covers(self, measured: Residuals, largest_size: float) -> bool:
        """Whether no sample is beyond; the host reads values where its bound does not tell."""
        if largest_size > self._least and not self._bounded:
            self._least, self._bounded = float(self.values.min()), True
        return largest_size <= self._least or not bool(self.exceeded(measured).any())

    def exceeded(self, measured: Residuals) -> Tensor:
        """Samples that are beyond, (B,)."""
        return any_leaf(measured.size > self.values)

    def limit(self, measured: Residuals, r: Tensor) -> Tensor:
        """r, (B,); above 1 where a state beyond its reach has a residual that did not fall.

        A residual counts as no less than the rounding of its state, 8 eps times its size, and has
        fallen at `MIN_FALL` of the size of the start and the largest residual.
        """
        moves = measured.residual >= MIN_FALL * measured.size  # False for NaN
        further = torch.maximum(self.values, MAX_GROWTH * (self.start_size + measured.residual))
        self.values = torch.where((measured.size > self.values) & moves, further, self.values)
        self._bounded = False
        residual = torch.maximum(measured.residual, self._rounding(measured))
        scale = MIN_FALL / MAX_GROWTH * self.values
        if self._norm.atol is not None:
            scale = scale + self._norm.atol
        beyond = torch.where(measured.size > self.values, residual / scale, 0.0)
        beyond = beyond if beyond.dim() == 1 else beyond.amax(1)
        return torch.where(r <= 1, torch.maximum(r, beyond), r)

    def run_away(self, measured: Residuals) -> Tensor:
        """Samples that have grown while their residual has not fallen, (B,)."""
        scale = self.values / MAX_GROWTH  # start_size + the largest residual
        residual = measured.residual + self._rounding(measured)
        return any_leaf((measured.size > 3 * scale) & (residual >= scale - self.start_size))

    def _rounding(self, measured: Residuals) -> Tensor:
        return 8 * self._norm.eps * measured.size
