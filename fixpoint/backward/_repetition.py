"""Test that phi repeats itself: its residual at the solution, evaluated once more."""

from __future__ import annotations

import torch
from torch import Tensor

from fixpoint._torch import has_values
from fixpoint.failure import NonConvergenceHandler
from fixpoint.solution import Result, Solution
from fixpoint.solvers import Solver
from fixpoint.solvers.loop.norms import resolution

FACTOR = 2.0
"""A residual may be that many times the tolerance where it was within it before."""
NOISE = 100.0
"""Further units in the last place of phi(z), which other kernels may round differently."""


def check_repetition(
    handler: NonConvergenceHandler, solver: Solver, solution: Solution, z: Tensor, fz: Tensor
) -> None:
    """Report converged samples whose residual is above the tolerance in fz = phi(z), (B, D)."""
    if handler.silent or not solver.has_tolerance or not len(z) or not has_values(z):
        return
    with torch.no_grad():
        residual, bound = _residual_and_bound(solver, z.detach(), fz.detach(), None)
        if not bool((residual > bound).any()):
            return
        # Squares of numbers that are very small or large leave float32: measured again.
        residual, bound = _residual_and_bound(solver, z.detach(), fz.detach(), torch.float64)
        wrong = (residual > bound) & (solution.result == Result.CONVERGED.value)
        if not bool(wrong.any()):
            return
        excess = FACTOR * float((residual / bound)[wrong].max())
    handler.say(
        f"phi gave other values when it was evaluated once more at its solution: the residual of "
        f"{int(wrong.sum())} of {len(wrong)} samples, which had converged, is up to "
        f"{excess:.3g} times the tolerance. A random phi must repeat itself (for dropout take "
        "fixpoint.models.VariationalDropout); where samples depend on each other, as by batch "
        "normalization, attention over the batch or a graph, solve them as one with "
        "batched=False. fixpoint.check_rows(phi, z) tells which samples do"
    )


def _residual_and_bound(
    solver: Solver, z: Tensor, fz: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Return the norm of phi(z) - z of each sample, (B,), and the largest that passes.

    Where the state is a tree these are of the whole state, whose residual is within this bound if
    those of its leaves are.
    """
    atol = max(solver.leaf_atol) if solver.leaf_atol else solver.atol
    if solver.norm is not None:
        residual, size = solver.norm(fz - z), solver.norm(fz)
    else:
        dtype = dtype or torch.promote_types(z.dtype, torch.float32)
        residual, size = (torch.linalg.vector_norm(x, dim=1, dtype=dtype) for x in (fz - z, fz))
        atol = atol * z.shape[1] ** 0.5
    # One bound for both: the larger is above their maximum by at most a factor of 2.
    return residual, (FACTOR * solver.rtol + NOISE * resolution(z)) * size + FACTOR * atol
