"""The tensors of an equilibrium through time, and the arguments of its two passes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fixpoint.backward import Implicit, Unrolled
from fixpoint.solution import Result, Stall
from fixpoint.solvers import Solver

MAX_SIZE_ON_CUDA = 128
"""Units n: the largest U and V that fit into the registers of a multiprocessor."""
MAX_MEMORY_ON_CUDA = 8
"""Differences of Anderson mixing that the Triton kernel keeps in registers."""


class Inputs(NamedTuple):
    """h_t solves h = sigma(U h + V h_{t-1} + W x_t + bias), started at h_{t-1}.

    x: (T, B, d); W: (n, d); bias: (n,); U: (n, n), None for the identity; V: (n, n); h0: (B, n).
    """

    x: Tensor
    W: Tensor
    bias: Tensor | None
    U: Tensor | None
    V: Tensor
    h0: Tensor


class Method(NamedTuple):
    """Solver and backward of each equilibrium.

    start: time index of the first one.
    """

    activation: str
    solver: Solver
    backward: Implicit | Unrolled
    start: int = 0


class IterationSettings(NamedTuple):
    """A solver as the kernels take it.

    steps: weight of phi(z) in each update, (T or 1, max_iter), or beta of Anderson mixing.
    memory: differences kept by Anderson mixing, factors of Broyden's method; else 0.
    rtol, atol: tolerances; see `IterativeSolver`.
    method: "plain", "anderson" or "broyden".
    growth: of `Broyden`.
    undamped: whether all steps are known to be 1.
    """

    steps: Tensor
    memory: int
    rtol: float
    atol: float
    method: str = "plain"
    growth: float = 0.0
    undamped: bool = False


class Report(NamedTuple):
    """Endings of the solves, (T, B) each; see `Solution`.

    result: a kernel may add `STALL` times the `Stall` of a sample.
    """

    iterations: Tensor
    residual: Tensor
    result: Tensor


STALL = 16


class Ending(NamedTuple):
    """A `Report` with results and causes apart."""

    iterations: Tensor
    residual: Tensor | None
    result: Tensor
    stall: Tensor | None


def ending(report: Report) -> Ending:
    code = report.result
    result, stall = code % STALL, code // STALL
    unsaid = (result == Result.STALLED.value) & (stall == 0)
    stall = torch.where(unsaid, Stall.NO_PROGRESS.value, stall).to(code.dtype)
    return Ending(report.iterations, report.residual, result, stall)


class ForwardArguments(NamedTuple):
    """Arguments of a kernel that solves all time steps.

    S: (T + 1, B, n); S[0] is h_0, S[t + 1] receives h of time step t.
    C: (T, B, n) receives sigma(.) at h, or (0, B, n) to keep nothing.
    """

    x: Tensor
    W: Tensor
    bias: Tensor | None
    U: Tensor | None
    V: Tensor
    S: Tensor
    C: Tensor
    report: Report
    activation: str
    iteration: IterationSettings


class BackwardArguments(NamedTuple):
    """Arguments of a kernel that carries g, the gradient of the last state, in place to the first.

    At each step u = J^T u + g, J = diag(sigma') U, then the gradient of h_{t-1} is V^T d with
    d = sigma' u. A state whose solve failed has no gradient.

    G: (T, B, n), gradients of the states.
    C, result: of the forward pass.
    D: (T, B, n) receives d, the gradient with respect to U h + V h_{t-1} + W x_t + bias.
    adjoint: (B, n) receives the last u divided by max |g|.
    """

    G: Tensor
    U: Tensor | None
    V: Tensor
    g: Tensor
    C: Tensor
    result: Tensor
    D: Tensor
    adjoint: Tensor
    report: Report
    activation: str
    iteration: IterationSettings


class FixedStepsArguments(NamedTuple):
    """Arguments of a kernel of fixed updates; S as in `ForwardArguments`, steps of its settings."""

    x: Tensor
    W: Tensor
    bias: Tensor | None
    U: Tensor | None
    V: Tensor
    S: Tensor
    activation: str
    steps: Tensor


class UnrolledArguments(NamedTuple):
    """Arguments of a kernel that carries g, the gradient of the last state, through the updates.

    G: (T, B, n), gradients of the states.
    S: (T + 1, B, n) of the forward pass.
    counts: updates that lead to each state, (T, B).
    warm: states that have the implicit gradient in place of that of their updates, (T, B).
    D: (T, B, n) receives the gradient of V h_{t-1} + W x_t + bias.
    report: of the adjoint solves of the warm states.
    steps: of the updates, (T or 1, K).
    adjoint: how the adjoints of warm states are solved.
    """

    G: Tensor
    x: Tensor
    W: Tensor
    bias: Tensor | None
    U: Tensor | None
    V: Tensor
    g: Tensor
    S: Tensor
    counts: Tensor
    warm: Tensor
    D: Tensor
    report: Report
    activation: str
    steps: Tensor
    adjoint: IterationSettings
