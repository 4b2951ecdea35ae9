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
from fixpoint.models.ops.equilibrium.numba_anderson import anderson_update
from fixpoint.solution import Result

CONVERGED, MAX_ITER = int(Result.CONVERGED), int(Result.MAX_ITER)
STALLED, NONFINITE = int(Result.STALLED), int(Result.NONFINITE)


@cached_njit()
def solve_block(  # type: ignore[no-untyped-def]
    code, affine, dense, M, slope, q, nothing, z, f, scratch, best, final, steps, memory, anderson,
    rtol, atol, marks, running,
):  # fmt: skip
    """Solve all rows of z, (rows, n), in place; `final` receives phi of the returned z.

    code: of the activation; affine: solve z = (z * slope) M + q instead; dense: whether there is
    an M, else z itself is added to q. nothing: zeros, (rows n,). f, scratch, best: work, (rows, n).
    steps: weight of phi(z) in each update, (max_iter,), or beta where `memory` > 0 and the updates
    are those of Anderson mixing. rtol, atol: numbers of the dtype, atol for 2-norms. marks:
    (rows, 4) in float64 receives iterations, scaled residual, result.
    running: (rows,) bool, work.
    """
    rows = len(z)
    max_iter = steps.size
    marks[:, 0], marks[:, 1], marks[:, 2], marks[:, 3] = 0, np.inf, NONFINITE, 0
    running[:] = True
    for k in range(max_iter + 1):
        evaluate(code, affine, dense, M, slope, q, nothing, z, f, scratch)
        for i in range(rows):
            if not running[i]:
                continue
            r = scaled_residual(z, f, i, rtol, atol)
            if not r < np.inf:
                marks[i, 0], marks[i, 2] = k, NONFINITE
            elif r <= 1:
                marks[i, 0], marks[i, 1], marks[i, 2] = k, r, CONVERGED
                copy_row(final, f, i)
            else:
                if r < marks[i, 1]:
                    marks[i, 1], marks[i, 3] = r, k
                    copy_row(best, z, i)
                if k == max_iter:
                    early = max_iter >= 10 and marks[i, 3] <= max_iter // 2
                    marks[i, 0], marks[i, 2] = k, STALLED if early else MAX_ITER
                else:
                    if memory == 0:
                        move(z, f, i, steps[k])
                    continue
            running[i] = False
        if not running.any():
            break
        if memory > 0:
            anderson_update(anderson, running, k, z, f, steps[k])
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
def scaled_residual(z, f, i, rtol, atol):  # type: ignore[no-untyped-def]
    """|f - z| / (atol + rtol |f|) of row i; inf where that is not finite."""
    zero = z.dtype.type(0)
    change, size = zero, zero
    # One sum a loop: a loop with both takes longer.
    for j in range(z.shape[1]):
        d = f[i, j] - z[i, j]
        change += d * d
    for j in range(z.shape[1]):
        size += f[i, j] * f[i, j]
    scale = math.sqrt(size) * rtol + atol
    # Squares within the range of the dtype keep all digits.
    safe = np.finfo(z.dtype).tiny / np.finfo(z.dtype).eps
    if scale * scale >= safe and change + size < np.inf:
        return np.float64(z.dtype.type(math.sqrt(change)) / z.dtype.type(scale))
    return _residual_in_float64(z, f, i, rtol, atol)


@cached_njit()
def _residual_in_float64(z, f, i, rtol, atol):  # type: ignore[no-untyped-def]
    change, size = 0.0, 0.0
    for j in range(z.shape[1]):
        d = np.float64(f[i, j]) - np.float64(z[i, j])
        change += d * d
        size += np.float64(f[i, j]) * np.float64(f[i, j])
    if not change + size < np.inf:
        return np.inf
    change, size = math.sqrt(change), math.sqrt(size)
    tiny = np.float64(np.finfo(z.dtype).tiny)
    scale = max(size * np.float64(rtol) + np.float64(atol), tiny * change)
    return change / max(scale, 2.2250738585072014e-308)


@cached_njit()
def move(z, f, i, weight):  # type: ignore[no-untyped-def]
    """z + weight (f - z) of row i, exactly f at weight 1; see `torch.lerp`."""
    one = z.dtype.type(1)
    if weight == one:
        copy_row(z, f, i)
    elif weight < z.dtype.type(0.5):
        for j in range(z.shape[1]):
            z[i, j] += weight * (f[i, j] - z[i, j])
    else:
        for j in range(z.shape[1]):
            z[i, j] = f[i, j] - (f[i, j] - z[i, j]) * (one - weight)


@cached_njit()
def copy_row(to, given, i):  # type: ignore[no-untyped-def]
    for j in range(to.shape[1]):
        to[i, j] = given[i, j]


@cached_njit()
def restore_best(  # type: ignore[no-untyped-def]
    code, affine, dense, M, slope, q, nothing, z, f, scratch, best, final, marks
):
    """Put rows that did not converge back to their smallest residual."""
    failed = False
    for i in range(len(z)):
        if marks[i, 2] != CONVERGED:
            failed = True
            copy_row(z, best, i)
    if failed:
        evaluate(code, affine, dense, M, slope, q, nothing, z, f, scratch)
        for i in range(len(z)):
            if marks[i, 2] != CONVERGED:
                copy_row(final, f, i)
