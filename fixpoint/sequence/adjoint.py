"""Solve for the gradient of a sequence: lambda_t = g_t + J_{t+1}^T lambda_{t+1}."""

from __future__ import annotations

import torch

from fixpoint._validation import at_least, non_negative
from fixpoint.backward import Implicit
from fixpoint.failure import OnFailure
from fixpoint.sequence.jacobians import SequenceJacobian
from fixpoint.sequence.parallel import ParallelTime, rounding_tolerance
from fixpoint.sequence.recurrence import SequenceProblem
from fixpoint.solution import Solution


class SequenceAdjoint:
    """Solver of the reversed recurrence of a gradient.

    It is iterated with the Jacobian of the forward solve to a tolerance relative to lambda, one
    batched vector-Jacobian product an iteration; samples that do not converge are solved step by
    step, with the result FALLBACK. Either way the gradient is that of the sequential recurrence.

    Args:
        rtol: tolerance relative to each lambda_t; None takes one just above rounding, (8 +
            sqrt(T) / 2) eps.
        max_iter: most updates before the fallback.
        on_failure: "ignore", "warn" (once) or "raise" where neither path is finite.

    Attributes:
        solution: `Solution` of the last backward pass, its z lambda, (T, B, n), divided by each
            sample's max |g|; with windows that of the first one. None before.

    Example:
        >>> import torch
        >>> from fixpoint.sequence import SequenceAdjoint, solve_sequence
        >>> w, adjoint = torch.tensor(0.5, requires_grad=True), SequenceAdjoint()
        >>> f = lambda h, x: w * h + x
        >>> solution = solve_sequence(f, torch.ones(3, 1, 1), torch.zeros(1, 1), adjoint=adjoint)
        >>> solution.z[-1].sum().backward()
        >>> w.grad, adjoint.solution.result  # h_3 = w^2 + w + 1
        (tensor(2.), tensor([0], dtype=torch.int8))
    """

    def __init__(
        self, *, rtol: float | None = None, max_iter: int = 100, on_failure: OnFailure = "warn"
    ) -> None:
        self.rtol = None if rtol is None else non_negative(rtol=rtol)
        self.max_iter = at_least(1, max_iter=max_iter)
        self.on_failure = on_failure
        self.solution: Solution | None = None

    def backward(self, recurrence: SequenceProblem, jacobian: SequenceJacobian) -> Implicit:
        """Return the way to differentiate the solution of a recurrence."""
        T, dtype = recurrence.shape[0], recurrence.h0.dtype
        solver = ParallelTime(
            recurrence,
            jacobian.plain(),
            note=self._note,
            max_iter=self.max_iter,
            rtol=rounding_tolerance(T, dtype) if self.rtol is None else self.rtol,
            atol=torch.finfo(dtype).eps ** 2,
        )
        return Implicit(solver, on_failure=self.on_failure)

    def _note(self, solution: Solution) -> None:
        self.solution = solution
