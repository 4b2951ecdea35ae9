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

MIN_PREDICTED = 1e-6
"""Fraction of |g|^2 that the linear model must promise; a refused step below it is at a minimum."""
MAX_ESCAPES = 5
"""This many minima of |g| are left; at the next one the sample gives up."""


class LevenbergMarquardtState(NamedTuple):
    """Start of the step being tried: z and g, (B, D), |g|^2, (B, 1), and I - J, (B, D, D).

    predicted: fall of |g|^2 that the linear model promises for the step, (B, 1).
    damping: factor of the damping, (B, 1), and growth its factor at a rejection.
    first_merit: |g|^2 at the start of the solve.
    escapes: minima of |g| left so far, and plain: plain steps still to make from the last.
    """

    z: Tensor
    g: Tensor
    merit: Tensor
    A: Tensor
    predicted: Tensor
    damping: Tensor
    growth: Tensor
    first_merit: Tensor
    escapes: Tensor
    plain: Tensor


class LevenbergMarquardt(IterativeSolver):
    """z <- z + s, s the minimum of |(I - J) s - g|^2 + mu |s|^2, g = phi(z) - z.

    mu = damping |I - J|^2 |g| / |g_0|. A step that lowers |g| is accepted and damping falls with
    the agreement of the linear model, by a factor 3 at most; else it is taken back and damping
    grows, each sample by itself. Steps turn from those of Newton into short ones along the
    gradient of |g|^2, so that a nearly singular I - J bends them instead of making them long.

    A minimum of |g| that is not a solution is left by plain steps z <- phi(z), 2 for the first
    one and twice as many for each further one; a sample is STALLED at the sixth, or where such a
    step leaves the domain of phi.

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
            escapes = plain = torch.zeros_like(merit)
        else:
            first, escapes = state.first_merit, state.escapes
            ratio = (state.merit - merit) / state.predicted
            falls = ratio > 0  # False where phi is not finite
            lowered = (1 - (2 * ratio - 1) ** 3).clamp_min(1 / 3) * state.damping
            growth = torch.where(falls, 2.0, (2 * state.growth).clamp_max(1e10))
            damping = torch.where(falls, lowered, state.growth * state.damping).clamp_max(1e30)
            # A plain step needs not lower |g|, and leaves the damping as it was.
            escaping = (state.plain > 0) & merit.isfinite()
            damping = torch.where(escaping, state.damping, damping)
            accepted, plain = falls | escaping, (state.plain - 1).clamp_min(0.0)
            flat = state.predicted <= MIN_PREDICTED * state.merit
            outside = (state.plain > 0) & ~escaping  # the plain step left the domain of phi
            escapes = torch.where(outside, MAX_ESCAPES, escapes)
            plain = torch.where(outside, 0.0, plain)
            stuck = ~accepted & flat & (escapes < MAX_ESCAPES)
            plain = torch.where(stuck, 2.0 ** (escapes + 1), plain)
            escapes = escapes + stuck
            damping = torch.where(stuck, state.damping.clamp_max(self.damping), damping)
            growth = torch.where(stuck, 2.0, growth)
            z, g = torch.where(accepted, z, state.z), torch.where(accepted, g, state.g)
            merit = torch.where(accepted, merit, state.merit)
            A = torch.where(accepted.unsqueeze(2), A, state.A)
        relative = (merit / torch.where(first > 0, first, 1.0)).sqrt().sqrt()  # rounds exactly
        size = torch.linalg.matrix_norm(A).unsqueeze(1)
        step = solve_damped(A, g, damping.sqrt() * size * relative)
        rest = g - (A * step.unsqueeze(1)).sum(2)
        predicted = merit - dot(rest, rest)
        step = torch.where(plain > 0, g, step)
        new = LevenbergMarquardtState(
            z, g, merit, A, predicted, damping, growth, first, escapes, plain
        )
        return (z + step).to(z.dtype), new
