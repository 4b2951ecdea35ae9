"""The sentences say what the numbers say."""

import re

import pytest
import torch
from torch import nn

from fixpoint import Anderson, Implicit, Picard, Result
from fixpoint.analysis import ContractionProfile, contraction_profile, describe, diagnose
from fixpoint.analysis import equilibrium_gap as gap_of
from fixpoint.models import ERNN, LastStateClassifier, SelfFeedbackMap


def sample(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def jordan(T=20, K=1, **options):
    torch.manual_seed(0)
    return ERNN(3, 4, nonlinearity="tanh", max_iter=K, timesteps=T, **options)


def set_eta(layer, value):
    with torch.no_grad():
        layer.fixed_point.solver.eta.copy_(value)


def profile(norm, eta, lower, upper, t=None):
    """One window; rows are time steps, columns updates."""
    norm, eta, lower, upper = (
        torch.tensor(v, dtype=torch.float64) for v in (norm, eta, lower, upper)
    )
    t = torch.arange(len(norm)) if t is None else torch.tensor(t)
    return ContractionProfile(t, eta, *(v.unsqueeze(2) for v in (norm, lower, upper)))


NAN = float("nan")


def test_the_parts_are_those_of_the_single_functions():
    layer, x = jordan(), sample(20, 6, 3)
    given = diagnose(layer, x, points=5, windows=3)
    some = contraction_profile(layer, x[:, [0, 2, 5]], points=5)
    for part, expected in zip(given.profile, some, strict=True):
        assert torch.equal(part, expected)
    torch.testing.assert_close(given.gap, gap_of(layer.map, x, layer(x)[0]))
    assert (given.result == Result.FIXED_STEPS).all()
    assert (given.iterations == 1).all()
    assert str(given).splitlines() == list(given.sentences)


def test_a_layer_with_small_steps_integrates():
    given = diagnose(jordan(), sample(20, 6, 3)).sentences
    assert given[0] == "ERNN with JordanMap and InexactNewton, K = 1; 6 windows of 20 time steps."
    assert given[1] == (
        "The condition ||I + eta f'(h)|| < 1 holds at all of the (t, k, window) examined."
    )
    assert given[2] == "eta = 0.01; none is negative."
    assert given[3].startswith("The median state is 0.9")
    assert given[4] == "This layer integrates its input over time, it does not equilibrate."


def test_negative_steps_are_named():
    layer = jordan(K=2)
    eta = torch.full((20, 2), 0.1)
    eta[[0, 1, 2, 9], 0] = -0.05
    eta[19, 1] = -0.2
    set_eta(layer, eta)
    given = diagnose(layer, sample(20, 6, 3)).sentences
    assert "holds at 87.5 % of the (t, k, window)" in given[1]
    assert given[2] == (
        "It fails at t = 1..3, 10 for k = 1 and t = 20 for k = 2 (100 % of the windows) because "
        "eta < 0 and only positive ones satisfy it."
    )
    assert given[3] == (
        "eta lies between -0.2 and 0.1; 5 of 40 are negative, at t = 1..3, 10 for k = 1 and "
        "t = 20 for k = 2."
    )


def test_updates_that_fail_alike_are_named_together():
    layer = jordan(K=2)
    eta = torch.full((20, 2), 0.1)
    eta[4] = -0.05
    set_eta(layer, eta)
    assert "It fails at t = 5 for every k (100 %" in diagnose(layer, sample(20, 6, 3)).sentences[2]


def test_a_solved_layer_equilibrates():
    torch.manual_seed(0)
    cell = SelfFeedbackMap(3, 4, bound=0.5)
    layer = ERNN(3, 4, map=cell, solver=Anderson(rtol=1e-4, atol=0), backward=Implicit())
    model = LastStateClassifier(layer, 4, 2).train()
    given = diagnose(model, sample(20, 6, 3))
    assert "SelfFeedbackMap and Anderson, rtol = 0.0001" in given.sentences[0]
    assert given.sentences[1].startswith("The tolerance was reached in 100 % of the solves, by")
    assert given.sentences[-1] == "This layer equilibrates: its states solve h = phi(h)."
    assert model.training
    assert layer.training


@pytest.mark.filterwarnings("ignore::fixpoint.ConvergenceWarning")
def test_solves_that_failed_are_counted_with_their_remedy():
    cell = SelfFeedbackMap(3, 4, bound=0.9)
    solver = Picard(rtol=1e-6, atol=0, max_iter=3)
    layer = ERNN(3, 4, map=cell, solver=solver, backward=Implicit())
    given = diagnose(layer, sample(5, 2, 3)).sentences
    assert given[1] == "The tolerance was reached in 0 % of the solves, by 3.0 updates."
    assert given[2].startswith("10 solves ended as MAX_ITER: max_iter updates were not enough")


def test_a_few_larger_steps_equilibrate_in_part():
    layer = jordan(K=3)
    set_eta(layer, torch.full((20, 3), 0.6))
    given = diagnose(layer, sample(20, 6, 3))
    assert 0.01 < given.gap.median() < 0.3
    assert given.sentences[-1].startswith("This layer equilibrates in part")


def test_windows_that_are_not_finite():
    x = sample(20, 4, 3)
    x[3, 1, 0] = torch.nan
    given = diagnose(jordan(), x).sentences
    assert given[1] == "1 of 4 windows hold NaN or inf and are left out."
    assert "holds at all" in given[2]
    nothing = diagnose(jordan(), x * torch.nan).sentences
    assert "is unknown" in nothing[2]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (([[1.2]], [[0.5]], [[NAN]], [[NAN]]), "at t = 1 .* no eta satisfies it"),
        (([[1.2]], [[0.5]], [[-2.0]], [[0.0]]), "eta > 0 and only negative ones satisfy it"),
        (([[1.0]], [[0.0]], [[0.0]], [[2.0]]), "because eta is 0"),
        (([[1.2]], [[2.1]], [[0.0]], [[2.0]]), "because eta is too large"),
        (([[1.2]], [[-2.1]], [[-2.0]], [[0.0]]), "because eta is too far below 0"),
    ],
)
def test_every_reason(numbers, words):
    sentences = describe(profile(*numbers))
    assert "holds at none of" in sentences[0]
    assert re.search(words, sentences[1])
    assert len(sentences) == 3


def test_a_rare_failure_is_not_rounded_away():
    n = 100_000
    norm = [[0.5]] * (n - 1) + [[1.5]]
    sentences = describe(profile(norm, [[0.5]] * n, [[0.0]] * n, [[0.4]] * n))
    assert "holds at > 99.9 % of" in sentences[0]
    assert f"at t = {n} (100 % of the windows)" in sentences[1]


def test_time_steps_that_were_not_looked_at_do_not_break_a_range():
    sentences = describe(profile([[2.0]] * 3, [[-1.0]] * 3, [[0.0]] * 3, [[1.0]] * 3, [0, 50, 99]))
    assert "at t = 1..100 (100 % of the windows)" in sentences[1]
    many = [[2.0], [0.5]] * 10
    sentences = describe(profile(many, [[-1.0], [0.5]] * 10, [[0.0]] * 20, [[1.0]] * 20))
    assert "t = 1, 3, 5, 7, 9, 11, 13, and 3 more" in sentences[1]


def test_a_model_without_an_ernn():
    with pytest.raises(TypeError, match="diagnose is for an ERNN; got LSTM: pass an ERNN"):
        diagnose(nn.LSTM(3, 4), sample(2, 1, 3))
    with pytest.raises(ValueError, match="makes no updates"):
        diagnose(ERNN(3, 4, max_iter=0), sample(2, 1, 3))
