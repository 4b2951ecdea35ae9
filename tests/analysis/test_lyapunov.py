"""Exponents that have a closed form, and what they say of the parallel path."""

import math

import pytest
import torch

from fixpoint import Implicit, Picard, Result
from fixpoint.analysis import LyapunovExponent, lyapunov_exponent
from fixpoint.models import ERNN, EURNN, FastRNN


def test_a_linear_leaky_recurrence():
    """h' = (1 - eta) h + eta A h: log of the largest eigenvalue, here A = diag."""
    layer = ERNN(2, 3, nonlinearity="identity", max_iter=2, rank=1).double()
    with torch.no_grad():
        layer.map.U1.zero_()
        layer.map.V.copy_(torch.diag(torch.tensor([0.9, 0.2, -0.5])))
        layer.fixed_point.solver.eta.copy_(torch.tensor([0.5, 0.25]))
    found = lyapunov_exponent(layer, torch.randn(120, 2, 2, dtype=torch.float64))
    expected = math.log((1 - 0.5 * 0.1) * (1 - 0.25 * 0.1))
    torch.testing.assert_close(found.exponent, torch.full((2,), expected, dtype=torch.float64))
    assert found.growth.shape == (120, 2)
    assert "forgets" in found.sentence


def test_a_rotation_keeps_lengths():
    layer = EURNN(2, 4, bias=False).double()
    with torch.no_grad():
        found = lyapunov_exponent(layer, torch.randn(60, 2, 2, dtype=torch.float64))
    assert found.exponent.max() <= 1e-9


def test_against_finite_differences():
    torch.manual_seed(0)
    layer, x = FastRNN(3, 5).double(), torch.randn(80, 2, 3, dtype=torch.float64)
    with torch.no_grad():
        layer.l0.alpha.fill_(1.0)
        e = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).double()
        e /= e.norm(dim=1, keepdim=True)
        states, moved = layer(x)[0], layer(x, 1e-7 * e.unsqueeze(0))[0]
    expected = ((moved - states)[10].norm(dim=1) / 1e-7).log()
    torch.testing.assert_close(lyapunov_exponent(layer, x).growth[10], expected, rtol=1e-5, atol=0)


def test_a_joint_equilibrium():
    """h = u h + v h_prev + ..: the step is v / (1 - u)."""
    solver = Picard(rtol=1e-12, atol=1e-14)
    layer = ERNN(
        2, 1, map="linear", solver=solver, backward=Implicit(), implementation="reference"
    ).double()
    with torch.no_grad():
        layer.map.U.fill_(0.5)
        layer.map.V.fill_(0.3)
    found = lyapunov_exponent(layer, torch.randn(20, 2, 2, dtype=torch.float64))
    torch.testing.assert_close(found.exponent, torch.full_like(found.exponent, math.log(0.6)))


def test_chaos_is_positive_and_falls_back():
    torch.manual_seed(0)
    layer = FastRNN(3, 16, time="parallel", implementation="reference").double()
    with torch.no_grad():
        layer.l0.alpha.fill_(20.0)
        layer.l0.beta.fill_(-20.0)
        layer.l0.V.full.normal_(0, 1)
    x = 0.1 * torch.randn(120, 2, 3, dtype=torch.float64)
    found = lyapunov_exponent(layer, x)
    assert found.exponent.min() > 0
    assert "takes the sequential path" in found.sentence
    with pytest.warns(UserWarning, match="fell back"), torch.no_grad():
        layer(x)
    assert (layer.l0.time_solution.result == Result.FALLBACK).all()


def test_growth_along_some_windows_is_said_of_these():
    found = LyapunovExponent(torch.zeros(4, 2), torch.tensor([-0.4, 0.1]))
    assert "along some windows" in found.sentence
    assert "within 5 steps" in found._replace(exponent=torch.tensor([-0.2, -0.2])).sentence


def test_what_it_cannot_follow():
    with pytest.raises(TypeError, match="LSTM"):
        lyapunov_exponent(torch.nn.LSTM(2, 3), torch.randn(5, 1, 2))
    with pytest.raises(ValueError, match="directions"):
        lyapunov_exponent(FastRNN(2, 3, bidirectional=True), torch.randn(5, 1, 2))
