"""The solver loop on a block of rows, compiled by numba: what a kernel does between two products.

One block solves z = sigma(z M + q), or the affine z = (z * slope) M + q of an adjoint, with the
rules of `fixpoint.solvers`: each row is measured after each evaluation, and a row that is done is
frozen. No row affects another one.
"""

from __future__ import annotations

import math

import numpy as np

from fixpoint.models.ops.common.numba_blocks import activate, as_vector
from fixpoint.models.ops.common.numba_cache import cached_njit
from fixpoint.solution import Result

CONVERGED, MAX_ITER = int(Result.CONVERGED), int(Result.MAX_ITER)
STALLED, NONFINITE = int(Result.STALLED), int(Result.NONFINITE)
_RUNNING = -1


@cached_njit()
def solve_block(  # type: ignore[no-untyped-def]
    code, affine, dense, M, slope, q, nothing, z, f, scratch, best, final, steps, rtol, atol, marks
):
    """Solve all rows of z, (rows, n), in place; `final` receives phi of the returned z.

    code: of the activation; affine: solve z = (z * slope) M + q instead; dense: whether there is
    an M, else z itself is added to q. nothing: zeros, (rows n,). f, scratch, best: work, (rows, n).
    steps: weight of phi(z) in each update, (max_iter,). rtol, atol: numbers of the dtype, atol for
    2-norms. marks: (rows, 4) in float64 receives iterations, scaled residual, result.
    """
    rows = len(z)
    max_iter = steps.size
    marks[:, 0], marks[:, 1], marks[:, 2], marks[:, 3] = 0, np.inf, _RUNNING, 0
    running = rows
    for k in range(max_iter + 1):
        evaluate(code, affine, dense, M, slope, q, nothing, z, f, scratch)
        for i in range(rows):
            if marks[i, 2] != _RUNNING:
                continue
            zi, fi = z[i], f[i]
            r = scaled_residual(zi, fi, rtol, atol)
            if not r < np.inf:
                marks[i, 0], marks[i, 2] = k, NONFINITE
            elif r <= 1:
                marks[i, 0], marks[i, 1], marks[i, 2] = k, r, CONVERGED
                copy_row(final[i], fi)
            else:
                if r < marks[i, 1]:
                    marks[i, 1], marks[i, 3] = r, k
                    copy_row(best[i], zi)
                if k == max_iter:
                    early = max_iter >= 10 and marks[i, 3] <= max_iter // 2
                    marks[i, 0], marks[i, 2] = k, STALLED if early else MAX_ITER
                else:
                    move(zi, fi, steps[k])
                    continue
            running -= 1
        if running == 0:
            break
    restore_best(code, affine, dense, M, slope, q, nothing, z, f, scratch, best, final, marks)


@cached_njit()
def evaluate(code, affine, dense, M, slope, q, nothing, z, f, scratch):  # type: ignore[no-untyped-def]
    """f <- sigma(z M + q), or (z * slope) M + q."""
    a = z
    if affine:
        a = scratch
        x, s, y = as_vector(z), as_vector(slope), as_vector(scratch)
        for j in range(x.size):
            y[j] = x[j] * s[j]
    if dense:
        np.dot(a, M, f)
    else:
        f[:] = a
    activate(0 if affine else code, as_vector(f), as_vector(q), nothing)


@cached_njit()
def scaled_residual(z, f, rtol, atol):  # type: ignore[no-untyped-def]
    """|f - z| / (atol + rtol |f|) of one row; inf where that is not finite."""
    zero = z.dtype.type(0)
    change, size = zero, zero
    for j in range(z.size):
        d = f[j] - z[j]
        change += d * d
        size += f[j] * f[j]
    scale = math.sqrt(size) * rtol + atol
    # Squares within the range of the dtype keep all digits.
    safe = np.finfo(z.dtype).tiny / np.finfo(z.dtype).eps
    if scale * scale >= safe and change + size < np.inf:
        return np.float64(z.dtype.type(math.sqrt(change)) / z.dtype.type(scale))
    return _residual_in_float64(z, f, rtol, atol)


@cached_njit()
def _residual_in_float64(z, f, rtol, atol):  # type: ignore[no-untyped-def]
    change, size = 0.0, 0.0
    for j in range(z.size):
        d = np.float64(f[j]) - np.float64(z[j])
        change += d * d
        size += np.float64(f[j]) * np.float64(f[j])
    if not change + size < np.inf:
        return np.inf
    change, size = math.sqrt(change), math.sqrt(size)
    tiny = np.float64(np.finfo(z.dtype).tiny)
    scale = max(size * np.float64(rtol) + np.float64(atol), tiny * change)
    return change / max(scale, 2.2250738585072014e-308)


@cached_njit()
def move(z, f, weight):  # type: ignore[no-untyped-def]
    """z + weight (f - z), exactly f at weight 1; see `torch.lerp`."""
    one = z.dtype.type(1)
    if weight == one:
        copy_row(z, f)
    elif weight < z.dtype.type(0.5):
        for j in range(z.size):
            z[j] += weight * (f[j] - z[j])
    else:
        for j in range(z.size):
            z[j] = f[j] - (f[j] - z[j]) * (one - weight)


@cached_njit()
def copy_row(to, given):  # type: ignore[no-untyped-def]
    for j in range(to.size):
        to[j] = given[j]


@cached_njit()
def restore_best(  # type: ignore[no-untyped-def]
    code, affine, dense, M, slope, q, nothing, z, f, scratch, best, final, marks
):
    """Put rows that did not converge back to their smallest residual."""
    failed = False
    for i in range(len(z)):
        if marks[i, 2] != CONVERGED:
            failed = True
            copy_row(z[i], best[i])
    if failed:
        evaluate(code, affine, dense, M, slope, q, nothing, z, f, scratch)
        for i in range(len(z)):
            if marks[i, 2] != CONVERGED:
                copy_row(final[i], f[i])
