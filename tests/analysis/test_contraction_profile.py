"""The condition along a sequence, and the distance of each state from its equilibrium."""

import numpy as np
import pytest
import torch
from support import numpy_reference as reference

from fixpoint import Anderson, Implicit, InexactNewton, Picard
from fixpoint.analysis import contraction_profile, equilibrium_gap, feasible_eta, learned_eta
from fixpoint.models import ERNN, SelfFeedbackMap


def sample(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def jordan(T=5, K=2, *, nonlinearity="tanh", batch_first=False):
    torch.manual_seed(0)
    layer = ERNN(
        3,
        4,
        nonlinearity=nonlinearity,
        max_iter=K,
        timesteps=T,
        batch_first=batch_first,
    ).double()
    with torch.no_grad():
        layer.map.b.normal_()
        layer.fixed_point.solver.eta.copy_(0.4 + 0.3 * sample(T, K, seed=7))
    return layer


def direct_profile(layer, x):
    """Norm and interval at every (t, k, row), from the formula of the Jordan map in NumPy."""
    w = reference.weights(layer.map)
    eta = layer.fixed_point.solver.eta.detach().double().numpy()
    T, B = x.shape[:2]
    (K, one) = (eta.shape[1], np.eye(4))
    norm, upper = np.empty((T, K, B)), np.empty((T, K, B))
    for row in range(B):
        h = np.zeros(4)
        for t in range(T):
            for k in range(K):
                value = reference.phi("jordan", "tanh", w, h, None, x[t, row])
                F = np.diag(1 - value**2) @ (one + w["U"]) @ w["V"] - one
                norm[t, k, row] = np.linalg.svd(one + eta[t, k] * F, compute_uv=False)[0]
                S = -(F + F.T)
                assert np.linalg.eigvalsh(S)[0] > 0  # small weights: F is near -1
                upper[t, k, row] = (
                    1 / np.linalg.norm(F @ np.linalg.inv(np.linalg.cholesky(S)).T, 2) ** 2
                )
                h = h + eta[t, k] * (value - h)
    return norm, upper


@pytest.mark.parametrize("batch_first", [False, True])
def test_profile_of_two_steps_against_the_formula(batch_first):
    layer = jordan(batch_first=batch_first)
    x = sample(5, 3, 3)
    profile = contraction_profile(layer, x.transpose(0, 1) if batch_first else x)
    assert profile.t.tolist() == [0, 1, 2, 3, 4]
    assert profile.eta.shape == (5, 2)
    assert torch.equal(profile.eta, layer.fixed_point.solver.eta.detach())
    norm, upper = direct_profile(layer, x.numpy())
    assert profile.norm.shape == (5, 2, 3)
    np.testing.assert_allclose(profile.norm.numpy(), norm, rtol=1e-12)
    np.testing.assert_allclose(profile.upper.numpy(), upper, rtol=1e-12)
    assert not profile.lower.any()
    assert not profile.norm.requires_grad
    assert profile.fraction_holding == (norm < 1).mean()
    assert 0 < profile.fraction_holding < 1  # some of the steps above are negative or too large


def test_points_are_spread_over_the_whole_sequence():
    layer = jordan(T=101)
    profile = contraction_profile(layer, sample(101, 2, 3), points=5)
    assert profile.t.tolist() == [0, 25, 50, 75, 100]
    assert profile.norm.shape == (5, 2, 2)
    whole = contraction_profile(layer, sample(101, 2, 3), points=101)
    assert torch.equal(profile.norm, whole.norm[profile.t])
    assert torch.equal(profile.eta, whole.eta[profile.t])


def test_one_time_step():
    profile = contraction_profile(jordan(T=1), sample(1, 2, 3))
    assert profile.norm.shape == (1, 2, 2)


def test_a_tolerance_solver_is_looked_at_where_it_ended():
    torch.manual_seed(0)
    cell = SelfFeedbackMap(3, 4, bound=0.5).double().eval()
    solver = Anderson(rtol=1e-12, atol=0)
    layer = ERNN(3, 4, map=cell, solver=solver, backward=Implicit())
    x = sample(5, 3, 3)
    profile = contraction_profile(layer, x)
    assert profile.eta.tolist() == [[1.0]] * 5
    U = cell.U.detach().numpy()
    output = layer(x)[0].detach().numpy()
    for t in range(5):
        for row in range(3):
            # tanh' at the equilibrium is 1 - h^2.
            J = np.diag(1 - output[t, row] ** 2) @ U
            assert profile.norm[t, 0, row].item() == pytest.approx(np.linalg.norm(J, 2), rel=1e-9)
    assert profile.fraction_holding == 1.0


def test_a_fixed_number_of_damped_steps():
    layer = ERNN(3, 4, solver=Picard(beta=0.25, max_iter=3, rtol=0, atol=0)).double()
    newton = ERNN(3, 4, solver=InexactNewton(3, eta=0.25, learn=False)).double()
    newton.map.load_state_dict(layer.map.state_dict())
    x = sample(5, 2, 3)
    given, expected = contraction_profile(layer, x), contraction_profile(newton, x)
    assert given.eta.tolist() == [[0.25] * 3] * 5
    torch.testing.assert_close(given.norm, expected.norm, rtol=1e-13, atol=0)


def test_negative_steps_are_shown():
    layer = jordan()
    with torch.no_grad():
        layer.fixed_point.solver.eta.fill_(-0.2)
    profile = contraction_profile(layer, sample(5, 3, 3))
    assert (profile.eta < 0).all()
    assert (profile.norm > 1).all()
    assert profile.fraction_holding == 0.0


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_a_window_that_is_not_finite(nonlinearity):
    """It has no condition from its bad step on; its batch-mates keep theirs."""
    layer = jordan(nonlinearity=nonlinearity)
    x = sample(5, 3, 3)
    clean = contraction_profile(layer, x)
    bad = x.clone()
    bad[2, 1, 0] = torch.nan
    profile = contraction_profile(layer, bad)
    for given, expected in zip(profile[2:], clean[2:], strict=True):
        torch.testing.assert_close(
            given[:, :, [0, 2]], expected[:, :, [0, 2]], rtol=1e-12, atol=0, equal_nan=True
        )
        torch.testing.assert_close(
            given[:2, :, 1], expected[:2, :, 1], rtol=1e-12, atol=0, equal_nan=True
        )
        assert given[2:, :, 1].isnan().all()


# The distance from equilibrium.


def test_gap_is_its_definition(named_cell_of_the_table):
    name, cell = named_cell_of_the_table
    layer = ERNN(3, 4, map=cell, max_iter=2).double()
    x = sample(5, 3, 3)
    output = layer(x)[0].detach()
    gap = equilibrium_gap(cell, x, output)
    w = reference.weights(cell)
    expected = np.empty((5, 3))
    for row in range(3):
        past = np.zeros(4)
        for t in range(5):
            h = output[t, row].numpy()
            target = reference.phi(name, cell.nonlinearity, w, h, past, x[t, row].numpy())
            expected[t, row] = np.linalg.norm(target - h) / np.linalg.norm(target)
            past = h
    np.testing.assert_allclose(gap.numpy(), expected, rtol=1e-12)


@pytest.fixture(params=["jordan", "self-feedback", "identity-feedback", "linear"])
def named_cell_of_the_table(request):
    from fixpoint.models import MAPS

    torch.manual_seed(0)
    cell = MAPS[request.param](3, 4).double()
    torch.nn.init.normal_(cell.b)
    return request.param, cell


def test_gap_tells_an_equilibrium_from_a_leaky_integrator():
    torch.manual_seed(0)
    cell = SelfFeedbackMap(3, 4, bound=0.5).double().eval()
    x = sample(5, 3, 3)
    solved = ERNN(3, 4, map=cell, solver=Picard(rtol=1e-9, atol=0), backward=Implicit())
    assert (equilibrium_gap(cell, x, solved(x)[0].detach()) <= 1.001e-9).all()
    few = ERNN(3, 4, map=cell, max_iter=1)  # eta = 0.01
    assert (equilibrium_gap(cell, x, few.double()(x)[0].detach()) > 0.9).all()


def test_gap_of_a_dead_unit_that_rests_at_zero():
    """phi = 0 and h = 0 is an equilibrium: 0, not 0 / 0."""
    layer = ERNN(3, 4)
    with torch.no_grad():
        layer.map.b.fill_(-100.0)
    assert not equilibrium_gap(layer.map, torch.zeros(1, 2, 3), torch.zeros(1, 2, 4)).any()


def test_the_interval_of_the_profile_is_that_of_feasible_eta():
    layer = jordan(K=1)
    x = sample(5, 3, 3)
    profile = contraction_profile(layer, x)
    past = layer(x)[0].detach()[2]
    interval = feasible_eta(layer.map.bind(x)(3, past), past)
    torch.testing.assert_close(profile.upper[3, 0], interval.upper, rtol=1e-13, atol=0)
    torch.testing.assert_close(profile.lower[3, 0], interval.lower, rtol=1e-13, atol=0)


def test_a_solver_that_makes_no_updates():
    with pytest.raises(ValueError, match="makes no updates .max_iter=0., so there is no condition"):
        contraction_profile(ERNN(3, 4, max_iter=0), torch.zeros(2, 1, 3))


@pytest.mark.parametrize("timesteps", [None, 4])
def test_fewer_updates_than_eta_has(timesteps):
    layer = ERNN(3, 4, max_iter=5, timesteps=timesteps)
    fixed_point = layer.fixed_point
    fixed_point.solver = fixed_point.solver.with_options(max_iter=2)
    eta = learned_eta(layer)
    assert eta.shape == (timesteps or 1, 2)
    assert torch.equal(eta, torch.full_like(eta, 0.01))
