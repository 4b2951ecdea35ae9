"""Gradients through time against finite differences, closed forms and NumPy."""

import numpy as np
import pytest
import torch
from torch import nn

from fixpoint import Anderson, Implicit, Picard
from fixpoint.analysis import gradient_norms, hidden_states, jacobian_spectrum
from fixpoint.models import ERNN, LastStateClassifier, SelfFeedbackMap


def sample(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layers():
    torch.manual_seed(0)
    ernn = ERNN(3, 4, max_iter=2, timesteps=6, nonlinearity="tanh")
    with torch.no_grad():
        ernn.fixed_point.solver.eta.copy_(0.3 + 0.1 * torch.randn(6, 2))
    solver = Anderson(rtol=1e-13, atol=0, max_iter=100)
    cell = SelfFeedbackMap(3, 4, bound=0.5).eval()
    solved = ERNN(3, 4, map=cell, solver=solver, backward=Implicit(Anderson(rtol=1e-13, atol=0)))
    return {
        "rnn": nn.RNN(3, 4),
        "two layers": nn.RNN(3, 4, num_layers=2),
        "batch first": nn.RNN(3, 4, batch_first=True),
        "lstm": nn.LSTM(3, 4),
        "gru": nn.GRU(3, 4),
        "ernn": ernn,
        "solved ernn": solved,
    }


EVERY = list(layers())


@pytest.fixture(params=EVERY)
def layer(request):
    return layers()[request.param].double()


def windows(layer, x):
    return x.transpose(0, 1) if getattr(layer, "batch_first", False) else x


def loss(h):
    return (h * torch.arange(1.0, 5.0)).sin().sum()


def test_states_are_those_of_the_layer(layer):
    x = sample(6, 5, 3)
    states = hidden_states(layer, windows(layer, x), batch_size=2)
    assert states.shape == (6, 5, 4)
    assert not states.requires_grad
    output = layer(windows(layer, x))[0]
    torch.testing.assert_close(states, windows(layer, output), rtol=1e-12, atol=1e-14)


def test_states_of_a_classifier_are_those_of_its_layer():
    model = LastStateClassifier(nn.RNN(3, 4, batch_first=True), 4, 2).double()
    x = sample(5, 6, 3)
    expected = model.layer(x)[0].transpose(0, 1)
    torch.testing.assert_close(hidden_states(model, x), expected.detach(), rtol=1e-13, atol=0)


def test_the_last_gradient_is_that_of_the_loss(layer):
    x = sample(6, 2, 3)
    h = hidden_states(layer, windows(layer, x))[-1].requires_grad_()
    (expected,) = torch.autograd.grad(loss(h), h)
    norms = gradient_norms(layer, windows(layer, x), loss)
    assert norms.shape == (6, 2)
    torch.testing.assert_close(norms[-1], expected.norm(dim=1), rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", ["rnn", "two layers", "gru", "lstm"])
def test_an_early_gradient_against_a_restart_of_the_layer(name):
    """Run the rest of the sequence from the state at t, and differentiate that."""
    layer, x, t = layers()[name].double(), sample(6, 2, 3), 2
    _, hx = layer(x[: t + 1])
    parts = hx if isinstance(hx, tuple) else (hx,)
    parts = tuple(p.detach().requires_grad_() for p in parts)
    output, _ = layer(x[t + 1 :], parts if len(parts) > 1 else parts[0])
    gradients = torch.autograd.grad(loss(output[-1]), parts)
    expected = sum(g.square().sum((0, 2)) for g in gradients).sqrt()
    norms = gradient_norms(layer, x, loss)
    torch.testing.assert_close(norms[t], expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", ["ernn", "solved ernn"])
def test_the_first_gradient_of_an_ernn_against_its_jacobian_by_finite_differences(name):
    """h_1 -> h_T with steps 2 .. T of the same eta, through an input that sets h_0."""
    layer, x = layers()[name].double(), sample(6, 1, 3)
    at, solve = layer.map.bind(x), layer.fixed_point

    def rest(h):
        with torch.no_grad():
            for t in range(1, 6):
                h = solve(at(t, h), h, t=t).z
        return h

    with torch.no_grad():
        h1 = solve(at(0, x.new_zeros(1, 4)), x.new_zeros(1, 4), t=0).z
    step = 1e-5
    units = step * torch.eye(4, dtype=torch.float64).unsqueeze(1)
    J = torch.cat([(rest(h1 + e) - rest(h1 - e)) / (2 * step) for e in units]).T
    values = jacobian_spectrum(layer, x, times=[0])
    np.testing.assert_allclose(values[0, 0].numpy(), np.linalg.svd(J)[1], rtol=1e-6, atol=1e-9)
    h = rest(h1).requires_grad_()
    (g,) = torch.autograd.grad(loss(h), h)
    given = gradient_norms(layer, x, loss)[0]
    torch.testing.assert_close(given, (g @ J).norm(dim=1), rtol=1e-6, atol=1e-9)


def test_spectrum_of_a_linear_layer_is_that_of_a_matrix_power():
    solver = Picard(rtol=1e-14, atol=0, max_iter=200)
    layer = ERNN(3, 4, map="linear", solver=solver).double()
    with torch.no_grad():
        layer.map.U.mul_(0.5)
    U, V = (w.detach().numpy() for w in (layer.map.U, layer.map.V))
    A = np.linalg.solve(np.eye(4) - U, V)
    given = jacobian_spectrum(layer, sample(6, 2, 3), times=[0, 3, 5])
    for row, t in zip(given, [0, 3, 5], strict=True):
        expected = np.linalg.svd(np.linalg.matrix_power(A, 5 - t))[1]
        np.testing.assert_allclose(row.numpy(), [expected] * 2, rtol=1e-6, atol=1e-12)


def test_spectrum_of_every_layer_bounds_its_gradients(layer):
    """|J^T g| <= sigma_1 |g|; at the last step J is the identity."""
    x = sample(6, 2, 3)
    values = jacobian_spectrum(layer, windows(layer, x))
    torch.testing.assert_close(values[-1], torch.ones_like(values[-1]))
    assert (values.diff(dim=2) <= 0).all()
    norms = gradient_norms(layer, windows(layer, x), loss)
    assert (norms <= values[:, :, 0] * norms[-1] * (1 + 1e-9)).all()


def test_a_bidirectional_layer_is_refused():
    for analyze in (lambda m, x: gradient_norms(m, x, loss), jacobian_spectrum):
        with pytest.raises(ValueError, match="bidirectional layer has no one state"):
            analyze(nn.RNN(3, 4, bidirectional=True), torch.zeros(2, 1, 3))


def test_no_gradient_is_left_in_the_layer(layer):
    x = windows(layer, sample(6, 2, 3))
    gradient_norms(layer, x, loss)
    jacobian_spectrum(layer, x)
    assert all(p.grad is None for p in layer.parameters())


def test_all_layers_of_an_ernn_count():
    torch.manual_seed(0)
    layer, x = ERNN(3, 5, num_layers=2, nonlinearity="tanh").double(), torch.randn(6, 2, 3).double()
    state, states = None, []
    for rows in x:
        y, state = layer.step(rows, state)
        states.append(state.hx)
    g = torch.autograd.grad(y.square().sum(), states[:-1])
    expected = torch.stack([part.transpose(0, 1).flatten(1).norm(dim=1) for part in g])
    given = gradient_norms(layer, x, lambda h: h.square().sum())
    torch.testing.assert_close(given[:-1], expected)
    torch.testing.assert_close(given[-1], 2 * y.norm(dim=1))
    assert jacobian_spectrum(layer, x, times=[0, 5]).shape == (2, 2, 10)
    torch.testing.assert_close(
        jacobian_spectrum(layer, x, times=[5]), torch.ones_like(x[:1, :, :1].expand(1, 2, 10))
    )
    with pytest.raises(ValueError, match="bidirectional"):
        gradient_norms(ERNN(3, 5, bidirectional=True).double(), x, torch.sum)
