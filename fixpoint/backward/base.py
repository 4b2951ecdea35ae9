"""What every way of differentiating a solve offers, and what several of them use."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fixpoint.solution import Result, Solution
from fixpoint.solvers import InexactNewton, IterativeSolver
from fixpoint.solvers.base import MatrixMap


class Backward(nn.Module):
    """A way to differentiate a solve; works on (B, D) matrices."""

    def check(self, solver: IterativeSolver) -> None:
        """Refuse, with the remedy, a solver that this backward cannot serve."""

    def solve(self, solver: IterativeSolver, phi: MatrixMap, z0: Tensor, t: int | None) -> Solution:
        """The solution with a differentiable z."""
        raise NotImplementedError


def refuse_learned_eta(solver: IterativeSolver, backward: str) -> None:
    if isinstance(solver, InexactNewton) and solver.learn:
        raise ValueError(
            f"eta receives no gradient under {backward}: use Unrolled(), or "
            "InexactNewton(..., learn=False)"
        )


def tracked_updates(
    solution: Solution, solver: IterativeSolver, phi: MatrixMap, t: int | None
) -> Solution:
    """The solution with the gradient of `solver`'s updates made from it; its value stays."""
    moved = solver.run(phi, solution.z, t).z
    lost = (solution.result == Result.NONFINITE)[:, None]
    z = torch.where(lost, solution.z, solution.z + (moved - moved.detach()))
    return solution._replace(z=z, evaluations=solution.evaluations + solver.max_iter)
