"""The iterative solver and the loop: the only place that evaluates, measures and stops."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fixpoint.derivatives import Derivatives
from fixpoint.names import unknown_name
from fixpoint.solution import Result, Solution, Trace
from fixpoint.solvers.checks import at_least, non_negative

MatrixMap = Callable[[Tensor], Tensor]
"""phi as a map of (B, D) matrices."""
Norm = Callable[[Tensor], Tensor]
"""Size of each sample: (B, D) -> (B,)."""


class IterativeSolver(nn.Module):
    """A solver of z = phi(z) given by `init` and a pure `update`; `iterate` runs it.

    A sample has converged when rms(phi(z) - z) <= atol + rtol * rms(phi(z)), the root mean
    square over its D numbers. With rtol = atol = 0 exactly `max_iter` updates are made and
    nothing is measured: no norm, no device synchronisation, no data-dependent branch.

    Args:
        max_iter: most updates of a sample.
        rtol, atol: relative tolerance, and absolute tolerance in units of z.
        keep_best: return a sample that failed at its smallest residual, not at its last one.
        record: "residual" keeps each sample's residual after each update, "iterates" the states
            too; see `Trace`.
        check_every: look whether all samples are done (one device synchronisation, more where the
            solver takes steps back) only at each n-th update.
        norm: size of each sample, (B, D) -> (B,), in place of the RMS.

    Raises:
        ValueError: a value is out of range, or `record` is unknown.
        TypeError: an option is unknown.
    """

    def __init__(
        self,
        *,
        max_iter: int = 50,
        rtol: float = 1e-5,
        atol: float = 1e-6,
        keep_best: bool = True,
        record: Literal["residual", "iterates"] | None = None,
        check_every: int = 1,
        norm: Norm | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        for name in unknown:
            raise TypeError(
                unknown_name(f"{type(self).__name__} option", name, option_names(type(self)))
            )
        self.max_iter = at_least(0, max_iter=max_iter)
        self.rtol = non_negative(rtol=rtol)
        self.atol = non_negative(atol=atol)
        self.keep_best = keep_best
        if record not in (None, "residual", "iterates"):
            raise ValueError(f'record must be None, "residual" or "iterates"; got {record!r}')
        self.record = record
        self.check_every = at_least(1, check_every=check_every)
        self.norm = norm

    needs_derivatives = False
    """Whether `update` takes `derivatives=`, a `Derivatives` of phi."""
    rejects_steps = False
    """Whether `update` takes back a step to where phi is not finite."""

    unrollable = True
    """Whether backpropagation through its updates is possible."""

    @property
    def has_tolerance(self) -> bool:
        """Whether the solver stops at a tolerance; else it makes exactly `max_iter` updates."""
        return self.rtol > 0 or self.atol > 0

    @property
    def looks_each_update(self) -> bool:
        """Whether the host reads after every update how the samples stand.

        Where it does, `update` may read numbers too, and leave out what no sample needs.
        """
        return self.has_tolerance and self.check_every == 1

    def init(self, z: Tensor, t: int | None) -> Any:
        """State before the first update; z is (B, D), t the time index of a sequence."""
        return None

    def update(self, k: int, z: Tensor, fz: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Next iterate and state from z and fz = phi(z), both (B, D), at k = 0, 1, ..."""
        raise NotImplementedError

    def run(
        self,
        phi: MatrixMap,
        z: Tensor,
        t: int | None = None,
        *,
        track_from: int = 0,
        derivatives: Derivatives | None = None,
    ) -> Solution:
        """Solve from z, (B, D).

        Under grad mode the updates are differentiable, those before number `track_from` excepted.
        `derivatives` are those of phi, where the caller knows a better way than differentiating
        it.
        """
        return iterate(self, phi, z, t, track_from, derivatives or Derivatives(phi))

    def with_options(self, **options: Any) -> IterativeSolver:
        """A shallow copy with other `max_iter`, `rtol`, ...; parameters are shared."""
        other = copy.copy(self)
        for name, value in options.items():
            setattr(other, name, value)
        return other

    def extra_repr(self) -> str:
        parts = [f"max_iter={self.max_iter}"]
        if self.has_tolerance:
            parts += [f"rtol={self.rtol:g}", f"atol={self.atol:g}"]
        if self.record is not None:
            parts.append(f"record={self.record!r}")
        if self.check_every != 1:
            parts.append(f"check_every={self.check_every}")
        return ", ".join(parts)


def option_names(kind: type) -> list[str]:
    """Names of all constructor arguments of a solver class, its own first."""
    names: list[str] = []
    for owner in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for parameter in inspect.signature(owner).parameters.values():
            if parameter.kind is not parameter.VAR_KEYWORD and parameter.name not in names:
                names.append(parameter.name)
    return names


def refuse_options(kind: type, options: dict[str, Any], *refused: str) -> None:
    """Refuse options of `IterativeSolver` that a solver without its loop cannot honour."""
    for name in refused:
        if name in options:
            raise TypeError(f"{kind.__name__} runs a loop of its own and has no {name}: omit it")


def iterate(
    solver: IterativeSolver,
    phi: MatrixMap,
    z: Tensor,
    t: int | None,
    track_from: int,
    derivatives: Derivatives,
) -> Solution:
    """THE loop; see `IterativeSolver.run`."""
    given = {"derivatives": derivatives} if solver.needs_derivatives else {}
    tracking = torch.is_grad_enabled()
    watch = _Watch(solver, z) if solver.has_tolerance or solver.record else None
    state: Any = None
    with torch.set_grad_enabled(tracking and track_from <= 0):
        for k in range(solver.max_iter + 1):
            if watch is None and k == solver.max_iter:
                break
            if k == track_from:
                torch.set_grad_enabled(tracking)
            fz = phi(z)
            if watch is not None:
                z, fz = watch.look(k, z, fz, phi)
                if watch.done or k == solver.max_iter:
                    break
            if k == 0:
                state = solver.init(z, t)
            proposal, state = solver.update(k, z, fz, state, **given)
            z = proposal if watch is None else watch.freeze(proposal, z)
    solution = _fixed_steps(solver, z) if watch is None else watch.solution(z)
    return solution._replace(
        evaluations=solution.evaluations + derivatives.evaluations,
        products=derivatives.products,
        state=state,
    )


def _fixed_steps(solver: IterativeSolver, z: Tensor) -> Solution:
    iterations = torch.full((len(z),), solver.max_iter, dtype=torch.int64, device=z.device)
    result = torch.full((len(z),), Result.FIXED_STEPS.value, dtype=torch.int8, device=z.device)
    return Solution(z, None, iterations, solver.max_iter, result)


class _Watch:
    """Measures one solve, freezes its samples and counts; (z, fz, r) always belong together.

    As long as every sample is active and finite, which the host knows right after a check, there
    is nothing to mask, and the bookkeeping of single samples is left out.
    """

    def __init__(self, solver: IterativeSolver, z: Tensor) -> None:
        self.solver = solver
        self.active = torch.ones(len(z), dtype=torch.bool, device=z.device)
        self.failed = torch.zeros_like(self.active)
        self.masking = solver.check_every > 1  # whether some may be lost
        self.summing_up = solver.looks_each_update and len(z) > 0
        self.all_active = solver.check_every == 1
        self.improving = False  # whether the residuals of all active samples are their least
        self.done = False
        self.r = torch.full((len(z),), torch.inf, dtype=_norm_dtype(z), device=z.device)
        self.inf, self.zero = self.r, torch.zeros_like(self.r)
        self.least_exact = least_exact_norm(self.r.dtype)
        self.z, self.fz = z, z
        self.keep_best = solver.keep_best or solver.rejects_steps
        self.best_r, self.best_z = self.r, z
        self.some_stuck, self.stuck = False, self.failed
        self.common = 0  # updates made while all samples were active
        self.iterations = torch.zeros_like(self.active, dtype=torch.int64)  # those after
        self.evaluations = 0
        self.residuals: list[Tensor] = []
        self.iterates: list[Tensor] = []

    def look(self, k: int, z: Tensor, fz: Tensor, phi: MatrixMap) -> tuple[Tensor, Tensor]:
        """Measure z with fz = phi(z) and return both, lost samples put back where they were."""
        self.evaluations += 1
        measured = Measured.of(self.solver, z, fz)
        if self.masking or not self.summing_up or not self._note_if_sound(measured):
            z, fz, r = self._look_closely(k, z, fz, measured, phi)
        else:
            r = measured.r
        if self.improving:
            self.best_z, self.best_r = z, r
        elif self.keep_best:
            better = r < self.best_r
            self.best_z = _rows(better, z, self.best_z)
            self.best_r = torch.where(better, r, self.best_r)
        self.z, self.fz, self.r = z, fz, r
        self.residuals.append(r)
        if self.solver.record == "iterates":
            self.iterates.append(z.detach())
        return z, fz

    def _note_if_sound(self, measured: Measured) -> bool:
        """Note who goes on, if all samples are finite and measured exactly; else do nothing.

        One pass over the measures, and one device synchronisation.
        """
        r, scale = measured.r, measured.scale
        gain, going = self.best_r - r, r
        if not self.all_active:
            # A sample that is done needs no best state, and nobody waits for it.
            gain = torch.where(self.active, gain, self.inf)
            going = torch.where(self.active, r, self.zero)
        extremes = torch.stack((-(r + scale), scale, gain, r, -going)).amin(1)
        minus_sum, least_scale, least_gain, low, minus_going = extremes.tolist()
        if not (minus_sum > -math.inf and least_scale >= self.least_exact):
            return False
        self.improving = least_gain > 0
        self.done = -minus_going <= 1
        if not self.all_active or low <= 1:
            self.active = self.active & (r > 1)
            self.all_active = False
        return True

    def _look_closely(
        self, k: int, z: Tensor, fz: Tensor, measured: Measured, phi: MatrixMap
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Measure sample by sample, put lost ones back, and note who goes on: z, fz and r."""
        r, finite = measured.closely(self.solver, z, fz)
        if self.solver.rejects_steps and k > 0:
            # The solver takes a step to where phi is not finite back: no sample is lost by it.
            r, finite = torch.where(finite, r, torch.inf), torch.ones_like(finite)
        active = finite & (r > 1) if self.solver.has_tolerance else finite
        if not self.all_active:
            active = active & self.active
        self.improving, some_lost = False, False
        if k % self.solver.check_every == 0:
            going, sound = torch.stack((active, finite)).sum(1).tolist()
            self.done = going == 0
            some_lost = sound < len(z)
            self.masking = self.masking or some_lost
            self.all_active = self.all_active and going == len(z)
        if self.masking:
            self.failed = self.failed | (self.active & ~finite)
            z, r = _rows(finite, z, self.z), torch.where(finite, r, self.r)
            # In the graph of fz a lost sample's zero gradient would meet inf and spoil the rest.
            if some_lost and k > 0 and torch.is_grad_enabled():
                fz = phi(z)
                self.evaluations += 1
            fz = _rows(finite, fz, self.fz)
        self.active = active
        return z, fz, r

    def freeze(self, proposal: Tensor, z: Tensor) -> Tensor:
        """The proposal, with samples that are done left where they are."""
        if self.all_active:
            self.common += 1
        else:
            self.iterations = self.iterations + self.active
            proposal = _rows(self.active, proposal, z)
        # A sample that stands still keeps its residual, so it is none of those that improve.
        if self.solver.rejects_steps and self.solver.has_tolerance and not self.improving:
            stuck = self.active & (proposal == z).all(1)
            if self.solver.check_every > 1 or bool(stuck.any()):
                self.stuck, self.active = self.stuck | stuck, self.active & ~stuck
                self.some_stuck, self.all_active = True, False
        return proposal

    def solution(self, z: Tensor) -> Solution:
        solver, r = self.solver, self.r
        iterations = self.common + self.iterations
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


class Measured(NamedTuple):
    """Norms of phi(z) - z and phi(z), their tolerance and their quotient, (B,) each."""

    residual: Tensor
    size: Tensor
    scale: Tensor
    r: Tensor

    @classmethod
    def of(cls, solver: IterativeSolver, z: Tensor, fz: Tensor, *, wide: bool = False) -> Measured:
        """In the dtype of z, at least float32, or in the widest of the device."""
        z, fz = z.detach(), fz.detach()
        dtype = _widest(z) if wide else _norm_dtype(z)
        rtol, atol = (solver.rtol, solver.atol) if solver.has_tolerance else (1.0, 0.0)
        if solver.norm is not None:
            residual, size = solver.norm(fz - z).to(dtype), solver.norm(fz).to(dtype)
        else:
            residual = torch.linalg.vector_norm(fz - z, dim=1, dtype=dtype)
            size = torch.linalg.vector_norm(fz, dim=1, dtype=dtype)
            # Both sides of the test are RMS: the factor 1 / sqrt(D) moves to atol.
            atol = atol * z.shape[1] ** 0.5
        scale = size * rtol
        if atol > 0:
            scale = scale + atol
        return cls(residual, size, scale, residual / scale)

    def closely(self, solver: IterativeSolver, z: Tensor, fz: Tensor) -> tuple[Tensor, Tensor]:
        """Residuals r, never inf, and whether z and fz are finite, (B,) each.

        Squares of float32 numbers as small as 1e-30 or as large as 1e30 leave float32: such
        samples are measured once more in float64, and only they, so that what is measured of a
        sample does not depend on its batch-mates.
        """
        narrow = self.r.dtype
        exact = (self.scale >= least_exact_norm(narrow)) & (self.residual + self.size < torch.inf)
        wide = Measured.of(solver, z, fz, wide=True)
        finite = wide.residual + wide.size < torch.inf  # False for NaN; cheaper than isfinite
        scale = torch.maximum(wide.scale, torch.finfo(narrow).tiny * wide.residual)
        r = wide.residual / scale.clamp_min(torch.finfo(scale.dtype).tiny)
        return torch.where(exact, self.r, r.to(narrow)), finite


def measure(solver: IterativeSolver, z: Tensor, fz: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled residual of each sample, (B,), never inf, and whether z and fz are finite."""
    return Measured.of(solver, z, fz).closely(solver, z, fz)


def least_exact_norm(dtype: torch.dtype) -> float:
    """Least 2-norm whose square keeps all its digits in this dtype."""
    return math.sqrt(torch.finfo(dtype).tiny / torch.finfo(dtype).eps)


def _norm_dtype(z: Tensor) -> torch.dtype:
    return torch.promote_types(z.dtype, torch.float32)


def _widest(z: Tensor) -> torch.dtype:
    return torch.float32 if z.device.type == "mps" else torch.float64


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product of each sample, (B, 1)."""
    return (a * b).sum(1, keepdim=True)


def _rows(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Rows of new where mask, (B,), else of old."""
    return torch.where(mask[:, None], new, old)
