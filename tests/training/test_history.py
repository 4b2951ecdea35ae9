"""What is recorded of a training, parameter drift and discrimination, by their definitions."""

import numpy as np
import pytest
import torch
from torch import nn

from fixpoint.analysis import (
    class_distance_ratio,
    contraction_profile,
    discrimination,
    parameter_drift,
)
from fixpoint.models import ERNN, LastStateClassifier
from fixpoint.training.history import record_training


def problem(n=96):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 5, 2, generator=generator)
    return x, (x.sum((1, 2)) > 0).long()


def classifier(layer=None):
    torch.manual_seed(0)
    return LastStateClassifier(layer or nn.RNN(2, 4, batch_first=True), 4, 2)


def test_history_is_that_of_the_same_training_by_hand():
    x, y = problem()
    history = record_training(classifier(), x, y, epochs=2, batch_size=32, lr=0.02, seed=3)
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    order = torch.Generator().manual_seed(3)
    loss = [nn.functional.cross_entropy(model(x), y).item()]
    vectors = [nn.utils.parameters_to_vector(model.parameters()).detach().clone()]
    for _ in range(2):
        values = []
        for rows in torch.randperm(96, generator=order).split(32):
            optimizer.zero_grad()
            value = nn.functional.cross_entropy(model(x[rows]), y[rows])
            value.backward()
            optimizer.step()
            values.append(value.item())
        loss.append(np.mean(values))
        vectors.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    np.testing.assert_allclose(history.loss.numpy(), loss, rtol=1e-6)
    assert torch.equal(history.parameters, torch.stack(vectors))
    assert history.loss[-1] < history.loss[0]
    assert history.accuracy is None


def test_test_data_and_a_watch_are_looked_at_before_and_after_each_epoch():
    x, y = problem()
    calls = []
    model = classifier()
    history = record_training(
        model, x, y, test=(x[:50], y[:50]), epochs=2, watch=lambda m: calls.append(m) or len(calls)
    )
    assert history.watched == [1, 2, 3]
    assert history.test_loss.shape == history.accuracy.shape == (3,)
    right = (model(x[:50]).argmax(1) == y[:50]).double().mean()
    assert history.accuracy[-1].item() == pytest.approx(100 * right.item(), rel=1e-6)


def test_bad_data_are_named():
    x, y = problem()
    for given, name in (((x.numpy(), y), "x"), ((x, y.tolist()), "y")):
        with pytest.raises(TypeError, match=f"^{name} must be a tensor; got "):
            record_training(classifier(), *given)
    for wrong in (y.float(), y[:-1], y[:, None]):
        with pytest.raises(ValueError, match="^y must be a class, int64, for each of the 96 samp"):
            record_training(classifier(), x, wrong)
    with pytest.raises(ValueError, match="^test y must be a class"):
        record_training(classifier(), x, y, test=(x[:4], y))


def test_the_condition_over_training():
    x, y = problem()
    model = classifier(ERNN(2, 4, timesteps=5, batch_first=True))
    history = record_training(
        model, x, y, epochs=2, watch=lambda m: contraction_profile(m.layer, x[:3], points=2)
    )
    first, *_, last = (profile.norm for profile in history.watched)
    assert first.shape == (2, 1, 3)
    assert not torch.equal(first, last)


def test_a_clipped_gradient_moves_no_further():
    """One plain step of Adam hides the scale; its second moment remembers it."""
    x, y = problem()
    free = record_training(classifier(), x, y, epochs=2, batch_size=48)
    tight = record_training(classifier(), x, y, epochs=2, batch_size=48, clip=1e-3)
    assert not torch.equal(free.parameters, tight.parameters)


def test_drift_by_hand():
    parameters = torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 0.0], [0.0, 0.0]])
    drift = parameter_drift(parameters)
    assert drift.to_last.tolist() == [0, 5, 3, 0]
    assert drift.change.tolist() == [5, 4, 3]
    assert drift.size.item() == 0


# Discrimination.


def ratio_by_hand(h, y):
    pairs = [(i, j) for i in range(len(y)) for j in range(i)]
    distance = {p: np.linalg.norm(h[p[0]] - h[p[1]]) for p in pairs}
    intra = [np.mean([distance[p] for p in pairs if y[p[0]] == y[p[1]] == c]) for c in np.unique(y)]
    inter = np.mean([distance[p] for p in pairs if y[p[0]] != y[p[1]]])
    return np.mean(intra) / inter


def test_ratio_is_the_mean_over_pairs():
    states = torch.randn(3, 9, 4, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 0, 0, 0, 2, 2, 1, 1, 1])
    given = class_distance_ratio(states, y)
    expected = [ratio_by_hand(h, y.numpy()) for h in states.numpy().astype(float)]
    np.testing.assert_allclose(given.numpy(), expected, rtol=1e-12)


def test_known_ratios():
    y = torch.tensor([0, 1]).repeat(500)
    noise = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    apart = noise + 1e4 * y[:, None]
    states = torch.stack([noise, y[:, None] + 0 * noise, apart, 0 * noise])
    given = class_distance_ratio(states, y)
    # Over 1e6 pairs of 1000 points the mean is known to about 1/sqrt(1000).
    assert given[0].item() == pytest.approx(1, abs=0.03)
    assert given[1] == 0
    assert given[2] < 1e-3
    assert given[3].isnan()


def test_it_falls_over_time_for_a_layer_that_sums_up_its_class():
    y = torch.tensor([0, 1]).repeat(20)
    generator = torch.Generator().manual_seed(0)
    x = (y - 0.5)[:, None, None] + torch.randn(40, 30, 1, generator=generator)
    layer = nn.RNN(1, 1, nonlinearity="relu", batch_first=True)
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
        layer.weight_ih_l0.fill_(0.1)
        layer.weight_hh_l0.fill_(1.0)
        layer.bias_ih_l0.fill_(1.0)
    ratio = discrimination(layer, x, y)
    assert ratio.shape == (30,)
    assert ratio[-1] < 0.7 * ratio[0]
    assert torch.equal(ratio, discrimination(LastStateClassifier(layer, 1, 2), x, y))


@pytest.mark.parametrize("y", [[0, 0, 0], [0, 0, 1]])
def test_too_few_windows(y):
    with pytest.raises(ValueError, match="needs two classes of two windows each; got classes of"):
        class_distance_ratio(torch.zeros(2, 3, 1), torch.tensor(y))
