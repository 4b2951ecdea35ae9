"""The rate of one solve, the rate that Lemma 1 promises, and its condition at each update."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fixpoint.analysis.contraction import contraction, feasible_eta
from fixpoint.analysis.contraction_profile import ContractionProfile
from fixpoint.derivatives import Derivatives, MatrixMap
from fixpoint.fixed_point import solve
from fixpoint.solution import Trace
from fixpoint.solvers import Newton


class ConvergenceRate(NamedTuple):
    """Rates of the n updates of a solve: the bound of Lemma 1, and the measured ones.

    forcing: ||r_k|| / ||f(z_k)|| with r_k = f(z_k) + f'(z_k) (z_{k+1} - z_k), (n, B); NaN where
        the sample did not move.
    tau: the largest forcing of each sample, (B,). Below 1 Lemma 1 applies.
    error: ||z_k - z*||_* = ||f'(z*) (z_k - z*)||, (n + 1, B).
    rate: error_{k+1} / error_k, (n, B); NaN where the sample did not move.
    """

    forcing: Tensor
    tau: Tensor
    error: Tensor
    rate: Tensor


@torch.no_grad()
def convergence_rate(
    trace: Trace, phi: MatrixMap, *, z_star: Tensor | None = None
) -> ConvergenceRate:
    """Return Lemma 1's tau of a recorded solve and the measured rate, side by side.

    The lemma: if ||r_k|| <= tau ||f(z_k)|| with tau < 1 for all k, then close enough to z* the
    errors satisfy ||z_{k+1} - z*||_* <= tau ||z_k - z*||_*, ||y||_* = ||f'(z*) y||. It holds for
    any solver, for r_k is the linear residual of its step; for the inexact Newton method
    r_k = [I + eta f'(z_k)] f(z_k). A rate above tau says that the start was not close enough.

    Args:
        trace: of a solve with `record="iterates"`.
        phi: the map of that solve, on (B, D) matrices.
        z_star: its solution, (B, D); by `Newton` from the last iterate if not given, NaN for a
            sample where that does not converge.

    Raises:
        ValueError: the trace holds no updates.

    Source: Dembo, Eisenstat, Steihaug (1982), Inexact Newton methods, as Lemma 1 of Zhang et
        al. (2019), Equilibrated Recurrent Neural Network.

    Example:
        >>> import torch
        >>> from fixpoint import InexactNewton, solve
        >>> from fixpoint.analysis import convergence_rate
        >>> solver = InexactNewton(4, eta=0.5, learn=False, record="iterates")
        >>> trace = solve(torch.cos, torch.zeros(1, 1), solver).trace
        >>> speed = convergence_rate(trace, torch.cos)
        >>> print(f"tau {speed.tau.item():.2f}, last rate {speed.rate[-1].item():.2f}")
        tau 0.50, last rate 0.16
    """
    z = _iterates(trace)
    if z_star is None:
        z_star = _solution(phi, z[-1])
    forcing, step = [], z.diff(dim=0)
    for state, s in zip(z[:-1], step, strict=True):
        f = phi(state) - state
        forcing.append((f + _times_jacobian(phi, state, s)).norm(dim=1) / f.norm(dim=1))
    error = torch.stack([_times_jacobian(phi, z_star, state - z_star).norm(dim=1) for state in z])
    moved = (step != 0).any(2)
    ratio = torch.where(moved, torch.stack(forcing), -torch.inf)
    rate = torch.where(moved, error[1:] / error[:-1], torch.nan)
    ratio = torch.cat([ratio.amax(0, keepdim=True), ratio])
    ratio = torch.where(ratio == -torch.inf, torch.nan, ratio)
    return ConvergenceRate(ratio[1:], ratio[0], error, rate)


@torch.no_grad()
def iteration_profile(phi: MatrixMap, trace: Trace, eta: float | Tensor) -> ContractionProfile:
    """Compute ||I + eta f'(z_k)||_2 and the feasible eta at each iterate of a recorded solve.

    Args:
        phi: the map of the solve, on (B, D) matrices.
        trace: of a solve with `record="iterates"`.
        eta: step of each update, a number or (n,): `Picard.beta`, or `InexactNewton.steps(t)`.

    Returns:
        A profile with one time step, S = 1, and K = n updates.

    Raises:
        ValueError: the trace holds no updates, or another number of them than eta.

    Source: Zhang et al. (2019), Theorem 1.

    Example:
        >>> import torch
        >>> from fixpoint import Picard, solve
        >>> from fixpoint.analysis import iteration_profile
        >>> solver = Picard(max_iter=3, rtol=0, atol=0, record="iterates")
        >>> trace = solve(torch.cos, torch.zeros(1, 1), solver).trace
        >>> iteration_profile(torch.cos, trace, 1.0).norm.flatten()
        tensor([0.0000, 0.8415, 0.5144])
    """
    z = _iterates(trace)[:-1]
    steps = torch.as_tensor(eta, dtype=z.dtype).detach().to(z.device)
    if steps.dim() and steps.shape != z.shape[:1]:
        raise ValueError(
            f"eta must be a number or one an update, ({len(z)},); got {tuple(steps.shape)}"
        )
    steps = steps.expand(len(z))
    norm = torch.stack([contraction(phi, state, s) for state, s in zip(z, steps, strict=True)])
    intervals = [feasible_eta(phi, state) for state in z]
    lower, upper = (torch.stack([i[end] for i in intervals])[None] for end in (0, 1))
    return ContractionProfile(
        torch.zeros(1, dtype=torch.int64), steps[None], norm[None], lower, upper
    )


def _iterates(trace: Trace | None) -> Tensor:
    if trace is None or trace.iterates is None:
        raise ValueError('the trace holds no iterates: solve with record="iterates"')
    if len(trace.iterates) < 2:
        raise ValueError("the solve made no updates: record one with max_iter >= 1")
    return trace.iterates


def _solution(phi: MatrixMap, z: Tensor) -> Tensor:
    eps = torch.finfo(z.dtype).eps
    solution = solve(phi, z, Newton(rtol=1e3 * eps, atol=1e2 * eps, max_iter=100))
    return torch.where(solution.converged[:, None], solution.z, torch.nan)


def _times_jacobian(phi: MatrixMap, z: Tensor, v: Tensor) -> Tensor:
    """Compute f'(z) v = J v - v of each sample, (B, D)."""
    return Derivatives(phi).jvp(z, v) - v
