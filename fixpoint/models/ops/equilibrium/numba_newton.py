"""One update of Newton's method with a direct solve, compiled by numba; see `Newton`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from fixpoint.models.ops.common.numba_blocks import activation_grad, widest_vectors
from fixpoint.models.ops.common.numba_cache import cached_njit
from fixpoint.models.ops.equilibrium.numba_line_search import dot, shorter_step, write_difference
from fixpoint.models.ops.equilibrium.numba_plain import AFFINE
from fixpoint.solvers.watchdog import MAX_GROWTH, STEPS, WINDOW


class NewtonRows(NamedTuple):
    """The trial of each row, as `fixpoint.solvers.line_search`, and work for one row.

    z, g, direction: (rows, n). scalars: |g|^2 and the step size, (rows, 2).
    home_z, home_g, home: the same where the undamped steps of `fixpoint.solvers.watchdog` began.
    left: how many of them are still to make, -1 before they began, (rows,).
    merits: |g|^2 before the last updates, (rows, WINDOW + 1).
    A: I - J and then its factors, (n, n). pivots: (n,). slope, probe, probed: (n,).
    """

    z: Any
    g: Any
    direction: Any
    scalars: Any
    home_z: Any
    home_g: Any
    home: Any
    left: Any
    merits: Any
    A: Any
    pivots: Any
    slope: Any
    probe: Any
    probed: Any


def new_rows(rows: int, n: int, dtype: torch.dtype) -> NewtonRows:
    z, g, direction, home_z, home_g = torch.empty(5, rows, n, dtype=dtype).numpy()
    probe = torch.arange(1, n + 1, dtype=dtype).cos().numpy()
    slope, probed = torch.empty(2, n, dtype=dtype).numpy()
    scalars, home = np.empty((2, rows, 2), z.dtype)
    left, merits = np.empty(rows, np.int64), np.empty((rows, WINDOW + 1), z.dtype)
    A, pivots = torch.empty(n, n, dtype=dtype).numpy(), np.empty(n, np.int64)
    watch = home_z, home_g, home, left, merits
    return NewtonRows(z, g, direction, scalars, *watch, A, pivots, slope, probe, probed)


@cached_njit()
def newton_update(state, equation, order, active, k, z, f, new, weight):  # type: ignore[no-untyped-def]
    """Write the iterates after update k of the active places into new, from f = phi(z)."""
    widest_vectors()
    kind = z.dtype.type
    for p in range(active):
        i = order[p]
        g, start, direction, scalars = state.g[i], state.z[i], state.direction[i], state.scalars[i]
        merit = write_difference(new[p], f[p], z[p])
        if k == 0:
            state.left[i] = -1
        most = (kind(1) - kind(2e-4) * scalars[1]) * scalars[0]
        if state.left[i] > 0:
            most = kind(MAX_GROWTH * MAX_GROWTH) * state.home[i, 0]
        accepted = k == 0 or (merit <= most and scalars[1] > 0)
        if accepted:
            for j in range(z.shape[1]):
                start[j], g[j] = z[p, j], new[p, j]
            scalars[0], scalars[1] = merit, kind(1)
        else:
            scalars[1] = shorter_step(z, scalars[1], scalars[0], merit)
        back = follow(state, i, k, accepted)
        if accepted or back:
            phi = f[p]
            if back:
                phi = new[p]  # what it held is in g
                for j in range(z.shape[1]):
                    phi[j] = start[j] + g[j]
            write_direction(state, equation, p, phi, g, direction)
        for j in range(z.shape[1]):
            new[p, j] = start[j] + scalars[1] * direction[j]


@cached_njit()
def follow(state, i, k, accepted):  # type: ignore[no-untyped-def]
    """Begin and end the undamped steps of row i, as `Watchdog.follow`; whether it went back."""
    half, scalars, merits, left = state.z.dtype.type(0.5), state.scalars[i], state.merits[i], 0
    back = False
    if state.left[i] > 0:
        fell = accepted and scalars[0] <= half * state.home[i, 0]
        if accepted and not fell:
            left = state.left[i] - 1
        state.left[i] = left
        back = not fell and left == 0
        if back:
            copy_trial(
                state.z[i], state.g[i], scalars, state.home_z[i], state.home_g[i], state.home[i]
            )
            scalars[1] *= half
    merits[k % (WINDOW + 1)] = scalars[0]
    if k >= WINDOW and state.left[i] < 0:
        slow = (accepted or back) and scalars[0] > half * merits[(k + 1) % (WINDOW + 1)]
        if slow or scalars[1] == 0:
            copy_trial(
                state.home_z[i], state.home_g[i], state.home[i], state.z[i], state.g[i], scalars
            )
            scalars[1] = 1
            state.left[i] = STEPS
    return back


@cached_njit()
def copy_trial(z, g, scalars, given_z, given_g, given_scalars):  # type: ignore[no-untyped-def]
    for j in range(z.size):
        z[j], g[j] = given_z[j], given_g[j]
    scalars[0], scalars[1] = given_scalars[0], given_scalars[1]


@cached_njit()
def write_direction(state, equation, p, f, g, out):  # type: ignore[no-untyped-def]
    """out <- the solution of (I - J) s = g; where I - J is singular the one of least norm."""
    kind, slope = f.dtype.type, state.slope
    if equation.code == AFFINE:
        for j in range(f.size):
            slope[j] = equation.slope[p, j]
    else:
        for j in range(f.size):
            slope[j] = activation_grad(equation.code, kind(1), f[j], kind(0), kind(1))
    if len(equation.M) == 0:
        solve_diagonal(state, g, out)
        return
    size = write_matrix(state.A, equation, slope)
    regular = factorize(state.A, state.pivots)
    if regular:
        for j in range(out.size):
            out[j], state.probed[j] = g[j], state.probe[j]
        solve_factored(state.A, state.pivots, out)
        solve_factored(state.A, state.pivots, state.probed)
        least = 100 * np.float64(np.finfo(f.dtype).eps) * size
        bound = 1 / (least * least)
        regular = dot(out, out) <= bound * dot(g, g) and (
            dot(state.probed, state.probed) <= bound * dot(state.probe, state.probe)
        )
    if not regular:
        size = write_matrix(state.A, equation, slope)
        solve_damped(state.A, g, math.sqrt(np.float64(np.finfo(f.dtype).eps)) * size, out)


@cached_njit()
def write_matrix(A, equation, slope):  # type: ignore[no-untyped-def]
    """A <- I - J, or I where J is not finite; its Frobenius norm."""
    kind, M, n = A.dtype.type, equation.M, len(A)
    total = 0.0
    for i in range(n):
        for j in range(n):
            d = M[j, i] * slope[j if equation.code == AFFINE else i]
            a = (kind(1) if i == j else kind(0)) - d
            A[i, j] = a
            total += np.float64(a) * np.float64(a)
    if total < np.inf:
        return math.sqrt(total)
    for i in range(n):
        for j in range(n):
            A[i, j] = kind(1) if i == j else kind(0)
    return math.sqrt(n)


@cached_njit()
def factorize(A, pivots):  # type: ignore[no-untyped-def]
    """A <- L and U with partial pivoting; False where a pivot is 0."""
    kind, n = A.dtype.type, len(A)
    for k in range(n):
        pivot = k
        for i in range(k + 1, n):
            if abs(A[i, k]) > abs(A[pivot, k]):
                pivot = i
        pivots[k] = pivot
        if A[pivot, k] == kind(0):
            return False
        row = A[k]
        if pivot != k:
            other = A[pivot]
            for j in range(n):
                x = row[j]
                row[j] = other[j]
                other[j] = x
        inverse = kind(1) / row[k]
        for i in range(k + 1, n):
            other = A[i]
            weight = other[k] * inverse
            other[k] = weight
            for j in range(k + 1, n):
                other[j] -= weight * row[j]
    return True


@cached_njit()
def solve_factored(A, pivots, x):  # type: ignore[no-untyped-def]
    """x <- A^-1 x from the factors of A."""
    n = len(A)
    for k in range(n):
        y = x[k]
        x[k] = x[pivots[k]]
        x[pivots[k]] = y
    for i in range(n):
        row, total = A[i], A.dtype.type(0)
        for j in range(i):
            total += row[j] * x[j]
        x[i] -= total
    for i in range(n - 1, -1, -1):
        row, total = A[i], A.dtype.type(0)
        for j in range(i + 1, n):
            total += row[j] * x[j]
        x[i] = (x[i] - total) / row[i]


@cached_njit()
def solve_diagonal(state, g, out):  # type: ignore[no-untyped-def]
    """The same with J = diag(slope): one division a unit."""
    kind, eps = g.dtype.type, np.float64(np.finfo(g.dtype).eps)
    total, right, probed, probe, regular, finite = 0.0, 0.0, 0.0, 0.0, True, True
    for j in range(g.size):
        finite = finite and abs(state.slope[j]) < np.inf
    for j in range(g.size):
        a = kind(1) - state.slope[j] if finite else kind(1)
        out[j], state.probed[j] = g[j] / a, state.probe[j] / a
        state.slope[j] = a
        total += np.float64(a) * np.float64(a)
        regular = regular and a != 0
    size = math.sqrt(total)
    least = 100 * eps * size
    bound = 1 / (least * least)
    if regular:
        right, probe = dot(g, g), dot(state.probe, state.probe)
        probed = dot(state.probed, state.probed)
        if dot(out, out) <= bound * right and probed <= bound * probe:
            return
    damping = eps * total if total > 0 else 1.0
    for j in range(g.size):
        a = np.float64(state.slope[j])
        out[j] = a * np.float64(g[j]) / (a * a + damping)


@cached_njit(allocates=True)
def solve_damped(A, g, damping, out):  # type: ignore[no-untyped-def]
    """out <- s that minimizes |A s - g|^2 + damping^2 |s|^2, by QR in float64."""
    n = len(A)
    stacked = np.zeros((2 * n, n))
    for i in range(n):
        for j in range(n):
            stacked[i, j] = A[i, j]
        stacked[n + i, i] = damping if damping > 0 else 1.0
    Q, R = np.linalg.qr(stacked)
    for j in range(n - 1, -1, -1):
        total = 0.0
        for i in range(n):
            total += Q[i, j] * np.float64(g[i])
        for i in range(j + 1, n):
            total -= R[j, i] * np.float64(out[i])
        out[j] = total / R[j, j]
