"""Dataset, drop_nonfinite, normalise."""

from dataclasses import replace

import pytest
import torch
from making import D, N, T, make

from fixpoint.data import drop_nonfinite, normalise

EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": torch.zeros(N, T)}, r"x_train must be float32 \(N, T, d\)"),
        ({"x_test": torch.zeros(20, T, D).double()}, "x_test must be float32"),
        ({"x_test": torch.zeros(20, T, D + 1)}, r"one \(T, d\), got \(6, 3\) and \(6, 4\)"),
        ({"y_train": torch.zeros(N - 1).long()}, r"y_train must be int64 \(50,\)"),
        ({"y_test": torch.zeros(20)}, "y_test must be int64"),
        ({"groups_train": torch.zeros(3).long()}, "groups_train must be int64"),
        ({"y_test": torch.full((20,), 2)}, r"y_test must lie in 0\.\.1 for 2 classes, got 2\.\.2"),
        ({"y_train": torch.full((N,), -1)}, "y_train must lie in"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


@pytest.mark.parametrize(("per", "over"), [("column", 0), ("channel", (0, 1))])
def test_normalise_gives_train_zero_mean_and_unit_population_sd(per, over):
    x = normalise(make(), per=per).x_train.double()
    # rounding to float32 of x, shift and quotient: a few units in the last place of |x| < 8
    torch.testing.assert_close(x.mean(over), torch.zeros_like(x.mean(over)), rtol=0, atol=32 * EPS)
    sd = x.std(over, correction=0)
    torch.testing.assert_close(sd, torch.ones_like(sd), rtol=0, atol=32 * EPS)


def test_column_is_the_default_and_channel_keeps_the_shape_in_time():
    data = make()
    ramp = replace(data, x_train=data.x_train + 10 * torch.arange(T).view(1, T, 1))
    assert torch.equal(normalise(ramp).x_train, normalise(ramp, per="column").x_train)
    slope = normalise(ramp).x_train.mean(0).diff(dim=0)
    assert slope.abs().max() < 32 * EPS
    slope = normalise(ramp, per="channel").x_train.mean(0).diff(dim=0)
    assert slope.min() > 0.3  # 10 over a s.d. of about 17.3


def test_normalise_applies_the_train_statistics_to_test():
    data = make()
    mean, std = data.x_train.double().mean(0), data.x_train.double().std(0, correction=0)
    expected = ((data.x_test - mean) / std).float()
    torch.testing.assert_close(normalise(data).x_test, expected, rtol=0, atol=32 * EPS)


@pytest.mark.parametrize("per", ["column", "channel"])
def test_test_windows_do_not_change_train(per):
    data = make()
    other = replace(data, x_test=1000 * data.x_test)
    assert torch.equal(normalise(data, per=per).x_train, normalise(other, per=per).x_train)


@pytest.mark.parametrize("value", [0.0, 0.1, 1234.5])
def test_a_constant_column_keeps_its_scale(value):
    data = make()
    data.x_train[:, 2, 1] = value
    data.x_test[:, 2, 1] = value + 1
    result = normalise(data)
    assert torch.equal(result.x_train[:, 2, 1], torch.zeros(N))
    # value + 1 is rounded to float32
    expected = torch.ones(20)
    torch.testing.assert_close(result.x_test[:, 2, 1], expected, rtol=0, atol=(value + 1) * EPS)


def test_statistics_are_summed_in_float64():
    data = make(x_train=10_000 + make().x_train.repeat(100, 1, 1), groups_train=None,
                y_train=torch.zeros(100 * N).long())  # fmt: skip
    result = normalise(data)
    expected = data.x_train.double()
    expected = (expected - expected.mean(0)) / expected.std(0, correction=0)
    # the mean is rounded to float32, half a unit in the last place of 8192..16384; the s.d. is ~ 3
    torch.testing.assert_close(result.x_train.double(), expected, rtol=0, atol=2**-11 / 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_windows_that_are_not_finite(bad):
    data = make()
    dirty = replace(data, x_train=data.x_train.clone(), x_test=data.x_test.clone())
    dirty.x_train[[3, 7], 1, 2] = bad
    dirty.x_test[4, 0, 0] = bad
    keep = torch.tensor([i for i in range(N) if i not in (3, 7)])

    kept, dropped = drop_nonfinite(dirty)
    assert dropped == 2
    assert torch.equal(kept.x_train, data.x_train[keep])
    assert torch.equal(kept.y_train, data.y_train[keep])
    assert torch.equal(kept.groups_train, keep)
    assert kept.x_test is dirty.x_test  # test windows stay
    assert drop_nonfinite(data)[1] == 0
    assert drop_nonfinite(replace(dirty, groups_train=None))[0].groups_train is None

    # the statistics pass them by, dropped or not
    assert torch.equal(normalise(dirty).x_train[keep], normalise(kept).x_train)
    assert normalise(dirty).x_test[:4].isfinite().all()


def test_normalise_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="per must be 'column' or 'channel', got 'row'"):
        normalise(make(), per="row")
    with pytest.raises(ValueError, match="at least one training window without NaN or inf"):
        normalise(make(x_train=torch.full((N, T, D), float("nan"))))


def test_repr_is_one_short_line():
    assert repr(make()) == (
        "Dataset(toy: 50 train + 20 test windows of 6 steps x 3 channels, 2 classes)"
    )
