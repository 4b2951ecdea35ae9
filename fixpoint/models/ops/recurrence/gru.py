"""The gated recurrent unit of torch.nn.GRU."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fixpoint.models.ops.common.pointwise import SIGMOID, one_minus, sigma, slope
from fixpoint.models.ops.recurrence.arguments import Gradients, Operands
from fixpoint.models.ops.recurrence.autograd import FusedRecurrence
from fixpoint.models.ops.recurrence.registered import register
from fixpoint.models.ops.recurrence.step import Activation


class GRUStep(Activation):
    """r, z = sigmoid(.), c = sigma(u_c + b_c + r (V_c h + b_p)), h' = c + z (h - c)."""

    states, kept, products, drives = 1, 4, (0, 1, 2), (0, 1, 3)

    def step(self, h: Any, p: Any, u: Any, b: Any, w: Any) -> Any:
        r = sigma(SIGMOID, p[0] + (u[0] + b[0]))
        z = sigma(SIGMOID, p[1] + (u[1] + b[1]))
        product = p[2] + b[3]
        c = sigma(self.activation, u[2] + b[2] + r * product)
        return (c + z * (h[0] - c),), (r, z, c, product)

    def pullback(self, g: Any, h: Any, kept: Any, w: Any) -> Any:
        (x,), (r, z, c, product) = g, kept
        dz = slope(SIGMOID, x * (h[0] - c), z)
        dc = slope(self.activation, x * one_minus(z), c)
        dr, dp = slope(SIGMOID, dc * product, r), dc * r
        return (x * z,), (dr, dz, dp, dc), (dr, dz, dc, dp), ()


class GRUInputs(NamedTuple):
    """x: (T, B, d); W: (3 n, d) and V: (3 n, n) of r, z, c; bias: (4 n,), the last of V_c h."""

    x: Tensor
    W: Tensor | None
    bias: Tensor | None
    V: Tensor
    h0: Tensor


class GRURecurrence(FusedRecurrence[GRUInputs]):
    """Recurrence of a GRU, with the weights of torch.nn.GRU."""

    name, reference_name, inputs, step = "gru", "the reference", GRUInputs, GRUStep

    def operands(self, inputs: GRUInputs) -> Operands:
        x, W, bias, V, h0 = inputs
        n = h0.shape[1]
        rows = h0.new_zeros(4, n) if bias is None else bias.view(4, n)
        matrices = None if W is None else W.unflatten(0, (-1, n))
        return Operands(x, matrices, rows, V.unflatten(0, (-1, n)), (), 1, (h0,))

    def of_inputs(self, inputs: GRUInputs, found: Gradients) -> GRUInputs:
        W = None if found.W is None else found.W.flatten(0, 1)
        return GRUInputs(found.x, W, found.bias.flatten(), found.V.flatten(0, 1), found.start[0])


GRU = GRURecurrence()
register(GRU)
