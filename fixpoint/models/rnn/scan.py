"""The loop over time: each hidden state is the solution of one fixed-point problem."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fixpoint._torch import FakeTensor, is_functorch_wrapped_tensor
from fixpoint.backward import Unrolled
from fixpoint.fixed_point import FixedPoint
from fixpoint.models.maps import EquilibriumMap
from fixpoint.solution import Result, Solution


class Trajectory(NamedTuple):
    """The hidden states of a sequence and how each was solved.

    output: h_1 .. h_T, (T, B, n).
    h_n: h_T, (B, n).
    iterations: updates made, (T, B).
    residual: scaled residual at each step, (T, B), None where not measured; see `Solution`.
    result: a `Result` each, (T, B) int8.
    evaluations: calls of phi, each for a whole batch.
    """

    output: Tensor
    h_n: Tensor
    iterations: Tensor
    residual: Tensor | None
    result: Tensor
    evaluations: int


def scan(
    phi: EquilibriumMap,
    fixed_point: FixedPoint,
    x: Tensor,
    h0: Tensor | None = None,
    *,
    start: int | None = 0,
) -> Trajectory:
    """Return h_t = the solution of h = phi(h, h_{t-1}, x_t) started at h_{t-1}, for t = 1 .. T.

    A sample with a NaN or inf in x_t or h0 has NaN outputs from there on, the result NONFINITE,
    and no part in any gradient; its batch-mates are untouched.

    Args:
        x: (T, B, d) with T >= 1.
        h0: (B, n), zeros if not given.
        start: time index of the first step; None leaves the solver without, for T = 1.

    Raises:
        ValueError: the map and the solver do not fit (see `check_compatible`), or the solver's
            `timesteps` is below T.

    Example:
        >>> import torch
        >>> from fixpoint import FixedPoint
        >>> from fixpoint.models import SelfFeedbackMap, scan
        >>> phi = SelfFeedbackMap(3, 8, bound=0.5)
        >>> path = scan(phi, FixedPoint("anderson"), torch.randn(5, 2, 3))
        >>> path.output.shape, path.iterations.shape
        (torch.Size([5, 2, 8]), torch.Size([5, 2]))
    """
    check_compatible(phi, fixed_point)
    if h0 is None:
        h0 = x.new_zeros(x.shape[1], phi.hidden_size)
    x, h0, good = mask_nonfinite(x, h0)
    states, solutions = [], []
    for solution in solve_steps(phi, fixed_point, x, h0, start=start):
        states.append(solution.z)
        solutions.append(replace(solution, z=None))
    residuals = [s.residual for s in solutions if s.residual is not None]
    return mask_trajectory(
        torch.stack(states),
        good,
        torch.stack([s.iterations for s in solutions]),
        torch.stack(residuals) if residuals else None,
        torch.stack([s.result for s in solutions]),
        sum(s.evaluations for s in solutions),
    )


def mask_trajectory(
    output: Tensor,
    good: Tensor | None,
    iterations: Tensor,
    residual: Tensor | None,
    result: Tensor,
    evaluations: int,
) -> Trajectory:
    """Return NaN and NONFINITE where a state is not good, (T, B); see `mask_nonfinite`."""
    if good is not None:
        output = torch.where(good.unsqueeze(2), output, torch.nan)
        result = torch.where(good, result, int(Result.NONFINITE)).to(torch.int8)
    return Trajectory(output, output[-1], iterations, residual, result, evaluations)


def solve_steps(
    phi: EquilibriumMap,
    fixed_point: FixedPoint,
    x: Tensor,
    h0: Tensor,
    *,
    start: int | None = 0,
) -> Iterator[Solution]:
    """Yield the solution of each time step, the next one started at its z; arguments as for `scan`.

    States have the units of the activation: a default atol does not follow their scale.
    """
    at, h, fixed_point = phi(read=lambda own: own.bind(x)), h0, _with_absolute_atol(fixed_point)
    for t in range(len(x)):
        solution = fixed_point(at(t, h), h, t=None if start is None else start + t)
        h = solution.z
        yield solution


def _with_absolute_atol(fixed_point: FixedPoint) -> FixedPoint:
    solver = fixed_point.solver.absolute()
    if solver is fixed_point.solver:
        return fixed_point
    other = FixedPoint(solver, fixed_point.backward)
    other.non_convergence = fixed_point.non_convergence
    return other


def mask_nonfinite(x: Tensor, h0: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return x and h0 without the samples that are not finite, and which states are good, (T, B).

    A state is good where its sample has had no NaN or inf, in h0 or x, up to that step. None in
    place of them: all certainly are.
    """
    if all_finite(x, h0):
        return x, h0, None
    start = h0.isfinite().all(1)
    good = (~x.isfinite().all(2)).cumsum(0).eq(0) & start
    return torch.where(good.unsqueeze(2), x, 0.0), torch.where(start.unsqueeze(1), h0, 0.0), good


def all_finite(x: Tensor, h0: Tensor) -> bool:
    """Tell whether x and h0 are certainly finite, where that can be asked without a device sync."""
    if torch.compiler.is_compiling() or not x.is_cpu or torch.jit.is_tracing():
        return False
    if is_functorch_wrapped_tensor(x) or is_functorch_wrapped_tensor(h0):
        return False
    if isinstance(x, FakeTensor):
        return False
    if torch.is_grad_enabled():
        x, h0 = x.detach(), h0.detach()
    return math.isfinite(x.sum().item() + h0.sum().item())


def check_compatible(phi: EquilibriumMap, fixed_point: FixedPoint) -> None:
    """Refuse a map that sees the past only as its start with a solve that forgets its start.

    Raises:
        ValueError: with the remedy.
    """
    if phi.uses_previous_state:
        return
    solver, backward = fixed_point.solver, fixed_point.backward
    if solver.has_tolerance:
        given = f"{type(solver).__name__} with a tolerance"
    elif not isinstance(backward, Unrolled):
        given = f"{type(backward).__name__} differentiation"
    elif backward.last is not None and backward.last < solver.max_iter:
        given = f"Unrolled(last={backward.last}), which cuts the gradient to the start,"
    else:
        return
    raise ValueError(
        f"{type(phi).__name__} sees h_{{t-1}} only as the start of its iteration, so {given} "
        "would make it forget the past: use InexactNewton(max_iter=1 or 2) with Unrolled(), or "
        "the self-feedback map"
    )
