"""The tensors of an equilibrium through time, and the arguments of its two passes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fixpoint.backward import Implicit
from fixpoint.solvers import Solver


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
    """How each equilibrium is solved and differentiated."""

    activation: str
    solver: Solver
    backward: Implicit


class Iteration(NamedTuple):
    """A solver as the kernels take it.

    steps: weight of phi(z) in each update, (T or 1, max_iter), or beta of Anderson mixing.
    memory: differences kept by Anderson mixing, 0 for plain iteration.
    rtol, atol: tolerances; see `IterativeSolver`.
    """

    steps: Tensor
    memory: int
    rtol: float
    atol: float


class Report(NamedTuple):
    """How each solve ended, (T, B) each; see `Solution`."""

    iterations: Tensor
    residual: Tensor
    result: Tensor


class ForwardArguments(NamedTuple):
    """Solve all time steps.

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
    iteration: Iteration


class BackwardArguments(NamedTuple):
    """Carry g, the gradient of the last state, in place to the first.

    At each step u = J^T u + g, J = diag(sigma') U, then the gradient of h_{t-1} is V^T d with
    d = sigma' u. A state that is NONFINITE has no gradient.

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
    iteration: Iteration
