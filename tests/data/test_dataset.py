"""Dataset, drop_nonfinite, normalize."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.factories import D, N, T, make

from fixpoint.data import Dataset, drop_nonfinite, normalize

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
def test_inconsistent_datasets_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"y_train": [0, 1] * (N // 2)},
            r"toy: y_train must be a tensor, int64 \(50,\), .*got list",
        ),
        (
            {"y_test": np.arange(20) % 2},
            r"y_test must be .*got ndarray: give torch.as_tensor\(y_te",
        ),
        ({"groups_train": [0] * N}, "groups_train must be a tensor, int64"),
        ({"lengths_test": [T] * 20}, "lengths_test must be a tensor, int64"),
        (
            {"x_train": np.zeros((N, T, D))},
            r"x_train must be a tensor, float32 \(N, T.*got ndarray",
        ),
        ({"x_test": None}, r"x_test must be a tensor, float32 \(N, T, d\).*got NoneType"),
    ],
)
def test_what_is_not_a_tensor_is_named(changes, message):
    with pytest.raises(TypeError, match=message):
        make(**changes)


@pytest.mark.parametrize(("per", "over"), [("column", 0), ("channel", (0, 1))])
def test_normalize_gives_train_zero_mean_and_unit_population_sd(per, over):
    x = normalize(make(), per=per).x_train.double()
    # rounding to float32 of x, shift and quotient: a few units in the last place of |x| < 8
    torch.testing.assert_close(x.mean(over), torch.zeros_like(x.mean(over)), rtol=0, atol=32 * EPS)
    sd = x.std(over, correction=0)
    torch.testing.assert_close(sd, torch.ones_like(sd), rtol=0, atol=32 * EPS)


def test_column_is_the_default_and_channel_keeps_the_shape_in_time():
    data = make()
    ramp = replace(data, x_train=data.x_train + 10 * torch.arange(T).view(1, T, 1))
    assert torch.equal(normalize(ramp).x_train, normalize(ramp, per="column").x_train)
    slope = normalize(ramp).x_train.mean(0).diff(dim=0)
    assert slope.abs().max() < 32 * EPS
    slope = normalize(ramp, per="channel").x_train.mean(0).diff(dim=0)
    assert slope.min() > 0.3  # 10 over a s.d. of about 17.3


def test_normalize_applies_the_train_statistics_to_test():
    data = make()
    mean, std = data.x_train.double().mean(0), data.x_train.double().std(0, correction=0)
    expected = ((data.x_test - mean) / std).float()
    torch.testing.assert_close(normalize(data).x_test, expected, rtol=0, atol=32 * EPS)


@pytest.mark.parametrize("per", ["column", "channel"])
def test_test_windows_do_not_change_train(per):
    data = make()
    other = replace(data, x_test=1000 * data.x_test)
    assert torch.equal(normalize(data, per=per).x_train, normalize(other, per=per).x_train)


@pytest.mark.parametrize("value", [0.0, 0.1, 1234.5])
def test_a_constant_column_keeps_its_scale(value):
    data = make()
    data.x_train[:, 2, 1] = value
    data.x_test[:, 2, 1] = value + 1
    result = normalize(data)
    assert torch.equal(result.x_train[:, 2, 1], torch.zeros(N))
    # value + 1 is rounded to float32
    expected = torch.ones(20)
    torch.testing.assert_close(result.x_test[:, 2, 1], expected, rtol=0, atol=(value + 1) * EPS)


def test_statistics_are_summed_in_float64():
    data = make(x_train=10_000 + make().x_train.repeat(100, 1, 1), groups_train=None,
                y_train=torch.zeros(100 * N).long())  # fmt: skip
    result = normalize(data)
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
    assert torch.equal(normalize(dirty).x_train[keep], normalize(kept).x_train)
    assert normalize(dirty).x_test[:4].isfinite().all()


def test_normalize_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="per must be 'column', 'channel' or 'asinh', got"):
        normalize(make(), per="row")
    with pytest.raises(ValueError, match="at least one training window without NaN or inf"):
        normalize(make(x_train=torch.full((N, T, D), float("nan"))))
    with pytest.raises(ValueError, match="toy is normalized by asinh already"):
        normalize(normalize(small(), "asinh"))


def test_asinh_is_that_of_robust_units():
    """Against numpy in float64; an outlier in train changes nothing of the rest."""
    data = make()
    values = data.x_train.double().flatten(0, 1).numpy()
    # 300 values of each channel: torch's median is the lower of the two in the middle
    center = np.sort(values, 0)[149]
    spread = 1.4826 * np.sort(abs(values - center), 0)[149]
    for part in ("train", "test"):
        x = getattr(data, f"x_{part}")
        expected = torch.from_numpy(np.arcsinh((x.double().numpy() - center) / spread)).float()
        got = getattr(normalize(data, "asinh"), f"x_{part}")
        torch.testing.assert_close(got, expected, rtol=0, atol=16 * EPS)
    far = replace(data, x_train=data.x_train.clone())
    far.x_train[far.x_train == far.x_train.max()] = 1e6
    assert torch.equal(normalize(far, "asinh").x_test, normalize(data, "asinh").x_test)
    constant = normalize(make(x_train=torch.full((N, T, D), 0.1)), "asinh")
    assert torch.equal(constant.x_train, torch.zeros(N, T, D))


@pytest.mark.parametrize("per", ["column", "channel", "asinh"])
def test_late_normalization_keeps_stored_values(per):
    data = make(vectors=((2, 0, 1),))
    result, expected = normalize(data, per, late=True), normalize(data, per)
    for part in ("train", "test"):
        x = getattr(result, f"x_{part}")
        assert x is getattr(data, f"x_{part}")
        torch.testing.assert_close(
            result.inputs(x), getattr(expected, f"x_{part}"), rtol=0, atol=64 * EPS
        )
    # what was normalized channel by channel is not to be turned
    assert (result.vectors, expected.vectors) == (data.vectors, ())


@pytest.mark.parametrize("sensors", [(0, 1), (-1,)])
def test_each_vector_has_a_sensor(sensors):
    with pytest.raises(ValueError, match=r"toy: sensors must be a number >= 0 for each of 1 vec"):
        make(vectors=((0, 1, 2),), sensors=sensors)


@pytest.mark.parametrize(
    "image", [(6,), (2, 2), (1, 2, 3), (2.0, 3.0), (-2, -3), (True, 6), 6, "23"]
)
def test_an_image_has_as_many_pixels_as_time_steps(image):
    with pytest.raises(ValueError, match="toy: image must be rows and columns, 6 pixels for as"):
        make(image=image)
    lengths = {"lengths_train": torch.full((N,), T), "lengths_test": torch.full((20,), T)}
    with pytest.raises(ValueError, match="toy: an image has all pixels"):
        make(image=(2, 3), **lengths)


@pytest.mark.parametrize("image", [[2, 3], np.array([2, 3]), (np.int64(2), np.uint8(3))])
def test_the_size_of_an_image_is_kept_as_ints(image):
    found = make(image=image).image
    assert found == (2, 3)
    assert [type(found), *map(type, found)] == [tuple, int, int]


def test_images_with_rows_are_reshaped():
    x = torch.zeros(N, 8, 8)
    with pytest.raises(ValueError, match=r"x is \(50, 8, 8\): reshape x to \(N, 64, 1\)"):
        make(x_train=x, x_test=x[:20], image=(8, 8))


@pytest.mark.parametrize("vectors", [((0, 1),), ((0, 1, 3),), ((0, 1, 1),), ((0, 1, 2),) * 2])
def test_vectors_are_triples_of_channels(vectors):
    with pytest.raises(ValueError, match=r"toy: vectors must be triples of different .* 0\.\.2"):
        make(vectors=vectors)


def test_repr_is_one_short_line():
    assert repr(make()) == (
        "Dataset(toy: 50 train + 20 test windows of 6 steps x 3 channels, 2 classes)"
    )


def small(**changes):
    """The data of `make` as int16 steps of 0.01."""
    data = make()
    steps = {
        f"x_{part}": (getattr(data, f"x_{part}") * 100).round().to(torch.int16)
        for part in ("train", "test")
    }
    return replace(data, **steps, scale=torch.tensor(0.01), **changes)


def test_small_integers_become_values_in_batches():
    data = small(shift=torch.tensor([1.0, 2.0, 3.0]))
    expected = data.x_test.double() * 0.01 + torch.tensor([1.0, 2.0, 3.0])
    assert data.inputs(data.x_test).dtype == torch.float32
    torch.testing.assert_close(data.inputs(data.x_test).double(), expected, rtol=0, atol=32 * EPS)
    plain = make()
    assert plain.inputs(plain.x_test) is plain.x_test


@pytest.mark.parametrize("per", ["column", "channel", "asinh"])
def test_normalize_leaves_small_integers_small(per):
    data = small(shift=torch.tensor(0.5))
    result = normalize(data, per)
    assert result.x_train is data.x_train
    values = replace(data, scale=None, shift=None, **{
        f"x_{part}": data.inputs(getattr(data, f"x_{part}")) for part in ("train", "test")
    })  # fmt: skip
    expected = normalize(values, per)
    for part in ("train", "test"):
        x = getattr(result, f"x_{part}")
        torch.testing.assert_close(
            result.inputs(x), getattr(expected, f"x_{part}"), rtol=0, atol=64 * EPS
        )
    assert drop_nonfinite(data) == (data, 0)


def unequal():
    """The data of `make` with sequences of 1 to T steps, padded with zeros."""
    data = make()
    lengths = {f"lengths_{part}": 1 + torch.arange(len(getattr(data, f"y_{part}"))) % T
               for part in data.parts}  # fmt: skip
    padded = {
        f"x_{part}": getattr(data, f"x_{part}")
        * (torch.arange(T)[:, None] < lengths[f"lengths_{part}"].view(-1, 1, 1))
        for part in data.parts
    }
    return replace(data, **lengths, **padded)


@pytest.mark.parametrize("per", ["column", "channel", "asinh"])
def test_padding_has_no_part_in_the_statistics_and_is_zero(per):
    data = unequal()
    changed = replace(data, x_train=data.x_train.clone())
    real = torch.arange(T) < data.lengths_train[:, None]
    changed.x_train[~real] = 1e6
    result = normalize(data, per)
    assert torch.equal(result.x_train, normalize(changed, per).x_train)
    assert not result.x_train[~real].any()
    assert not result.x_test[torch.arange(T) >= data.lengths_test[:, None]].any()
    if per == "column":
        for t in range(T):
            column = result.x_train[real[:, t], t].double()
            torch.testing.assert_close(
                column.mean(0), torch.zeros(D).double(), rtol=0, atol=64 * EPS
            )
            one = torch.ones(D, dtype=torch.float64)
            torch.testing.assert_close(column.std(0, correction=0), one, rtol=0, atol=64 * EPS)
    if per == "channel":
        rows = result.x_train[real].double()
        one = torch.ones(D, dtype=torch.float64)
        torch.testing.assert_close(rows.std(0, correction=0), one, rtol=0, atol=64 * EPS)


def test_lengths_are_those_of_all_parts_and_within_the_steps():
    data = unequal()
    assert repr(data).endswith("windows of at most 6 steps x 3 channels, 2 classes)")
    with pytest.raises(ValueError, match="lengths are given of train only: give them of all parts"):
        replace(data, lengths_test=None)
    for wrong in (0, T + 1):
        lengths = data.lengths_train.clone()
        lengths[3] = wrong
        with pytest.raises(ValueError, match=r"lengths_train must lie in 1\.\.6, got"):
            replace(data, lengths_train=lengths)


@pytest.mark.parametrize("per", ["column", "channel"])
@pytest.mark.parametrize("unit", [1e-30, 1e-13, 1e-3, 1e20])
def test_normalize_does_not_depend_on_the_unit(per, unit):
    data = make()
    scaled = replace(data, x_train=data.x_train * unit, x_test=data.x_test * unit)
    result, expected = normalize(scaled, per), normalize(data, per)
    torch.testing.assert_close(result.x_train, expected.x_train, rtol=0, atol=64 * EPS)
    torch.testing.assert_close(result.x_test, expected.x_test, rtol=0, atol=64 * EPS)
    assert result.notes == ()


def test_what_differs_by_rounding_alone_counts_as_constant():
    data = make()
    data.x_train[:, 2, 1] = 1234.5
    data.x_train[::2, 2, 1] = torch.nextafter(torch.tensor(1234.5), torch.tensor(2e3))
    data.x_train[:, 4, 0] = 0.0
    result = normalize(data)
    assert result.notes == ("2 of 18 columns (time step, channel) are constant",)
    assert result.x_train[:, 2, 1].abs().max() < 2e-4  # not scaled to 1
    assert normalize(data, "channel").notes == ()
    flat = normalize(make(x_train=torch.ones(N, T, D)), "channel")
    assert flat.notes == ("3 of 3 channels are constant",)


def test_the_steps_of_small_integers_do_not_count_as_rounding():
    steps = torch.zeros(N, T, D, dtype=torch.int16)
    steps[0] = 1
    steps += 30_000
    data = make(x_train=steps, x_test=steps[:20])
    assert normalize(data).notes == ()
    x = normalize(data).inputs(steps)
    sd = x.double().std(0, correction=0)
    # float32 holds 30000 s.d. in units of 2^-8
    torch.testing.assert_close(sd, torch.ones_like(sd), rtol=0, atol=2**-6)


def test_asinh_of_a_channel_that_is_mostly_one_value_takes_the_sd():
    data = make()
    data.x_train[..., 1] = 0.0
    data.x_train[:10, 0, 1] = 3e-9
    result = normalize(data, "asinh")
    expected = np.arcsinh(1 / np.sqrt(10 / 300 * (1 - 10 / 300)))
    np.testing.assert_allclose(result.x_train[:10, 0, 1], expected, rtol=1e-6)
    assert result.notes == ()


def test_the_validation_part_is_normalized_too():
    data = make()
    whole = replace(data, x_valid=data.x_test, y_valid=data.y_test)
    result = normalize(whole)
    assert torch.equal(result.x_valid, result.x_test)
    assert torch.equal(result.x_train, normalize(data).x_train)


def texts(**changes):
    fields = {
        "name": "texts",
        "kind": "tokens",
        "x_train": torch.tensor([[1, 2, 0], [2, 2, 2]], dtype=torch.int16),
        "y_train": torch.tensor([0, 1]),
        "lengths_train": torch.tensor([2, 3]),
        "x_test": torch.tensor([[2, 0, 0]], dtype=torch.int16),
        "y_test": torch.tensor([1]),
        "lengths_test": torch.tensor([1]),
        "classes": ("a", "b"),
        "vocabulary": ("<pad>", "x", "y"),
        "license": "none",
        "citation": "none",
    }
    return Dataset(**(fields | changes))


def test_texts_and_streams():
    data = texts()
    assert data.inputs(data.x_train).dtype == torch.int64
    assert repr(data) == "Dataset(texts: 2 train + 1 test texts of at most 3 of 3 words, 2 classes)"
    stream = torch.tensor([0, 1, 2, 1])
    words = ("a", "b", "c")
    model = texts(kind="language-model", x_train=stream[:-1], y_train=stream[1:], classes=words,
                  x_test=stream[:-1], y_test=stream[1:], x_valid=stream[:1], y_valid=stream[1:2],
                  lengths_train=None, lengths_test=None, vocabulary=words,
                  subset="part")  # fmt: skip
    assert repr(model) == (
        "Dataset(texts (subset): 3 train + 1 valid + 3 test predictions of the next of 3 words)"
    )
    for data in (texts(), model):
        with pytest.raises(ValueError, match="texts holds tokens, which are not normalized"):
            normalize(data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "images"}, "kind must be one of classification, tokens, language-model, got"),
        ({"x_test": torch.zeros(1, 3)}, r"x_test must be integers \(N, T\), got torch.float32"),
        ({"lengths_test": None}, "x_test needs lengths_test too"),
        ({"lengths_train": torch.ones(3).long()}, r"lengths_train must be int64 \(2,\)"),
        ({"vocabulary": ("<pad>", "x")}, r"x_train must lie in 0\.\.1 for 2 words, got 0\.\.2"),
        ({"x_valid": torch.zeros(1, 3).short()}, "x_valid needs y_valid too"),
        ({"x_test": torch.zeros(1, 4).short()}, r"one \(T, d\), got \(3,\) and \(4,\)"),
    ],
)
def test_inconsistent_texts_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        texts(**changes)
