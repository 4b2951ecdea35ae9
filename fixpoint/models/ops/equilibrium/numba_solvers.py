"""Solver loop on a block of rows, compiled by numba: the work of a kernel between two products.

One block solves z = sigma(z M + q), or the affine z = (z * slope) M + q of an adjoint, with the
rules of `fixpoint.solvers`: each row is measured after each evaluation, and ends by itself. Rows
that have ended leave the block, so that the products are those of active rows alone. No row
affects another one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba.extending import overload

from fixpoint.models.ops.common.numba_blocks import activate, as_vector, product, widest_vectors
from fixpoint.models.ops.common.numba_cache import FAST, cached_njit
from fixpoint.models.ops.equilibrium import numba_anderson, numba_broyden
from fixpoint.models.ops.equilibrium.arguments import IterationSettings
from fixpoint.models.ops.equilibrium.numba_monitor import (
    ACTIVE,
    BEST_UPDATE,
    COLUMNS,
    CONVERGED,
    IMPROVED,
    NONFINITE,
    RESTART,
    STALL,
    STALLED,
    STEP_REFUSED,
    improves,
    measure,
    measure_in_float64,
    observe,
)
from fixpoint.models.ops.equilibrium.numba_plain import AFFINE, Equation, PlainRows, plain_update

TOGETHER = 8
"""Rows of a product are a multiple of this: then BLAS computes each one alike."""


class RowBlock(NamedTuple):
    """Work for a block. Active rows come first; `order` says which row of the block lies where.

    z, f, z_before, f_before, q, slope, scratch: by place, (rows rounded up, n). history: see
    `numba_monitor`; codes, iterations: (rows,); these are by row. nothing: zeros. measured: see
    `measure`.
    """

    z: Any
    f: Any
    z_before: Any
    f_before: Any
    q: Any
    slope: Any
    scratch: Any
    order: Any
    history: Any
    codes: Any
    iterations: Any
    nothing: Any
    measured: Any


def new_block(rows: int, n: int, dtype: torch.dtype) -> RowBlock:
    """Return arrays aligned as torch does it."""
    places = -(-rows // TOGETHER) * TOGETHER
    arrays = list(torch.zeros(7, places, n, dtype=dtype).numpy())
    order, codes, iterations = np.zeros((3, places), np.int64)
    history, nothing = np.zeros((places, COLUMNS)), np.zeros(places * n, arrays[0].dtype)
    measured = np.zeros((places, 3))
    return RowBlock._make([*arrays, order, history, codes, iterations, nothing, measured])


def new_state(iteration: IterationSettings, rows: int, n: int, dtype: torch.dtype) -> Any:
    """Return what the solver keeps of each row of a block."""
    if iteration.method == "anderson":
        return numba_anderson.new_rows(rows, n, min(iteration.memory, n), dtype)
    if iteration.method == "broyden":
        return numba_broyden.new_rows(rows, n, iteration.memory, iteration.growth, dtype)
    return PlainRows(np.zeros(1, np.int64))


UPDATES = {
    PlainRows: plain_update,
    numba_anderson.AndersonRows: numba_anderson.anderson_update,
    numba_broyden.BroydenRows: numba_broyden.broyden_update,
}


def update(state, equation, order, active, k, z, f, new, weight):  # type: ignore[no-untyped-def]
    """Write the iterates after update k of the active places into `new`, from f = phi(z)."""
    raise NotImplementedError


@overload(update, jit_options=FAST)
def _update_of_state(state, equation, order, active, k, z, f, new, weight):  # type: ignore[no-untyped-def]
    method = UPDATES[state.instance_class]
    return lambda state, equation, order, active, k, z, f, new, weight: method(
        state, equation, order, active, k, z, f, new, weight
    )


def rules(state):  # type: ignore[no-untyped-def]
    """Tell whether updates are plain, and whether the solver backtracks and restarts lost rows."""
    raise NotImplementedError


@overload(rules, jit_options=FAST)
def _rules_of_state(state):  # type: ignore[no-untyped-def]
    kind = state.instance_class
    plain, restarts = kind is PlainRows, kind is numba_anderson.AndersonRows
    backtracks = not plain and not restarts
    return lambda state: (plain, backtracks, restarts)


def restart(state, i, z, f):  # type: ignore[no-untyped-def]
    """Forget what is kept of row i, which has been put back to z with f = phi(z)."""
    raise NotImplementedError


@overload(restart, jit_options=FAST)
def _restart_of_state(state, i, z, f):  # type: ignore[no-untyped-def]
    if state.instance_class is not numba_anderson.AndersonRows:
        return lambda state, i, z, f: None
    anderson_restart = numba_anderson.anderson_restart
    return lambda state, i, z, f: anderson_restart(state, i, z, f)


@cached_njit()
def solve_block(block, best, final, code, M, steps, state, rtol, atol):  # type: ignore[no-untyped-def]
    """Solve all rows from block.z; best receives z and final phi(z), (rows, n) each.

    code, M: see `Equation`. steps: weight of phi(z) in each update, (max_iter,), or beta of
    Anderson mixing. rtol, atol: of the dtype, atol for 2-norms. block.codes receives a `Result`
    and `STALL` times a `Stall` of each row, block.history its residual.
    """
    (
        z,
        f,
        z_before,
        f_before,
        q,
        _,
        scratch,
        order,
        history,
        codes,
        iterations,
        nothing,
        measured,
    ) = block
    slope = block.slope
    widest_vectors()
    rows, max_iter, eps = len(best), steps.size, np.float64(np.finfo(z.dtype).eps)
    plain, backtracks, restarts = rules(state)
    equation, active, all_converged = Equation(code, M, slope), rows, True
    scale = np.float64(atol)
    for i in range(rows):
        order[i] = i
    for k in range(max_iter + 1):
        evaluate(equation, q, nothing, z, f, scratch, active)
        measure(z, f, active, rtol, atol, measured)
        for p in range(active - 1, -1, -1):
            i = order[p]
            if improves(history[i], k, measured[p], max_iter):
                continue
            status = observe(
                history, i, k, measured[p], z, p, scale, eps, max_iter, backtracks, restarts
            )
            if status == ACTIVE and history[i, IMPROVED] == 1:
                continue
            if status == CONVERGED:
                copy_row(best[i], z[p])
                copy_row(final[i], f[p])
            elif history[i, BEST_UPDATE] == k:
                copy_row(best[i], z[p])
            elif history[i, BEST_UPDATE] == k - 1:
                copy_row(best[i], z_before[p])
            if status == RESTART:
                copy_row(z[p], z_before[p])
                copy_row(f[p], f_before[p])
                restart(state, i, z[p], f[p])
            elif status != ACTIVE:
                codes[i], iterations[i] = status, k
                all_converged = all_converged and status == CONVERGED
                active -= 1
                leave(block, equation, p, active, z, f)
        if active == 0:
            break
        if plain and steps[k] == 1:
            z_before, z, f = z, f, z_before
            continue
        update(state, equation, order, active, k, z, f, z_before, steps[k])
        if backtracks:
            for p in range(active - 1, -1, -1):
                i = order[p]
                if history[i, IMPROVED] == 0 and equal_rows(z[p], z_before[p]):
                    lost = not measure_in_float64(z[p], f[p], rtol, atol)[2] < np.inf
                    codes[i] = NONFINITE if lost else STALLED + STALL * STEP_REFUSED
                    iterations[i], all_converged = k, False
                    active -= 1
                    copy_row(z_before[p], z_before[active])
                    leave(block, equation, p, active, z, f)
            if active == 0:
                break
        z_before, z = z, z_before
        f_before, f = f, f_before
    if not all_converged:
        evaluate_best(block, equation, best, final)


@cached_njit()
def evaluate(equation, q, nothing, z, f, scratch, active):  # type: ignore[no-untyped-def]
    """Write f <- phi(z) in the active places, and in those up to a multiple of `TOGETHER`."""
    widest_vectors()
    places = min(-(-active // TOGETHER) * TOGETHER, len(z))
    a, out = z[:places], f[:places]
    c, added = as_vector(out), as_vector(q[:places])
    if equation.code == AFFINE:
        x, s, y = as_vector(a), as_vector(equation.slope[:places]), as_vector(scratch[:places])
        for j in range(x.size):
            y[j] = x[j] * s[j]
        a = scratch[:places]
    if len(equation.M) > 0:
        product(a, equation.M, out)
    else:
        x = as_vector(a)
        for j in range(c.size):
            c[j] = x[j]
    activate(max(equation.code, 0), c, added, nothing[: c.size])


@cached_njit()
def leave(block, equation, p, last, z, f):  # type: ignore[no-untyped-def]
    """Put the last active row into place p, whose row has ended, and q and slope of that there."""
    if p != last:
        copy_row(z[p], z[last])
        copy_row(f[p], f[last])
        exchange_rows(block.q[p], block.q[last])
        if equation.code == AFFINE:
            exchange_rows(block.slope[p], block.slope[last])
        order = block.order
        order[p], order[last] = order[last], order[p]


@cached_njit()
def evaluate_best(block, equation, best, final):  # type: ignore[no-untyped-def]
    """Write final <- phi(best) of rows that did not converge."""
    rows = len(best)
    for p in range(rows):
        copy_row(block.z[p], best[block.order[p]])
    evaluate(equation, block.q, block.nothing, block.z, block.f, block.scratch, rows)
    for p in range(rows):
        i = block.order[p]
        if block.codes[i] != CONVERGED:
            copy_row(final[i], block.f[p])


@cached_njit()
def copy_row(to, given):  # type: ignore[no-untyped-def]
    for j in range(to.size):
        to[j] = given[j]


@cached_njit()
def exchange_rows(a, b):  # type: ignore[no-untyped-def]
    for j in range(a.size):
        x = a[j]
        a[j] = b[j]
        b[j] = x


@cached_njit()
def equal_rows(a, b):  # type: ignore[no-untyped-def]
    different = 0
    for j in range(a.size):
        different += a[j] != b[j]
    return different == 0
