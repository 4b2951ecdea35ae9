"""Plain iteration whose damping follows the residual."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from fixpoint._validation import at_least, positive
from fixpoint.solvers._rowwise import at_least_float32, dot
from fixpoint.solvers.base import IterativeOptions, IterativeSolver

TOO_FAR = 10.0
"""Growth of |g| over its least at which a sample returns."""
OPPOSED = -0.9
"""g . g_last / |g_last|^2 below which g turns back without falling much: a slow oscillation."""
ALIGNED = 0.9
"""Above this quotient g falls slowly in one direction, which damping makes slower still."""
RECOVERY = 4
"""This many times `patience` such updates in a row, and beta rises again."""


class DampedPicardState(NamedTuple):
    """State z of least |g|, g = phi(z) - z, (B, D), its |g|^2, and the mixing, (B, 1) each.

    waited: updates since |g| was least; aligned: successive slow ones in one direction, (B, 1).
    """

    z: Tensor
    g: Tensor
    merit: Tensor
    beta: Tensor
    waited: Tensor
    aligned: Tensor


class DampedPicard(IterativeSolver):
    """z <- z + beta (phi(z) - z), beta of each sample lowered where its residual does not fall.

    After `patience` updates without a new least |phi(z) - z|, or at once where it points against
    the one before and has hardly fallen, beta is multiplied by `factor`, and the least is taken
    again. Where |phi(z) - z| is more than ten times its least, or phi is not finite, that is done
    at once, and the sample returns to its best state. After 4 `patience` slow updates in one
    direction beta rises again.

    For maps whose J has eigenvalues far left of -1, which plain iteration makes oscillate, and
    for maps that leave their domain; it needs no beta chosen by hand, and converges where some
    beta does. It stores 2 states.

    Args:
        beta: mixing at the start, 1 = undamped.
        patience: updates without progress before beta is lowered.
        factor: of beta, below 1.
        options: see `IterativeSolver`.

    Example:
        >>> import torch
        >>> from fixpoint import DampedPicard, solve
        >>> solution = solve(lambda z: 6 - 2 * z, torch.zeros(1, 1), DampedPicard())
        >>> round(solution.z.item(), 4)
        2.0
    """

    backtracks = True

    def __init__(
        self,
        *,
        beta: float = 1.0,
        patience: int = 5,
        factor: float = 0.5,
        **options: Unpack[IterativeOptions],
    ) -> None:
        super().__init__(**options)
        self.beta = positive(beta=beta)
        self.patience = at_least(1, patience=patience)
        if not 0 < factor < 1:
            raise ValueError(f"factor must lie between 0 and 1; got {factor}")
        self.factor = factor

    def init_fixed(self, z: Tensor, fz: Tensor, t: int | None = None) -> DampedPicardState:
        g = at_least_float32(fz - z)
        merit = dot(g, g)
        beta = torch.full_like(merit, self.beta).detach()
        return DampedPicardState(z, g, merit, beta, torch.zeros_like(beta), torch.zeros_like(beta))

    def update(
        self, k: int | Tensor, z: Tensor, fz: Tensor, state: DampedPicardState | None
    ) -> tuple[Tensor, DampedPicardState]:
        one = k > 0 if isinstance(k, int) else (k > 0).unsqueeze(-1)
        g = at_least_float32(fz - z)
        merit = dot(g, g)
        if state is None:
            state = self.init_fixed(z, fz)
        with torch.no_grad():
            better = merit < state.merit
            waited = torch.where(better, 0.0, state.waited + one)
            far = ~(merit <= TOO_FAR**2 * state.merit)  # True where phi is not finite
            # Where g was least at the update before, that is the last one.
            product = torch.where(state.waited == 0, dot(g, state.g), 0.0)
            opposed = product < OPPOSED * state.merit
            aligned = torch.where(product > ALIGNED * state.merit, state.aligned + one, 0.0)
            rises = aligned >= RECOVERY * self.patience
            expired = ((waited >= self.patience) | opposed) & ~far
            beta = torch.where(far | expired, self.factor * state.beta, state.beta)
            beta = torch.where(rises, (beta / self.factor).clamp_max(self.beta), beta)
        new = DampedPicardState(
            torch.where(better | expired, z, state.z),
            torch.where(better | expired, g, state.g),
            torch.where(better | expired, merit, state.merit),
            beta,
            torch.where(far | expired, 0.0, waited),
            torch.where(rises, 0.0, aligned),
        )
        start, change = torch.where(far, new.z, z), torch.where(far, new.g, g)
        return (start + beta * change).to(z.dtype), new

    def extra_repr(self) -> str:
        return f"beta={self.beta:g}, patience={self.patience}, {super().extra_repr()}"
