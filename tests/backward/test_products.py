"""J v by two reverse passes, where forward mode has no rule."""

import pytest
import torch

from fixpoint import FixedPoint, Implicit, Newton, Picard


class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return torch.sin(z) / 2 if ctx.save_for_backward(z) is None else z

    @staticmethod
    def backward(ctx, g):
        (z,) = ctx.saved_tensors
        return g * torch.cos(z) / 2


def lstm_map(x):
    torch.manual_seed(0)
    lstm = torch.nn.LSTM(4, 4, batch_first=True)
    return lambda z: 0.5 * lstm(z)[0] + x


def attention_map(x):
    return lambda z: torch.nn.functional.scaled_dot_product_attention(z, z, 0.5 * z) + x


def function_map(x):
    return lambda z: Halve.apply(z) + x


@pytest.mark.parametrize("make", [lstm_map, attention_map, function_map])
def test_newton_krylov_takes_maps_without_forward_mode(make):
    x = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(1))
    phi = make(x.requires_grad_())
    options = {"rtol": 1e-6, "atol": 1e-7}
    found = []
    for solver in (Newton(linear="gmres", **options), Picard(max_iter=200, **options)):
        z = FixedPoint(solver, Implicit())(phi, torch.zeros(3, 2, 4)).check().z
        found.append((z.detach(), torch.autograd.grad(z.sum(), x)[0]))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-5)
