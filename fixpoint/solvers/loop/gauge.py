"""The residual of single evaluations, for solvers with a loop of their own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fixpoint._groups import groups_of
from fixpoint._torch import from_host
from fixpoint.solvers.loop import rules
from fixpoint.solvers.loop.norms import Norms, Tolerance
from fixpoint.solvers.loop.rules import Measures, Rules


class Gauge:
    """Gauge of states as in the loop: |phi(z) - z| / (atol + rtol |phi(z)|).

    Args:
        z, fz: start and phi(z), (B, D); they give the scale of each sample.
        tolerance: of the solver.
        columns: numbers of each leaf of a tree.
        norms: of states like z, in place of those of the tolerance and the columns.
    """

    def __init__(
        self,
        z: Tensor,
        fz: Tensor,
        tolerance: Tolerance,
        columns: Sequence[int] = (),
        norms: Norms | None = None,
    ) -> None:
        self.norms = norms = norms or Norms(z, tolerance, columns)
        self.rules = Rules.of(norms)
        self.grouped = groups_of(columns) is not None
        residual, size, start = norms.measure(z, fz, z.detach())
        with np.errstate(all="ignore"):
            self.status = rules.begin(np, Measures(residual, size), start)

    def measure(self, z: Tensor, fz: Tensor, row: int | None = None) -> tuple[Tensor, Tensor]:
        """Return residuals and whether z and fz are finite, (B,) each, or of one row, (1, D)."""
        status, given = self.status, self.rules
        if row is not None:
            one = slice(row, row + 1)
            status = status._replace(start=status.start[one], largest=status.largest[one])
            if self.grouped:
                given = given._replace(atol=given.atol[one], unit=given.unit[one])
        sizes = self.norms.measure(z, fz, atol=rules.tolerance(np, given, status.scale))
        m = Measures(sizes[0], sizes[1])
        with np.errstate(all="ignore"):
            r = rules.plain_residual(np, given, status, m)
            finite = rules.are_finite(m)
        r = from_host(r.astype(self.norms.numpy_dtype), z.device)
        return r, from_host(finite, z.device)
