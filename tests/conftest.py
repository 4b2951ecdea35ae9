import functools
import os

import numpy as np
import pytest
from hypothesis import settings

from fixpoint.data import Dataset, load_dataset
from fixpoint.data.sources.har import read_har
from fixpoint.data.sources.sample import read_sample
from fixpoint.data.storage import folder

settings.register_profile("suite", deadline=None)  # no test depends on the speed of the machine
settings.load_profile("suite")


def pytest_configure(config):
    """The workers, which inherit the environment and share the cores, have one thread each."""
    if config.getoption("numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items):
    """Skip tests marked `gpu` where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def full_file(name):
    """Path of a file of the full data; without it the test is skipped."""
    path = folder() / name
    if not path.is_file():
        pytest.skip(f"needs the full data: {path} is not there (see FIXPOINT_DATA)")
    return path


@pytest.fixture(scope="session")
def full_har():
    """Arrays of the full har.npz."""
    return read_har(full_file("har.npz"))


@pytest.fixture(scope="session")
def full_path():
    return full_file


@pytest.fixture(scope="session")
def full():
    """Arrays of a file of the full data, not to be written."""

    @functools.cache
    def arrays(name):
        with np.load(full_file(name), allow_pickle=False) as archive:
            read = dict(archive)
        for array in read.values():
            array.flags.writeable = False
        return read

    return arrays


@pytest.fixture(scope="session")
def sample_arrays():
    return read_sample()


@pytest.fixture(scope="session")
def sample() -> Dataset:
    return load_dataset("har2-sample")
