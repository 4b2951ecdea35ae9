"""The bundled sample: what it holds, and that it is a part of the full data."""

import runpy
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch

from fixpoint.data.sources.har import HAR2_CLASS

SAMPLES = resources.files("fixpoint.data") / "samples"
SCRIPT = Path(__file__).parents[3] / "scripts" / "make_har2_sample.py"
PARTS = ["train", "test"]


def test_sizes_of_the_sample(sample):
    assert sample.x_train.shape == (756, 128, 9)
    assert sample.x_test.shape == (324, 128, 9)
    assert sample.x_train.dtype == torch.float32
    assert sample.x_train.is_contiguous()
    assert len(sample.classes) == 2
    assert sample.x_train.isfinite().all()


def test_file_is_small_and_its_terms_are_beside_it():
    with resources.as_file(SAMPLES / "har2_sample.npz") as path:
        assert path.stat().st_size <= 1_700_000
    terms = (SAMPLES / "LICENSE-har2.txt").read_text(encoding="utf-8")
    for needed in ("CC BY 4.0", "commercial use is prohibited", "ESANN", "10.24432/C54S4K"):
        assert needed in terms


def test_classes_activities_and_subjects_are_balanced(sample, sample_arrays):
    for part, y, groups in (
        ("train", sample.y_train, sample.groups_train),
        ("test", sample.y_test, sample.groups_test),
    ):
        assert y.bincount().tolist() == [len(y) // 2] * 2
        activity = torch.from_numpy(sample_arrays[f"y_{part}"]).long()
        cells, counts = torch.stack([groups, activity]).unique(dim=1, return_counts=True)
        assert cells.shape[1] == 6 * len(groups.unique())
        assert (counts == 6).all()
        assert torch.equal(torch.tensor(HAR2_CLASS)[activity], y)


def test_subjects_are_disjoint(sample):
    train, test = set(sample.groups_train.tolist()), set(sample.groups_test.tolist())
    assert (len(train), len(test)) == (21, 9)
    assert not train & test


@pytest.mark.parametrize("part", PARTS)
def test_windows_are_those_of_the_full_file(part, sample_arrays, full_har):
    rows = sample_arrays[f"row_{part}"]
    full = full_har[f"x_{part}"][rows]
    error = np.abs(sample_arrays[f"x_{part}"] - full)
    # half a step, and the product rounded to float32
    rounding = np.finfo(np.float32).eps * np.abs(full)
    assert (error <= sample_arrays["scale"] / 2 + rounding).all()
    for key in ("y", "y2", "subject"):
        np.testing.assert_array_equal(
            sample_arrays[f"{key}_{part}"], full_har[f"{key}_{part}"][rows]
        )


@pytest.mark.parametrize("part", PARTS)
def test_no_two_windows_overlap(part, sample_arrays):
    assert np.diff(sample_arrays[f"row_{part}"]).min() > 1


def test_script_makes_the_bundled_file(full_har):
    made = runpy.run_path(str(SCRIPT))["make_sample"](full_har)
    with (
        resources.as_file(SAMPLES / "har2_sample.npz") as path,
        np.load(path, allow_pickle=False) as bundled,
    ):
        assert set(made) == set(bundled.files)
        for key in made:
            np.testing.assert_array_equal(made[key], bundled[key])
