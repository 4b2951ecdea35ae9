"""How little a new recurrence needs: the minimal gated unit, fused in some forty lines.

Specifies: fixpoint.models.ops.recurrence.step, arguments, autograd, numba_kernels, torch_kernels.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from fixpoint.models.ops.common.pointwise import SIGMOID, one_minus, sigma, slope
from fixpoint.models.ops.recurrence.arguments import Operands
from fixpoint.models.ops.recurrence.autograd import FusedRecurrence, Options
from fixpoint.models.ops.recurrence.step import Activation

pytestmark = pytest.mark.usefixtures("backend")


class MinimalGatedStep(Activation):
    """f = sigmoid(V_f h + u_f), c = sigma(f (V_c h) + u_c), h' = h + f (c - h)."""

    states, kept, products, drives = 1, 3, (0, 1), (0, 2)

    def step(self, h, p, u, b, w):
        f = sigma(SIGMOID, p[0] + (u[0] + b[0]))
        c = sigma(self.activation, f * p[1] + (u[1] + b[1]))
        return (h[0] + f * (c - h[0]),), (f, c, p[1])

    def pullback(self, g, h, kept, w):
        (x,), (f, c, p) = g, kept
        dc = slope(self.activation, x * f, c)
        df = slope(SIGMOID, x * (c - h[0]) + dc * p, f)
        return (x * one_minus(f),), (df, dc * f, dc), (df, dc), ()


class Inputs(NamedTuple):
    x: Tensor
    W: Tensor
    bias: Tensor
    V: Tensor
    h0: Tensor


class MinimalGatedUnit(FusedRecurrence[Inputs]):
    """Source: Zhou, Wu, Zhang, Zhou (2016), Minimal gated unit for recurrent neural networks."""

    name, reference_name, inputs, step = "mgu", "the reference", Inputs, MinimalGatedStep

    def operands(self, inputs):
        x, W, bias, V, h0 = inputs
        n = h0.shape[1]
        matrices = W.unflatten(0, (2, n)), V.unflatten(0, (2, n))
        return Operands(x, matrices[0], bias.view(2, n), matrices[1], (), 1, (h0,))

    def of_inputs(self, inputs, found):
        W, V = found.W.flatten(0, 1), found.V.flatten(0, 1)
        return Inputs(found.x, W, found.bias.flatten(), V, *found.start)


UNIT = MinimalGatedUnit()


def arguments(T, B, n, d, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = (T, B, d), (2 * n, d), (2 * n,), (2 * n, n), (B, n)
    return [
        (0.5 * torch.randn(shape, generator=draw, dtype=torch.float64)).requires_grad_()
        for shape in shapes
    ]


@pytest.mark.parametrize("size", [(1, 1, 1, 1), (5, 41, 17, 3)], ids=str)
@pytest.mark.parametrize("last_only", [False, True])
def test_equals_its_plain_loop(size, last_only):
    given, options = Inputs(*arguments(*size)), Options("tanh", last_only)
    for run in (UNIT, UNIT.reference):
        (output,) = run(given, options)
        found = [output, *torch.autograd.grad(output.sin().sum(), given)]
        if run is UNIT:
            fused = found
    for f, e in zip(fused, found, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-12, atol=1e-12)


def test_derivatives():
    def run(*values):
        return UNIT(Inputs(*values), Options("tanh", False))[0]

    assert gradcheck(run, arguments(3, 2, 3, 2))
    assert gradgradcheck(run, arguments(3, 2, 2, 2), fast_mode=True)
