"""The cells against the paper's equations in NumPy, and the facts that are easy to get wrong."""

import numpy as np
import pytest
import torch
from support import numpy_reference as reference
from torch.nn.utils import parametrize

from fixpoint import Anderson, Implicit, InexactNewton, solve
from fixpoint.models import (
    ERNN,
    MAPS,
    IdentityFeedbackMap,
    JordanMap,
    LastStateClassifier,
    LinearMap,
    ManifoldMap,
    SelfFeedbackMap,
    model_size_kb,
    parameter_count,
)

EPS = 2.0**-52


def sample(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def expected_phi(name, cell, h, h_prev, x):
    rows = zip(h.numpy(), h_prev.numpy(), x.numpy(), strict=True)
    w = reference.weights(cell)
    return torch.from_numpy(
        np.stack([reference.phi(name, cell.nonlinearity, w, *row) for row in rows])
    )


def assert_rounding(given, expected, terms=50):
    """Equal up to the rounding of sums of a few `terms`."""
    torch.testing.assert_close(given, expected, rtol=terms * EPS, atol=terms * EPS)


def test_phi_is_the_formula(named_cell):
    name, cell = named_cell
    h, h_prev, x = sample(4, 5), sample(4, 5, seed=2), sample(4, 3, seed=3)
    assert_rounding(cell(h, h_prev, x), expected_phi(name, cell, h, h_prev, x))


def test_maps_of_a_sequence_are_phi_at_each_step(named_cell):
    name, cell = named_cell
    h, h_prev, x = sample(4, 5), sample(4, 5, seed=2), sample(3, 4, 3, seed=3)
    at = cell.bind(x)
    for t in (2, 0, 1):
        assert_rounding(at(t, h_prev)(h), expected_phi(name, cell, h, h_prev, x[t]))


@pytest.mark.parametrize("sigma", ["relu", "tanh", "sigmoid", "identity"])
@pytest.mark.parametrize("kind", [JordanMap, SelfFeedbackMap, IdentityFeedbackMap, ManifoldMap])
def test_every_nonlinearity(kind, sigma, make_ready):
    name = next(name for name, known in MAPS.items() if known is kind)
    cell = make_ready(kind(3, 5, nonlinearity=sigma))
    h, h_prev, x = sample(4, 5), sample(4, 5, seed=2), sample(4, 3, seed=3)
    assert_rounding(cell(h, h_prev, x), expected_phi(name, cell, h, h_prev, x))


@pytest.mark.parametrize(("name", "kind"), MAPS.items())
def test_without_bias(name, kind, make_ready):
    cell = make_ready(kind(3, 5, bias=False))
    assert "b" not in cell.state_dict()
    h, h_prev, x = sample(4, 5), sample(4, 5, seed=2), sample(4, 3, seed=3)
    assert_rounding(cell(h, h_prev, x), expected_phi(name, cell, h, h_prev, x))


def test_own_nonlinearities():
    assert JordanMap(2, 3).nonlinearity == "relu"
    assert SelfFeedbackMap(2, 3).nonlinearity == "tanh"
    assert IdentityFeedbackMap(2, 3).nonlinearity == "tanh"


@pytest.mark.parametrize("rank", [None, 1, 2, 7])
def test_jordan_recurrence(rank, make_ready):
    cell = make_ready(JordanMap(3, 5, rank=rank))
    x, h = sample(6, 4, 3), sample(4, 5, seed=2)
    A, W, b = cell.as_leaky_step()
    u = x @ W.mT + b
    w = reference.weights(cell)
    mixed = np.eye(5) + w["U"]
    assert_rounding(A, torch.from_numpy(mixed @ w["V"]))
    project = np.einsum("nd,tbd->tbn", w["W"], x.numpy()) + w["b"]
    assert_rounding(u, torch.from_numpy(np.einsum("mn,tbn->tbm", mixed, project)))
    expected = expected_phi("jordan", cell, h, torch.zeros_like(h), x[3])
    assert_rounding(torch.relu(h @ A.mT + u[3]), expected)


def test_a_jordan_map_of_rank_0_is_that_of_U_0():
    bare, full = JordanMap(3, 5, rank=0), JordanMap(3, 5, rank=2)
    assert sorted(name for name, _ in bare.named_parameters()) == ["V", "W", "b"]
    torch.manual_seed(0)
    with torch.no_grad():
        bare.b.normal_()
        full.load_state_dict(bare.state_dict(), strict=False)
        full.U1.zero_()
    h, x = torch.randn(4, 5), torch.randn(4, 3)
    expected = torch.relu(h @ bare.V.mT + x @ bare.W.mT + bare.b)
    for cell in (bare, full):
        torch.testing.assert_close(cell(h, h, x), expected)


def test_new_weights_are_normal_with_standard_deviation_a_tenth():
    torch.manual_seed(0)
    cell = JordanMap(100, 200, rank=100)
    for weight in (cell.U1, cell.U2, cell.V, cell.W):
        # s.d. of a sample s.d. is sigma / sqrt(2 N), of a mean sigma / sqrt(N); five of them
        count = weight.numel()
        assert weight.std().item() == pytest.approx(0.1, abs=0.5 / (2 * count) ** 0.5)
        assert abs(weight.mean().item()) < 0.5 / count**0.5
    assert not cell.b.any()


# The bound on ||U||_2.


def norm_of_U(cell):
    return float(np.linalg.norm(cell.U.detach().numpy(), 2))


def train_bounded(kind, steps=60):
    """A bounded cell trained to push its U up, and ||U||_2 as each forward pass saw it."""
    torch.manual_seed(0)
    cell = kind(3, 16, bound=0.8)
    layer = ERNN(3, 16, map=cell, solver=Anderson(), backward=Implicit())
    optimizer = torch.optim.Adam(cell.parameters(), lr=1e-2)
    seen = []
    for _ in range(steps):
        with parametrize.cached():
            output, _ = layer(torch.randn(4, 8, 3))
            seen.append(norm_of_U(cell))
        optimizer.zero_grad()
        (-output.square().mean()).backward()
        optimizer.step()
    return cell, seen


@pytest.mark.parametrize("kind", [SelfFeedbackMap, LinearMap, ManifoldMap])
@pytest.mark.parametrize("n", [1, 4, 16, 80])
def test_bound_holds_when_built(kind, n):
    for seed in range(5):
        torch.manual_seed(seed)
        cell = kind(3, n, bound=0.8).eval()
        assert norm_of_U(cell) <= 0.8 * (1 + 1e-3)


@pytest.mark.parametrize("kind", [SelfFeedbackMap, LinearMap])
def test_bound_holds_in_training(kind):
    _, seen = train_bounded(kind)
    assert max(seen) <= 0.8 * (1 + 1e-3)


@pytest.mark.parametrize("kind", [SelfFeedbackMap, LinearMap])
def test_bound_holds_in_evaluation_after_any_optimizer_step(kind):
    for steps in (1, 5, 20):
        cell, _ = train_bounded(kind, steps)
        assert norm_of_U(cell.eval()) <= 0.8 * (1 + 1e-3)


@pytest.mark.parametrize("sigma", ["relu", "tanh", "sigmoid", "identity"])
def test_a_bounded_cell_contracts(sigma, make_ready):
    torch.manual_seed(0)
    cell = make_ready(SelfFeedbackMap(3, 16, nonlinearity=sigma, bound=0.8))
    at = cell.bind(sample(1, 200, 3))(0, sample(200, 16, seed=2))
    a, b = 3 * sample(200, 16, seed=3), 3 * sample(200, 16, seed=4)
    with torch.no_grad():
        shrink = (at(a) - at(b)).norm(dim=1) / (a - b).norm(dim=1)
    assert shrink.max() <= 0.8 * (1 + 1e-3)
    # The bound is attained by the first singular vector, where sigma' = 1.
    if sigma == "identity":
        v = torch.linalg.svd(cell.U)[2][:1].detach()
        stretch = (at(a + v) - at(a)).norm(dim=1).detach()
        torch.testing.assert_close(stretch, torch.full_like(stretch, 0.8), rtol=1e-3, atol=0)


# The linear map's closed form.


def twin(cell, inverse):
    """A linear map with the same weights and another inverse."""
    other = LinearMap(cell.input_size, cell.hidden_size, inverse=inverse).double()
    other.load_state_dict(cell.state_dict())
    return other


def test_exact_is_the_equilibrium_of_the_linear_map(make_ready):
    torch.manual_seed(0)
    cell = make_ready(LinearMap(3, 5))
    h_prev, x = sample(4, 5), sample(1, 4, 3, seed=2)
    iterated = solve(cell.bind(x)(0, h_prev), h_prev, Anderson(rtol=1e-13, atol=0)).check().z
    exact = twin(cell, "exact").bind(x)(0, h_prev)(h_prev)
    # |z - z*| <= |residual| / (1 - ||U||), ||U|| < 0.6 here
    assert norm_of_U(cell) < 0.6
    torch.testing.assert_close(exact, iterated, rtol=0, atol=1e-12 * iterated.norm().item())


@pytest.mark.parametrize("inverse", ["exact", "neumann"])
def test_a_closed_form_does_not_depend_on_the_start(inverse, make_ready):
    cell = make_ready(LinearMap(3, 5, inverse=inverse))
    x, h_prev = sample(1, 4, 3), sample(4, 5, seed=2)
    at = cell.bind(x)(0, h_prev)
    assert torch.equal(at(sample(4, 5, seed=3)), at(torch.zeros(4, 5, dtype=torch.float64)))


def test_neumann_is_the_first_two_terms_of_the_exact_series(make_ready):
    """The error of I + U is U^2 + U^3 + ...: it falls by 4 when U is halved."""
    cell = make_ready(LinearMap(3, 5))
    x, h_prev = sample(1, 4, 3), sample(4, 5, seed=2)
    errors = []
    for scale in (0.02, 0.01):
        with torch.no_grad():
            cell.U.copy_(scale * sample(5, 5, seed=3))
            exact, neumann = (
                twin(cell, inverse).bind(x)(0, h_prev)(h_prev) for inverse in ("exact", "neumann")
            )
        errors.append((exact - neumann).norm().item())
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)


# Facts that are easy to get wrong.


def test_jordan_does_not_see_the_past(make_ready):
    cell = make_ready(JordanMap(3, 5))
    h, x = sample(4, 5), sample(4, 3, seed=2)
    assert torch.equal(cell(h, sample(4, 5, seed=3), x), cell(h, torch.zeros_like(h), x))
    assert not JordanMap.uses_previous_state
    for kind in (SelfFeedbackMap, IdentityFeedbackMap, LinearMap, ManifoldMap):
        other = make_ready(kind(3, 5))
        assert other.uses_previous_state
        assert not torch.equal(other(h, sample(4, 5, seed=3), x), other(h, torch.zeros_like(h), x))


def fast_rnn(w, x, alpha, beta):
    """c = relu(W x + V h + b), h = beta h + alpha c: FastRNN as published, one sample."""
    h = np.zeros(len(w["V"]))
    states = []
    for x_t in x:
        h = beta * h + alpha * np.maximum(w["W"] @ x_t + w["V"] @ h + w["b"], 0)
        states.append(h)
    return np.stack(states)


def without_feedback(timesteps, make_ready):
    layer = ERNN(3, 5, max_iter=1, timesteps=timesteps)
    make_ready(layer.map)
    with torch.no_grad():
        layer.map.U.zero_()
        layer.fixed_point.solver.eta.fill_(0.3)
    return layer.double()


def test_fast_rnn_is_jordan_with_one_step_and_no_feedback(make_ready):
    """If beta = 1 - alpha and eta is shared over time, and only then."""
    x = sample(12, 3)
    layer = without_feedback(None, make_ready)
    w = reference.weights(layer.map)
    eta = layer.fixed_point.solver.eta.item()
    output = layer(x)[0].detach()
    assert_rounding(output, torch.from_numpy(fast_rnn(w, x.numpy(), eta, 1 - eta)))
    other_beta = torch.from_numpy(fast_rnn(w, x.numpy(), eta, 0.9))
    assert (output - other_beta).abs().max() > 0.01

    own_steps = without_feedback(12, make_ready)
    own_steps.map.load_state_dict(layer.map.state_dict())
    assert_rounding(own_steps(x)[0].detach(), output)
    with torch.no_grad():
        own_steps.fixed_point.solver.eta[5] = 0.4
    moved = own_steps(x)[0].detach()
    assert_rounding(moved[:5], output[:5])
    assert (moved[5:] - output[5:]).abs().amax(1).min() > 1e-4


@pytest.mark.parametrize("K", [1, 2, 3])
def test_jordan_follows_the_inner_iterate(K, make_ready):
    """V h^(k-1), not V h_{t-1}: the same for K = 1, another state for K >= 2."""
    cell = make_ready(JordanMap(3, 5, nonlinearity="tanh"))
    layer = ERNN(3, 5, map=cell, solver=InexactNewton(K, eta=0.5)).double()
    x = sample(6, 3)
    w = reference.weights(cell)
    with_inner, with_past = [], []
    for states, inner in ((with_inner, True), (with_past, False)):
        h_prev = np.zeros(5)
        for x_t in x.numpy():
            h = h_prev
            for _ in range(K):
                seen = h if inner else h_prev
                project = w["V"] @ seen + w["W"] @ x_t + w["b"]
                h = h + 0.5 * (np.tanh((np.eye(5) + w["U"]) @ project) - h)
            states.append(h)
            h_prev = h
    output = layer(x)[0].detach()
    assert_rounding(output, torch.from_numpy(np.stack(with_inner)))
    difference = np.abs(output.numpy() - np.stack(with_past)).max()
    assert (difference < 1e-14) if K == 1 else (difference > 1e-3)


@pytest.mark.parametrize(("rank", "expected", "spread"), [(None, 0.85, 0.05), (8, 0.06, 0.01)])
def test_how_well_one_plus_u_inverts_at_80_units(rank, expected, spread):
    """Relative Frobenius error of I + U against (I - U)^-1: mean of 20 draws.

    For a full U it tends to n s^2 = 0.8, s the s.d. of a weight, as n grows.
    """
    errors = []
    for seed in range(20):
        torch.manual_seed(seed)
        cell = JordanMap(9, 80, rank=rank)
        # With V = 1, A = I + U.
        with torch.no_grad():
            cell.V.copy_(torch.eye(80))
            A = cell.as_leaky_step()[0].double().numpy()
        inverse = np.linalg.inv(2 * np.eye(80) - A)
        errors.append(np.linalg.norm(A - inverse) / np.linalg.norm(inverse))
    assert np.mean(errors) == pytest.approx(expected, abs=spread)


# Sizes.


@pytest.mark.parametrize(("n", "d"), [(5, 3), (80, 9), (1, 1)])
@pytest.mark.parametrize(("K", "T"), [(1, 128), (2, 128), (2, None)])
def test_parameter_count(n, d, K, T):
    steps = K * (T or 1)
    layer = ERNN(d, n, max_iter=K, timesteps=T)
    assert parameter_count(layer) == 2 * n**2 + n * d + n + steps
    layer = ERNN(d, n, max_iter=K, timesteps=T, rank=8)
    assert parameter_count(layer) == n**2 + 2 * n * 8 + n * d + n + steps
    for name in ("self-feedback", "linear"):
        layer = ERNN(d, n, map=name, max_iter=K, timesteps=T)
        assert parameter_count(layer) == 2 * n**2 + n * d + n + steps
    layer = ERNN(d, n, map="identity-feedback", max_iter=K, timesteps=T)
    assert parameter_count(layer) == n**2 + n * d + n + steps  # those of an RNN


def test_a_bound_adds_no_parameter():
    assert parameter_count(SelfFeedbackMap(3, 5, bound=0.8)) == parameter_count(
        SelfFeedbackMap(3, 5)
    )


@pytest.mark.parametrize(("K", "size"), [(1, 34.3), (2, 34.8)])
def test_model_size_on_har2(K, size):
    layer = ERNN(9, 80, rank=8, max_iter=K, timesteps=128, batch_first=True)
    model = LastStateClassifier(layer, 80, 2)
    assert round(model_size_kb(model), 1) == size


def test_embeddings_do_not_count_in_the_size():
    model = torch.nn.Sequential(torch.nn.Embedding(1000, 4), torch.nn.Linear(4, 64, bias=False))
    assert model_size_kb(model) == 1.0


def test_classifier_reads_the_last_state():
    torch.manual_seed(0)
    model = LastStateClassifier(ERNN(3, 5, batch_first=True), 5, 2)
    x = torch.randn(4, 6, 3)
    _, h_n = model.layer(x)
    expected = h_n[0] @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(x), expected)
    assert model(x).shape == (4, 2)


# What a user can get wrong.


@pytest.mark.parametrize("kind", MAPS.values())
def test_sizes_are_checked(kind):
    with pytest.raises(ValueError, match="input_size must be at least 1; got 0"):
        kind(0, 5)
    with pytest.raises(ValueError, match="hidden_size must be at least 1; got -1"):
        kind(3, -1)
    with pytest.raises(TypeError, match=r"hidden_size must be an integer; got 2\.5"):
        kind(3, 2.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: JordanMap(3, 5, nonlinearity="rely"),
            r"unknown nonlinearity 'rely': expected one of identity, relu, tanh, "
            r"sigmoid, quantTanh, quantSigm; did you "
            "mean 'relu'",
        ),
        (lambda: JordanMap(3, 5, rank=-1), "rank must be at least 0; got -1"),
        (lambda: SelfFeedbackMap(3, 5, bound=0.0), r"bound must be a finite number > 0; got 0\.0"),
        (lambda: LinearMap(3, 5, bound=-1.0), r"bound must be a finite number > 0; got -1\.0"),
        (
            lambda: LinearMap(3, 5, inverse="newman"),
            'inverse must be None, "exact" or "neumann"; got \'newman\'',
        ),
    ],
)
def test_bad_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_repr_says_what_a_cell_is():
    assert repr(JordanMap(3, 5, rank=2)) == "JordanMap(3, 5, nonlinearity='relu', rank=2)"
    assert "bound=0.8" in repr(SelfFeedbackMap(3, 5, bound=0.8))
    assert repr(LinearMap(3, 5, inverse="exact", bias=False)) == (
        "LinearMap(3, 5, nonlinearity='identity', bias=False, inverse='exact')"
    )
