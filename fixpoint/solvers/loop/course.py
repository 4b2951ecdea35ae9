"""The course of one solve on the host: how its samples stand, and what the loop may skip."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fixpoint._torch import from_host, to_host, versions
from fixpoint.derivatives import Derivatives, MatrixMap
from fixpoint.solution import Solution, Trace
from fixpoint.solvers._rowwise import choose_rows
from fixpoint.solvers.loop import rules
from fixpoint.solvers.loop.norms import LoopOptions, Norms, checked_test
from fixpoint.solvers.loop.rules import Measures, Rules, Status

CHANGED = (
    "phi must leave its input and what it returned before as they are; one of them was changed in "
    "place: use out-of-place operations in phi, and return a new tensor each time"
)


class CourseOptions(LoopOptions, Protocol):
    """Options of a course, from a solver; see `IterativeSolver`."""

    record: Literal["residual", "iterates"] | None
    check_every: int
    origin: tuple[Tensor, Tensor] | None


class Course:
    """Course of one solve: its measured, frozen and counted samples; (z, fz, r) belong together.

    `rules.observe` defines what happens to a sample. While every sample is finite, near its scale
    and above rounding, only residuals change, and which samples have converged: it is not asked.

    Args:
        options: of the solver.
        z: the start, (B, D).
        norms: of states like it.
        every: number of updates from one look of the host to the next.
        most: number of the last update.

    Attributes:
        done: whether all samples have ended.
        restarting: samples that were put back and restart, (B,); None where there are none.
        coupled: whether a sample that had converged no longer has, as rows of phi are coupled.
        born: number of the update after which each sample began, 0 for all or (B,).
    """

    _status: Status

    def __init__(
        self, options: CourseOptions, z: Tensor, norms: Norms, *, every: int, most: int
    ) -> None:
        self.options, self.norms, self.most = options, norms, most
        self.rules = Rules.of(norms, options)
        self.keep_best = options.keeps_best
        self.every, self.next_check = every, 0
        self.updates = self.looked = self.evaluations = 0
        self.born: int | np.ndarray = 0
        self.renewed: np.ndarray | None = None
        self.done, self.coupled = len(z) == 0, False
        self.all_active = self.all_improved = True
        self._active_count, self._only_solved_end = len(z), options.stop_when is None
        self.restarting: Tensor | None = None
        self.z, self.fz, self.best_z = z, z, z
        self._before = z, z  # z and phi(z) before the last update
        self.active: Tensor | None = None  # on the device; None where all are
        self.moved: Tensor | None = None
        self._has_moved: np.ndarray | None = None
        self._measured: Measures | None = None  # by `trusts`, for `observe`
        self._watch(z, z)
        self._quiet: tuple[int, np.ndarray] | None = None
        self.residuals: list[np.ndarray] = []
        self.iterates: list[Tensor] = []

    @property
    def status(self) -> Status:
        """Status of the samples, NumPy arrays."""
        if self._quiet is not None:
            age, r = self._quiet
            before, self._quiet = self._status, None
            self._status = before._replace(
                r=r,
                best_r=r,
                best_update=np.full_like(before.best_update, age),
                improved=before.active,
                restarting=self._none,
                plain=self._none if age else before.plain,
            )
        return self._status

    @status.setter
    def status(self, status: Status) -> None:
        self._status, self._quiet = status, None

    def observe(self, k: int, z: Tensor, fz: Tensor, phi: MatrixMap) -> tuple[Tensor, Tensor]:
        """Measure z with fz = phi(z), after update k, and return both, lost samples put back."""
        self.updates = k
        self.evaluations += 1
        if self.versions is not None and self.versions != versions(*self.given):
            raise RuntimeError(CHANGED)
        if k < self.next_check and k < self.most:
            self._before = z, fz
            return z, fz
        m, self._measured = self._measured or self._measure(k, z, fz), None
        if self.renewed is not None:
            self._begin_again(k, z, fz, m, self.renewed)
        if not self._is_quiet(k, z, m):
            calm = self._calm(k, m)
            if calm is None:
                z, fz = self._look(k, z, fz, m, phi)
            else:
                self._follow_calm(k, z, *calm)
        self.z, self.fz, self.m, self.looked = z, fz, m, k
        self._before = z, fz
        self.next_check = k + self.every if self.rules.most == np.inf else self._next_look(k)
        if self.options.record is not None:
            self.residuals.append(self.status.r)
        if self.options.record == "iterates":
            self.iterates.append(z.detach())
        return z, fz

    def give_each(self, most: int) -> None:
        """Give each sample a budget of its own, in updates since it began."""
        self.rules = self.rules._replace(most=float(most))
        self.next_check = self._next_look(self.looked)

    def _next_look(self, k: int) -> int:
        """Return the update after which the host looks again, not past the end of a budget."""
        left = np.where(self.status.active, self.born + self.rules.most - k, self.every)
        return k + int(left.min(initial=self.every))

    def trusts(self, k: int, z: Tensor, fz: Tensor, doubts: Tensor) -> bool:
        """Tell whether no sample was moved by a guess, (B,), as `observe` measures z; else it is to
        be moved again.
        """
        self._measured = self._measure(k, z, fz, doubts)
        if self._guessed.any():
            self._measured, self.evaluations = None, self.evaluations + 1
            return False
        return True

    def renew(self, rows: np.ndarray) -> None:
        """Let samples, (B,), be other ones from the next update on, which proposes their starts."""
        self.renewed = rows if self.renewed is None else self.renewed | rows
        self.status = self.status._replace(active=self.status.active | rows)
        self.next_check = 0
        self._note_active()

    def _begin_again(self, k: int, z: Tensor, fz: Tensor, m: Measures, renewed: np.ndarray) -> None:
        """Begin with the renewed samples at their starts."""
        with np.errstate(all="ignore"):
            begun = rules.begin(np, m, self.norms.measure(z, fz, z.detach())[2])
        pairs = zip(begun, self.status, strict=True)
        self.status = Status(
            *(old if new.ndim == 0 else _chosen(renewed, new, old) for new, old in pairs)
        )
        self.born, self.renewed, self._has_moved = np.where(renewed, k, self.born), None, None
        rows = self._on_device(renewed)
        self.z, self.best_z = choose_rows(rows, z, self.z), choose_rows(rows, z, self.best_z)
        self.fz = choose_rows(rows, fz, self.fz)
        self._note_scale()

    def freeze(self, proposal: Tensor, z: Tensor) -> Tensor:
        """Return the proposal, with samples that have ended left where they are."""
        self.moved = None
        if self.options.backtracks and not self.all_improved:
            self.moved = (proposal != z).any(1)
        if self.active is not None:
            proposal = choose_rows(self.active, proposal, z)
        self._watch(proposal, self.fz)
        return proposal

    def _watch(self, z: Tensor, fz: Tensor) -> None:
        """Note the tensors that phi must not change."""
        self.given = z, fz
        self.versions = versions(*self.given)

    def _measure(self, k: int, z: Tensor, fz: Tensor, doubts: Tensor | None = None) -> Measures:
        self._has_moved = None
        if k == 0:
            sizes = self.norms.measure(z, fz, z.detach())
            m = Measures(sizes[0], sizes[1])
            self._begin(m, sizes[2])
            return m
        flags = [x for x in (self.moved, doubts) if x is not None]
        sizes = self.norms.measure(z, fz, atol=self._atol, least_atol=self._least_atol, flags=flags)
        if flags:
            found = (sizes if sizes.ndim == 2 else sizes[:, :, 0]) > 0
            if self.moved is not None:
                self._has_moved = found[2]
            if doubts is not None:
                self._guessed = found[-1]
        return Measures(sizes[0], sizes[1])

    def _begin(self, m: Measures, start: np.ndarray) -> None:
        if self.options.origin is not None:
            first = self.norms.measure(*self.options.origin, self.options.origin[0])
            m, start = Measures(first[0], first[1]), first[2]
        with np.errstate(all="ignore"):
            self.status = rules.begin(np, m, start)
        self._none = np.zeros_like(self.status.active)
        self._note_scale()

    def _note_scale(self) -> None:
        scale = self.status.scale
        self._atol, self._bound = rules.tolerance(np, self.rules, scale), rules.GROWN * scale
        self._least_atol = float(np.min(self._atol, initial=np.inf))
        if scale.size == 1:
            self._atol, self._bound = self._least_atol, self._bound.item()

    def _is_quiet(self, k: int, z: Tensor, m: Measures) -> bool:
        """Note an update after which each sample is nearer to its solution than before, or was at
        it, as most are, and tell whether it was one.
        """
        if not self._only_solved_end or self._has_moved is not None or self.rules.most < np.inf:
            return False
        best_r = self._status.best_r if self._quiet is None else self._quiet[1]
        if m.size.size == 1:  # Python's numbers are faster than arrays of one
            one = Measures(m.residual.item(), m.size.item())
            if not self.norms.rtol * one.size + self._atol > 0:
                return False
            number, near = self._compare(k, one)
            r, quiet = np.array((number,)), near and number < best_r.item()
        else:
            with np.errstate(all="ignore"):
                r, near = self._compare(k, m)
                nearer = near & (r < best_r)
            if not self.all_active:
                nearer = np.where(self._status.active, nearer, r <= 1)
            quiet = nearer.all()
        if not quiet:
            return False
        going = r > 1
        count = np.count_nonzero(going)
        if count < self._active_count:
            if self.rules.goes_on:
                return False
            self._end_solved(k, r, going)
        self._quiet, self.best_z = (k, r), z
        self.restarting, self.all_improved = None, True
        return True

    def _compare(self, k: int, m: Measures) -> tuple[Any, Any]:
        """Return residuals in units of the tolerance, and which samples, (B,), are near their scale
        and, where this is checked, above rounding.
        """
        r = m.residual / (self.norms.rtol * m.size + self._atol)
        near = m.size <= self._bound
        above = None
        if k % rules.FLOOR_CHECK == 0:
            above = m.residual > rules.FLOOR * self.rules.eps * m.size
        if not isinstance(r, float) and r.ndim == 2:
            above = None if above is None else (above & (r > 1)).any(1)
            r, near = r.max(1), near.all(1)
        return r, near if above is None else near & above

    def _calm(self, k: int, m: Measures) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Return residuals, and samples that are nearer to their solution than before or have just
        reached it, (B,) each; None where the rules have to be asked.
        """
        status, age = self.status, k - self.born
        if self.options.stop_when is not None or self.rules.most < np.inf:
            return None
        with np.errstate(all="ignore"):
            r, near = self._compare(k, m)
            better, solved = r < status.best_r, r <= 1
            calm = near & (r < np.inf)
            if k % rules.FLOOR_CHECK == 0:
                calm &= better | (age - status.best_update <= rules.PATIENCE)
        if self._has_moved is not None:  # else the solver may have refused the step
            calm &= self._has_moved | status.improved
        if not self.all_active:
            at_solution = ~status.active & ~status.nonfinite & (status.r <= 1)
            calm = np.where(status.active, calm, solved | ~at_solution)
            better, solved = better & status.active, solved & status.active
            r = np.where(status.active | at_solution, r, status.r)
        if not calm.all() or (self.rules.goes_on and solved.any()):
            return None
        return r, better, solved

    def _follow_calm(
        self, k: int, z: Tensor, r: np.ndarray, better: np.ndarray, solved: np.ndarray
    ) -> None:
        """Note an update whose samples are calm."""
        before, age = self.status, k - self.born
        status = before._replace(
            r=r,
            best_r=r,
            best_update=np.full_like(before.best_update, age),
            improved=better,
            restarting=self._none,
            plain=self._none if k else before.plain,
        )
        self.restarting, self.all_improved, ends = None, bool(better.all()), bool(solved.any())
        if ends or not self.all_improved:
            iterations = np.where(before.active, age, before.iterations)
            status = status._replace(active=before.active & ~solved, iterations=iterations)
        if self.all_improved:
            self.best_z = z
        else:
            status = status._replace(
                best_r=np.where(better, r, before.best_r),
                best_update=np.where(better, age, before.best_update),
            )
            self._keep_best(z, status)
        self.status = status
        if ends:
            self._note_active()

    def _look(
        self, k: int, z: Tensor, fz: Tensor, m: Measures, phi: MatrixMap
    ) -> tuple[Tensor, Tensor]:
        """Ask the rules how each sample stands, and put lost ones back: z and fz."""
        before = self.status
        if k > self.looked + 1:  # the updates since then were not plain ones
            before = before._replace(plain=before.plain & False)
        with np.errstate(all="ignore"):
            distance = self._distance(z, fz, m) if k else None
            age = k - self.born
            status = rules.observe(np, self.rules, before, age, m, distance, self._accepts(z, fz))
            finite = rules.are_finite(m)
            if k and torch.is_grad_enabled() and (before.active & ~finite).any():
                fz = self._evaluate_again(z, fz, phi, finite)
            if not self.options.backtracks or k == 0:
                z, fz = self._put_back(z, fz, finite)
            if self._has_moved is not None:
                status = rules.end_refused(np, before, status, self._has_moved)
            if k and k % rules.FLOOR_CHECK == 0 and k < self.most:
                status = rules.end_at_floor(np, self.rules, status, age, m)
        self._keep_best(z, status)
        self._follow(before, status)
        return z, fz

    def _accepts(self, z: Tensor, fz: Tensor) -> np.ndarray | None:
        """Return samples that the test of the solver accepts, (B,)."""
        test = self.options.stop_when
        if test is None:
            return None
        return to_host(checked_test(test(z.detach(), fz.detach()), z))

    def _distance(self, z: Tensor, fz: Tensor, m: Measures) -> np.ndarray | None:
        """Estimate the distance to the solution by the secant of the last step, where a state has
        grown.
        """
        if not rules.grown(self.status, m).any():
            return None
        # Of the last step, though the host has not looked: a longer secant hides how far it is.
        # Where that step is rounding, only the longer one tells.
        distance = self._by_secant(*self._before, z, fz, m)
        if self._before[0] is not self.z:
            longer = self._by_secant(self.z, self.fz, z, fz, m)
            distance = np.where(distance < np.inf, distance, longer)
        return np.where(m.residual > 0, distance, 0.0)

    def _by_secant(
        self, start: Tensor, end: Tensor, z: Tensor, fz: Tensor, m: Measures
    ) -> np.ndarray:
        """Estimate the distance by the secant from a state and its phi, inf if that is rounding."""
        change = (fz - z) - (end - start)
        sizes = self.norms.measure(start.detach(), z.detach(), change.detach())
        noise = 4 * self.norms.eps * m.size  # of both residuals
        change = np.maximum(sizes[2] - noise, 0 * noise)
        return np.where(change > 0, m.residual * sizes[0] / change, np.inf)

    def _evaluate_again(self, z: Tensor, fz: Tensor, phi: MatrixMap, finite: np.ndarray) -> Tensor:
        """Return phi(z) whose graph holds lost samples where they were.

        In that of fz their zero gradient would meet inf and spoil the rest.
        """
        rows = self._on_device(finite)
        before = self.best_z if self.options.backtracks else self.z
        self.evaluations += 1
        return choose_rows(rows, phi(choose_rows(rows, z, before)), fz.detach())

    def _put_back(self, z: Tensor, fz: Tensor, finite: np.ndarray) -> tuple[Tensor, Tensor]:
        if finite.all():
            return z, fz
        rows = self._on_device(finite)
        return choose_rows(rows, z, self.z), choose_rows(rows, fz, self.fz)

    def _keep_best(self, z: Tensor, status: Status) -> None:
        # One that moves on from its solution may have to be put back there.
        replaced = status.improved if self.rules.goes_on else status.improved | (status.r <= 1)
        self.all_improved = bool(replaced.all())
        if self.all_improved:
            self.best_z = z
        elif self.keep_best and status.improved.any():
            self.best_z = choose_rows(self._on_device(status.improved), z, self.best_z)

    def _follow(self, before: Status, status: Status) -> None:
        """Keep for the loop what has changed."""
        self.status = status
        self.coupled = bool(status.coupled)
        self.restarting = None
        if status.restarting.any():
            self.restarting = self._on_device(status.restarting)
            self.every = 1  # a sample that leaves the domain of phi has to be seen at once
        if (status.active != before.active).any():
            self._note_active()
        self._note_scale()

    def _note_active(self) -> None:
        status = self.status
        self._active_count = count = int(np.count_nonzero(status.active))
        self.all_active = count == len(status.active)
        self.active = None if self.all_active else self._on_device(status.active)
        self.done = count == 0 or bool(rules.has_enough(self.rules, status))
        solved = (status.r <= 1) & ~status.nonfinite
        self._only_solved_end = self.options.stop_when is None and bool(
            (status.active | solved).all()
        )

    def _end_solved(self, k: int, r: np.ndarray, going: np.ndarray) -> None:
        """End the samples that a quiet update has brought to their solution."""
        before = self._status
        self.status = before._replace(
            r=r,
            best_r=r,
            active=going,
            iterations=np.where(before.active, k, before.iterations),
        )
        self._note_active()

    def _on_device(self, mask: np.ndarray) -> Tensor:
        return from_host(mask, self.z.device)

    @property
    def mixes_states(self) -> bool:
        """True if there are solutions beside samples that are put back to their best states."""
        if not self.keep_best or len(self.z) < 2 or rules.is_last(self.status).all():
            return False
        return bool(rules.solved(self.status).any())

    def returned(self, z: Tensor) -> Tensor:
        """Return the states of the solution, z where no better one is kept."""
        return choose_rows(self._on_device(rules.is_last(self.status)), z, self.best_z)

    def contradicts(self, z: Tensor, phi: MatrixMap) -> bool:
        """Tell whether a solution is none beside the states that are returned, z, (B, D)."""
        self.evaluations += 1
        with torch.no_grad():
            sizes = self.norms.measure(z, phi(z.detach()), atol=self._atol)
        with np.errstate(all="ignore"):
            m = Measures(sizes[0], sizes[1])
            return bool(rules.contradicted(np, self.rules, self.status, m).any())

    def solution(self, z: Tensor, derivatives: Derivatives) -> Solution:
        """Return the solution after the last update, z where no better state is kept."""
        status = self.status
        with np.errstate(all="ignore"):
            age = np.minimum(self.updates - self.born, self.rules.most)
            result, stall = rules.finish(np, self.rules, status, age, self.m)
            atol_decides = rules.atol_decides(np, self.rules, status, self.m)
        r, is_last = status.r, rules.is_last(status)
        iterations = np.where(status.active, age, status.iterations)
        if self.keep_best and not is_last.all():
            z = choose_rows(self._on_device(is_last), z, self.best_z)
            r = np.where(is_last, r, status.best_r)
        return Solution(
            z=z.clone(),
            residual=self._tensor(r, self.norms.numpy_dtype),
            iterations=self._tensor(iterations, np.int64),
            evaluations=self.evaluations + derivatives.evaluations,
            result=self._tensor(result, np.int8),
            trace=self._trace(),
            products=derivatives.products,
            stall=self._tensor(stall, np.int8),
            coupled=self.coupled,
            atol_decides=self._tensor(atol_decides, np.bool_),
        )

    def _tensor(self, x: np.ndarray, dtype: type[np.generic]) -> Tensor:
        return from_host(x.astype(dtype, order="C"), self.z.device)

    def _trace(self) -> Trace | None:
        if self.options.record is None:
            return None
        residual = self._tensor(np.stack(self.residuals), self.norms.numpy_dtype)
        return Trace(residual, torch.stack(self.iterates) if self.iterates else None)


def _chosen(rows: np.ndarray, new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Return rows of new, (B, ...), where rows, (B,), else of old."""
    return np.where(rows if new.ndim == 1 else rows[:, None], new, old)
