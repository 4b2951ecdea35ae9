"""The residuals of all evaluations of a problem by a solver, and its first solution."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor
from torch.func import jacrev

MIN_FALL = 0.5
"""A residual has fallen at this fraction of that of the start."""


GOAL = 1e-10
"""rms(phi(z) - z) / rms(phi(z)) at which a solve ends."""
ACCEPTED = 1e-9
"""The largest that counts as solved."""
BUDGET = 300
"""The most evaluations of phi."""


def rms(z: Tensor) -> float:
    return float(z.square().mean().sqrt())


def relative_residual(z: Tensor, fz: Tensor, largest: float) -> float:
    """rms(fz - z) / rms(fz), 0 where both are; inf where the residual is above `largest`.

    Relative to a state that has run away every residual is small.
    """
    residual = rms(fz - z)
    if not residual <= largest:
        return math.inf
    return residual / rms(fz) if residual > 0 else 0.0


def largest_residual(phi: Callable[[Tensor], Tensor], z0: Tensor) -> float:
    """The largest residual of a solve from z0 that has fallen."""
    return MIN_FALL * rms(phi(z0) - z0)


class Recorder:
    """phi of one start, (1, D), that ends the solve by an exception at its goal or its budget.

    Attributes:
        at: evaluations up to the least residual, and products: Jacobian-vector products.
        solved: whether it is accepted.
    """

    def __init__(self, phi: Callable[[Tensor], Tensor], z0: Tensor) -> None:
        self.phi, self.largest = phi, largest_residual(phi, z0)
        self.calls = self.products = self.at = self.products_at = 0
        self.best = math.inf

    def __call__(self, z: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > BUDGET or self.best <= GOAL:
            raise StopIteration
        fz = self.phi(z)
        r = relative_residual(z, fz, self.largest)
        if r < self.best:
            self.best, self.at, self.products_at = r, self.calls, self.products
        return fz

    def jacobian(self, z: Tensor) -> Tensor:
        """J of phi at z, (D, D), which counts as D products."""
        self.products += z.shape[1]
        return jacrev(lambda row: self.phi(row[None])[0])(z[0])

    @property
    def solved(self) -> bool:
        return self.best <= ACCEPTED
