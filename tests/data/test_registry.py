"""load_dataset."""

import subprocess
import sys

import pytest

from fixpoint.data import DATASETS, load_dataset


def test_each_data_set_carries_its_registered_name(full_har):
    for name in DATASETS:
        data = load_dataset(name)
        assert data.name == name
        assert data.licence
        assert data.citation


def test_an_unknown_name_lists_the_known_ones_and_the_nearest():
    with pytest.raises(
        ValueError, match=r"expected one of .*; did you mean 'har2-sample'\?"
    ) as error:
        load_dataset("har2_sample")
    assert all(name in str(error.value) for name in DATASETS)
    with pytest.raises(ValueError, match="unknown data set 'zzz'") as error:
        load_dataset("zzz")
    assert "did you mean" not in str(error.value)


def test_the_sample_needs_neither_pooch_nor_a_data_folder():
    code = (
        "import sys; sys.modules['pooch'] = None\n"
        "from fixpoint.data import load_dataset\n"
        "assert len(load_dataset('har2-sample').x_test) == 324"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"FIXPOINT_DATA": "/nowhere"})
