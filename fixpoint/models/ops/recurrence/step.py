"""The pointwise step of a recurrence and its pullback: all that one has of its own."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class Activation(NamedTuple):
    """The base of a `Step`: the code of sigma."""

    activation: int


class Step(Protocol):
    """An `Activation` with one step of a recurrence, on numbers or tensors alike.

    Written once in the functions of `pointwise`, it is compiled into the kernels, and called with
    tensors by the plain loop. What it takes and gives are tuples, also of one.

    Attributes:
        activation: code of sigma.
        states: states carried; the first one is multiplied.
        kept: values that the pullback needs besides the states before the step.
        products, drives: for each product and each drive, the place of its gradient in d.
    """

    activation: int
    states: int
    kept: int
    products: tuple[int, ...]
    drives: tuple[int, ...]

    def step(self, h: Any, p: Any, u: Any, b: Any, w: Any) -> tuple[Any, Any]:
        """Return the new states and what is kept, from states h, products p, drives u, biases b and
        scalars w."""

    def pullback(self, g: Any, h: Any, kept: Any, w: Any) -> tuple[Any, Any, Any, Any]:
        """Carry back gradients g of the new states: those of h besides its products, d of products
        and
        drives, those of the biases, and those of the scalars."""


def gradients_of(step: type) -> int:
    """Count how many gradients d the pullback gives."""
    return 1 + max(*step.products, *step.drives)  # type: ignore[attr-defined]
