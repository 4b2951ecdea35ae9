"""The iterative solver and the loop: the only place that evaluates, updates and stops."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fixpoint._messages import unknown_name
from fixpoint._validation import at_least, non_negative
from fixpoint.derivatives import Derivatives
from fixpoint.solution import Result, Solution
from fixpoint.solvers.monitor import ConvergenceMonitor

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
            Solvers that take steps back do so always.
        record: "residual" keeps each sample's residual after each update, "iterates" the states
            too; see `Trace`.
        check_every: look whether all samples are done (one device synchronisation, more where the
            solver takes steps back or updates are differentiated) only at each n-th update.
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
    backtracks = False
    """Whether `update` takes back a step to where phi is not finite."""

    state_has_rows = True
    """Whether each tensor of the state has a row for each sample, (B, ...)."""
    unrollable = True
    """Whether backpropagation through its updates is possible."""

    @property
    def has_tolerance(self) -> bool:
        """Whether the solver stops at a tolerance; else it makes exactly `max_iter` updates."""
        return self.rtol > 0 or self.atol > 0

    @property
    def may_sync(self) -> bool:
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
    watch = ConvergenceMonitor(solver, z) if solver.has_tolerance or solver.record else None
    state: Any = None
    with torch.set_grad_enabled(tracking and track_from <= 0):
        for k in range(solver.max_iter + 1):
            if watch is None and k == solver.max_iter:
                break
            if k == track_from:
                torch.set_grad_enabled(tracking)
            fz = phi(z if watch is None else watch.stop_finished(z))
            if watch is not None:
                z, fz = watch.look(k, z, fz, phi)
                if watch.done or k == solver.max_iter:
                    break
            if k == 0:
                state = solver.init(z, t)
            if watch is None:
                z, state = solver.update(k, z, fz, state, **given)
                continue
            start, fz = watch.stop_finished((z, fz))
            if solver.state_has_rows:
                state = watch.stop_finished(state)
            proposal, state = solver.update(k, start, fz, state, **given)
            z = watch.freeze(proposal, z)
    if watch is not None:
        solution = watch.solution(z)
        evaluations = solution.evaluations + derivatives.evaluations
        return solution._replace(
            evaluations=evaluations, products=derivatives.products, state=state
        )
    iterations = torch.full((len(z),), solver.max_iter, dtype=torch.int64, device=z.device)
    result = torch.full((len(z),), Result.FIXED_STEPS.value, dtype=torch.int8, device=z.device)
    evaluations = solver.max_iter + derivatives.evaluations
    return Solution(z, None, iterations, evaluations, result, None, derivatives.products, state)


def at_least_float32(x: Tensor) -> Tensor:
    """x, or its float32 where it is narrower, as squares of float16 numbers overflow at 256."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product of each sample, (B, 1)."""
    return (a * b).sum(1, keepdim=True)
