"""What happens when a solve does not converge."""

from __future__ import annotations

import warnings
from typing import Literal, get_args

from fixpoint._messages import unknown_name
from fixpoint.solution import Solution, describe_failures, has_failed

OnFailure = Literal["ignore", "warn", "raise"]


class ConvergenceWarning(UserWarning):
    """A solve did not converge for some samples; given once a layer."""


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

    def check(self, solution: Solution) -> None:
        """Act on the samples of a solution that failed."""
        if self.silent:
            return
        if self.on_failure == "raise":
            solution.check()
        elif bool(has_failed(solution.result).any()):
            self.silent = True
            failures = describe_failures(solution.result, solution.stall)
            warnings.warn(
                f"{self.what}: {failures}. Shown once per layer.",
                ConvergenceWarning,
                stacklevel=2,
            )
