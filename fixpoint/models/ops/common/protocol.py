"""The interface of a kernel module: numba, plain torch and Triton implement the same two passes."""

from __future__ import annotations

from typing import Protocol, TypeVar

Forward = TypeVar("Forward", contravariant=True)
Backward = TypeVar("Backward", contravariant=True)
Sums = TypeVar("Sums", covariant=True)


class Backend(Protocol[Forward, Backward, Sums]):
    """A module with the forward and the backward pass of one recurrence.

    Each takes one NamedTuple and writes into its output tensors; see `ops/*/arguments.py`.
    """

    def forward(self, arguments: Forward, /) -> None:
        """Advance the state through all time steps."""

    def backward(self, arguments: Backward, /) -> Sums:
        """Carry the gradient of the last state to the first; return the sums over all rows."""
