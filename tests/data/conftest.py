import pytest

from fixpoint.data import Dataset, load_dataset
from fixpoint.data.cache import folder
from fixpoint.data.har import read_har
from fixpoint.data.sample import read_sample


@pytest.fixture(scope="session")
def full_har():
    """Arrays of the full har.npz."""
    path = folder() / "har.npz"
    if not path.is_file():
        pytest.skip(f"needs the full data: {path} is not there (see FIXPOINT_DATA)")
    return read_har(path)


@pytest.fixture(scope="session")
def sample_arrays():
    return read_sample()


@pytest.fixture(scope="session")
def sample() -> Dataset:
    return load_dataset("har2-sample")
