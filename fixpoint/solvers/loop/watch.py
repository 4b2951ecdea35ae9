"""Observers of a fixed number of updates: a record, or the samples that settle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fixpoint._torch import stored, tracks
from fixpoint._with_gradient import with_gradient_of
from fixpoint.row_guard import clean_rows
from fixpoint.solution import Trace
from fixpoint.solvers.loop.finished import stop_finished
from fixpoint.solvers.loop.norms import Norms, Tolerance

AtSolution = Callable[[Tensor, Tensor], Tensor]
"""(z, rows) -> z, (B, D), with the implicit gradient of some rows, (B,), that are at their solution
beside the others.
"""


class RecordOptions(Protocol):
    """Options of a record, from a solver; see `IterativeSolver`."""

    record: Literal["residual", "iterates"] | None

    @property
    def tolerance(self) -> Tolerance: ...


class Record:
    """Relative residuals |phi(z) - z| / |phi(z)| and states of each update, where asked for.

    Attributes:
        looks: whether the last state is evaluated too.
    """

    def __init__(self, solver: RecordOptions, z: Tensor, columns: Sequence[int]) -> None:
        self.kind = solver.record
        self.looks = self.kind is not None
        self.residuals: list[Tensor] = []
        self.iterates: list[Tensor] = []
        if self.looks:
            self.norms = Norms(z, solver.tolerance, columns)

    @property
    def residual(self) -> Tensor | None:
        """The residual of the last state, (B,)."""
        return self.residuals[-1] if self.looks else None

    def stop_settled(self, tree: Any) -> Any:
        """Return the state as it is: no sample settles."""
        return tree

    enter = stop_settled

    def note(self, z: Tensor, fz: Tensor) -> None:
        if not self.looks:
            return
        z, fz = z.detach(), fz.detach()
        residual, size = (self.norms.size(x, self.norms.dtype) for x in (fz - z, fz))
        r = torch.where(residual == 0, residual, residual / size)
        self.residuals.append(r if r.dim() == 1 else r.amax(1))
        if self.kind == "iterates":
            self.iterates.append(z)

    def trace(self) -> Trace | None:
        """Return the course of the solve, if recorded."""
        if not self.looks:
            return None
        iterates = torch.stack(self.iterates) if self.iterates else None
        return Trace(torch.stack(self.residuals), iterates)


class Settling:
    """Samples at their solution, |phi(z) - z| <= sqrt(eps) |phi(z)|: they keep the best state.

    Later updates are made of rounding noise; they take no part in a gradient, and may make the
    state worse.

    Args:
        z: the start, (B, D).
        restless: samples that do not settle, (B,).
        at_solution: gives settled samples the derivatives with which they enter phi; None: those of
            the state at which they settled.

    Attributes:
        settled: which samples, (B,).
        best: the state of least residual, without gradient, and entered: that at which a sample
            settled, else the last, (B, D) each.
    """

    looks = True
    residual: Tensor | None = None

    def __init__(self, z: Tensor, restless: Tensor, at_solution: AtSolution | None = None) -> None:
        self.restless, self.settled = restless, torch.zeros_like(restless)
        self.at_solution, self.given = at_solution, torch.zeros_like(restless)
        self.best, self.entered = z.detach(), z
        self.size = _norm(z)
        self.least = self.size + torch.inf
        self.tolerance = torch.finfo(z.dtype).eps ** 0.5

    def stop_settled(self, tree: Any) -> Any:
        """Return the (B, ...) tensors without gradient in the rows of settled samples."""
        return stop_finished(~self.settled, tree)

    def enter(self, z: Tensor) -> Tensor:
        """Return z for phi, of whose rows others may depend on settled ones: these have the
        derivatives of the state at which they settled, or of their solution.
        """
        if len(z) == 1 or not tracks():
            return self.stop_settled(z)
        entered = self._entered(z)
        new = self.settled & ~self.given
        if self.at_solution is not None and bool(stored(new).any()):
            start = torch.where(new[:, None], self.best, entered)
            self.entered = torch.where(new[:, None], self.at_solution(start, new), self.entered)
            self.given, entered = self.settled, self._entered(z)
        return clean_rows(entered, self.settled)

    def _entered(self, z: Tensor) -> Tensor:
        return torch.where(self.settled[:, None], with_gradient_of(z, self.entered), z)

    def note(self, z: Tensor, fz: Tensor) -> None:
        residual, size = _norm(fz - z), _norm(fz)
        self.size = torch.where(size < torch.inf, torch.maximum(self.size, size), self.size)
        better = residual < self.least
        self.least = torch.where(better, residual, self.least)
        self.best = torch.where(better[:, None], z.detach(), self.best)
        self.entered = torch.where(self.settled[:, None], self.entered, z)
        near = residual <= self.tolerance * self.size
        self.settled = self.settled | (near & ~self.restless)

    def left(self, z: Tensor, fz: Tensor) -> Tensor:
        """Return settled samples, (B,), that are not at their solution any more."""
        return self.settled & ~(_norm(fz - z) <= self.tolerance * self.size)

    def trace(self) -> None:
        """Record nothing."""


def _norm(x: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x.detach(), dim=1, dtype=dtype)
