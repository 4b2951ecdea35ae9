"""The states of a cell for all time steps at once: its recurrence in the form of `sequence`."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import linear

from fixpoint._messages import unknown_name
from fixpoint._torch import carries_tangents, tree_leaves
from fixpoint._tree import Tree
from fixpoint.failure import ConvergenceWarning
from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.sequence import (
    DiagonalJacobian,
    LeakyJacobian,
    SequenceJacobian,
    solve_equilibrium_sequence,
    solve_sequence,
)
from fixpoint.sequence.recurrence import Step
from fixpoint.solution import Result, Solution
from fixpoint.solvers import IterativeSolver

TimeMode = Literal["sequential", "parallel", "auto"]

CACHED = 2**16
"""Numbers T B n of a window on the CPU: as many as fit in the cache of a core."""
MOST_UNITS = 128
"""Most units B n of a step on the CPU: above, a few sweeps over all steps cost more than a loop."""
STEPS_PER_UPDATE = 16
"""Time steps of a loop that cost as much as one update of all of them."""


class ParallelForm(NamedTuple):
    """A recurrence as `solve_sequence` takes it.

    step: f(h_prev, x), or with a `solver` phi(h, h_prev, x), on rows.
    x: its inputs, (T K, B, ...), K inner steps a time step.
    jacobian: what stands for its Jacobian.
    inner: K; the state after each K-th step is that of a time step.
    solver: that of the joint equilibrium, or None.
    """

    step: Step
    x: Tree
    jacobian: str | SequenceJacobian
    inner: int = 1
    solver: IterativeSolver | None = None


def checked_time(time: str) -> str:
    """Return the value, if it is a `TimeMode`."""
    if time not in get_args(TimeMode):
        raise ValueError(unknown_name("time", time, get_args(TimeMode)))
    return time


def solve_states(form: ParallelForm, h0: Tensor) -> tuple[Tensor, Solution]:
    """Return h_1 .. h_T, (T, B, n), and the `Solution` of all (inner) steps without its z."""
    window = max(32, CACHED // max(h0.numel(), 1)) if h0.device.type == "cpu" else None
    if form.solver is None:
        # This many updates cost as much as two loops of a long sequence; then a sample falls back.
        most = max(50, 2 * len(tree_leaves(form.x)[0]) // STEPS_PER_UPDATE)
        solution = solve_sequence(
            form.step, form.x, h0, jacobian=form.jacobian, window=window, max_iter=min(100, most)
        )
    else:
        solution = solve_equilibrium_sequence(
            form.step,
            form.x,
            h0,
            jacobian=form.jacobian,
            solver=form.solver,
            rtol=form.solver.rtol,
            atol=form.solver.atol,
            window=window,
        )
    states = solution.z[form.inner - 1 :: form.inner]
    return states, replace(solution, z=None)


def parallel_pays(form: ParallelForm, h0: Tensor) -> bool:
    """Tell whether all steps at once are expected to be faster than a Python loop over them.

    By measurement (docs/parallel_in_time.md): for few units and long sequences, where the Jacobian
    costs nothing. No GPU has been measured.
    """
    if isinstance(form.jacobian, str) or form.solver is not None or h0.device.type != "cpu":
        return False
    steps = tree_leaves(form.x)[0].shape[0]
    return h0.numel() <= MOST_UNITS and steps >= STEPS_PER_UPDATE * _expected_updates(form, steps)


def _expected_updates(form: ParallelForm, steps: int) -> float:
    """Return updates as measured: they grow with the sum of 1 - decay, up to what a state
    remembers.
    """
    if not isinstance(form.jacobian, LeakyJacobian):
        return 64.0
    leaks = (1 - form.jacobian.decay.double()).abs()
    total = float(leaks.sum()) if leaks.dim() else steps * float(leaks)
    return 4.0 + min(1.4 * total, 30.0)


def is_traced() -> bool:
    """Tell whether a tracer or transform runs, which cannot follow a loop that depends on data."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or carries_tangents()


def warn_of_fallback(solution: Solution, name: str) -> bool:
    """Warn where samples were solved step by step; whether any was."""
    count = int((solution.result == Result.FALLBACK.value).sum())
    if count:
        warnings.warn(
            f'{name}: {count} of {solution.result.numel()} samples fell back with time="parallel": '
            "the recurrence does not contract, so they were solved step by step and nothing was "
            'gained; use time="sequential". Shown once per layer.',
            ConvergenceWarning,
            stacklevel=2,
        )
    return count > 0


def leaky_form(
    x: Tensor,
    B: int,
    *,
    A: Tensor,
    W: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    activation: str,
) -> ParallelForm:
    """Return h <- a_tk h + b_tk sigma(A h + W x_t + bias) as one chain of T K steps."""
    sigma, At, T = ACTIVATIONS[activation], A.t(), len(x)
    K = max((v.shape[-1] for v in (a, b) if v.dim()), default=1)
    decay, gain = (v.expand(T, K).reshape(-1) for v in (a, b))
    u = linear(x, W, bias).repeat_interleave(K, 0) if K > 1 else linear(x, W, bias)
    scalars = [v[:, None, None].expand(-1, B, 1) for v in (decay, gain)]

    def step(h: Tensor, x: Tree) -> Tensor:
        u, a, b = x
        return a * h + b * sigma(torch.addmm(u, h, At))

    if bool((decay.detach() == 0).all()):
        return ParallelForm(step, (u, *scalars), DiagonalJacobian(), K)
    return ParallelForm(step, (u, *scalars), LeakyJacobian(decay), K)


def gated_form(
    x: Tensor, *, V: Tensor, W: Tensor, bias: Tensor | None, p: Tensor, q: Tensor, activation: str
) -> ParallelForm:
    """Return h <- z h + (p (1 - z) + q) c, with the diagonal of its Jacobian by formula."""
    sigma, n, u = ACTIVATIONS[activation], V.shape[1], linear(x, W)
    b_z, b_c = V.new_zeros(2, n) if bias is None else bias.view(2, n)

    def parts(h: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        product = torch.addmm(u, h, V.t())
        return torch.sigmoid(product[:, :n] + b_z), sigma(product[:, -n:] + b_c)

    def step(h: Tensor, u: Tensor) -> Tensor:
        z, c = parts(h, u)
        return z * h + (p * (1 - z) + q) * c

    def formula(h: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        z, c = parts(h, u)
        gain = p * (1 - z) + q
        in_gate = (h - p * c) * z * (1 - z) * V[:n].diagonal()
        in_candidate = gain * slope(activation, c) * V[-n:].diagonal()
        return z * h + gain * c, z + in_gate + in_candidate

    return ParallelForm(step, u, DiagonalJacobian(formula))


def slope(activation: str, c: Tensor) -> Tensor:
    """Return sigma' from c = sigma(.)."""
    if activation == "tanh":
        return 1 - c * c
    if activation == "sigmoid":
        return c * (1 - c)
    return (c > 0).to(c) if activation == "relu" else torch.ones_like(c)
