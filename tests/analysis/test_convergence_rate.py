"""Lemma 1's tau against the rate that was measured, and the condition along one solve."""

import numpy as np
import pytest
import torch

from fixpoint import Anderson, InexactNewton, Newton, Picard, solve
from fixpoint.analysis import contraction, convergence_rate, feasible_eta, iteration_profile

RNG = np.random.default_rng(0)
J = torch.from_numpy(RNG.normal(size=(5, 5)) / 4)
B = torch.from_numpy(RNG.normal(size=5))
START = torch.from_numpy(RNG.normal(size=(3, 5)))


def affine(z):
    return z @ J.T + B


def curved(z):
    return torch.tanh(z @ J.T + B)


def path(phi, solver, z0=START):
    return solve(phi, z0, solver).trace


def test_on_an_affine_map_rate_and_forcing_are_equal():
    """f(z_k) = F e_k, so r_k = (I + eta F) F e_k = F e_{k+1}: both are its growth."""
    trace = path(affine, InexactNewton(12, eta=0.6, learn=False, record="iterates"))
    speed = convergence_rate(trace, affine)
    F = J.numpy() - np.eye(5)
    star = np.linalg.solve(-F, B.numpy())
    e = trace.iterates.numpy() - star
    expected = np.linalg.norm(e @ F.T, axis=2)
    np.testing.assert_allclose(speed.error.numpy(), expected, rtol=1e-9)
    np.testing.assert_allclose(speed.forcing.numpy(), expected[1:] / expected[:-1], rtol=1e-9)
    np.testing.assert_allclose(speed.rate.numpy(), speed.forcing.numpy(), rtol=1e-9)
    np.testing.assert_allclose(speed.tau.numpy(), speed.forcing.numpy().max(0))


def test_forcing_is_below_the_norm_of_the_theorem():
    trace = path(curved, Picard(beta=0.7, max_iter=6, rtol=0, atol=0, record="iterates"))
    speed = convergence_rate(trace, curved)
    profile = iteration_profile(curved, trace, 0.7)
    assert profile.norm.shape == (1, 6, 3)
    assert (speed.forcing <= profile.norm[0] * (1 + 1e-12)).all()
    for k in range(6):
        z = trace.iterates[k]
        assert torch.equal(profile.norm[0, k], contraction(curved, z, 0.7))
        assert torch.equal(profile.upper[0, k], feasible_eta(curved, z).upper)


def test_near_the_solution_the_measured_rate_obeys_the_lemma():
    star = solve(curved, START, Newton(rtol=1e-14, atol=1e-14)).z
    z0 = star + 1e-4 * START
    trace = path(curved, Picard(beta=0.5, max_iter=8, rtol=0, atol=0, record="iterates"), z0)
    speed = convergence_rate(trace, curved)
    assert (speed.tau < 1).all()
    assert (speed.rate <= speed.tau * (1 + 1e-3)).all()  # the lemma allows any t > tau
    given = convergence_rate(trace, curved, z_star=star)
    np.testing.assert_allclose(given.rate.numpy(), speed.rate.numpy(), rtol=1e-6)


def test_newton_solves_its_linear_model():
    """The start is chosen so that every step is accepted at once."""
    trace = path(curved, Newton(rtol=1e-13, atol=0, record="iterates"), torch.zeros_like(START))
    speed = convergence_rate(trace, curved)
    assert speed.forcing[0].max() < 1e-12
    assert (speed.rate[0] < 0.5).all()
    assert (speed.rate[1] < speed.rate[0] ** 1.5).all()  # faster than linear


def test_samples_that_stopped_have_no_rate():
    start = torch.tensor([[0.0], [100.0]], dtype=torch.float64)
    trace = path(lambda z: 0.5 * z + 1, Anderson(rtol=1e-10, atol=0, record="iterates"), start)
    speed = convergence_rate(trace, lambda z: 0.5 * z + 1)
    still = (trace.iterates.diff(dim=0) == 0).all(2)
    assert torch.equal(speed.forcing.isnan(), still)
    assert torch.equal(speed.rate.isnan(), still)
    assert speed.tau.isfinite().all()


def test_a_start_that_is_solved_has_no_tau():
    trace = path(lambda z: 0 * z, Picard(max_iter=3, rtol=0, atol=0, record="iterates"), 0 * START)
    assert convergence_rate(trace, lambda z: 0 * z).tau.isnan().all()


def test_no_fixed_point_to_measure_from():
    solver = Picard(max_iter=3, rtol=0, atol=0, record="iterates")
    speed = convergence_rate(path(lambda z: z + 1, solver), lambda z: z + 1)
    assert speed.error.isnan().all()
    np.testing.assert_allclose(speed.forcing.numpy(), 1)  # f' = 0: the step changes nothing


def test_steps_of_their_own_for_each_update():
    solver = InexactNewton(2, timesteps=3, learn=False, record="iterates")
    solver.eta.copy_(torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, -0.6]]))
    trace = solve(curved, START, solver, t=2).trace
    profile = iteration_profile(curved, trace, solver.steps(2))
    np.testing.assert_allclose(profile.eta.numpy(), [[0.5, -0.6]], rtol=1e-6)
    assert (profile.norm[0, 0] < 1).all()
    assert (profile.norm[0, 1] > 1).all()


def test_traces_that_hold_nothing():
    for solver, words in (
        (Picard(record="residual"), 'solve with record="iterates"'),
        (Picard(), 'solve with record="iterates"'),
        (Picard(max_iter=0, record="iterates"), "made no updates"),
    ):
        for analyze in (
            lambda t: convergence_rate(t, curved),
            lambda t: iteration_profile(curved, t, 1.0),
        ):
            with pytest.raises(ValueError, match=words):
                analyze(path(curved, solver))
    trace = path(curved, Picard(max_iter=3, rtol=0, atol=0, record="iterates"))
    with pytest.raises(
        ValueError, match=r"eta must be a number or one an update, \(3,\); got \(2,\)"
    ):
        iteration_profile(curved, trace, torch.ones(2))
