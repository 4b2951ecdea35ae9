"""Observers of a fixed number of updates: a record, or the samples that settle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fixpoint.solution import Trace
from fixpoint.solvers.loop.finished import stop_finished
from fixpoint.solvers.loop.norms import Norms, Tolerance


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

    Attributes:
        settled: which samples, (B,).
        best: the state of least residual, without gradient, and entered: that at which a sample
            settled, else the last, (B, D) each.
    """

    looks = True
    residual: Tensor | None = None

    def __init__(self, z: Tensor) -> None:
        self.settled = torch.zeros(z.shape[0], dtype=torch.bool, device=z.device)
        self.best, self.entered = z.detach(), z
        self.size = _norm(z)
        self.least = self.size + torch.inf
        self.tolerance = torch.finfo(z.dtype).eps ** 0.5

    def stop_settled(self, tree: Any) -> Any:
        """Return the (B, ...) tensors without gradient in the rows of settled samples."""
        return stop_finished(~self.settled, tree)

    def note(self, z: Tensor, fz: Tensor) -> None:
        residual = _norm(fz - z)
        self.size = torch.maximum(self.size, _norm(fz))
        better = residual < self.least
        self.least = torch.where(better, residual, self.least)
        self.best = torch.where(better[:, None], z.detach(), self.best)
        self.entered = torch.where(self.settled[:, None], self.entered, z)
        self.settled = self.settled | (residual <= self.tolerance * self.size)

    def trace(self) -> None:
        """Record nothing."""


def _norm(x: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x.detach(), dim=1, dtype=dtype)
