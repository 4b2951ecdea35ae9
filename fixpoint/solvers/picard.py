"""Plain (Picard) iteration, damped."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from fixpoint._validation import positive
from fixpoint.solvers.base import IterativeOptions, IterativeSolver


class Picard(IterativeSolver):
    """Plain iteration z <- z + beta (phi(z) - z).

    Converges linearly where phi is a contraction, and with a small enough beta where the
    spectrum of J = d phi / d z lies left of 1. It stores nothing: choose it for strong
    contractions and for memory; `Anderson` or `Broyden` where it takes more than some twenty
    updates.

    Args:
        beta: mixing, 1 = undamped.
        options: see `IterativeSolver`.

    Example:
        >>> import torch
        >>> from fixpoint import Picard, solve
        >>> solution = solve(torch.cos, torch.zeros(1, 1, dtype=torch.float64), Picard())
        >>> round(solution.z.item(), 4)
        0.7391
    """

    def __init__(self, *, beta: float = 1.0, **options: Unpack[IterativeOptions]) -> None:
        super().__init__(**options)
        self.beta = positive(beta=beta)

    def update(self, k: int, z: Tensor, fz: Tensor, state: None) -> tuple[Tensor, None]:
        return (fz if self.beta == 1 else torch.lerp(z, fz, self.beta)), None

    def init_fixed(self, z: Tensor, fz: Tensor, t: int | None = None) -> tuple[()]:
        return ()

    def update_fixed(
        self, k: Tensor, z: Tensor, fz: Tensor, state: tuple[()]
    ) -> tuple[Tensor, tuple[()]]:
        return self.update(0, z, fz, None)[0], ()

    def extra_repr(self) -> str:
        return f"beta={self.beta:g}, {super().extra_repr()}"
