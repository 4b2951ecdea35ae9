"""Result of a solve: one code a sample, the solution, its trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fixpoint._error_estimate import krylov_error
from fixpoint._tree import Map, Packing, Tree


class Result(IntEnum):
    """Ending of the solve of one sample; `RESULT_TEXT` says what it means and what to do.

    Example:
        >>> import torch
        >>> from fixpoint import Picard, Result, solve
        >>> solution = solve(lambda z: 0.99 * z + 1, torch.zeros(1, 1), Picard(max_iter=5))
        >>> Result(solution.result.item()).name
        'MAX_ITER'
    """

    CONVERGED = 0
    FIXED_STEPS = 1
    MAX_ITER = 2
    STALLED = 3
    NONFINITE = 4
    FALLBACK = 5
    STOPPED = 6
    ACCEPTED = 7


class Stall(IntEnum):
    """Reason why a sample is STALLED; `STALL_TEXT` says what it means and what to do.

    Example:
        >>> import torch
        >>> from fixpoint import Picard, Stall, solve
        >>> solution = solve(lambda z: 2 - z, torch.zeros(1, 1), Picard(max_iter=40))
        >>> Stall(solution.stall.item()).name
        'NO_PROGRESS'
    """

    NONE = 0
    NO_PROGRESS = 1
    STEP_REFUSED = 2
    GAVE_UP = 3
    ROUNDING = 4
    RUNAWAY = 5


RESULT_TEXT: dict[Result, str] = {
    Result.CONVERGED: "the residual is within the tolerance",
    Result.FIXED_STEPS: (
        "exactly max_iter updates were made and nothing was measured (rtol = atol = 0); "
        "set rtol or atol to stop at a tolerance"
    ),
    Result.MAX_ITER: (
        "max_iter updates were not enough, and none showed that further ones lead nowhere: raise "
        "max_iter, loosen rtol, or use a faster solver (Anderson, Broyden)"
    ),
    Result.STALLED: (
        "the residual no longer falls: it cycles, diverges or is at the rounding floor; check "
        "that a fixed point exists (contraction of phi), damp (beta < 1), try another solver, use "
        "float64 or loosen rtol"
    ),
    Result.NONFINITE: (
        "phi returned NaN or inf: z is the finite state of the smallest residual, else the start; "
        "check the input, or damp (beta < 1) if the sample diverged"
    ),
    Result.FALLBACK: (
        "the iteration over the whole sequence did not converge, so the sample was solved step by "
        "step: its states are right, but nothing was gained; lower the window, choose another "
        'jacobian, or use the sequential path (time="sequential") where most samples do this'
    ),
    Result.STOPPED: (
        "the batch ended before the sample had converged, as the fraction of samples had that "
        '`stop` asks for: raise it, or take stop="each"'
    ),
    Result.ACCEPTED: "stop_when accepted the state; its residual is above the tolerance",
}

SLOW = 0.9
"""Rate above which a residual says little of the error."""

STALL_TEXT: dict[Stall, str] = {
    Stall.NONE: "the sample did not stall",
    Stall.NO_PROGRESS: (
        "the residual has not fallen over the last half of the updates: it cycles or diverges; "
        "check that a fixed point exists (contraction of phi), damp (beta < 1), or try another "
        "solver; if samples depend on each other in phi (`check_rows`), pass batched=False"
    ),
    Stall.STEP_REFUSED: (
        "no step along the last direction lowers the residual: a local minimum of |phi(z) - z| "
        "that is not a solution, or a singular I - J (in an adjoint solve: the gradient does not "
        "exist); start elsewhere, or try another solver"
    ),
    Stall.ROUNDING: (
        "the residual is as small as the rounding of the state allows and above the tolerance: "
        "loosen rtol or atol, or use float64"
    ),
    Stall.RUNAWAY: (
        "the state grew far beyond its start, and its residual, if small, is small relative to the "
        "state: phi may have no fixed point, or I - J is singular (in an adjoint solve: the "
        "gradient does not exist); check that a fixed point exists, try another solver (Anderson, "
        "Newton), or start near it"
    ),
    Stall.GAVE_UP: (
        "the external solver ended before max_iter without meeting the tolerance: start "
        "elsewhere, or try another solver"
    ),
}


class ConvergenceError(RuntimeError):
    """Error of `Solution.check` when a sample has not reached its tolerance."""


class Trace(NamedTuple):
    """The course of a solve over its n updates; a sample that stopped repeats its last value.

    residual: scaled residual at the start and after each update, (n + 1, B).
    iterates: the states, (n + 1, B, D), where `record="iterates"` asked for them, else None.

    Example:
        >>> import torch
        >>> from fixpoint import Picard, solve
        >>> solution = solve(torch.cos, torch.zeros(1, 1), Picard(max_iter=3, record="iterates"))
        >>> solution.trace.residual.shape, solution.trace.iterates.shape
        (torch.Size([4, 1]), torch.Size([4, 1, 1]))
    """

    residual: Tensor
    iterates: Tensor | None = None


class ErrorEstimate(NamedTuple):
    """Distance of a state from the fixed point, and rate at which plain iteration would come there.

    error: estimate of rms(z - z*), (B,); inf where phi is known not to contract.
    rate: factor by which a plain update reduces the residual in the long run, (B,).
    """

    error: Tensor
    rate: Tensor

    def describe(self) -> str:
        """Return what the rates mean for the errors, in a sentence."""
        slow = self.rate >= SLOW
        if not bool(slow.any()):
            return f"no sample has a rate above {SLOW}: errors are of the size of residuals"
        largest = float(self.rate.max())
        times = "without bound" if largest >= 1 else f"{1 / (1 - largest):.0f} times"
        return (
            f"{int(slow.sum())} of {len(slow)} samples have a rate above {SLOW} (the largest is "
            f"{largest:.6g}): their error may exceed their residual {times}; lower rtol and atol "
            "to reduce it"
        )


@dataclass(frozen=True, eq=False)
class Solution:
    """The end of a solve; `(z, residual)` belong together.

    Attributes:
        z: state with the structure and shapes of z0.
        residual: rms(phi(z) - z) / (atol + rtol * rms(phi(z))) of this z, (B,): in units of the
            tolerance, converged where <= 1. A state that has run away from its start counts by
            the size it started from (`Stall.RUNAWAY`). With rtol = atol = 0 and `record` set,
            rms(phi(z) - z) / rms(phi(z)). None where nothing was measured.
        iterations: updates applied to each sample, (B,) int64.
        evaluations: calls of phi made for the whole batch.
        result: a `Result` a sample, (B,) int8.
        trace: `Trace` if recorded.
        products: Jacobian-vector products made for the whole batch, besides the evaluations; a
            Jacobian is D.
        stall: a `Stall` a sample, (B,) int8: why it is STALLED. None in a solve of fixed steps.
        solved_by: of `Auto`: the solver that solved each sample, None where none did.
        coupled: whether a sample that had converged ceased to be a solution when others moved, so
            that the batch was solved as a whole: rows of phi depend on each other, or phi does not
            repeat itself. `batched=False` says so from the start.
        atol_decides: whether atol is the larger part of the tolerance of each sample, (B,) bool:
            the state is then small relative to it. None where nothing was measured.
        aux: by-product of phi at z, where it returns one (`has_aux=True`); else None.
        start: of `multi_start`: the number of the start that each sample takes, (B,) int64.

    Example:
        >>> import torch
        >>> from fixpoint import Picard, solve
        >>> solution = solve(lambda z: 0.5 * z + 1, torch.zeros(2, 1), Picard(rtol=1e-3))
        >>> solution.iterations.tolist(), solution.evaluations, solution.converged.tolist()
        ([9, 9], 10, [True, True])
        >>> solution
        Solution(2 of 2 converged, 9 updates, 10 evaluations)
    """

    z: Tree
    residual: Tensor | None
    iterations: Tensor
    evaluations: int
    result: Tensor
    trace: Trace | None = None
    products: int = 0
    stall: Tensor | None = None
    solved_by: tuple[str | None, ...] | None = None
    coupled: bool = False
    atol_decides: Tensor | None = None
    aux: Any = None
    start: Tensor | None = None

    def __repr__(self) -> str:
        return f"Solution({self.describe()})"

    def describe(self) -> str:
        """Return how the samples ended and what it took, in a line."""
        counts = _counts(self.result, len(Result))
        parts = [
            f"{count} of {self.result.numel()} {_SHORT[code]}"
            for code, count in zip(Result, counts, strict=True)
            if count
        ]
        updates = int(self.iterations.max()) if self.iterations.numel() else 0
        parts += [_plural(updates, "update"), _plural(self.evaluations, "evaluation")]
        if self.products:
            parts.append(_plural(self.products, "product"))
        if self.coupled:
            parts.append("as one sample, since rows of phi depend on each other")
        return ", ".join(parts)

    @property
    def converged(self) -> Tensor:
        """True if each sample met its tolerance, or the test of `stop_when`, (B,) bool."""
        return (self.result == Result.CONVERGED.value) | (self.result == Result.ACCEPTED.value)

    def with_samples(self, z: Tree, choose: Callable[[Tensor], Tensor]) -> Solution:
        """Return the solution with state z and `choose` applied to each per-sample tensor."""

        def chosen(x: Tensor | None) -> Tensor | None:
            return None if x is None else choose(x)

        return replace(
            self,
            z=z,
            residual=chosen(self.residual),
            iterations=choose(self.iterations),
            result=choose(self.result),
            trace=None,
            stall=chosen(self.stall),
            solved_by=None,
            atol_decides=chosen(self.atol_decides),
        )

    def error_estimate(
        self,
        phi: Map,
        *,
        products: int = 8,
        batched: bool = True,
        groups: Tensor | None = None,
    ) -> ErrorEstimate:
        """Estimate the error of z, and the rate at which plain updates would converge.

        A small residual means a small error only where the rate, the size of J along its slowest
        direction, is well below 1. The error solves (I - J) e = phi(z) - z to first order; both
        come from the Krylov space of a few products, with difference quotients. It is not a bound:
        what lies outside the space is not seen, and where the error is large so is its curvature.
        Where phi does not contract the estimate is inf.

        Args:
            phi: the map that was solved.
            products: J times a vector, each one evaluation of phi.
            batched, groups: as for the solve.

        Example:
            >>> import torch
            >>> from fixpoint import Picard, solve
            >>> phi = lambda z: 0.999 * z + 0.001
            >>> solution = solve(phi, torch.zeros(1, 1).double(), Picard(max_iter=10000, rtol=1e-4))
            >>> estimate = solution.error_estimate(phi)
            >>> round(estimate.rate.item(), 4), round(estimate.error.item(), 3)
            (0.999, 0.002)
            >>> round(1 - solution.z.item(), 3)
            0.002
        """
        packing = Packing(self.z, batched=batched, groups=groups)
        packed, z = packing.wrap(phi), packing.pack(self.z)
        with torch.no_grad():
            error, rate = krylov_error(packed, z, products)
        size: float | Tensor = float(z.shape[1])
        if packing.groups is not None:
            size = torch.from_numpy(packing.groups.fill(packing.columns).sum(1)).to(error)
        return ErrorEstimate(error / size**0.5, rate)

    def check(self) -> Solution:
        """Return self, or say which samples failed and what to do.

        Samples of a solve with a fixed number of steps pass: they had no tolerance to meet. So do
        those that fell back to the sequential path: their states are right.

        Raises:
            ConvergenceError: a sample is MAX_ITER, STALLED, NONFINITE or STOPPED.
        """
        if bool(has_failed(self.result).any()):
            raise ConvergenceError(describe_failures(self.result, self.stall))
        return self


_SHORT = {
    Result.CONVERGED: "converged",
    Result.FIXED_STEPS: "after fixed steps",
    Result.MAX_ITER: "at max_iter",
    Result.STALLED: "stalled",
    Result.NONFINITE: "not finite",
    Result.FALLBACK: "solved step by step",
    Result.STOPPED: "stopped with the batch",
    Result.ACCEPTED: "accepted by stop_when",
}


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def has_failed(result: Tensor) -> Tensor:
    """Return which samples have a z that does not solve their problem, of the shape of `result`."""
    failed = (result > Result.FIXED_STEPS.value) & (result != Result.FALLBACK.value)
    return failed & (result != Result.ACCEPTED.value)


def describe_failures(result: Tensor, stall: Tensor | None = None) -> str:
    """Return counts and remedies of the samples that did not converge, in one sentence a kind."""
    parts = []
    for code in (Result.MAX_ITER, Result.STALLED, Result.NONFINITE, Result.STOPPED):
        if stall is not None and code == Result.STALLED:
            causes = _counts(stall, len(Stall))
            parts += [
                f"{causes[cause]} STALLED ({STALL_TEXT[cause]})"
                for cause in Stall
                if cause > 0 and causes[cause]
            ]
        elif count := _counts(result, len(Result))[code]:
            parts.append(f"{count} {code.name} ({RESULT_TEXT[code]})")
    failed = int(has_failed(result).sum())
    return f"{failed} of {result.numel()} samples did not converge: " + "; ".join(parts)


def _counts(codes: Tensor, kinds: int) -> list[int]:
    return torch.bincount(codes.long().flatten(), minlength=kinds).tolist()
