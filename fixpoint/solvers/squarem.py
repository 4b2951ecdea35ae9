"""Squared extrapolation of plain iteration (SQUAREM)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from fixpoint.solvers._rowwise import at_least_float32, dot, either
from fixpoint.solvers.base import IterativeOptions, IterativeSolver

WIDENING = 4.0
"""Factor of the bound of |alpha| where it was reached, and its inverse where it went too far."""


class SQUAREMState(NamedTuple):
    """Start z and change r = phi(z) - z of a cycle, (B, D), and its plain end phi(phi(z)).

    bound: largest |alpha| of each sample, (B, 1); reached: whether the last one was cut to it.
    phase: of the cycle, 0 to 2; (B, 1) where the state has a fixed shape.
    """

    z: Tensor
    r: Tensor
    plain: Tensor
    bound: Tensor
    reached: Tensor
    phase: Any


class SQUAREM(IterativeSolver):
    """Cycles of two plain steps, one extrapolation and one plain step from its end.

    With r = phi(z) - z and v = phi(phi(z)) - phi(z) - r, z' = z - 2 alpha r + alpha^2 v and
    alpha = -|r| / |v|, each sample by itself. Where |phi(z') - z'| > |r|, the cycle continues from
    phi(phi(z)) and the bound of |alpha| shrinks.

    For slow monotone maps, as EM steps and proximal iterations: no linear solve, no memory that
    grows, and close to plain iteration. It stores 3 states. `Anderson` needs fewer evaluations
    where its differences are good.

    Args:
        options: see `IterativeSolver`.

    Source: Varadhan and Roland (2008), Simple and globally convergent methods for accelerating
        the convergence of any EM algorithm, scheme SqS3.

    Example:
        >>> import torch
        >>> from fixpoint import SQUAREM, solve
        >>> solution = solve(lambda z: 0.95 * z + 0.05, torch.zeros(1, 1), SQUAREM())
        >>> round(solution.z.item(), 4), solution.iterations.item()
        (1.0, 11)
    """

    def __init__(self, **options: Unpack[IterativeOptions]) -> None:
        super().__init__(**options)

    def init_fixed(self, z: Tensor, fz: Tensor, t: int | None = None) -> SQUAREMState:
        state = _begin(z)
        return state._replace(phase=torch.zeros_like(state.bound, dtype=torch.int64))

    def update_fixed(
        self, k: Tensor, z: Tensor, fz: Tensor, state: SQUAREMState
    ) -> tuple[Tensor, SQUAREMState]:
        proposal, new = self._finish(z, fz, state)
        for phase, step in enumerate((self._start, self._extrapolate)):
            chosen = state.phase == phase
            other, changed = step(z, fz, state)
            proposal = torch.where(chosen, other, proposal)
            pairs = zip(changed, new, strict=True)
            new = SQUAREMState(*(either(chosen, a, b) for a, b in pairs))
        return proposal, new._replace(phase=(state.phase + 1) % 3)

    def update(
        self, k: int, z: Tensor, fz: Tensor, state: SQUAREMState | None
    ) -> tuple[Tensor, SQUAREMState]:
        state = _begin(z) if state is None else state
        phase = state.phase
        step = (self._start, self._extrapolate, self._finish)[phase]
        proposal, new = step(z, fz, state)
        return proposal, new._replace(phase=(phase + 1) % 3)

    def _start(self, z: Tensor, fz: Tensor, state: SQUAREMState) -> tuple[Tensor, SQUAREMState]:
        return fz, state._replace(z=z, r=at_least_float32(fz - z))

    def _finish(self, z: Tensor, fz: Tensor, state: SQUAREMState) -> tuple[Tensor, SQUAREMState]:
        g = at_least_float32(fz - z)
        accepted = dot(g, g) <= dot(state.r, state.r)
        wider = torch.where(state.reached, WIDENING * state.bound, state.bound)
        bound = torch.where(accepted, wider, (state.bound / WIDENING).clamp_min(1.0)).detach()
        return torch.where(accepted, fz, state.plain), state._replace(bound=bound)

    def _extrapolate(
        self, z: Tensor, fz: Tensor, state: SQUAREMState
    ) -> tuple[Tensor, SQUAREMState]:
        r, bound = state.r, state.bound
        v = at_least_float32(fz - z) - r
        above, below = dot(r, r), dot(v, v)
        defined = (below > 0) & (above > 0) & (above + below < torch.inf)
        # The inner `where` keeps 0 / 0 out of the gradient.
        quotient = torch.where(defined, above, 1.0) / torch.where(defined, below, 1.0)
        length = quotient.sqrt()
        reached = length >= bound
        alpha = -torch.where(reached, bound, length)
        new = state.z + (alpha * (alpha * v - 2 * r)).to(z.dtype)
        return new, state._replace(plain=fz, reached=reached)


def _begin(z: Tensor) -> SQUAREMState:
    bound = torch.ones_like(at_least_float32(z[:, :1]))
    reached = torch.zeros_like(bound, dtype=torch.bool)
    return SQUAREMState(z, at_least_float32(z), z, bound, reached, 0)
