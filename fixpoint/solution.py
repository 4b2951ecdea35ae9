"""What a solve returns: one result code a sample, the solution, its trace."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fixpoint._tree import Tree


class Result(IntEnum):
    """How the solve of one sample ended; `RESULT_TEXT` says what it means and what to do."""

    CONVERGED = 0
    FIXED_STEPS = 1
    MAX_ITER = 2
    STALLED = 3
    NONFINITE = 4


RESULT_TEXT: dict[Result, str] = {
    Result.CONVERGED: "the residual is within the tolerance",
    Result.FIXED_STEPS: (
        "exactly max_iter updates were made and nothing was measured (rtol = atol = 0); "
        "set rtol or atol to stop at a tolerance"
    ),
    Result.MAX_ITER: (
        "max_iter updates were not enough and the residual was still falling: raise max_iter, "
        "loosen rtol, or use a faster solver (Anderson, Broyden)"
    ),
    Result.STALLED: (
        "the residual has not fallen over the last half of the updates: it cycles, diverges or "
        "sits at the rounding floor; check that a fixed point exists (contraction of phi), damp "
        "(beta < 1), try another solver, use float64 or loosen rtol"
    ),
    Result.NONFINITE: (
        "phi returned NaN or inf: the sample was frozen at its last finite iterate; check its "
        "input, or damp (beta < 1) if it diverged"
    ),
}


class ConvergenceError(RuntimeError):
    """Raised by `Solution.check` when a sample has not reached its tolerance."""


class Trace(NamedTuple):
    """The course of a solve over its n updates; a sample that stopped repeats its last value.

    residual: scaled residual at the start and after each update, (n + 1, B).
    iterates: the states, (n + 1, B, D), where `record="iterates"` asked for them, else None.
    """

    residual: Tensor
    iterates: Tensor | None = None


class Solution(NamedTuple):
    """The end of a solve; `(z, residual)` belong together.

    z: state with the structure and shapes of z0.
    residual: rms(phi(z) - z) / (atol + rtol * rms(phi(z))) of this z, (B,): converged where
        <= 1. With rtol = atol = 0 and `record` set, rms(phi(z) - z) / rms(phi(z)). None where
        nothing was measured.
    iterations: updates applied to each sample, (B,) int64.
    evaluations: calls of phi made for the whole batch.
    products: Jacobian-vector products made for the whole batch, beside the evaluations; a
        Jacobian is D.
    state: the solver's last state, kept inside the package only; None for users.
    result: a `Result` a sample, (B,) int8.
    trace: `Trace` if recorded.
    """

    z: Tree
    residual: Tensor | None
    iterations: Tensor
    evaluations: int
    result: Tensor
    trace: Trace | None = None
    products: int = 0
    state: Any = None

    @property
    def converged(self) -> Tensor:
        """Whether each sample met its tolerance, (B,) bool."""
        return self.result == Result.CONVERGED

    def check(self) -> Solution:
        """Return self, or say which samples failed and what to do.

        Samples of a solve with a fixed number of steps pass: they had no tolerance to meet.

        Raises:
            ConvergenceError: a sample is MAX_ITER, STALLED or NONFINITE.
        """
        if bool((self.result > Result.FIXED_STEPS).any()):
            raise ConvergenceError(describe_failures(self.result))
        return self


def describe_failures(result: Tensor) -> str:
    """Counts and remedies of the samples that did not converge, in one sentence a kind."""
    counts = torch.bincount(result.long().flatten(), minlength=len(Result)).tolist()
    parts = [
        f"{counts[code]} {code.name} ({RESULT_TEXT[code]})"
        for code in Result
        if code > Result.FIXED_STEPS and counts[code]
    ]
    return f"{sum(counts[Result.MAX_ITER :])} of {result.numel()} samples did not converge: " + (
        "; ".join(parts)
    )
