"""Recurrence and its derivatives step by step: the fallback of a sample that fails."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fixpoint.derivatives import batch_vjp_of_units
from fixpoint.fixed_point import solve
from fixpoint.sequence.recurrence import RowMap, SequenceProblem
from fixpoint.solution import Result
from fixpoint.solvers import Solver


@torch.no_grad()
def sequential_states(recurrence: SequenceProblem, solver: Solver | None) -> tuple[Tensor, Tensor]:
    """Return h_1 .. h_T, (T, B, n), one step after the other, and a `Result` of each sample, (B,).

    A joint equilibrium is solved by `solver` at each step; its worst result is that of the sample.
    """
    h, states = recurrence.h0, []
    worst = torch.full((len(h),), int(Result.CONVERGED), dtype=torch.int8, device=h.device)
    for step in recurrence.steps():
        past = h
        if solver is None:
            h = step(past, past)
        else:
            solution = solve(_equilibrium_map(step, past), past, solver)
            h, worst = solution.z, torch.maximum(worst, solution.result)
        states.append(h)
    return torch.stack(states), worst


def sequential_adjoint(recurrence: SequenceProblem, path: Tensor, g: Tensor) -> Tensor:
    """Return lambda_t = g_t + J_{t+1}^T lambda_{t+1} at the states h_0 .. h_T, (T + 1, B, n),
    exactly.

    With a joint equilibrium (I - d phi / d h)^T lambda_t = g_t + (d phi / d h_prev)^T lambda_{t+1}.
    """
    out, total = torch.empty_like(g), g[-1]
    for t, step in reversed(list(enumerate(recurrence.steps()))):
        F, h, h_prev = _tracked(step, path, t)
        out[t] = _solve_inner(F, h, total, transposed=True) if recurrence.joint else total
        if t:
            total = g[t - 1] + _vjp(F, h_prev, out[t])
    return out


def sequential_tangent(recurrence: SequenceProblem, path: Tensor, g: Tensor) -> Tensor:
    """Return e_t = g_t + J_t e_{t-1} at the states h_0 .. h_T, the transpose of
    `sequential_adjoint`.

    With a joint equilibrium the inputs g are those of the transpose: e_t = y_t, where
    (I - d phi / d h) y_t = g_t + (d phi / d h_prev) y_{t-1}.
    """
    out, e = torch.empty_like(g), torch.zeros_like(g[0])
    for t, step in enumerate(recurrence.steps()):
        e = advance_tangent(step, path[t + 1], path[t], e, g[t], joint=recurrence.joint)
        out[t] = e
    return out


def advance_tangent(
    step: RowMap, h: Tensor, h_prev: Tensor, e: Tensor, g: Tensor | None = None, *, joint: bool
) -> Tensor:
    """Return J e + g, (B, n), for one step from h_prev to h; see `sequential_tangent`."""
    total = _jvp(step, h, h_prev, e)
    if g is not None:
        total = total + g
    if not joint:
        return total
    h = h.detach().clone().requires_grad_()
    with torch.enable_grad():
        F = step(h, h_prev)
    return _solve_inner(F, h, total, transposed=False)


def _equilibrium_map(step: RowMap, h_prev: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda h: step(h, h_prev)


def _tracked(step: RowMap, path: Tensor, t: int) -> tuple[Tensor, Tensor, Tensor]:
    h, h_prev = (x.detach().clone().requires_grad_() for x in (path[t + 1], path[t]))
    with torch.enable_grad():
        return step(h, h_prev), h, h_prev


def _solve_inner(F: Tensor, h: Tensor, v: Tensor, *, transposed: bool) -> Tensor:
    J = batch_vjp_of_units(F, h)
    A = torch.eye(J.shape[-1], dtype=J.dtype, device=J.device) - (J.mT if transposed else J)
    return torch.linalg.solve_ex(A, v.unsqueeze(2))[0].squeeze(2)


def _vjp(F: Tensor, h: Tensor, v: Tensor) -> Tensor:
    if not F.requires_grad:
        return torch.zeros_like(v)
    (out,) = torch.autograd.grad(F, h, v, retain_graph=True, allow_unused=True)
    return torch.zeros_like(v) if out is None else out


def _jvp(step: RowMap, h: Tensor, h_prev: Tensor, v: Tensor) -> Tensor:
    """Return (d step / d h_prev) v by two vector-Jacobian products: any f has them."""
    h_prev = h_prev.detach().clone().requires_grad_()
    with torch.enable_grad():
        F = step(h, h_prev)
        w = torch.zeros_like(F, requires_grad=True)
        if not F.requires_grad:
            return torch.zeros_like(v)
        (product,) = torch.autograd.grad(F, h_prev, w, create_graph=True, allow_unused=True)
    if product is None or not product.requires_grad:
        return torch.zeros_like(v)
    return torch.autograd.grad(product, w, v)[0]
