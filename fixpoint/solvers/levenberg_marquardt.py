"""The method of Levenberg and Marquardt."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from fixpoint._validation import positive
from fixpoint.derivatives import Derivatives
from fixpoint.solvers._damped_least_squares import residual_matrix, solve_damped
from fixpoint.solvers._rowwise import at_least_float32, dot
from fixpoint.solvers.base import IterativeOptions, IterativeSolver


class LevenbergMarquardtState(NamedTuple):
    """Where the step being tried starts: z and g, (B, D), |g|^2, (B, 1), and I - J, (B, D, D).

    predicted: fall of |g|^2 that the linear model promises for the step, (B, 1).
    damping: factor of the damping, (B, 1), and growth its factor at a rejection.
    first_merit: |g|^2 at the start of the solve.
    """

    z: Tensor
    g: Tensor
    merit: Tensor
    A: Tensor
    predicted: Tensor
    damping: Tensor
    growth: Tensor
    first_merit: Tensor


class LevenbergMarquardt(IterativeSolver):
    """z <- z + s, s the minimum of |(I - J) s - g|^2 + mu |s|^2, g = phi(z) - z.

    mu = damping |I - J|^2 |g| / |g_0|. A step that lowers |g| is accepted and damping falls with
    the agreement of the linear model, by a factor 3 at most; else it is taken back and damping
    grows, each sample by itself. Steps turn from those of Newton into short ones along the
    gradient of |g|^2, so that a nearly singular I - J bends them instead of making them long.

    Choose it where `Newton` stalls: expansive maps, tanh layers of large gain. Per update D
    vector-Jacobian products and a QR factorization of 2 D x D.

    Args:
        damping: at the start.
        options: see `IterativeSolver`.

    Source: Marquardt (1963), An algorithm for least-squares estimation of nonlinear parameters;
        damping: Nielsen (1999), Damping parameter in Marquardt's method; its factor |g|: Fan and
        Yuan (2005), On the quadratic convergence of the Levenberg-Marquardt method.

    Example:
        >>> import torch
        >>> from fixpoint import LevenbergMarquardt, solve
        >>> solution = solve(torch.cos, torch.zeros(1, 1), LevenbergMarquardt())
        >>> round(solution.z.item(), 4)
        0.7391
    """

    needs_derivatives = True
    backtracks = True
    unrollable = False

    def __init__(self, *, damping: float = 1e-2, **options: Unpack[IterativeOptions]) -> None:
        super().__init__(**options)
        self.damping = positive(damping=damping)

    def update(  # type: ignore[override]
        self,
        k: int,
        z: Tensor,
        fz: Tensor,
        state: LevenbergMarquardtState | None,
        *,
        derivatives: Derivatives,
    ) -> tuple[Tensor, LevenbergMarquardtState]:
        g = at_least_float32(fz - z)
        merit = dot(g, g)
        A = residual_matrix(derivatives.jacobian(z), g.dtype)
        if state is None:
            damping = torch.full_like(merit, self.damping)
            growth, first = torch.full_like(merit, 2.0), merit
        else:
            ratio = (state.merit - merit) / state.predicted
            accepted = ratio > 0  # False where phi is not finite
            lowered = (1 - (2 * ratio - 1) ** 3).clamp_min(1 / 3) * state.damping
            raised = state.growth * state.damping
            damping = torch.where(accepted, lowered, raised).clamp_max(1e30)
            growth = torch.where(accepted, 2.0, (2 * state.growth).clamp_max(1e10))
            z, g = torch.where(accepted, z, state.z), torch.where(accepted, g, state.g)
            merit, first = torch.where(accepted, merit, state.merit), state.first_merit
            A = torch.where(accepted.unsqueeze(2), A, state.A)
        relative = (merit / torch.where(first > 0, first, 1.0)) ** 0.25
        size = torch.linalg.matrix_norm(A).unsqueeze(1)
        step = solve_damped(A, g, damping.sqrt() * size * relative)
        rest = g - torch.einsum("bij,bj->bi", A, step)
        new = LevenbergMarquardtState(
            z, g, merit, A, merit - dot(rest, rest), damping, growth, first
        )
        return (z + step).to(z.dtype), new
