"""The iteration on all states of a sequence: evaluate, scan, measure, freeze, fall back."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fixpoint.sequence.jacobians import SequenceJacobian
from fixpoint.sequence.recurrence import Recurrence
from fixpoint.solution import Result, Solution

GROWTHS = 2
"""A sample whose residual grows so many times in a row is given up."""


class Tolerance(NamedTuple):
    """When a sample is done; rtol = atol = 0 makes exactly max_iter updates."""

    rtol: float
    atol: float
    max_iter: int

    @property
    def is_set(self) -> bool:
        return self.rtol > 0 or self.atol > 0

    def scaled(self, delta: Tensor, state: Tensor) -> Tensor:
        """max over t of rms(delta_t) / (atol + rtol rms(state_t)), (B,), for (T, B, n) each."""
        n = max(delta.shape[2], 1)
        size, norm = _norm(delta), _norm(state)
        scale = norm * self.rtol + self.atol * n**0.5
        # 0 / 0 is a state that nothing moves; NaN / 0 is NaN.
        ratio = torch.where(size == 0, 0.0, size / scale)
        return ratio.amax(0)


def rounding_tolerance(T: int, dtype: torch.dtype) -> float:
    """The relative tolerance just above the rounding of T steps, which adds up as sqrt(T)."""
    return torch.finfo(dtype).eps * (8 + T**0.5 / 2)


class Progress:
    """Which samples are active, converged or lost, from one scaled residual after another."""

    def __init__(self, B: int, device: torch.device) -> None:
        self.previous = torch.full((B,), torch.inf, device=device)
        self.growths = torch.zeros(B, dtype=torch.int8, device=device)

    def observe(self, residual: Tensor, size: Tensor) -> Tensor:
        """A `Result` for each sample, MAX_ITER standing for those that are still active.

        From the scaled residual and the norm of r over the whole sequence, (B,) each.
        """
        self.growths = torch.where(size > self.previous, self.growths + 1, 0)
        self.previous = size
        result = torch.full_like(self.growths, int(Result.MAX_ITER))
        result[self.growths >= GROWTHS] = int(Result.STALLED)
        result[residual <= 1] = int(Result.CONVERGED)
        result[~residual.isfinite()] = int(Result.NONFINITE)
        return result

    def select(self, samples: Tensor) -> None:
        self.previous, self.growths = self.previous[samples], self.growths[samples]


@torch.no_grad()
def iterate(
    recurrence: Recurrence, jacobian: SequenceJacobian, tolerance: Tolerance, start: Tensor | None
) -> Solution:
    """Update all states at once until each sample is done; z is (T, B, n).

    Samples that are done leave the batch, so that they cost nothing and do not move.
    """
    T, B, n = recurrence.shape
    path = recurrence.h0.new_empty(T + 1, B, n)
    path[0] = recurrence.h0
    path[1:] = recurrence.h0 if start is None else start
    whole, rows = path, torch.arange(B, device=path.device)
    residual = path.new_zeros(B) if tolerance.is_set else None
    iterations = torch.full((B,), tolerance.max_iter, dtype=torch.int64, device=path.device)
    result = torch.full((B,), int(Result.FIXED_STEPS), dtype=torch.int8, device=path.device)
    progress, products = Progress(B, path.device), 0
    k = 0
    while True:
        if residual is None and k == tolerance.max_iter:
            break
        F, scan, made = jacobian.linearize(recurrence, path)
        products += made
        r = F - path[1:]
        size = torch.linalg.vector_norm(r, dim=(0, 2))
        delta = scan.forward(r)
        if residual is not None:
            seen = tolerance.scaled(delta, path[1:])
            now = progress.observe(seen, size)
            residual[rows], iterations[rows], result[rows] = seen, k, now
            # A sample that has converged takes the measured update too: it costs nothing.
            path[1:] += torch.where((now == Result.CONVERGED)[:, None], delta, 0.0)
            active = (now == Result.MAX_ITER).nonzero().flatten()
            if k == tolerance.max_iter or not len(active):
                break
            if len(active) < len(rows):
                if path is not whole:
                    whole[:, rows] = path
                rows, path, delta = rows[active], path[:, active], delta[:, active]
                recurrence = recurrence.select(active)
                progress.select(active)
        path[1:] += delta
        k += 1
    if path is not whole:
        whole[:, rows] = path
    return Solution(
        whole[1:], residual, iterations, k + (residual is not None), result, None, products
    )


@torch.no_grad()
def iterate_linear(
    map_of: Callable[[Tensor], Tensor],
    precondition: Callable[[Tensor], Tensor],
    g: Tensor,
    tolerance: Tolerance,
) -> Solution:
    """u = map_of(u), a linear map plus g, (T, B, n), by u <- u + precondition(map_of(u) - u)."""
    u, B = precondition(g.clone()), g.shape[1]
    progress, frozen = Progress(B, g.device), torch.zeros(B, dtype=torch.bool, device=g.device)
    residual, iterations = g.new_zeros(B), torch.zeros(B, dtype=torch.int64, device=g.device)
    result = torch.full((B,), int(Result.MAX_ITER), dtype=torch.int8, device=g.device)
    for k in range(tolerance.max_iter + 1):
        r = map_of(u) - u
        size = torch.linalg.vector_norm(r, dim=(0, 2))
        delta = precondition(r)
        seen = tolerance.scaled(delta, u)
        now = progress.observe(seen, size)
        residual = torch.where(frozen, residual, seen)
        result = torch.where(frozen, result, now)
        iterations = torch.where(frozen, iterations, k)
        # A sample that is done takes its last update too, which costs nothing and helps.
        u = torch.where(frozen[:, None], u, u + delta)
        frozen = result != Result.MAX_ITER
        if k == tolerance.max_iter or bool(frozen.all()):
            break
    return Solution(u, residual, iterations, k + 1, result, None, k + 1)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=2)
