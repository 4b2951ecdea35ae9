"""Newton's method, with a direct or a Krylov linear solve."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from fixpoint._validation import at_least
from fixpoint.derivatives import Derivatives
from fixpoint.solvers.base import IterativeOptions, IterativeSolver
from fixpoint.solvers.gmres import gmres
from fixpoint.solvers.line_search import LineSearchState, accept_or_backtrack


class NewtonState(NamedTuple):
    """The step being tried, and the forcing term and `LinearResult` of its linear solve, (B,).

    linear_result is None with "direct".
    """

    trial: LineSearchState
    forcing: Tensor
    linear_result: Tensor | None = None


class Newton(IterativeSolver):
    """z <- z + lambda s with (I - J) s = phi(z) - z, J = d phi / d z.

    A step that leaves the domain of phi or does not lower |phi(z) - z| is taken back and
    shortened, each sample by itself; a sample whose steps are all refused is STALLED, at a
    minimum of |phi(z) - z| that is no solution or at a singular I - J.

    Quadratic near a solution, whether or not phi is a contraction. An update costs D
    vector-Jacobian products and a D x D factorisation with "direct" (D up to a few hundred), or
    at most `memory` Jacobian-vector products with "gmres" (any D, phi must support forward-mode
    differentiation).

    Args:
        linear: "direct" or "gmres".
        memory: most products of one GMRES solve, and its basis vectors.
        options: see `IterativeSolver`.

    Source: Eisenstat and Walker (1996), Choosing the forcing terms in an inexact Newton method,
        choice 2 with gamma = 0.9, alpha = 2; Dennis and Schnabel (1983), Numerical methods for
        unconstrained optimization and nonlinear equations, algorithm A6.3.1.

    Example:
        >>> import torch
        >>> from fixpoint import Newton, solve
        >>> solution = solve(torch.cos, torch.zeros(1, 1), Newton())
        >>> round(solution.z.item(), 4), solution.iterations.item()
        (0.7391, 4)
    """

    needs_derivatives = True
    backtracks = True

    def __init__(
        self,
        *,
        linear: Literal["direct", "gmres"] = "direct",
        memory: int = 30,
        **options: Unpack[IterativeOptions],
    ) -> None:
        super().__init__(**options)
        if linear not in ("direct", "gmres"):
            raise ValueError(f'linear must be "direct" or "gmres"; got {linear!r}')
        self.linear = linear
        self.unrollable = linear == "direct"
        self.memory = at_least(1, memory=memory)

    def update(  # type: ignore[override]
        self,
        k: int,
        z: Tensor,
        fz: Tensor,
        state: NewtonState | None,
        *,
        derivatives: Derivatives,
    ) -> tuple[Tensor, NewtonState]:
        trial = None if state is None else state.trial
        accepted, all_accepted, z, g, merit, step_size = accept_or_backtrack(
            trial, z, fz, may_sync=self.may_sync
        )
        forcing = _forcing(state, accepted, merit)
        if self.linear == "direct":
            direction, linear_result = _direct(derivatives.jacobian(z), g), None
        else:
            direction, linear_result = self._krylov(derivatives, z, g, forcing)
        if trial is not None and not all_accepted:
            direction = torch.where(accepted, direction, trial.direction)
        new = (z + step_size * direction).to(z.dtype)
        new_trial = LineSearchState(z, g, merit, direction, step_size)
        return new, NewtonState(new_trial, forcing, linear_result)

    def _krylov(
        self, derivatives: Derivatives, z: Tensor, g: Tensor, rtol: Tensor
    ) -> tuple[Tensor, Tensor]:
        solution = gmres(
            lambda v: v - derivatives.jvp(z, v.to(z.dtype)).to(v.dtype),
            g,
            rtol=rtol,
            memory=self.memory,
        )
        usable = solution.x.isfinite().all(1, keepdim=True)
        return torch.where(usable, solution.x, g), solution.result

    def extra_repr(self) -> str:
        memory = f", memory={self.memory}" if self.linear == "gmres" else ""
        return f"linear={self.linear!r}{memory}, {super().extra_repr()}"


def _direct(J: Tensor, g: Tensor) -> Tensor:
    """The solution of (I - J) s = g, (B, D); g itself where I - J is singular."""
    dtype = torch.promote_types(g.dtype, torch.float32)
    matrix = torch.eye(J.shape[1], dtype=dtype, device=J.device) - J.to(dtype)
    s, info = torch.linalg.solve_ex(matrix, g.to(dtype).unsqueeze(2))
    s = s.squeeze(2)
    usable = (info == 0)[:, None] & s.isfinite().all(1, keepdim=True)
    return torch.where(usable, s.to(g.dtype), g)


def _forcing(state: NewtonState | None, accepted: Tensor, merit: Tensor) -> Tensor:
    """Relative tolerance of the linear solve, (B,): tighter the faster |g| falls."""
    if state is None:
        return torch.full_like(merit[:, 0], 0.5)
    with torch.no_grad():
        fall = (merit / state.trial.merit.clamp_min(torch.finfo(merit.dtype).tiny))[:, 0]
        chosen = 0.9 * fall
        floor = 0.9 * state.forcing**2
        chosen = torch.where(floor > 0.1, torch.maximum(chosen, floor), chosen)
        return torch.where(accepted[:, 0], chosen.clamp(1e-8, 0.9), state.forcing)
