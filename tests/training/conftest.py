from dataclasses import replace

import pytest

from fixpoint.data import load_dataset, normalise


@pytest.fixture(scope="session")
def tiny():
    """Every 4th window and 8th time step of the sample, normalised: 189 + 81 windows, T = 16."""
    data = normalise(load_dataset("har2-sample"))
    return replace(
        data,
        x_train=data.x_train[::4, ::8].contiguous(),
        y_train=data.y_train[::4],
        x_test=data.x_test[::4, ::8].contiguous(),
        y_test=data.y_test[::4],
        groups_train=None,
        groups_test=None,
    )
