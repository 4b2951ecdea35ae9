"""DSA-19: its archive, and the full data where it is at hand."""

import numpy as np
import pytest
import torch
from support.factories import table, truncated, write_zip

from fixpoint.data import load_dataset, normalize
from fixpoint.data.sources import dsa

STEP = np.array(5 * ([0.01] * 3 + [0.002] * 3 + [0.0005] * 3))
KEYS = [(1, 1, 1), (1, 4, 60), (19, 5, 1), (2, 8, 3), (2, 1, 2)]  # activity, person, segment


@pytest.fixture
def segments():
    rng = np.random.default_rng(0)
    return {key: rng.normal(size=(125, 45)) * 1000 * STEP for key in KEYS}


def archive(path, segments):
    members = {
        f"data/a{a:02}/p{p}/s{s:02}.txt": table(values, delimiter=",")
        for (a, p, s), values in segments.items()
    }
    return write_zip(path, {"data/": b"", **members})


def test_segments_are_split_by_subject_and_rounded_to_steps(segments, tmp_path):
    arrays = dsa.parse([archive(tmp_path / "a.zip", segments)])
    order = {"train": [(1, 1, 1), (1, 4, 60), (2, 1, 2)], "test": [(2, 8, 3), (19, 5, 1)]}
    for part, keys in order.items():
        assert arrays[f"x_{part}"].dtype == np.int16
        for row, key in enumerate(keys):
            values = arrays[f"x_{part}"][row].T * arrays["scale"].astype(float)
            assert (np.abs(values - segments[key]) <= STEP * 0.50001).all()
        labels = zip(*(arrays[f"{k}_{part}"] for k in ("y", "subject", "segment")), strict=True)
        assert [(int(a) + 1, int(p), int(s)) for a, p, s in labels] == keys


@pytest.mark.parametrize("form", ["DATA/A{:02}/P{}/S{:02}.TXT", "data\\a{:02}\\p{}\\s{:02}.txt"])
def test_names_in_capitals_or_with_backslashes_and_folders(form, segments, tmp_path):
    expected = dsa.parse([archive(tmp_path / "a.zip", segments)])
    members = {form.format(*key): table(v, delimiter=",") for key, v in segments.items()}
    other = [write_zip(tmp_path / "b.zip", members)]
    if "/" in form:
        for name, data in members.items():
            (tmp_path / "c" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "c" / name).write_bytes(data)
        other.append(tmp_path / "c")
    for path in other:
        found = dsa.parse([path])
        assert found.keys() == expected.keys()
        for key, array in expected.items():
            np.testing.assert_array_equal(found[key], array)


def test_a_small_archive_is_not_the_whole_data(segments, tmp_path):
    with pytest.raises(ValueError, match=r"x_train must be int16 \(4560, 45, 125\), got"):
        dsa.SOURCE.make([archive(tmp_path / "a.zip", segments)])


def test_the_counts_are_those_of_the_whole_data():
    arrays = {"scale": STEP.astype(np.float32)}
    for part in ("train", "test"):
        arrays[f"x_{part}"] = np.zeros((4560, 45, 125), np.int16)
        arrays[f"y_{part}"] = (np.arange(4560) % 19).astype(np.uint8)
        arrays[f"subject_{part}"] = np.ones(4560, np.uint8)
    dsa.verify(arrays)
    with pytest.raises(ValueError, match="the classes of y_test must have"):
        dsa.verify({**arrays, "y_test": arrays["y_test"].clip(1)})


DAMAGE = {
    "lines": (lambda v: v[:-1], "s03.txt must have 125 lines, got 124"),
    "sensor": (lambda v: v[:, :-1], "must have 45 numbers a line, got 44"),
    "NaN": (lambda v: np.where(np.arange(125)[:, None] == 3, np.nan, v), "first in line 4"),
    "range": (lambda v: v + 1e4, "which no sensor of this data set reads"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_wrong_segment_is_named(segments, tmp_path, name):
    damage, message = DAMAGE[name]
    segments[2, 8, 3] = damage(segments[2, 8, 3])
    with pytest.raises(ValueError, match=message) as error:
        dsa.SOURCE.make([archive(tmp_path / "a.zip", segments)])
    assert "\n" not in str(error.value)


def test_another_or_a_truncated_archive(segments, tmp_path):
    with pytest.raises(ValueError, match="has no segment of the train subjects 1 to 4"):
        dsa.SOURCE.make([write_zip(tmp_path / "b.zip", {"readme.txt": b""})])
    with pytest.raises(ValueError, match="is truncated or corrupt"):
        dsa.SOURCE.make([truncated(archive(tmp_path / "a.zip", segments))])


def test_the_full_data_of_dsa(full_path):
    full_path("dsa.npz")
    data = load_dataset("dsa19")
    assert data.x_train.shape == data.x_test.shape == (4560, 125, 45)
    assert data.x_train.dtype == torch.int16  # 51 MB, not 103
    assert data.y_train.bincount().tolist() == [240] * 19
    assert set(data.groups_train.tolist()) == {1, 2, 3, 4}
    assert set(data.groups_test.tolist()) == {5, 6, 7, 8}
    first = data.inputs(data.x_train[:1])[0, 0, :3]  # of the file a01/p1/s01.txt
    assert first.tolist() == pytest.approx([8.1305, 1.0349, 5.4217], abs=0.005)
    expected = data.x_train[7].double().numpy() * STEP
    np.testing.assert_allclose(data.inputs(data.x_train[7:8])[0], expected, rtol=1e-6)

    scaled = normalize(data)
    assert scaled.x_train is data.x_train
    x = scaled.inputs(scaled.x_train)[:, ::5].double()
    assert x.mean(0).abs().max() < 1e-4
    assert (x.std(0, correction=0) - 1).abs().max() < 1e-4


def test_a_sensor_has_three_vectors_of_three_axes():
    for (x, y, z), sensor in zip(dsa.VECTORS, dsa.SENSORS, strict=True):
        names = [dsa.CHANNELS[channel] for channel in (x, y, z)]
        assert [name.split("_")[1][0] for name in names] == ["x", "y", "z"]
        assert {name.split("_")[0] for name in names} == {("T", "RA", "LA", "RL", "LL")[sensor]}
        assert len({name.split("_")[1][1:] for name in names}) == 1
