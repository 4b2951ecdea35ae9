"""Samples whose solve does not converge: the message, and their part in gradients."""

from __future__ import annotations

import warnings
from typing import Literal, get_args

from torch import Tensor

from fixpoint._messages import unknown_name
from fixpoint._torch import has_values, is_readable, is_recorded, stored
from fixpoint.solution import (
    ConvergenceError,
    Result,
    Solution,
    Stall,
    describe_failures,
    has_failed,
)

OnFailure = Literal["ignore", "warn", "raise"]
FailedRows = Literal["zero", "keep", "phantom", "raise"]
"""The gradient of a sample whose solve failed.

"zero": none; "keep": as if it had converged; "phantom": that of one plain update from where it
ended; "raise": a `ConvergenceError`. A sample that is NONFINITE has none in any case.
"""


class ConvergenceWarning(UserWarning):
    """A solve did not converge for some samples; given once a layer."""


def checked_failed(failed: FailedRows) -> FailedRows:
    """Return the value of the option `failed`, if it is one."""
    if failed not in get_args(FailedRows):
        raise ValueError(unknown_name("failed", failed, get_args(FailedRows)))
    return failed


def some_failed(result: Tensor) -> bool:
    """Tell whether a sample has failed, in any instance that torch.func.vmap hides."""
    return has_values(result) and bool(has_failed(stored(result)).any())


def some_lost(solution: Solution) -> bool:
    """Tell whether a sample is NONFINITE; not looked for where no value can be read."""
    if not is_readable(solution.result):
        return False
    return bool((stored(solution.result) == Result.NONFINITE.value).any())


def unsafe_rows(solution: Solution) -> Tensor | None:
    """Return samples that failed where a derivative of phi may not be finite, (B,); None without.

    Those whose budget is spent, or that make no progress, ended where phi is as at any other state.
    """
    if is_recorded(solution.result) or not some_failed(solution.result):
        return None
    result, stall = solution.result, solution.stall
    safe = (result == Result.MAX_ITER.value) | (result == Result.STOPPED.value)
    if stall is not None:
        idle = (stall == Stall.NO_PROGRESS.value) | (stall == Stall.ROUNDING.value)
        safe = safe | ((result == Result.STALLED.value) & idle)
    unsafe = has_failed(result) & ~safe
    return unsafe if bool(stored(unsafe).any()) else None


class NonConvergenceHandler:
    """Ignores, warns once of, or raises at samples that did not converge.

    Args:
        what: the solve, as the message names it.
        on_failure: "ignore", "warn" or "raise"; the last two look at the result, which waits for
            the device.

    Raises:
        ValueError: another `on_failure`.
    """

    def __init__(self, what: str, on_failure: OnFailure) -> None:
        if on_failure not in get_args(OnFailure):
            raise ValueError(unknown_name("on_failure", on_failure, get_args(OnFailure)))
        self.what = what
        self.on_failure = on_failure
        self.silent = on_failure == "ignore"

    def check(self, solution: Solution, *, advice: str = "") -> None:
        """Act on the samples of a solution that failed.

        Args:
            advice: a further sentence for the message.
        """
        if not self.silent and some_failed(solution.result):
            self.report(solution, advice=advice)

    def report(self, solution: Solution, *, advice: str = "") -> None:
        """Act on a solution with samples that failed."""
        stall = None if solution.stall is None else stored(solution.stall)
        failures = describe_failures(stored(solution.result), stall)
        self.say(f"{failures}{'. ' if advice else ''}{advice}")

    def say(self, text: str) -> None:
        """Warn once, or raise."""
        if self.on_failure == "raise":
            raise ConvergenceError(f"{self.what}: {text}")
        if not self.silent:
            self.silent = True
            warnings.warn(
                f"{self.what}: {text}. Shown once per layer.", ConvergenceWarning, stacklevel=3
            )
