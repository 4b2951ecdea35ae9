"""Status of each sample of a solve after an update: pure functions, on the host or in a graph.

They take the array namespace `xp`, NumPy or torch, whose operations of these names agree. The eager
loop keeps a `Status` of NumPy arrays, so that an update costs one read of the device; a graph keeps
one of tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fixpoint.solution import Result, Stall
from fixpoint.solvers.loop.norms import LoopOptions, Norms

Array = Any
"""A NumPy array or a tensor."""

MIN_UPDATES = 10
"""A solve of fewer updates is not called stalled for its residuals."""
FLOOR_CHECK = 4
"""Number of updates from one check for the rounding floor to the next."""
FLOOR = 2.0
"""Largest residual that is rounding noise, in eps of the size of phi(z)."""
PATIENCE = 5
"""Updates without a smaller residual, before which it is not called rounding noise for that."""
FLOOR_CHECKS = 5
"""Most checks at which a sample may be at the rounding floor."""

GROWN = 3.0
"""Size in units of its scale from which a state has grown: its residual must have fallen below the
largest by the factor of its further growth, and its distance to the solution below
`MAX_DISTANCE`."""
MAX_GROWTH = 100.0
"""Size in units of its scale from which a state says nothing of its tolerance: its residual
must have fallen to `MIN_FALL` of the scale, and to the tolerance of a state of this size, or to
rounding."""
MIN_FALL = 1e-3
MAX_DISTANCE = 0.1
"""Largest distance of a grown state to the solution, by the secant of its last step, over its
size."""
MAX_EXCESS = 2.0
"""Largest residual in units of the tolerance where it was below 1 before, as rounding may change
it."""

T = TypeVar("T", int, Tensor, np.ndarray)


class Rules(NamedTuple):
    """Constants of a solve.

    tiny: the least normal number of the dtype of residuals.
    together: whether samples move until all have converged.
    fraction: of the samples, that ends the batch when it has converged.
    most: updates of a sample, where samples may begin one after the other.
    The others: see `Norms` and `IterativeSolver`.
    """

    rtol: float
    atol: Array
    unit: Array
    eps: float
    tiny: float
    relative_atol: bool
    backtracks: bool = False
    restarts: bool = False
    keeps_best: bool = True
    min_iter: int = 0
    together: bool = False
    fraction: float = 1.0
    most: float = np.inf

    @classmethod
    def of(cls, norms: Norms, options: LoopOptions | None = None, *, alone: bool = False) -> Rules:
        """Return the rules for what is measured by these norms.

        Args:
            options: of the solver.
            alone: whether each sample ends as soon as it has converged, whatever they say.
        """
        tiny = torch.finfo(norms.dtype).tiny
        constants = norms.rtol, norms.atol, norms.unit, norms.eps, tiny, norms.relative_atol
        if options is None:
            return cls(*constants)
        rules = cls(*constants, options.backtracks, options.restarts, options.keeps_best)
        if alone:
            return rules
        stop = options.stop
        fraction = 1.0 if isinstance(stop, str) else float(stop)
        return rules._replace(min_iter=options.min_iter, together=stop == "all", fraction=fraction)

    @property
    def goes_on(self) -> bool:
        """True if a sample may move that has converged."""
        return self.together or self.min_iter > 0


class Measures(NamedTuple):
    """Sizes of phi(z) - z and of phi(z), (B,) or (B, leaves)."""

    residual: Array
    size: Array


class Status(NamedTuple):
    """Status of the samples; (B,) each, but for the sizes of leaves, (B, leaves).

    r: residual in units of the tolerance; best_r: the smallest so far, and best_update its update.
    improved: whether the last r was the smallest.
    active: samples that the solve moves.
    restarting: samples that were put back, whose next step is plain; plain: whose last step was.
    nonfinite: samples lost to NaN or inf; stall: `Stall` of those that were ended for it.
    iterations: updates applied; floor_checks: checks at which the residual was rounding noise.
    start: size of the start; largest: the largest residual that has moved the state.
    coupled: whether a sample that had converged no longer has, the same for all.
    accepted: samples that `stop_when` has ended.
    """

    r: Array
    best_r: Array
    best_update: Array
    improved: Array
    active: Array
    restarting: Array
    plain: Array
    nonfinite: Array
    stall: Array
    iterations: Array
    floor_checks: Array
    start: Array
    largest: Array
    coupled: Array
    accepted: Array

    @property
    def scale(self) -> Array:
        """The size of the start and the largest residual: what a state of this solve may weigh."""
        return self.start + self.largest


def begin(xp: Any, m: Measures, start: Array) -> Status:
    """Return the status before the start is observed.

    Args:
        m: measures at the start.
        start: size of the start.
    """
    start = xp.where((m.size > start) | ~(start < np.inf), m.size, start)
    largest = xp.where(m.residual < np.inf, m.residual, 0.0 * start)
    scale = start + largest
    # A leaf that rests at 0 until others have moved shows no size of its own.
    start = xp.where(scale > 0, start, np.inf) if scale.ndim == 2 else start
    r = _over_leaves(xp, xp.full_like(m.residual, np.inf))
    none = r < 0
    zero = none + 0
    return Status(
        r=r,
        best_r=r,
        best_update=zero,
        improved=none,
        active=~none,
        restarting=none,
        plain=~none,
        nonfinite=none,
        stall=zero,
        iterations=zero,
        floor_checks=zero,
        start=start,
        largest=largest,
        coupled=none.any(),
        accepted=none,
    )


def observe(
    xp: Any,
    rules: Rules,
    status: Status,
    k: Array,
    m: Measures,
    distance: Array | None = None,
    accepts: Array | None = None,
) -> Status:
    """Return the status after update k, 0 for the start; of each sample, (B,), where they differ.

    Args:
        accepts: samples that `stop_when` accepts, where there is one.
        distance: to the solution by the secant of the last step, like m; None where no grown
            state may have converged.
    """
    status = _note_growth(xp, status, m)
    finite = are_finite(m)
    r = xp.where(finite, scaled_residual(xp, rules, status, m, distance), np.inf)
    ended = status.nonfinite | (status.stall > 0) | status.accepted
    lost = ~finite
    if rules.backtracks:  # the solver takes a step to where phi is not finite back
        lost = lost & (k == 0)
    lost_now = status.active & lost
    restarting = lost_now & ~status.plain if rules.restarts else lost_now & False
    nonfinite = status.nonfinite | (lost_now & ~restarting)
    # Also one that could not move on from its solution, for `goes_on`, and was ended there.
    left = ~status.active & ~status.nonfinite & (status.r <= 1) & ~(r <= 1)
    if rules.most < np.inf:
        left = left & (k <= rules.most)
    coupled = status.coupled | left.any()
    r = xp.where(lost | (ended & ~left), status.r, r)
    moving = ~ended & ~nonfinite
    settled = (r <= 1) if accepts is None else (r <= 1) | (accepts & finite)
    settled = settled & moving & (k >= rules.min_iter)
    if rules.together:
        settled = settled & (settled | ~moving).all()
    active = moving & ~settled
    if rules.most < np.inf:
        active = active & (k < rules.most)
    improved = (r < status.best_r) & ~lost
    plain = (status.plain & (k == 0)) | restarting
    return status._replace(
        r=r,
        best_r=xp.where(improved, r, status.best_r),
        best_update=xp.where(improved, k, status.best_update),
        improved=improved,
        active=active,
        restarting=restarting,
        plain=plain,
        nonfinite=nonfinite,
        iterations=xp.where(status.active, k, status.iterations),
        coupled=coupled,
        accepted=status.accepted | (settled & ~(r <= 1)),
    )


def has_enough(rules: Rules, status: Status) -> Array:
    """Tell whether enough samples have converged for the batch to end."""
    if rules.fraction == 1:
        return False
    solved = ~status.active & ~status.nonfinite & ((status.r <= 1) | status.accepted)
    return solved.sum() >= rules.fraction * solved.shape[0]


def tolerance(xp: Any, rules: Rules, scale: Array) -> Array:
    """Return the absolute tolerance of states of this scale, in units of sizes.

    One that was not asked for is relative to the scale where that is below that of ones: it must
    not decide alone where the state is small.
    """
    if not rules.relative_atol:
        return rules.atol
    relative = scale / rules.unit
    return rules.atol * xp.where(relative < 1, relative, 1.0)


def scaled_residual(
    xp: Any, rules: Rules, status: Status, m: Measures, distance: Array | None = None
) -> Array:
    """Return |phi(z) - z| / (atol + rtol |phi(z)|), the largest of the leaves, (B,).

    Above 1 where a state has grown and shows no solution: at infinity there is none.
    """
    r = plain_residual(xp, rules, status, m)
    limited = xp.where(grown(status, m), _of_grown(xp, rules, status, m, distance), 0.0)
    limited = _over_leaves(xp, limited)
    return xp.where((r <= 1) & (limited > r), limited, r)


def plain_residual(xp: Any, rules: Rules, status: Status, m: Measures) -> Array:
    """Return the same, whether or not a state has grown."""
    atol = tolerance(xp, rules, status.scale)
    return _over_leaves(xp, _quotient(xp, rules, m.residual, m.size * rules.rtol + atol))


def grown(status: Status, m: Measures) -> Array:
    """Tell where a state is above `GROWN` times its scale."""
    return m.size > GROWN * status.scale


def are_finite(m: Measures) -> Array:
    """Tell whether z and phi(z) of each sample are finite, (B,)."""
    finite = (m.residual + m.size) < np.inf  # False for NaN
    return finite if finite.ndim == 1 else finite.all(1)


def end_refused(xp: Any, before: Status, status: Status, moved: Array) -> Status:
    """End unsolved samples whose solver refuses every step: the last one was of length 0."""
    refused = status.active & ~before.improved & ~moved & ~(status.r <= 1)
    iterations = xp.where(refused, before.iterations, status.iterations)
    return _end(xp, status._replace(iterations=iterations), refused, Stall.STEP_REFUSED)


def end_at_floor(xp: Any, rules: Rules, status: Status, k: Array, m: Measures) -> Status:
    """End samples whose residual is rounding noise, after update k.

    It has not fallen for `PATIENCE` updates, and one more for each eps that it is above zero; or it
    was below `FLOOR` eps for `FLOOR_CHECKS` checks.
    """
    level = m.residual / (rules.eps * m.size)
    if level.ndim == 2:  # of the leaves above their tolerance
        scale = m.size * rules.rtol + tolerance(xp, rules, status.scale)
        level = xp.where(m.residual > scale, level, 0.0)
    level = _over_leaves(xp, level)
    status = status._replace(floor_checks=status.floor_checks + (level <= FLOOR))
    at_floor = (k - status.best_update > PATIENCE + level) | (status.floor_checks > FLOOR_CHECKS)
    at_floor = status.active & at_floor & (k >= rules.min_iter)
    far = _any_leaf(m.size > MAX_GROWTH * status.scale)
    status = _end(xp, status, at_floor & ~far, Stall.ROUNDING)
    return _end(xp, status, at_floor & far, Stall.RUNAWAY)


def finish(xp: Any, rules: Rules, status: Status, k: Array, m: Measures) -> tuple[Array, Array]:
    """Return `Result` and `Stall` codes of each sample after the last update k, (B,) each."""
    if xp is np and ((status.r <= 1) & ~status.nonfinite).all():
        none = 0 * status.stall
        return none + int(Result.CONVERGED), none
    near = plain_residual(xp, rules, status, m) <= 1  # False where it is not finite
    lost = status.nonfinite | ((status.r == np.inf) & ~near & _has_no_residual(rules, status))
    going = status.active
    if rules.most < np.inf:
        ended = lost | (status.stall > 0) | status.accepted | (status.r <= 1)
        going = going | (~ended & (k >= rules.most))
    slow = has_stalled(status.best_update, k) & going
    stall = xp.where(slow, int(Stall.NO_PROGRESS), 0 * status.stall)
    denied = going & near
    runs_away = (going & (k >= MIN_UPDATES) & _run_away(xp, rules, status, m)) | denied
    stall = xp.where(runs_away, int(Stall.RUNAWAY), stall)
    stall = xp.where(status.stall > 0, status.stall, stall)
    r = status.r
    if rules.goes_on and rules.keeps_best:  # one that moved on from a solution is put back there
        there = solved(status)
        r, lost = xp.where(there, status.best_r, r), lost & ~there
    result, stall = classify(xp, r, nonfinite=lost, stall=stall)
    result = xp.where(status.accepted & ~(r <= 1), int(Result.ACCEPTED), result)
    stopped = going & (result == int(Result.MAX_ITER)) & has_enough(rules, status)
    return xp.where(stopped, int(Result.STOPPED), result), stall


def is_last(status: Status) -> Array:
    """Tell which samples are returned at their last state, and not at their best, (B,)."""
    return (status.r <= 1) | status.accepted | status.coupled


def solved(status: Status) -> Array:
    """Tell which samples are at a solution in the state that is returned, (B,); one that has moved
    on from its solution is put back there.
    """
    return (status.r <= 1) | ((status.best_r <= 1) & ~status.coupled)


def contradicted(xp: Any, rules: Rules, status: Status, m: Measures) -> Array:
    """Tell which solutions are none beside the states that are returned, of m, (B,): of rows of phi
    that are coupled.
    """
    return solved(status) & ~(plain_residual(xp, rules, status, m) <= MAX_EXCESS)


def atol_decides(xp: Any, rules: Rules, status: Status, m: Measures) -> Array:
    """Tell whether atol is the larger part of the tolerance of a sample or of one of its leaves."""
    atol = tolerance(xp, rules, status.scale)
    return _any_leaf((atol > rules.rtol * m.size) & (m.size >= 0)) & ~status.nonfinite


def has_stalled(best_update: T, updates: T | int) -> T:
    """Tell whether the smallest residual, reached after `best_update` updates, lies in the first
    half
    of at least ten `updates`, (B,)."""
    return (best_update <= updates // 2) & (updates >= MIN_UPDATES)


def classify(xp: Any, r: Array, *, nonfinite: Array, stall: Array) -> tuple[Array, Array]:
    """Return `Result` and `Stall` codes, (B,) each, of a solve to a tolerance.

    Args:
        r: scaled residual of each sample.
        nonfinite: samples that were lost to NaN or inf.
        stall: why a sample without a solution made no progress, 0 where it did.
    """
    stall = xp.where((r <= 1) | nonfinite, int(Stall.NONE), stall)
    result = xp.where(stall > 0, int(Result.STALLED), int(Result.MAX_ITER))
    result = xp.where(r <= 1, int(Result.CONVERGED), result)
    return xp.where(nonfinite, int(Result.NONFINITE), result), stall


def _end(xp: Any, status: Status, samples: Array, cause: Stall) -> Status:
    stall = xp.where(samples, int(cause), status.stall)
    return status._replace(stall=stall, active=status.active & ~samples)


def _note_growth(xp: Any, status: Status, m: Measures) -> Status:
    """Return the largest residual, where a grown state has one that moves it."""
    moves = m.residual >= MIN_FALL * m.size  # False for NaN
    further = grown(status, m) & moves & (m.residual > status.largest)
    return status._replace(largest=xp.where(further, m.residual, status.largest))


def _of_grown(xp: Any, rules: Rules, status: Status, m: Measures, distance: Array | None) -> Array:
    """Return the residual of grown states in units of what it must have fallen to.

    Beyond `MAX_GROWTH` it counts as no less than the rounding of its state, 8 eps times its size.
    """
    scale, atol = status.scale, tolerance(xp, rules, status.scale)
    fallen = m.residual / (status.largest * (GROWN * scale / m.size) + atol)
    rounding = 8 * rules.eps * m.size
    residual = xp.where(m.residual > rounding, m.residual, rounding)
    far = residual / (MIN_FALL * scale + atol)
    least = rules.rtol * MAX_GROWTH * scale
    capped = m.residual / (xp.where(rounding > least, rounding, least) + atol)
    far = xp.where(capped > far, capped, far)
    limited = xp.where(m.size > MAX_GROWTH * scale, far, fallen)
    if distance is None:
        return limited
    moved = status.active if distance.ndim == 1 else status.active[:, None]
    distance = xp.where(moved, distance, 0.0)
    relative = distance / (MAX_DISTANCE * m.size)
    return xp.where(relative > limited, relative, limited)


def _run_away(xp: Any, rules: Rules, status: Status, m: Measures) -> Array:
    """Return samples that have grown while their residual has not fallen, (B,)."""
    residual = m.residual + 8 * rules.eps * m.size
    unfallen = grown(status, m) & (residual >= status.largest)
    explodes = (m.size > MAX_GROWTH * status.start) & (m.residual > MAX_DISTANCE * m.size)
    return _any_leaf(unfallen | explodes)


def _has_no_residual(rules: Rules, status: Status) -> Array:
    """Return samples without a finite residual that no step leads on from, (B,)."""
    if not rules.backtracks:
        return status.r == np.inf
    # A trial that is not finite is shortened; it shows a loss where none is left.
    refused = status.stall == int(Stall.STEP_REFUSED)
    return refused | (status.best_r == np.inf)


def _quotient(xp: Any, rules: Rules, residual: Array, scale: Array) -> Array:
    """Return residual / scale, 0 for 0 / 0 and never inf where the residual is finite."""
    least = rules.tiny * residual
    scale = xp.where(scale > least, scale, least)
    return xp.where(residual == 0, residual, residual / xp.where(scale > 0, scale, 1.0))


def _over_leaves(xp: Any, x: Array) -> Array:
    """Return the largest of the leaves of each sample, (B,)."""
    return x if x.ndim == 1 else xp.amax(x, 1)


def _any_leaf(condition: Array) -> Array:
    return condition if condition.ndim == 1 else condition.any(1)
