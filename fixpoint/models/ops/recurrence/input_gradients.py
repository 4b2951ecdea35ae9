"""Gradients of the weights and inputs of a recurrence, one product each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fixpoint.models.ops.recurrence.arguments import Gradients, Operands


class InputGradients:
    """Sums over chunks of time; `needed` is a NamedTuple of bool, those of x and W are read."""

    def __init__(self, step: Any, operands: Operands, needed: Any) -> None:
        self.step, self.operands, h = step, operands, operands.start[0]
        G, n, d = len(operands.V), h.shape[1], operands.x.shape[2]
        self.x = torch.empty_like(operands.x) if needed.x else None
        # x^T d rather than d^T x, which is several times slower where there are few input features.
        self.Wt = None if operands.W is None else h.new_zeros(G, d, n)
        self.V, self.bias = torch.zeros_like(operands.V), h.new_zeros(len(operands.bias), n)

    def add(self, at: slice, D: tuple[Tensor, ...], S: Tensor, bias: Tensor) -> None:
        """Add the gradients of some time steps, from the gradients D of the pullback and the states
        S.
        """
        K, n = self.operands.K, S.shape[-1]
        self.bias += bias
        before = S[:-1].view(-1, n)
        for total, i in zip(self.V, self.step.products, strict=True):
            total.addmm_(D[i].view(-1, n).t(), before)
        drives = [D[i] if K == 1 else D[i].unflatten(0, (-1, K)).sum(1) for i in self.step.drives]
        if self.Wt is None:
            if self.x is not None:
                torch.cat(drives, 2, out=self.x[at])
            return
        inside = self.operands.x[at].flatten(0, 1)
        for total, d in zip(self.Wt, drives, strict=True):
            total.addmm_(inside.t(), d.view(-1, n))
        if self.x is not None and self.operands.W is not None:
            out = self.x[at].view(inside.shape)
            for k, (d, W) in enumerate(zip(drives, self.operands.W, strict=True)):
                torch.addmm(out, d.view(-1, n), W, beta=min(k, 1), out=out)

    def all(self, w: Tensor, start: tuple[Tensor, ...]) -> Gradients:
        """Return all gradients, with those of the scalars and of the first states."""
        x = self.operands.x[:0] if self.x is None else self.x
        W = None if self.Wt is None else self.Wt.mT.contiguous()
        return Gradients(x, W, self.bias, self.V, w, start)
