"""What every way of differentiating a solve offers, and what several of them use."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from fixpoint.derivatives import MatrixMap
from fixpoint.solution import Result, Solution
from fixpoint.solvers import Solver


class Backward(nn.Module):
    """A way to differentiate a solve; works on (B, D) matrices.

    Example:
        >>> from fixpoint import Implicit, Phantom, Unrolled
        >>> from fixpoint.backward import Backward
        >>> all(issubclass(kind, Backward) for kind in (Implicit, Phantom, Unrolled))
        True
    """

    def check(self, solver: Solver) -> None:
        """Refuse, with the remedy, a solver that this backward cannot serve."""

    def solve(self, solver: Solver, phi: MatrixMap, z0: Tensor, t: int | None) -> Solution:
        """The solution with a differentiable z."""
        raise NotImplementedError


def refuse_learned_eta(solver: Solver, backward: str) -> None:
    if solver.learns_steps:
        raise ValueError(
            f"eta receives no gradient under {backward}: use Unrolled(), or "
            "InexactNewton(..., learn=False)"
        )


def tracked_updates(solution: Solution, solver: Solver, phi: MatrixMap, t: int | None) -> Solution:
    """The solution with the gradient of `solver`'s updates made from it; its value is unchanged."""
    moved = solver.run(phi, solution.z, t).z
    lost = (solution.result == Result.NONFINITE)[:, None]
    z = torch.where(lost, solution.z, solution.z + (moved - moved.detach()))
    return replace(solution, z=z, evaluations=solution.evaluations + solver.max_iter)
