"""Anderson mixing, type II."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from fixpoint._validation import at_least, non_negative, positive
from fixpoint.solvers import _weights
from fixpoint.solvers._weights import History, subtract_weighted
from fixpoint.solvers.base import IterativeOptions, IterativeSolver, at_least_float32

GROWTH = 1.5
"""A step that multiplies |g| by more than this is not accepted."""
RECOVERY = 1.1
"""Growth of a sample's reduced mixing with each accepted step."""


class AndersonState(NamedTuple):
    """Where the next step starts: fz = phi(z) and g = phi(z) - z, (B, D), with |g|^2, (B, 1).

    history: differences from the state that each step started from.
    mixing: factor of beta, at most 1, (B, 1).
    rejected: whether the last step was not accepted, (B, 1).
    damped: whether the host has to assume that a sample's mixing is below 1.
    """

    fz: Tensor
    g: Tensor
    merit: Tensor
    mixing: Tensor
    rejected: Tensor
    damped: bool
    history: History = History()


class Anderson(IterativeSolver):
    """Anderson mixing: z <- z + beta g - (dZ + beta dG) gamma, g = phi(z) - z.

    The weights gamma minimize ||g - dG gamma|| over the last `memory` differences of g, each
    sample by itself: by normal equations with columns scaled to length one where these are
    accurate, else by QR, where a difference that adds only rounding to the newer ones is left
    out. The result does not depend on the scale of z.

    A step after which ||g|| is more than 1.5 times as large is not continued: the next one starts
    where it started, with what the step showed of g', and with the mixing of that sample reduced
    to the inverse of the slope met, from which it recovers by a factor 1.1 a step. After a second
    such step in a row the history restarts.

    The default choice: few evaluations where phi is a slow contraction, no derivatives. It
    stores 2 * memory states.

    Args:
        memory: differences kept, m; no more than D are used.
        beta: mixing, 1 = undamped.
        ridge: added to the unit diagonal of the scaled Gram matrix.
        options: see `IterativeSolver`.

    Source: Anderson (1965), Iterative procedures for nonlinear integral equations; Walker and
        Ni (2011), Anderson acceleration for fixed-point iterations, Eq. 2.2 and section 4.

    Example:
        >>> import torch
        >>> from fixpoint import Anderson, solve
        >>> solution = solve(torch.cos, torch.zeros(1, 1), Anderson())
        >>> round(solution.z.item(), 4), solution.converged.tolist()
        (0.7391, [True])
    """

    def __init__(
        self,
        *,
        memory: int = 5,
        beta: float = 1.0,
        ridge: float = 0.0,
        **options: Unpack[IterativeOptions],
    ) -> None:
        super().__init__(**options)
        self.memory = at_least(1, memory=memory)
        self.beta = positive(beta=beta)
        self.ridge = non_negative(ridge=ridge)

    restarts = True

    def update(
        self, k: int, z: Tensor, fz: Tensor, state: AndersonState | None
    ) -> tuple[Tensor, AndersonState]:
        g = fz - z
        wide = at_least_float32(g)
        merit = torch.linalg.vecdot(wide, wide).detach().unsqueeze(1)
        if state is None:
            one, none = torch.ones_like(merit), torch.zeros_like(merit, dtype=torch.bool)
            damped = not self.may_sync
            return self._damp(fz, g, None), AndersonState(fz, g, merit, one, none, damped)
        place = (k - 1) % min(self.memory, max(z.shape[1], 1))  # that of the oldest
        history = state.history.replace(place, fz - state.fz, g - state.g)
        accepted = merit <= GROWTH**2 * state.merit
        if not state.damped:
            following = state._replace(fz=fz, g=g, merit=merit, history=history)
            gamma, sound = _weights.solve_gram(history, g, self._noise(fz), self.ridge)
            if bool((accepted.squeeze(1) & sound).all()):
                return self._mix(following, gamma), following
        state = self._judge(state._replace(history=history), place, fz, g, merit, accepted)
        return self._propose(state, place), state

    def restart(self, state: AndersonState, rows: Tensor, z: Tensor, fz: Tensor) -> AndersonState:
        rows, g = rows.unsqueeze(1), fz - z
        wide = at_least_float32(g)
        merit = torch.linalg.vecdot(wide, wide).detach().unsqueeze(1)
        history = state.history.keep_rows(~rows) if state.history.dg else state.history
        return AndersonState(
            torch.where(rows, fz, state.fz),
            torch.where(rows, g, state.g),
            torch.where(rows, merit, state.merit),
            torch.where(rows, 1.0, state.mixing),
            state.rejected & ~rows,
            state.damped,
            history,
        )

    def _judge(
        self,
        state: AndersonState,
        place: int,
        fz: Tensor,
        g: Tensor,
        merit: Tensor,
        accepted: Tensor,
    ) -> AndersonState:
        """The state after a step that is accepted in some samples."""
        df, dg = (at_least_float32(x[place]) for x in (state.history.df, state.history.dg))
        step, change = (torch.linalg.vector_norm(x, dim=1, keepdim=True) for x in (df - dg, dg))
        inverse_slope = torch.where(accepted, 1.0, step) / torch.where(accepted, 1.0, change)
        again = ~accepted & state.rejected
        reduced = torch.minimum(state.mixing, inverse_slope)
        reduced = torch.where(again, torch.minimum(reduced, state.mixing / 2), reduced)
        mixing = torch.where(accepted, (RECOVERY * state.mixing).clamp_max(1.0), reduced)
        damped = not self.may_sync or bool((mixing < 1).any())
        return AndersonState(
            torch.where(accepted, fz, state.fz),
            torch.where(accepted, g, state.g),
            torch.where(accepted, merit, state.merit),
            mixing,
            ~accepted,
            damped,
            state.history.keep_rows(~again),
        )

    def _noise(self, fz: Tensor) -> Tensor:
        """Length below which a difference of g is rounding, (B, 1)."""
        size = torch.linalg.vector_norm(at_least_float32(fz.detach()), dim=1, keepdim=True)
        return torch.finfo(fz.dtype).eps * size

    def _propose(self, state: AndersonState, place: int) -> Tensor:
        noise, may_sync = self._noise(state.fz), self.may_sync
        gamma = _weights.solve(state.history, state.g, noise, self.ridge, place, may_sync=may_sync)
        return self._mix(state, gamma)

    def _mix(self, state: AndersonState, gamma: Tensor) -> Tensor:
        fz, g, history = state.fz, state.g, state.history
        gamma = gamma.to(g.dtype)
        new = subtract_weighted(fz, gamma, history.df)
        mixing = state.mixing.to(g.dtype) if state.damped else None
        if mixing is None and self.beta == 1:
            return new
        return self._damp(new, subtract_weighted(g, gamma, history.dg), mixing)

    def _damp(self, new: Tensor, g: Tensor, mixing: Tensor | None) -> Tensor:
        """z + beta g - (dZ + beta dG) gamma, with dZ = dF - dG, from its value at beta = 1."""
        if mixing is not None:
            return new - (1 - self.beta * mixing) * g
        return new if self.beta == 1 else new - (1 - self.beta) * g

    def extra_repr(self) -> str:
        return f"memory={self.memory}, beta={self.beta:g}, {super().extra_repr()}"
