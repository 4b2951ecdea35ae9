"""The full HAR data, where it is at hand."""

import numpy as np
import pytest
import torch

from fixpoint.data import load_dataset
from fixpoint.data.sources import har


def test_har2_has_the_official_windows(full_har):
    data = load_dataset("har2")
    for part, windows in (("train", 7352), ("test", 2947)):
        x = getattr(data, f"x_{part}")
        assert x.shape == (windows, 128, 9)
        assert np.array_equal(x.numpy(), full_har[f"x_{part}"])
    assert data.y_train.bincount().tolist() == [3586, 3766]
    assert data.y_test.bincount().tolist() == [1448, 1499]
    assert not set(data.groups_train.tolist()) & set(data.groups_test.tolist())
    assert set(torch.cat([data.groups_train, data.groups_test]).tolist()) == set(range(1, 31))


def test_har6_has_the_rows_of_har2(full_har):
    two, six = load_dataset("har2"), load_dataset("har6")
    assert six.y_train.bincount().tolist() == [1226, 1073, 986, 1286, 1374, 1407]
    assert six.y_test.bincount().tolist() == [496, 471, 420, 491, 532, 537]
    assert torch.equal(six.x_test, two.x_test)
    merged = torch.tensor(har.HAR2_CLASS)
    assert torch.equal(merged[six.y_train], two.y_train)
    assert torch.equal(merged[six.y_test], two.y_test)


def test_class_names_say_which_activities_are_merged():
    for name, merged in zip(har.ACTIVITIES, har.HAR2_CLASS, strict=True):
        assert name in har.HAR2_CLASSES[merged].split("|")
        assert name not in har.HAR2_CLASSES[1 - merged].split("|")


def test_standing_still_weighs_one_g(full_har):
    standing = full_har["x_train"][full_har["y_train"] == har.ACTIVITIES.index("standing")]
    total = standing[..., [har.CHANNELS.index(f"total_acc_{axis}") for axis in "xyz"]]
    assert np.linalg.norm(total.mean((0, 1))) == pytest.approx(1, abs=0.05)


def test_labels_in_another_order_are_refused(full_har, tmp_path):
    arrays = dict(full_har)
    arrays["y_test"] = 5 - arrays["y_test"]
    np.savez(tmp_path / "har.npz", **arrays)
    with pytest.raises(ValueError, match="classes of y_test must have"):
        har.read_har(tmp_path / "har.npz")


def test_missing_file_names_the_official_address(monkeypatch, tmp_path):
    monkeypatch.setenv("FIXPOINT_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"har\.npz was expected in .*") as error:
        load_dataset("har2")
    assert har.URL in str(error.value)
