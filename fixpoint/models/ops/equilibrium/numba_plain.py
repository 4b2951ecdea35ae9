"""The equation of a block, and plain updates of it, compiled by numba."""

from __future__ import annotations

from typing import Any, NamedTuple

from fixpoint.models.ops.common.numba_blocks import as_vector, widest_vectors
from fixpoint.models.ops.common.numba_cache import cached_njit

AFFINE = -1


class Equation(NamedTuple):
    """z = sigma(z M + q), or the affine z = (z * slope) M + q of an adjoint.

    code: of the activation, or `AFFINE`. M: (n, n), or (0, n), where z itself is added to q.
    slope: by place.
    """

    code: int
    M: Any
    slope: Any


class PlainRows(NamedTuple):
    """Plain updates keep nothing."""

    nothing: Any


@cached_njit()
def plain_update(state, equation, order, active, k, z, f, new, weight):  # type: ignore[no-untyped-def]
    """Compute z + weight (f - z), exactly f at weight 1; see `torch.lerp`."""
    widest_vectors()
    x, y, out = as_vector(z[:active]), as_vector(f[:active]), as_vector(new[:active])
    one = z.dtype.type(1)
    if weight < z.dtype.type(0.5):
        for j in range(x.size):
            out[j] = x[j] + weight * (y[j] - x[j])
    else:
        for j in range(x.size):
            out[j] = y[j] - (y[j] - x[j]) * (one - weight)
