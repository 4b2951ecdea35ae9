"""Toy walks: their statistics."""

import pytest
import torch

from fixpoint.data import load_dataset
from fixpoint.data.sources.toy_walks import toy_walks


def test_sizes_of_toy_walks():
    data = load_dataset("toy-walks")
    assert data.x_train.shape == data.x_test.shape == (10_000, 100, 2)
    for y in (data.y_train, data.y_test):
        assert y.bincount().tolist() == [5000, 5000]


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize(("label", "variance"), [(0, 0.1), (1, 1.0)])
def test_steps_are_gaussian_of_that_variance(part, label, variance):
    data = toy_walks()
    x = getattr(data, f"x_{part}")[getattr(data, f"y_{part}") == label].double()
    steps = torch.cat([x[:, :1], x.diff(dim=1)], dim=1)  # the first starts at 0
    n = steps.numel()
    # five standard errors of mean, variance and kurtosis
    assert abs(steps.mean()) < 5 * (variance / n) ** 0.5
    assert abs(steps.var() / variance - 1) < 5 * (2 / n) ** 0.5
    assert abs((steps**4).mean() / variance**2 - 3) < 5 * (96 / n) ** 0.5
    assert abs((steps[..., 0] * steps[..., 1]).mean()) < 5 * variance * (2 / n) ** 0.5
    assert abs((steps[:, 1:] * steps[:, :-1]).mean()) < 5 * variance * (1 / n) ** 0.5
    # the variance of a walk grows by that of a step
    end = x[:, -1].var() / (100 * variance)
    assert abs(end - 1) < 5 * (2 / x[:, -1].numel()) ** 0.5


def test_a_seed_is_a_data_set_and_walks_are_their_own():
    one, same, other = toy_walks(walks=4), toy_walks(walks=4), toy_walks(walks=4, seed=1)
    assert torch.equal(one.x_train, same.x_train)
    assert not torch.equal(one.x_train, other.x_train)
    walks = torch.cat([one.x_train, one.x_test]).flatten(1)
    assert len(walks.unique(dim=0)) == 8
    assert not torch.allclose(one.x_train[2:], one.x_train[:2] * 10**0.5)


@pytest.mark.parametrize("size", [{"walks": 1}, {"steps": 0}])
def test_too_few_walks_or_steps_are_refused(size):
    with pytest.raises(ValueError, match="at least 2 walks of 1 step"):
        toy_walks(**size)
