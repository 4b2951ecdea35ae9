"""Per-sample convergence state: active, converged, non-finite, stalled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fixpoint._torch import values, version
from fixpoint.derivatives import Derivatives, MatrixMap
from fixpoint.solution import Result, Solution, Stall, Trace
from fixpoint.solvers._fast_path import Masks, Summary, summarize
from fixpoint.solvers._rowwise import choose_rows
from fixpoint.solvers.finished import stop_finished
from fixpoint.solvers.reach import Reach
from fixpoint.solvers.residual import ResidualNorm, Residuals, Tolerance
from fixpoint.solvers.status import MIN_UPDATES, classify, has_stalled

CHANGED = (
    "phi must leave its input and what it returned before as they are; one of them was changed in "
    "place: use out-of-place operations in phi, and return a new tensor each time"
)


FLOOR_CHECK = 4
"""The rounding floor is looked for at each so many updates."""
FLOOR_CHECKS = 5
"""Most checks at which a sample may be at the rounding floor."""


class MonitorOptions(Protocol):
    """What the monitor needs of a solver; see `IterativeSolver`."""

    rtol: float
    record: Literal["residual", "iterates"] | None
    check_every: int
    origin: tuple[Tensor, Tensor] | None

    @property
    def keeps_best(self) -> bool: ...
    @property
    def backtracks(self) -> bool: ...
    @property
    def restarts(self) -> bool: ...
    @property
    def tolerance(self) -> Tolerance: ...
    @property
    def has_tolerance(self) -> bool: ...
    @property
    def may_sync(self) -> bool: ...


class ConvergenceMonitor:
    """Measures one solve, freezes its samples and counts; (z, fz, r) always belong together.

    `_observe_masked` defines what happens to a sample. `summarize` replaces it while all samples
    are finite, where nothing has to be masked.

    Attributes:
        done: whether all samples have ended.
        restarting: samples that were put back and restart, (B,), None where none are known on the
            host.
    """

    def __init__(self, options: MonitorOptions, z: Tensor, columns: Sequence[int] = ()) -> None:
        self.options = options
        self.norm = ResidualNorm(z, options.tolerance, columns)
        self.done = False
        self.active = torch.ones(z.shape[0], dtype=torch.bool, device=z.device)
        self.none = torch.zeros_like(self.active)
        self.nonfinite = self.none
        self.stall: Tensor | None = None  # `Stall` of samples that were ended for it, (B,)
        # Known on the host: whether some sample may be non-finite, and whether all are active.
        self.masking = options.check_every > 1
        self.all_active = options.check_every == 1
        self.has_fast_path = options.may_sync and z.shape[0] > 0
        # The first step of a solver that restarts is plain: there is none to fall back on.
        self.restarting: Tensor | None = None
        self.restarted, self.waiting = self.active, self.none
        self.r = torch.full((z.shape[0],), torch.inf, dtype=self.norm.dtype, device=z.device)
        self.inf = self.r
        self.z, self.fz = z, z
        self.runaway: Tensor | None = None  # samples denied convergence beyond their reach, (B,)
        self.measured = Residuals(self.r, self.r, self.r, self.r)
        self.reach = Reach(self.norm, z, self.measured, 0.0)  # of the start, see `observe`
        self.least_r = 0.0  # a lower bound known on the host
        self.keep_best = options.keeps_best
        self.best_r, self.best_z = self.r, z
        self.floor_checks: Tensor | int = 0  # at which the residual was below 2 eps
        self.best_update: Tensor | int = 0  # the same number for all, or one a sample
        self.all_improved = False
        self.improved = self.none  # which samples', where not all
        self.updates = 0
        self.iterations: Tensor | int = 0  # the same number for all, or one a sample
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
        if k == 0 and self.options.origin is not None:
            origin = self.options.origin
            self.reach = Reach(self.norm, origin[0], self.norm.measure(*origin), 0.0)
        elif k == 0:
            self.reach = Reach(self.norm, z, measured, summary.sizes[0] if summary else 0.0)
        if summary is None:
            z, fz, r = self._observe_masked(k, z, fz, measured, phi)
        else:
            r = self._observe_unmasked(measured, summary)
        self._keep_best(k, z, r)
        self.z, self.fz, self.r, self.measured = z, fz, r, measured
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
            unsolved = self.active if self.stall is None else self.active | (self.stall > 0)
            masks = Masks(self.active, unsolved, self.inf)
        return summarize(measured, self.best_r, masks, self.norm.safe_size)

    def _observe_unmasked(self, measured: Residuals, summary: Summary) -> Tensor:
        r, self.all_improved, self.done = measured.r, summary.improved, summary.done
        self.least_r, self.restarting, self.runaway = summary.least_r, None, None
        if self.updates > 0:
            self.restarted = self.none
        if not self.reach.covers(measured, summary.sizes[1]):
            r, self.all_improved = self._limit(r, measured), False
            if summary.least_r <= 1:  # some may be denied what the summary took for a solution
                self.done = not bool((self.active & (r > 1)).any())
        if summary.least_r <= 1:
            self.active = self.active & (r > 1)
            self.all_active = False
        return r

    def _limit(self, r: Tensor, measured: Residuals) -> Tensor:
        limited = self.reach.limit(measured, r)
        self.runaway = limited > r
        return limited

    def _observe_masked(
        self, k: int, z: Tensor, fz: Tensor, measured: Residuals, phi: MatrixMap
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Measure sample by sample and put lost ones back: z, fz and r."""
        r, finite = self.norm.measure_masked(measured, z, fz)
        if self.options.has_tolerance:
            r = self._limit(r, measured)
        if k > 0 and torch.is_grad_enabled() and bool((self.active & ~finite).any()):
            # In the graph of fz a lost sample's zero gradient would meet inf and spoil the rest.
            before = self.best_z if self.options.backtracks else self.z
            fz = choose_rows(finite, phi(choose_rows(finite, z, before)), fz.detach())
            self.evaluations += 1
        if self.options.backtracks and k > 0:
            # The solver takes a step to where phi is not finite back: no sample is lost by it.
            r, finite = torch.where(finite, r, torch.inf), torch.ones_like(finite)
        lost = self._note_lost(k, finite)
        active = finite & (r > 1) if self.options.has_tolerance else finite
        if not self.all_active:
            active = active & self.active
        self.all_improved, self.least_r = False, 0.0
        self.active, self.restarting = active, None
        if k % self.options.check_every == 0:
            self._check(lost)
        if self.masking or self.restarting is not None:
            z, r = choose_rows(finite, z, self.z), torch.where(finite, r, self.r)
            fz = choose_rows(finite, fz, self.fz)
        return z, fz, r

    def _note_lost(self, k: int, finite: Tensor) -> Tensor:
        """Samples lost at this step, (B,): for good, or waiting to restart where they were.

        A solver that restarts makes a plain step first, and after it has been put back; who is
        lost by that is lost for good.
        """
        lost = self.active & ~finite
        if self.options.restarts and self.options.has_tolerance and k > 0:
            self.waiting = self.waiting | (lost & ~self.restarted)
            self.nonfinite = self.nonfinite | (lost & self.restarted)
            self.restarted = self.none
        else:
            self.nonfinite = self.nonfinite | lost
        return lost

    def _check(self, lost: Tensor) -> None:
        """Let the host read how many samples are active, lost and waiting."""
        counts = torch.stack((self.active, lost, self.waiting)).sum(1)
        active, some_lost, some_waiting = values(counts)
        self.masking = self.masking or some_lost > some_waiting
        self.all_active = self.all_active and active == len(lost)
        self.done = active == 0 and some_waiting == 0
        if some_waiting:
            self.restarting = self.restarted = self.waiting
            self.active, self.waiting = self.active | self.waiting, self.none

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
        k, options = self.updates, self.options
        if options.has_tolerance:
            if options.backtracks and not self.all_improved:
                self._end_refused(proposal, z)
            if k % FLOOR_CHECK == 0 and self._may_be_at_floor(k):
                self._end_at_floor(k)
        if self.all_active:
            self.iterations += 1
        else:
            self.iterations = self.iterations + self.active
            proposal = choose_rows(self.active, proposal, z)
        self.given = (proposal, version(proposal)), (self.fz, version(self.fz))
        return proposal

    def _end_refused(self, proposal: Tensor, z: Tensor) -> None:
        """End samples whose solver refuses every step, which is then of length 0."""
        refused = self.active & ~self.improved & (proposal == z).all(1)
        if not self.has_fast_path or bool(refused.any()):
            self._end(refused, Stall.STEP_REFUSED)

    def _may_be_at_floor(self, k: int) -> bool:
        """False where, by what the host has read, `_end_at_floor` ends and counts no sample."""
        least_level = self.least_r * self.options.rtol / self.norm.eps
        return least_level <= 2 or (least_level < k - 5 and not self.all_improved)

    def _end_at_floor(self, k: int) -> None:
        """End samples whose residual is rounding noise.

        It has not fallen for 5 updates, and one more for each eps that it is above zero; or it
        was below 2 eps for `FLOOR_CHECKS` checks.
        """
        level = self.norm.level(self.measured)
        self.floor_checks = self.floor_checks + (level <= 2)
        at_floor = (k - self.best_update > 5 + level) | (self.floor_checks > FLOOR_CHECKS)
        at_floor = self.active & at_floor
        if self.has_fast_path and not self.masking and not bool(at_floor.any()):
            return
        far = self.reach.exceeded(self.measured)
        self._end(at_floor & ~far, Stall.ROUNDING)
        self._end(at_floor & far, Stall.RUNAWAY)

    def _end(self, samples: Tensor, cause: Stall) -> None:
        before = (
            torch.zeros_like(self.active, dtype=torch.int64) if self.stall is None else self.stall
        )
        self.stall = torch.where(samples, cause.value, before)
        self.active, self.all_active = self.active & ~samples, False

    def solution(self, z: Tensor, derivatives: Derivatives) -> Solution:
        """The solution after the last update, z where no better state is kept."""
        r, tolerance = self.r, self.options.has_tolerance
        all_converged = self.done and not self.masking and self.stall is None and tolerance
        if all_converged:
            result = stall = torch.zeros_like(self.active, dtype=torch.int8)
        elif tolerance:
            result, stall = classify(r, nonfinite=self._lost(), stall=self._stall())
        else:
            result = torch.full_like(self.active, Result.FIXED_STEPS.value, dtype=torch.int8)
            result = result.masked_fill(self._lost(), Result.NONFINITE.value)
            stall = None
        if tolerance and self.keep_best and not all_converged:
            z = choose_rows(r <= 1, z, self.best_z)
            r = torch.where(r <= 1, r, self.best_r)
        iterations = self.iterations
        if isinstance(iterations, int):
            iterations = torch.full_like(r, iterations, dtype=torch.int64)
        return Solution(
            z,
            r,
            iterations,
            self.evaluations + derivatives.evaluations,
            result,
            self._trace(),
            derivatives.products,
            stall,
        )

    def _lost(self) -> Tensor:
        """Samples that no step leads on from: phi is not finite wherever they tried, (B,)."""
        without_residual = self.r == torch.inf
        if self.options.backtracks and self.options.has_tolerance:
            # A trial that is not finite is shortened; it shows a loss where none is left.
            refused = self.none if self.stall is None else self.stall == Stall.STEP_REFUSED.value
            without_residual = without_residual & (refused | (self.best_r == torch.inf))
        return self.nonfinite | without_residual

    def _stall(self) -> Tensor:
        """Why each sample makes no progress, 0 where it does, (B,)."""
        none = torch.zeros_like(self.active, dtype=torch.int64)
        slow = has_stalled(none + self.best_update, self.updates) & (self.active | self.waiting)
        cause = torch.where(slow, Stall.NO_PROGRESS.value, none)
        if self.updates >= MIN_UPDATES:
            grown = self.reach.run_away(self.measured) & (self.active | self.waiting)
            cause = torch.where(grown, Stall.RUNAWAY.value, cause)
        if self.runaway is not None:
            cause = torch.where(self.runaway, Stall.RUNAWAY.value, cause)
        return cause if self.stall is None else torch.where(self.stall > 0, self.stall, cause)

    def _trace(self) -> Trace | None:
        if self.options.record is None:
            return None
        iterates = torch.stack(self.iterates) if self.iterates else None
        return Trace(torch.stack(self.residuals), iterates)
