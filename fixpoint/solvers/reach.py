"""How far a state may run before its residual must have fallen: no solution is found at infinity.

A state that runs away, where z = phi(z) has no solution say, makes a residual that falls beside
its own size. A state that has grown is judged by its largest residual as well, and beyond its reach
by the size of the start.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from fixpoint.solvers.residual import ResidualNorm, Residuals, any_leaf

GROWN = 3.0
"""From so many times the size of its start plus the largest residual on, the residual of a state
must have fallen below the largest by the factor of its further growth."""
MAX_GROWTH = 100.0
"""How many times that size a state may grow before its residual must have fallen to `MIN_FALL`."""
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
            state has grown beyond what follows from it.
    """

    def __init__(
        self, norm: ResidualNorm, z: Tensor, measured: Residuals, least_size: float
    ) -> None:
        self._norm, self._z, self._first = norm, z.detach(), measured
        self._least = GROWN * least_size  # up to this size no sample has grown
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
        """Whether no sample has grown; the host reads values where its bound does not tell."""
        if largest_size > self._least and not self._bounded:
            self._least, self._bounded = float(self.values.min()) * GROWN / MAX_GROWTH, True
        return largest_size <= self._least or not bool(any_leaf(self._grown(measured)).any())

    def exceeded(self, measured: Residuals) -> Tensor:
        """Samples that are beyond, (B,)."""
        return any_leaf(measured.size > self.values)

    def limit(self, measured: Residuals, r: Tensor) -> Tensor:
        """r, (B,); above 1 where a state has grown and its residual did not fall.

        Beyond the reach a residual counts as no less than the rounding of its state, 8 eps times
        its size, and has fallen at `MIN_FALL` of the size of the start and the largest residual.
        """
        moves = measured.residual >= MIN_FALL * measured.size  # False for NaN
        further = torch.maximum(self.values, MAX_GROWTH * (self.start_size + measured.residual))
        self.values = torch.where(self._grown(measured) & moves, further, self.values)
        self._bounded = False
        scale = self.values / MAX_GROWTH
        least = (scale - self.start_size) * (GROWN * scale / measured.size)
        residual = torch.maximum(measured.residual, self._rounding(measured))
        exceeded = measured.size > self.values
        least = torch.where(exceeded, MIN_FALL * scale, least)
        residual = torch.where(exceeded, residual, measured.residual)
        if self._norm.atol is not None:
            least = least + self._norm.atol
        limited = torch.where(self._grown(measured), residual / least, 0.0)
        limited = limited if limited.dim() == 1 else limited.amax(1)
        return torch.where(r <= 1, torch.maximum(r, limited), r)

    def _grown(self, measured: Residuals) -> Tensor:
        """Where a state is above `GROWN` times the size of its start plus largest residual."""
        return measured.size > self.values * (GROWN / MAX_GROWTH)

    def run_away(self, measured: Residuals) -> Tensor:
        """Samples that have grown while their residual has not fallen, (B,)."""
        scale = self.values / MAX_GROWTH  # start_size + the largest residual
        residual = measured.residual + self._rounding(measured)
        return any_leaf(self._grown(measured) & (residual >= scale - self.start_size))

    def _rounding(self, measured: Residuals) -> Tensor:
        return 8 * self._norm.eps * measured.size
