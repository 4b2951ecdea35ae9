"""A batch whose rows depend on each other, as one sample that has them for its leaves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Size, Tensor

from fixpoint.derivatives import Derivatives, MatrixMap
from fixpoint.solution import Solution, Trace
from fixpoint.solvers.loop.norms import Norms


def as_one(phi: MatrixMap, shape: Size) -> MatrixMap:
    """Return phi, a map of (B, D) matrices, as a map of (1, B D) ones."""
    return lambda z: phi(z.view(shape)).reshape(1, -1)


class RowNorms(Norms):
    """The norms of each row of a (B, D) matrix, from the matrix as one row, (1, B D).

    Args:
        rows: the norms of the (B, D) matrix.
        shape: (B, D).
    """

    def __init__(self, rows: Norms, shape: Size) -> None:
        vars(self).update(vars(rows))
        self.rows, self.shape = rows, shape
        self.atol, self.unit = (self._for_each_row(x) for x in (rows.atol, rows.unit))

    def _for_each_row(self, values: float | np.ndarray) -> np.ndarray:
        leaves = () if self.rows.columns is None else (len(self.rows.columns),)
        return np.broadcast_to(values, (self.shape[0], *leaves)).reshape(-1)

    def size(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self.rows.size(x.view(self.shape), dtype).reshape(1, -1)


class WholeDerivatives(Derivatives):
    """Derivatives of such a map, by products that are exact for coupled rows.

    Args:
        phi: the map of (1, B D) matrices.
        rows: derivatives of the map of (B, D) matrices.
        shape: (B, D).
    """

    def __init__(self, phi: MatrixMap, rows: Derivatives, shape: Size) -> None:
        super().__init__(phi)
        self.rows, self.shape = rows, shape
        self._view: tuple[Tensor, Tensor] | None = None

    def evaluate(self, z: Tensor) -> Tensor:
        return self.phi(z)

    def jacobian(self, z: Tensor) -> Tensor:
        """Return J, (1, B D, B D)."""
        units = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
        return torch.cat([self.jvp(z, unit[None]) for unit in units]).mT.unsqueeze(0)

    def jvp(self, z: Tensor, v: Tensor) -> Tensor:
        """Return J v, (1, B D)."""
        self.products += 1
        if self._view is None or self._view[0] is not z:
            self._view = z, z.view(self.shape)  # one object, since products at it share a graph
        return self.rows.jvp(self._view[1], v.reshape(self.shape)).reshape(1, -1)


def derivatives_as_one(phi: MatrixMap, rows: Derivatives, shape: Size) -> Derivatives:
    """Return the derivatives of a map of (1, B D) matrices."""
    return Derivatives(phi) if type(rows) is Derivatives else WholeDerivatives(phi, rows, shape)


def join(first: Solution, rest: Solution, shape: Size) -> Solution:
    """Return the solution of a batch, (B, D), that `rest` ends as one sample after `first`."""

    def rows(x: Tensor) -> Tensor:
        return x.expand(shape[0]).clone()

    assert first.residual is not None
    assert rest.residual is not None
    assert rest.stall is not None
    return replace(
        rest,
        z=rest.z.view(shape),
        residual=rows(rest.residual),
        iterations=first.iterations + rest.iterations,
        evaluations=first.evaluations + rest.evaluations,
        result=rows(rest.result),
        stall=rows(rest.stall),
        atol_decides=None if rest.atol_decides is None else rows(rest.atol_decides),
        products=first.products + rest.products,
        trace=_join_traces(first.trace, rest.trace, shape),
        coupled=True,
    )


def _join_traces(first: Trace | None, rest: Trace | None, shape: Size) -> Trace | None:
    if first is None or rest is None:
        return None
    residual = torch.cat((first.residual, rest.residual[1:].expand(-1, shape[0])))
    if first.iterates is None or rest.iterates is None:
        return Trace(residual)
    return Trace(residual, torch.cat((first.iterates, rest.iterates[1:].unflatten(2, shape)[:, 0])))
