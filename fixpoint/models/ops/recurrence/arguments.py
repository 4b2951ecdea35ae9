"""The tensors of any recurrence, and the arguments of its two passes.

G products of the state with matrices V_g, as many drives u_g, K inner steps in each of T time
steps, M = T K of them. The state is a tuple; its first entry is multiplied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Operands(NamedTuple):
    """The tensors of a recurrence in the form of the kernels, x, bias and w contiguous.

    x: with W the input, (T, B, d), of u_g = x W_g^T, else the drives themselves, (T, B, G n).
    W: (G, n, d), or None. V: (G, n, n). bias: rows of n numbers that the step adds where it will.
    w: scalars of each inner step, (M,) each. K: inner steps in a time step.
    start: the states before the first step, (B, n) each.
    """

    x: Tensor
    W: Tensor | None
    bias: Tensor
    V: Tensor
    w: tuple[Tensor, ...]
    K: int
    start: tuple[Tensor, ...]

    def drives(self) -> list[Tensor]:
        """Return u_g, (T, B, n) each."""
        if self.W is None:
            return list(self.x.unflatten(2, (len(self.V), -1)).unbind(2))
        return [torch.nn.functional.linear(self.x, w) for w in self.W.unbind()]


class Gradients(NamedTuple):
    """Gradients of the tensors of `Operands`; w: (count, M). Those not asked for are 0."""

    x: Tensor
    W: Tensor | None
    bias: Tensor
    V: Tensor
    w: Tensor
    start: tuple[Tensor, ...]


class ForwardArguments(NamedTuple):
    """Arguments of a kernel that advances the states y in place by M inner steps.

    step: see `Step`. y: (B, n) each.
    S: of each state (M // every + 1, B, n); S[0] is the one before the first step, S[i] receives
        that after i * every inner steps. (0, B, n) to keep nothing.
    O: of each state (T, B, n), which receives those after each time step, or (0, B, n).
    kept: what the step keeps for its pullback, (M, B, n) each, or (0, B, n) to keep nothing.
    """

    step: Any
    operands: Operands
    y: tuple[Tensor, ...]
    S: tuple[Tensor, ...]
    O: tuple[Tensor, ...]
    kept: tuple[Tensor, ...]
    every: int


class BackwardArguments(NamedTuple):
    """Arguments of a kernel that carries g, the gradients of the last states, in place to the
    first.

    G: of each state (T, B, n), gradients after each time step, or (0, B, n) for none.
    w, K, V: as in `Operands`. S, kept: of the forward pass with every = 1.
    D: (M, B, n) each, receive the gradients d of the pullback.

    Returns those of w, (count, M), and of the bias, summed over rows and steps.
    """

    step: Any
    G: tuple[Tensor, ...]
    V: Tensor
    w: tuple[Tensor, ...]
    K: int
    biases: int
    g: tuple[Tensor, ...]
    S: tuple[Tensor, ...]
    kept: tuple[Tensor, ...]
    D: tuple[Tensor, ...]
