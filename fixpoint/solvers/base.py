"""Interfaces of a solver: `Solver` with tolerances, and `IterativeSolver`, which the loop runs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any, Literal, TypedDict, TypeVar

import torch
from torch import Size, Tensor, nn
from typing_extensions import Unpack

from fixpoint._messages import refuse_unknown, unknown_name
from fixpoint._validation import at_least, non_negative
from fixpoint.derivatives import Derivatives, MatrixMap
from fixpoint.solution import Solution
from fixpoint.solvers._options import whole_signature
from fixpoint.solvers._rowwise import at_least_float32, dot
from fixpoint.solvers.loop.eager import Problem, iterate
from fixpoint.solvers.loop.graph import iterate_in_graph
from fixpoint.solvers.loop.norms import Norm, Stop, Test, Tolerance

__all__ = [
    "IterativeOptions",
    "IterativeSolver",
    "LoopOptions",
    "MatrixMap",
    "Norm",
    "Record",
    "Solver",
    "SolverOptions",
    "at_least_float32",
    "dot",
    "option_names",
]

ALONE: dict[str, Any] = {"min_iter": 0, "stop": "each", "stop_when": None, "noise": 0.0}
"""Options by which each sample ends as soon as it has converged."""
MAX_ATOL = 1e-6
"""The largest absolute tolerance that is not asked for."""
Record = Literal["residual", "iterates"]
S = TypeVar("S", bound="Solver")


class SolverOptions(TypedDict, total=False):
    """Options of every `Solver`."""

    max_iter: int
    rtol: float
    atol: float | None
    norm: Norm | None
    leaf_atol: Sequence[float] | None


class LoopOptions(TypedDict, total=False):
    """Options of the loop."""

    keep_best: bool
    record: Record | None
    check_every: int
    min_iter: int
    stop: Stop
    stop_when: Test | None
    noise: float
    generator: torch.Generator | None


class IterativeOptions(SolverOptions, LoopOptions, total=False):
    """Options of every `IterativeSolver`."""


class Solver(nn.Module):
    """A solver of z = phi(z), the base of those that iterate and of adapters.

    A sample has converged when rms(phi(z) - z) <= atol + rtol * rms(phi(z)), the root mean
    square over its D numbers; where the state is a tree, of each of its leaves.

    Args:
        max_iter: most updates of a sample.
        rtol, atol: relative tolerance, and absolute tolerance in units of z. None is rtol / 10, at
            most 1e-6, times the scale of the problem where that is below 1: the size of z0 or
            phi(z0) and of the largest residual. So it does not decide where the state is small.
        norm: size of each sample, (B, D) -> (B,), in place of the RMS; D counts all leaves.
        leaf_atol: atol of each leaf of a tree, in units of that leaf, in place of atol.

    Raises:
        ValueError: a value is out of range.
        TypeError: an option is unknown.

    Example:
        >>> from fixpoint import Anderson, Solver
        >>> solver = Anderson(rtol=1e-4)
        >>> isinstance(solver, Solver), solver.with_options(max_iter=10).max_iter
        (True, 10)
    """

    def __init__(
        self,
        *,
        max_iter: int = 50,
        rtol: float = 1e-5,
        atol: float | None = None,
        norm: Norm | None = None,
        leaf_atol: Sequence[float] | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        refuse_unknown(type(self).__name__, unknown, option_names(type(self)))
        self.max_iter = at_least(0, max_iter=max_iter)
        self.rtol = non_negative(rtol=rtol)
        self.relative_atol = atol is None
        if atol is None:
            atol = min(MAX_ATOL, rtol / 10) if rtol > 0 else MAX_ATOL
        self.atol = non_negative(atol=atol)
        self.norm = norm
        self.leaf_atol = None
        if leaf_atol is not None:
            self.leaf_atol = tuple(non_negative(leaf_atol=value) for value in leaf_atol)

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Show the options that a constructor hands on in help() and in editors."""
        super().__init_subclass__(**arguments)
        cls.__signature__ = whole_signature(cls)  # type: ignore[attr-defined]

    needs_derivatives = False
    """Whether `update` takes `derivatives=`, a `Derivatives` of phi."""
    shared_options: tuple[str, ...] = ()
    """Options that parameters were made from, which a copy shares."""
    unrollable = True
    """Whether backpropagation through its updates is possible."""

    @property
    def learns_steps(self) -> bool:
        """True if its steps are parameters, which only `Unrolled` trains."""
        return False

    @property
    def compiles(self) -> bool:
        """True if torch.compile makes one graph of a solve; else it leaves the solve out."""
        return False

    @property
    def has_tolerance(self) -> bool:
        """True if the solver stops at a tolerance; else it makes exactly `max_iter` updates."""
        return self.rtol > 0 or self.atol > 0 or any(self.leaf_atol or ())

    @property
    def tolerance(self) -> Tolerance:
        """The tolerance and norm of residuals."""
        return Tolerance(self.rtol, self.atol, self.norm, self.leaf_atol, self.relative_atol)

    def absolute(self: S) -> S:
        """Return this solver with an atol that does not follow the scale of the state."""
        return self.with_options(atol=self.atol) if self.relative_atol else self

    def as_adjoint(self) -> Solver:
        """Return the solver of the adjoint by default, which is given no time index."""
        return self

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

        Args:
            phi: map of (B, D) matrices, each row on its own.
            z: start.
            t: time index, for solvers with steps of their own at each time.
            track_from: under grad mode the updates from this number on are differentiable.
            derivatives: those of phi, where the caller has a better way than differentiating
                it.
        """
        raise NotImplementedError

    def with_options(self: S, **options: Any) -> S:
        """Return a shallow copy with other options; parameters are shared.

        A constructor has to keep each argument under its own name.

        Raises:
            ValueError, TypeError: as the constructor; or an option belongs to shared parameters.
        """
        kind = type(self)
        refuse_unknown(kind.__name__, options, option_names(kind))
        for name in options:
            if name in self.shared_options:
                raise TypeError(
                    f"{name} cannot change in a copy that shares the parameters of its "
                    f"{kind.__name__}: build a new one"
                )
        checked, other = kind(**self.options_of(kind) | options), copy.copy(self)
        for name, value in vars(checked).items():
            if not name.startswith("_") and name not in self.shared_options:
                setattr(other, name, value)
        other.training = self.training
        return other

    def options_of(self, kind: type[Solver]) -> dict[str, Any]:
        """Return the values of the options of a class, its own or a parent, that are not shared."""
        names = [name for name in option_names(kind) if name not in self.shared_options]
        values = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return values | {"atol": None} if self.relative_atol else values

    def extra_repr(self) -> str:
        parts = [f"max_iter={self.max_iter}"]
        if self.has_tolerance:
            parts += [f"rtol={self.rtol:g}", f"atol={self.atol:g}"]
        return ", ".join(parts)


class IterativeSolver(Solver):
    """A solver of z = phi(z) given by `init` and a pure `update`, which the loop runs.

    With rtol = atol = 0 exactly `max_iter` updates are made and nothing is measured: no norm, no
    device synchronisation, no data-dependent branch.

    How the solve of a sample ends:

    ============  ======================================  ===================  ====================
    result        when                                    z returned           remedy
    ============  ======================================  ===================  ====================
    CONVERGED     the residual is within rtol and atol    the last             none
    FIXED_STEPS   rtol = atol = 0, `max_iter` updates     the last             set rtol or atol
                  made
    MAX_ITER      `max_iter` updates made, fewer than     the best; the last   raise max_iter,
                  ten or with a residual that still       without `keep_best`  loosen rtol
                  fell in their second half
    STALLED       no progress; `Solution.stall` has the   as MAX_ITER          `STALL_TEXT` of the
                  cause                                                        cause
    NONFINITE     phi is NaN or inf at the start, or      the best finite;     check the input,
                  after a plain step too                  else the start       damp (beta < 1)
    STOPPED       the fraction `stop` had converged       as MAX_ITER          raise `stop`
    ACCEPTED      `stop_when` is True                     the last             none
    ============  ======================================  ===================  ====================

    Args:
        max_iter: most updates of a sample.
        rtol, atol, norm, leaf_atol: see `Solver`.
        keep_best: return a sample that failed at its smallest residual, not at its last one.
            Solvers that take steps back do so always.
        record: "residual" keeps each sample's residual after each update, "iterates" the states
            too; see `Trace`.
        check_every: measure the residual, and let the host read it, only at each n-th update; a
            sample then ends at one of these. Under grad mode and with `record` it is 1. In a
            graph of torch.compile this many updates are one pass of the loop, each measured.
        min_iter: least updates of a sample, as long as they lead anywhere.
        stop: "each" sample ends when it has converged and moves no more; "all" move until all have
            converged at once, as in torchdeq; a fraction in (0, 1]: as "each", and the batch ends
            when this many of its samples have converged. The others are STOPPED.
        stop_when: further test, (z, phi(z)) -> bool, (B, D), (B, D) -> (B,), that ends a sample
            whose residual is above the tolerance: it is ACCEPTED.
        noise: standard deviation of normal numbers that are added to each update, in units of the
            update's RMS, so that they fade as a sample converges. Not for solvers with a line
            search.
        generator: of the noise, for the same numbers each time; torch's own if not given.

    The last five hold for the solve, and not for the adjoint that `Implicit` solves by default.

    Raises:
        ValueError: a value is out of range, `record` or `stop` is unknown, or the solver takes no
            noise.
        TypeError: an option is unknown.

    Example:
        >>> import torch
        >>> from fixpoint import IterativeSolver, solve
        >>> class HeavyBall(IterativeSolver):
        ...     def init(self, z, t):
        ...         return z
        ...
        ...     def update(self, k, z, fz, state):
        ...         return fz + 0.3 * (z - state), z
        >>> solve(lambda z: 0.5 * z + 1, torch.zeros(1, 1), HeavyBall()).converged
        tensor([True])
    """

    def __init__(
        self,
        *,
        keep_best: bool = True,
        record: Record | None = None,
        check_every: int = 1,
        min_iter: int = 0,
        stop: Stop = "each",
        stop_when: Test | None = None,
        noise: float = 0.0,
        generator: torch.Generator | None = None,
        **options: Unpack[SolverOptions],
    ) -> None:
        super().__init__(**options)
        self.keep_best = keep_best
        self.record = checked_record(record)
        self.check_every = at_least(1, check_every=check_every)
        self.min_iter = at_least(0, min_iter=min_iter)
        self.stop = checked_stop(stop)
        self.stop_when = stop_when
        self.noise, self.generator = non_negative(noise=noise), generator
        if noise and (self.backtracks or not self.unrollable):
            raise ValueError(
                f"{type(self).__name__} compares residuals to choose its steps, and noise would "
                "mislead it: use Picard, InexactNewton, Anderson, SQUAREM or BarzilaiBorwein"
            )

    backtracks = False
    """Whether `update` takes back a step to where phi is not finite."""
    guesses = False
    """Whether `update` may make a step that the host has not examined, and takes `certain`."""
    restarts = False
    """Whether a sample that steps to where phi is not finite is put back and restarts; the
    solver then has `restart`, and its first step is a plain one."""
    origin: tuple[Tensor, Tensor] | None = None
    """z and phi(z) where a solve began that this one continues; they tell what has run away."""
    state_has_rows = True
    """Whether each tensor of the state has a row for each sample, (B, ...)."""
    has_fixed_form = False
    """Whether `init_fixed` and `update_fixed` are those of its `update`; noted for each class."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        names = [
            name for kind in cls.__mro__ for name in ("init_fixed", "update") if name in vars(kind)
        ]
        cls.has_fixed_form = (
            cls.init_fixed is not IterativeSolver.init_fixed and names[0] == "init_fixed"
        )

    @property
    def may_sync(self) -> bool:
        """True if the host reads after every update how the samples stand.

        Where it does, `update` may read numbers too, and leave out what no sample needs.
        """
        return self.has_tolerance and self.check_every == 1

    @property
    def keeps_best(self) -> bool:
        """True if a sample that failed is returned at its smallest residual."""
        return self.keep_best or self.backtracks

    @property
    def compiles(self) -> bool:
        """True if phi is not differentiated, nothing recorded, no noise added, and a solve to a
        tolerance has a state of fixed shape."""
        if self.needs_derivatives or self.record is not None or self.noise:
            return False
        return self.has_fixed_form or not self.has_tolerance

    def init(self, z: Tensor, t: int | None) -> Any:
        """Return the state before the first update; z is (B, D), t the time index of a sequence."""
        return None

    def update(self, k: int, z: Tensor, fz: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return next iterate and state from z and fz = phi(z), both (B, D), at k = 0, 1, ..."""
        raise NotImplementedError(
            f"{type(self).__name__} has no update(k, z, fz, state): define it, and return the next "
            "z and state"
        )

    def doubts(self, state: Any) -> Tensor | None:
        """Return samples whose last step is a guess that the host has not examined, (B,) bool.

        Read with their residuals; where there are any, `update` is called again with certain=True.
        """
        return None

    def init_fixed(self, z: Tensor, fz: Tensor, t: int | None = None) -> Any:
        """Return the state before the first update, of tensors alone, each in its last shape.

        With `update_fixed` a solve can be traced: by torch.compile and torch.export within a
        `while_loop`, or into a CUDA graph. No value is read, and no shape changes.

        Args:
            z: the start, (B, D).
            fz: phi(z), (B, D).
            t: time index of a sequence.

        Raises:
            NotImplementedError: the solver has no such state.
            ValueError: it needs an option for it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no state of fixed shape, as a traced solve needs it: take "
            "Picard, DampedPicard, InexactNewton, Anderson, Broyden(memory=m) or SQUAREM"
        )

    def update_fixed(self, k: Tensor, z: Tensor, fz: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return `update` with a state of `init_fixed`; k = 0, 1, ... is a tensor of int64, 0-d, or
        (B,) where samples begin one after the other.
        """
        return self.update(k, z, fz, state)  # type: ignore[arg-type]

    def restart_fixed(self, state: Any, rows: Tensor, z: Tensor, fz: Tensor) -> Any:
        """Return `restart` of a state of fixed shape."""
        return self.restart(state, rows, z, fz)

    def restart(self, state: Any, rows: Tensor, z: Tensor, fz: Tensor) -> Any:
        """Return the state without what it holds of the samples `rows`, (B,) bool.

        They have been put back to z with fz = phi(z), and `update` makes a plain step from there.
        """
        raise NotImplementedError

    def as_one(self, shape: Size) -> IterativeSolver:
        """Return the solver of a (B, D) batch whose rows depend on each other, for its (1, B D)
        form.
        """
        return self

    def run(
        self,
        phi: MatrixMap,
        z: Tensor,
        t: int | None = None,
        *,
        track_from: int = 0,
        derivatives: Derivatives | None = None,
    ) -> Solution:
        if self.has_tolerance and torch.compiler.is_compiling():
            return iterate_in_graph(self, phi, z, t)
        return self.run_with_state(phi, z, t, track_from=track_from, derivatives=derivatives)[0]

    def run_with_state(
        self,
        phi: MatrixMap,
        z: Tensor,
        t: int | None = None,
        *,
        track_from: int = 0,
        derivatives: Derivatives | None = None,
    ) -> tuple[Solution, Any]:
        """Return `run`, and the state after the last update; None where no update was made."""
        problem = Problem(phi, derivatives or Derivatives(phi), t, track_from)
        return iterate(self, problem, z)

    def extra_repr(self) -> str:
        parts = [super().extra_repr()]
        if type(self).extra_repr is IterativeSolver.extra_repr:
            given = self.options_of(type(self))
            base = option_names(IterativeSolver)
            parts += [f"{name}={value!r}" for name, value in given.items() if name not in base]
        if self.record is not None:
            parts.append(f"record={self.record!r}")
        for name, plain in (("check_every", 1), ("min_iter", 0), ("stop", "each"), ("noise", 0.0)):
            if getattr(self, name) != plain:
                parts.append(f"{name}={getattr(self, name)!r}")
        return ", ".join(parts)


def checked_record(record: Record | None) -> Record | None:
    """Return the value of the option `record`, if it is one."""
    if record not in (None, "residual", "iterates"):
        raise ValueError(f'record must be None, "residual" or "iterates"; got {record!r}')
    return record


def checked_stop(stop: Stop) -> Stop:
    """Return the value of the option `stop`, if it is one."""
    if isinstance(stop, str):
        if stop not in ("each", "all"):
            raise ValueError(unknown_name("stop", stop, ("each", "all")))
    elif not 0 < stop <= 1:
        raise ValueError(f'stop must be "each", "all" or a fraction in (0, 1]; got {stop}')
    return stop


def option_names(kind: type[Solver]) -> list[str]:
    """Return names of all constructor arguments of a solver class, its own first."""
    return list(inspect.signature(kind).parameters)


Solver.__signature__ = whole_signature(Solver)  # type: ignore[attr-defined]
