"""Per-sample convergence state: active, converged, non-finite, stalled."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fixpoint._torch import version
from fixpoint.derivatives import Derivatives, MatrixMap
from fixpoint.solution import Result, Solution, Stall, Trace
from fixpoint.solvers._fast_path import Masks, Summary, summarize
from fixpoint.solvers._rowwise import choose_rows
from fixpoint.solvers.finished import stop_finished
from fixpoint.solvers.residual import Norm, ResidualNorm, Residuals
from fixpoint.solvers.status import classify, has_stalled

CHANGED = (
    "phi must leave its input and what it returned before as they are; one of them was changed in "
    "place: use out-of-place operations in phi, and return a new tensor each time"
)


class MonitorOptions(Protocol):
    """What the monitor needs of a solver; see `IterativeSolver`."""

    rtol: float
    atol: float
    norm: Norm | None
    keep_best: bool
    record: Literal["residual", "iterates"] | None
    check_every: int

    @property
    def backtracks(self) -> bool: ...
    @property
    def has_tolerance(self) -> bool: ...
    @property
    def may_sync(self) -> bool: ...


class ConvergenceMonitor:
    """Measures one solve, freezes its samples and counts; (z, fz, r) always belong together.

    `_observe_masked` defines what happens to a sample. `summarize` replaces it while all samples
    are finite, where nothing has to be masked.
    """

    def __init__(self, options: MonitorOptions, z: Tensor) -> None:
        self.options = options
        self.norm = ResidualNorm(z, rtol=options.rtol, atol=options.atol, norm=options.norm)
        self.done = False
        self.active = torch.ones(len(z), dtype=torch.bool, device=z.device)
        self.nonfinite = torch.zeros_like(self.active)
        self.stagnated = self.nonfinite  # samples that refuse every step
        self.some_stagnated = False
        # Known on the host: whether some sample may be non-finite, and whether all are active.
        self.masking = options.check_every > 1
        self.all_active = options.check_every == 1
        self.has_fast_path = options.may_sync and len(z) > 0
        self.r = torch.full((len(z),), torch.inf, dtype=self.norm.dtype, device=z.device)
        self.z, self.fz = z, z
        self.keep_best = options.keep_best or options.backtracks
        self.best_r, self.best_z = self.r, z
        self.best_update: Tensor | int = 0  # the same number for all, or one a sample
        self.all_improved = False
        self.improved = self.nonfinite  # which samples', where not all
        self.updates = 0
        self.shared_updates = 0  # made while all samples were active
        self.later_updates = torch.zeros_like(self.r, dtype=torch.int64)
        self.evaluations = 0
        self.given = (z, version(z)), (z, version(z))  # what phi must not change
        self.residuals: list[Tensor] = []
        self.iterates: list[Tensor] = []

    def observe(self, k: int, z: Tensor, fz: Tensor, phi: MatrixMap) -> tuple[Tensor, Tensor]:
        """Measure z with fz = phi(z) and return both, lost samples put back where they were."""
        self.updates = k
        self.evaluations += 1
        for x, given in self.given:
            if version(x) != given:
                raise RuntimeError(CHANGED)
        measured = self.norm.measure(z, fz)
        summary = self._summarize(measured)
        if summary is None:
            z, fz, r = self._observe_masked(k, z, fz, measured, phi)
        else:
            r = measured.r
            self._observe_unmasked(summary, r)
        self._keep_best(k, z, r)
        self.z, self.fz, self.r = z, fz, r
        if self.options.record is not None:
            self.residuals.append(r)
        if self.options.record == "iterates":
            self.iterates.append(z.detach())
        return z, fz

    def _summarize(self, measured: Residuals) -> Summary | None:
        if self.masking or not self.has_fast_path:
            return None
        masks = None
        if not self.all_active:
            unsolved = self.active | self.stagnated if self.some_stagnated else self.active
            masks = Masks(self.active, unsolved)
        return summarize(measured, self.best_r, masks, self.norm.smallest_safe)

    def _observe_unmasked(self, summary: Summary, r: Tensor) -> None:
        self.all_improved, self.done = summary.improved, summary.done
        if not self.all_active or summary.some_converged:
            self.active = self.active & (r > 1)
            self.all_active = False

    def _observe_masked(
        self, k: int, z: Tensor, fz: Tensor, measured: Residuals, phi: MatrixMap
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Measure sample by sample and put lost ones back: z, fz and r."""
        r, finite = self.norm.measure_masked(measured, z, fz)
        if k > 0 and torch.is_grad_enabled() and bool((self.active & ~finite).any()):
            # In the graph of fz a lost sample's zero gradient would meet inf and spoil the rest.
            before = self.best_z if self.options.backtracks else self.z
            fz = choose_rows(finite, phi(choose_rows(finite, z, before)), fz.detach())
            self.evaluations += 1
        if self.options.backtracks and k > 0:
            # The solver takes a step to where phi is not finite back: no sample is lost by it.
            r, finite = torch.where(finite, r, torch.inf), torch.ones_like(finite)
        active = finite & (r > 1) if self.options.has_tolerance else finite
        if not self.all_active:
            active = active & self.active
        self.all_improved = False
        if k % self.options.check_every == 0:
            still_active, still_finite = torch.stack((active, finite)).sum(1).tolist()
            self.done = still_active == 0
            self.masking = self.masking or still_finite < len(z)
            self.all_active = self.all_active and still_active == len(z)
        if self.masking:
            self.nonfinite = self.nonfinite | (self.active & ~finite)
            z, r = choose_rows(finite, z, self.z), torch.where(finite, r, self.r)
            fz = choose_rows(finite, fz, self.fz)
        self.active = active
        return z, fz, r

    def _keep_best(self, k: int, z: Tensor, r: Tensor) -> None:
        """Note the smallest residual of each sample and the update that reached it."""
        if self.all_improved:
            self.best_z, self.best_r, self.best_update = z, r, k
            return
        self.improved = r < self.best_r
        self.best_r = torch.where(self.improved, r, self.best_r)
        self.best_update = torch.where(self.improved, k, self.best_update)
        if self.keep_best:
            self.best_z = choose_rows(self.improved, z, self.best_z)

    def stop_finished(self, tree: Any) -> Any:
        """The tree of (B, ...) tensors, without gradient in the rows of finished samples."""
        if self.all_active or not torch.is_grad_enabled():
            return tree
        return stop_finished(self.active, tree)

    def freeze(self, proposal: Tensor, z: Tensor) -> Tensor:
        """The proposal, with samples that have ended left where they are."""
        if self.all_active:
            self.shared_updates += 1
        else:
            self.later_updates += self.active
            proposal = choose_rows(self.active, proposal, z)
        if self.options.backtracks and self.options.has_tolerance and not self.all_improved:
            self._freeze_stagnated(proposal, z)
        self.given = (proposal, version(proposal)), (self.fz, version(self.fz))
        return proposal

    def _freeze_stagnated(self, proposal: Tensor, z: Tensor) -> None:
        """End samples that refuse every step: they stand where their residual does not improve."""
        stagnated = self.active & ~self.improved & (proposal == z).all(1)
        if self.options.check_every > 1 or bool(stagnated.any()):
            self.stagnated, self.active = self.stagnated | stagnated, self.active & ~stagnated
            self.some_stagnated, self.all_active = True, False

    def solution(self, z: Tensor, derivatives: Derivatives) -> Solution:
        """The solution after the last update, z where no better state is kept."""
        r, tolerance = self.r, self.options.has_tolerance
        nonfinite = self.nonfinite | (r == torch.inf)
        if self.done and not self.masking and not self.some_stagnated and tolerance:
            result = stall = torch.zeros_like(self.active, dtype=torch.int8)  # all CONVERGED
        elif tolerance:
            result, stall = classify(r, nonfinite=nonfinite, stall=self._stall())
        else:
            result = torch.full_like(self.active, Result.FIXED_STEPS.value, dtype=torch.int8)
            result = result.masked_fill(nonfinite, Result.NONFINITE.value)
            stall = None
        if tolerance and self.keep_best:
            z = choose_rows(r <= 1, z, self.best_z)
            r = torch.where(r <= 1, r, self.best_r)
        return Solution(
            z,
            r,
            self.later_updates + self.shared_updates,
            self.evaluations + derivatives.evaluations,
            result,
            self._trace(),
            derivatives.products,
            stall,
        )

    def _stall(self) -> Tensor:
        """Why each sample makes no progress, 0 where it does, (B,)."""
        best_update = torch.zeros_like(self.later_updates) + self.best_update
        slow = has_stalled(best_update, self.updates) & (not self.done)
        cause = torch.where(slow, Stall.NO_PROGRESS.value, Stall.NONE.value)
        return torch.where(self.stagnated, Stall.STEP_REFUSED.value, cause)

    def _trace(self) -> Trace | None:
        if self.options.record is None:
            return None
        iterates = torch.stack(self.iterates) if self.iterates else None
        return Trace(torch.stack(self.residuals), iterates)
