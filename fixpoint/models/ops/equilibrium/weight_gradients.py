"""Gradients of the weights of an equilibrium through time, one product each."""

from __future__ import annotations

import torch
from torch import Tensor

from fixpoint.models.ops.equilibrium.arguments import Inputs


class WeightGradients:
    """Sums over time of the gradients of V h_{t-1} + W x_t + bias with respect to its weights.

    dU, (n, n), is left to the caller. needed: an `Inputs` of bool; that of x may be left out.
    """

    def __init__(self, inputs: Inputs, S: Tensor, needed: Inputs) -> None:
        self.x, self.W, self.S = inputs.x, inputs.W, S
        self.dx = torch.empty_like(self.x) if needed.x else None
        self.dWt = torch.zeros_like(inputs.W.t())
        self.dV = torch.zeros_like(inputs.V)
        self.dU, self.dbias = torch.zeros_like(self.dV), inputs.V.new_zeros(len(inputs.V))

    def add(self, at: slice, D: Tensor) -> None:
        """Add the gradients of a chunk of time, with the gradient D of each time step in it."""
        rows, inside = D.flatten(0, 1), self.x[at].flatten(0, 1)
        self.dV.addmm_(rows.t(), self.S[at].flatten(0, 1))
        self.dWt.addmm_(inside.t(), rows)
        self.dbias += rows.sum(0)
        if self.dx is not None:
            torch.mm(rows, self.W, out=self.dx[at].view(inside.shape))

    def of_inputs(self, dh0: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients in the order of `Inputs`."""
        return self.dx, self.dWt.t(), self.dbias, self.dU, self.dV, dh0
