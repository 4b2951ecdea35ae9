"""What the loop knows of each sample of a solve, and who is done, lost or stuck."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fixpoint._torch import version
from fixpoint.solution import Result, Solution, Trace
from fixpoint.solvers.finished import stop_finished
from fixpoint.solvers.residual import ResidualNorm, Residuals

if TYPE_CHECKING:
    from fixpoint.solvers.base import IterativeSolver

CHANGED = (
    "phi must leave its input and what it returned before as they are; one of them was changed in "
    "place: use out-of-place operations in phi, and return a new tensor each time"
)


class ConvergenceMonitor:
    """Measures one solve, freezes its samples and counts; (z, fz, r) always belong together.

    As long as every sample is active and finite, which the host knows right after a check, there
    is nothing to mask, and the bookkeeping of single samples is left out.
    """

    def __init__(self, solver: IterativeSolver, z: Tensor) -> None:
        self.solver = solver
        self.active = torch.ones(len(z), dtype=torch.bool, device=z.device)
        self.failed = torch.zeros_like(self.active)
        self.masking = solver.check_every > 1  # whether some may be lost
        self.summing_up = solver.may_sync and len(z) > 0
        self.all_active = solver.check_every == 1
        self.improving = False  # whether the residuals of all that matter are their least
        self.better = self.failed  # which samples' are, where not all
        self.done = False
        self.ruler = ResidualNorm(solver, z)
        self.r = torch.full((len(z),), torch.inf, dtype=self.ruler.dtype, device=z.device)
        self.inf, self.zero, self.one = self.r, torch.zeros_like(self.r), torch.ones_like(self.r)
        self.z, self.fz = z, z
        self.keep_best = solver.keep_best or solver.backtracks
        self.best_r, self.best_z = self.r, z
        self.some_stuck, self.stuck = False, self.failed
        self.common = 0  # updates made while all samples were active
        self.rest: list[Tensor] = []  # who made each of those after
        self.evaluations = 0
        self.given = (z, version(z)), (z, version(z))  # what phi must leave alone
        self.residuals: list[Tensor] = []
        self.iterates: list[Tensor] = []

    def look(
        self, k: int, z: Tensor, fz: Tensor, phi: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Measure z with fz = phi(z) and return both, lost samples put back where they were."""
        self.evaluations += 1
        for x, before in self.given:
            if version(x) != before:
                raise RuntimeError(CHANGED)
        measured = self.ruler.measure(z, fz)
        if self.masking or not self.summing_up or not self._observe_unmasked(measured):
            z, fz, r = self._observe_masked(k, z, fz, measured, phi)
        else:
            r = measured.r
        if self.improving:
            self.best_z, self.best_r = z, r
        elif self.keep_best:
            self.better = r < self.best_r
            self.best_z = _rows(self.better, z, self.best_z)
            self.best_r = torch.where(self.better, r, self.best_r)
        self.z, self.fz, self.r = z, fz, r
        self.residuals.append(r)
        if self.solver.record == "iterates":
            self.iterates.append(z.detach())
        return z, fz

    def _observe_unmasked(self, measured: Residuals) -> bool:
        """Note who goes on, if all samples are finite and measured exactly; else do nothing.

        One pass over the measures, and one device synchronisation.
        """
        r, scale = measured.r, measured.scale
        gain, going = self.best_r - r, r
        if not self.all_active:
            # A sample that has converged needs no best state, and nobody waits for it.
            gain = torch.where(self.active | self.stuck, gain, self.inf)
            going = torch.where(self.active, r, self.zero)
        rows = torch.stack((-(r + scale), scale, gain, r, -going))
        minus_sum, least_scale, least_gain, low, minus_high = rows.amin(1).tolist()
        if not (minus_sum > -math.inf and least_scale >= self.ruler.smallest_safe):
            return False
        self.improving = least_gain > 0
        self.done = minus_high >= -1
        if not self.all_active or low <= 1:
            self.active = self.active & (r > self.one)
            self.all_active = False
        return True

    def _observe_masked(
        self, k: int, z: Tensor, fz: Tensor, measured: Residuals, phi: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Measure sample by sample, put lost ones back, and note who goes on: z, fz and r."""
        r, finite = self.ruler.measure_masked(measured, z, fz)
        if k > 0 and torch.is_grad_enabled() and bool((self.active & ~finite).any()):
            # In the graph of fz a lost sample's zero gradient would meet inf and spoil the rest.
            before = self.best_z if self.solver.backtracks else self.z
            fz = _rows(finite, phi(_rows(finite, z, before)), fz.detach())
            self.evaluations += 1
        if self.solver.backtracks and k > 0:
            # The solver takes a step to where phi is not finite back: no sample is lost by it.
            r, finite = torch.where(finite, r, torch.inf), torch.ones_like(finite)
        active = finite & (r > 1) if self.solver.has_tolerance else finite
        if not self.all_active:
            active = active & self.active
        self.improving = False
        if k % self.solver.check_every == 0:
            going, sound = torch.stack((active, finite)).sum(1).tolist()
            self.done = going == 0
            self.masking = self.masking or sound < len(z)
            self.all_active = self.all_active and going == len(z)
        if self.masking:
            self.failed = self.failed | (self.active & ~finite)
            z, r = _rows(finite, z, self.z), torch.where(finite, r, self.r)
            fz = _rows(finite, fz, self.fz)
        self.active = active
        return z, fz, r

    def stop_finished(self, tree: Any) -> Any:
        """The tree of (B, ...) tensors, without gradient in the rows of finished samples."""
        if self.all_active or not torch.is_grad_enabled():
            return tree
        return stop_finished(self.active, tree)

    def freeze(self, proposal: Tensor, z: Tensor) -> Tensor:
        """The proposal, with samples that are done left where they are."""
        if self.all_active:
            self.common += 1
        else:
            self.rest.append(self.active)
            proposal = _rows(self.active, proposal, z)
        # A sample that stands still keeps its residual: it shows where it does not improve.
        if self.solver.backtracks and self.solver.has_tolerance and not self.improving:
            stuck = self.active & ~self.better & (proposal == z).all(1)
            if self.solver.check_every > 1 or bool(stuck.any()):
                self.stuck, self.active = self.stuck | stuck, self.active & ~stuck
                self.some_stuck, self.all_active = True, False
        self.given = (proposal, version(proposal)), (self.fz, version(self.fz))
        return proposal

    def solution(self, z: Tensor) -> Solution:
        solver, r = self.solver, self.r
        iterations = torch.full_like(r, self.common, dtype=torch.int64)
        if self.rest:
            iterations += torch.stack(self.rest).sum(0)
        trace = None
        if solver.record is not None:
            iterates = torch.stack(self.iterates) if self.iterates else None
            trace = Trace(torch.stack(self.residuals), iterates)
        if self.done and not self.masking and not self.some_stuck:
            result = torch.zeros_like(self.active, dtype=torch.int8)  # all CONVERGED
            return Solution(z, r, iterations, self.evaluations, result, trace)
        if solver.has_tolerance:
            result = torch.where(r <= 1, Result.CONVERGED, Result.MAX_ITER)
            stalled = self.stuck if self.done else self.stuck | self._stalled()
            result = torch.where(stalled & (r > 1), Result.STALLED, result)
        else:
            result = torch.full_like(iterations, Result.FIXED_STEPS)
        lost = self.failed | (r == torch.inf)
        result = torch.where(lost, Result.NONFINITE, result).to(torch.int8)
        if solver.has_tolerance and self.keep_best:
            z = _rows(r <= 1, z, self.best_z)
            r = torch.where(r <= 1, r, self.best_r)
        return Solution(z, r, iterations, self.evaluations, result, trace)

    def _stalled(self) -> Tensor:
        """Whether the smallest residual lies in the first half of ten or more updates, (B,)."""
        updates = len(self.residuals) - 1
        if updates < 10:
            return torch.zeros_like(self.active)
        return torch.stack(self.residuals).argmin(0) <= updates // 2


def _rows(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Rows of new where mask, (B,), else of old."""
    return torch.where(mask[:, None], new, old)
