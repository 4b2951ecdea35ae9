"""The long short-term memory of torch.nn.LSTM."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fixpoint.models.ops.common.pointwise import SIGMOID, sigma, slope, zero_like
from fixpoint.models.ops.recurrence.arguments import Gradients, Operands
from fixpoint.models.ops.recurrence.autograd import FusedRecurrence
from fixpoint.models.ops.recurrence.registered import register
from fixpoint.models.ops.recurrence.step import Activation


class LSTMStep(Activation):
    """c' = f c + i a, h' = o sigma(c') with gates i, f, o and a = sigma(.)."""

    states, kept, products, drives = 2, 5, (0, 1, 2, 3), (0, 1, 2, 3)

    def step(self, h: Any, p: Any, u: Any, b: Any, w: Any) -> Any:
        i = sigma(SIGMOID, p[0] + (u[0] + b[0]))
        f = sigma(SIGMOID, p[1] + (u[1] + b[1]))
        a = sigma(self.activation, p[2] + (u[2] + b[2]))
        o = sigma(SIGMOID, p[3] + (u[3] + b[3]))
        c = f * h[1] + i * a
        y = sigma(self.activation, c)
        return (o * y, c), (i, f, a, o, y)

    def pullback(self, g: Any, h: Any, kept: Any, w: Any) -> Any:
        i, f, a, o, y = kept
        dc = g[1] + slope(self.activation, g[0] * o, y)
        d = (
            slope(SIGMOID, dc * a, i),
            slope(SIGMOID, dc * h[1], f),
            slope(self.activation, dc * i, a),
            slope(SIGMOID, g[0] * y, o),
        )
        return (zero_like(f), dc * f), d, d, ()


class LSTMInputs(NamedTuple):
    """x: (T, B, d); W: (4 n, d), bias: (4 n,), V: (4 n, n) of i, f, a, o; h0, c0: (B, n)."""

    x: Tensor
    W: Tensor | None
    bias: Tensor | None
    V: Tensor
    h0: Tensor
    c0: Tensor


class LSTMRecurrence(FusedRecurrence[LSTMInputs]):
    """Recurrence of an LSTM, with the weights of torch.nn.LSTM."""

    name, reference_name, inputs, step = "lstm", "the reference", LSTMInputs, LSTMStep

    def operands(self, inputs: LSTMInputs) -> Operands:
        x, W, bias, V, h0, c0 = inputs
        n = h0.shape[1]
        rows = h0.new_zeros(4, n) if bias is None else bias.view(4, n)
        matrices = None if W is None else W.unflatten(0, (-1, n))
        return Operands(x, matrices, rows, V.unflatten(0, (-1, n)), (), 1, (h0, c0))

    def of_inputs(self, inputs: LSTMInputs, found: Gradients) -> LSTMInputs:
        W = None if found.W is None else found.W.flatten(0, 1)
        return LSTMInputs(found.x, W, found.bias.flatten(), found.V.flatten(0, 1), *found.start)


LSTM = LSTMRecurrence()
register(LSTM)
