"""`bound_spectral_norm`: exact, kept through training, and right derivatives of the weight."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils import parametrize

from fixpoint.models import bound_spectral_norm, normalize_weights


def norm(weight):
    return torch.linalg.matrix_norm(weight.detach().double().flatten(1), 2).item()


@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (3, 40), (40, 3), (120, 120)])
@pytest.mark.parametrize("bound", [0.5, 2.0])
def test_the_norm_is_the_bound(shape, bound):
    torch.manual_seed(0)
    linear = bound_spectral_norm(nn.Linear(shape[1], shape[0]), bound=bound)
    assert norm(linear.weight) == pytest.approx(bound, rel=1e-5)


def test_training_cannot_pass_the_bound():
    """Large steps that make singular values cross, looked at in both modes."""
    torch.manual_seed(0)
    linear = bound_spectral_norm(nn.Linear(16, 16), bound=0.8)
    optimizer = torch.optim.Adam(linear.parameters(), lr=0.1)
    for step in range(30):
        linear.train(step % 2 == 0)
        loss = -linear(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert norm(linear.weight) == pytest.approx(0.8, rel=1e-5)


def test_derivatives():
    torch.manual_seed(0)
    linear = bound_spectral_norm(nn.Linear(4, 3, bias=False).double(), bound=0.7)
    W = linear.parametrizations.weight.original.detach().clone().requires_grad_()

    def read(W):
        return linear.parametrizations.weight[0](W)

    assert gradcheck(read, W)
    assert gradgradcheck(read, W)


def test_other_names_convolutions_and_low_precision():
    conv = bound_spectral_norm(nn.Conv2d(2, 4, 3), bound=0.9)
    assert norm(conv.weight) == pytest.approx(0.9, rel=1e-5)
    rnn = bound_spectral_norm(nn.RNN(3, 5), "weight_hh_l0", bound=0.9)
    assert norm(rnn.weight_hh_l0) == pytest.approx(0.9, rel=1e-5)
    half = bound_spectral_norm(nn.Linear(8, 8), bound=0.9).bfloat16()
    assert half.weight.dtype == torch.bfloat16
    assert norm(half.weight) == pytest.approx(0.9, rel=2**-8)


def test_assignment_copy_state_dict_and_removal():
    torch.manual_seed(0)
    linear = bound_spectral_norm(nn.Linear(3, 3), bound=0.5)
    twin = bound_spectral_norm(nn.Linear(3, 3), bound=0.5)
    twin.load_state_dict(linear.state_dict())
    for other in (twin, copy.deepcopy(linear)):
        assert torch.equal(other.weight, linear.weight)
    linear.weight = torch.eye(3)
    torch.testing.assert_close(linear.weight, 0.5 * torch.eye(3))
    parametrize.remove_parametrizations(linear, "weight")
    torch.testing.assert_close(linear.weight.detach(), 0.5 * torch.eye(3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: bound_spectral_norm(nn.Linear(2, 2), bound=0.0),
            "bound must be a finite number > 0",
        ),
        (
            lambda: bound_spectral_norm(nn.Linear(2, 2), "wieght"),
            "no weight 'wieght'; it has weight, bias",
        ),
        (lambda: bound_spectral_norm(nn.ReLU()), "ReLU has no weight 'weight'; it has none"),
        (lambda: bound_spectral_norm(nn.Linear(2, 2), "bias"), "bias must have at least two axes"),
        (
            lambda: bound_spectral_norm(nn.utils.skip_init(nn.Linear, 2, 2).apply(zero)),
            "weight is zero",
        ),
    ],
)
def test_bad_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def zero(module):
    nn.init.zeros_(module.weight)


def test_all_weights_of_a_model_but_those_left_out():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Sequential(nn.Linear(8, 8)))
    head = nn.Sequential(model, nn.Linear(8, 2))
    before = head[1].weight.detach().clone()
    normalize_weights(head, bound=0.5, skip=("1",))
    for weight in (model[0].weight, model[2][0].weight):
        assert torch.linalg.matrix_norm(weight.flatten(1), 2).item() == pytest.approx(0.5)
    assert torch.equal(head[1].weight, before)


def test_weight_norm_over_a_model_keeps_the_weights():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    before = [layer.weight.detach().clone() for layer in model]
    normalize_weights(model, "weight")
    for layer, weight in zip(model, before, strict=True):
        assert torch.allclose(layer.weight, weight)
        assert nn.utils.parametrize.is_parametrized(layer, "weight")


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (nn.Linear(2, 2), {"kind": "l2"}, "unknown kind of norm 'l2'"),
        (nn.Sequential(nn.Linear(2, 2)), {"skip": ("head",)}, "unknown submodule 'head'"),
        (nn.Tanh(), {}, "no linear or convolutional layer"),
    ],
)
def test_what_cannot_be_normalized_is_named(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        normalize_weights(model, **arguments)


@pytest.mark.parametrize(("size", "expected"), [(0.0, 0.0), (0.3, 0.3), (0.9, 0.9), (5.0, 0.9)])
def test_a_bound_from_above_leaves_smaller_norms(size, expected):
    linear = torch.nn.Linear(3, 3).double()
    with torch.no_grad():
        linear.weight.copy_(size * torch.linalg.qr(torch.randn(3, 3).double())[0])
    bound_spectral_norm(linear, bound=0.9, only_above=True)
    norm = torch.linalg.matrix_norm(linear.weight, 2).item()
    assert norm == pytest.approx(expected, abs=1e-12)
    linear.weight.sum().backward()
    gradient = linear.parametrizations.weight.original.grad
    assert gradient.isfinite().all()
    if size < 0.9:  # below the bound W is the parameter itself
        assert torch.equal(gradient, torch.ones_like(gradient))
