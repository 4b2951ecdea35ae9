"""The iteration on all states of a sequence: evaluate, scan, measure, freeze, fall back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fixpoint.sequence.affine_scan import ZeroScan
from fixpoint.sequence.jacobians import SequenceJacobian
from fixpoint.sequence.recurrence import Recurrence
from fixpoint.solution import Result, Solution

GROWTHS = 2
"""A sample whose residual grows so many times in a row is given up."""


class Tolerance(NamedTuple):
    """Condition for the end of a sample; rtol = atol = 0 makes exactly max_iter updates."""

    rtol: float
    atol: float
    max_iter: int

    @property
    def is_set(self) -> bool:
        return self.rtol > 0 or self.atol > 0

    def measure(self, r: Tensor, delta: Tensor, state: Tensor) -> Tensor:
        """Return scaled residual and norm of r of each sample, (2, B), for (T, B, n) each.

        The first is the maximum over t of rms(delta_t) / (atol + rtol rms(state_t)).
        """
        scale = (_norm(state) * self.rtol).add_(self.atol * max(r.shape[2], 1) ** 0.5)
        ratio = _norm(delta).div_(scale.clamp_min_(torch.finfo(r.dtype).tiny))
        return torch.stack([ratio.amax(0), torch.linalg.vector_norm(_norm(r), dim=0)])


def rounding_tolerance(T: int, dtype: torch.dtype) -> float:
    """Return relative tolerance just above the rounding of T steps, which adds up as sqrt(T)."""
    return torch.finfo(dtype).eps * (8 + T**0.5 / 2)


class Progress:
    """Record of the samples that are active, converged or lost, from each measurement."""

    def __init__(self, B: int) -> None:
        self.previous, self.growths = [math.inf] * B, [0] * B

    def observe(self, measured: Tensor) -> tuple[list[float], list[Result]]:
        """Return the residual and `Result` of each sample, MAX_ITER for those that are still
        active.
        """
        residuals, sizes = measured.tolist()
        results = []
        for i, (residual, size) in enumerate(zip(residuals, sizes, strict=True)):
            self.growths[i] = self.growths[i] + 1 if size > self.previous[i] else 0
            self.previous[i] = size
            results.append(self._result(i, residual, size))
        return residuals, results

    def _result(self, i: int, residual: float, size: float) -> Result:
        if math.isnan(residual) or not math.isfinite(size):
            return Result.NONFINITE
        if residual <= 1:
            return Result.CONVERGED
        return Result.STALLED if self.growths[i] >= GROWTHS else Result.MAX_ITER

    def select(self, samples: list[int]) -> None:
        self.previous = [self.previous[i] for i in samples]
        self.growths = [self.growths[i] for i in samples]


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
    whole, rows = path, list(range(B))
    residuals, iterations = [0.0] * B, [tolerance.max_iter] * B
    results = [Result.MAX_ITER if tolerance.is_set else Result.FIXED_STEPS] * B
    progress, products, k = Progress(B), 0, 0
    while rows and (tolerance.is_set or k < tolerance.max_iter):
        F, scan, made = jacobian.linearize(recurrence, path)
        products += made
        r = F - path[1:]
        if not tolerance.is_set:
            path[1:] += scan.forward(r)
            k += 1
            continue
        size = r if isinstance(scan, ZeroScan) else r.clone()
        delta = scan.forward(r)
        seen, now = progress.observe(tolerance.measure(size, delta, path[1:]))
        for row, value, result in zip(rows, seen, now, strict=True):
            residuals[row], iterations[row], results[row] = value, k, result
        done = [i for i, result in enumerate(now) if result == Result.CONVERGED]
        active = [i for i, result in enumerate(now) if result == Result.MAX_ITER]
        if len(active) == len(rows):
            if k == tolerance.max_iter:
                break
            path[1:] += delta
        else:
            # A sample that has converged takes the measured update too: it costs nothing.
            path[1:, done] += delta[:, done]
            if path is not whole:
                whole[:, rows] = path
            if k == tolerance.max_iter or not active:
                break
            chosen = torch.tensor(active, device=path.device)
            rows, path = [rows[i] for i in active], path[:, chosen]
            path[1:] += delta[:, chosen]
            recurrence = recurrence.select(chosen)
            progress.select(active)
        k += 1
    if path is not whole:
        whole[:, rows] = path
    return Solution(
        whole[1:],
        path.new_tensor(residuals) if tolerance.is_set else None,
        torch.tensor(iterations, device=path.device),
        k + tolerance.is_set,
        torch.tensor([int(result) for result in results], dtype=torch.int8, device=path.device),
        None,
        products,
    )


@torch.no_grad()
def iterate_linear(
    map_of: Callable[[Tensor], Tensor],
    precondition: Callable[[Tensor], Tensor],
    g: Tensor,
    tolerance: Tolerance,
) -> Solution:
    """Return u = map_of(u), a linear map plus g, (T, B, n), by u <- u + precondition(map_of(u) -
    u).
    """
    u, B = precondition(g.clone()), g.shape[1]
    progress, active = Progress(B), list(range(B))
    residuals, iterations, results = [0.0] * B, [0] * B, [Result.MAX_ITER] * B
    k = 0
    while active:
        r = map_of(u) - u
        delta = precondition(r.clone())
        seen, now = progress.observe(tolerance.measure(r, delta, u))
        for i in active:
            residuals[i], iterations[i], results[i] = seen[i], k, now[i]
        # A sample that is done takes its last update too, which costs nothing and helps.
        if len(active) == B:
            u = u + delta
        else:
            u[:, active] += delta[:, active]
        active = [i for i in active if now[i] == Result.MAX_ITER]
        if k == tolerance.max_iter:
            break
        k += 1
    return Solution(
        u,
        g.new_tensor(residuals),
        torch.tensor(iterations, device=g.device),
        k,
        torch.tensor([int(result) for result in results], dtype=torch.int8, device=g.device),
        None,
        k,
    )


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=2)
