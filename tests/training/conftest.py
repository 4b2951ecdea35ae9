import signal
from dataclasses import replace

import pytest
import torch

from fixpoint.data import Dataset, load_dataset, normalize


@pytest.fixture(scope="session")
def tiny():
    """Every 4th window and 8th time step of the sample, normalized: 189 + 81 windows, T = 16."""
    data = normalize(load_dataset("har2-sample"))
    return replace(
        data,
        x_train=data.x_train[::4, ::8].contiguous(),
        y_train=data.y_train[::4],
        x_test=data.x_test[::4, ::8].contiguous(),
        y_test=data.y_test[::4],
        groups_train=None,
        groups_test=None,
    )


@pytest.fixture(scope="session")
def late():
    """Every 12th window and 8th time step of the sample in its units, normalized in batches."""
    data = load_dataset("har2-sample")
    few = replace(
        data,
        x_train=data.x_train[::12, ::8].contiguous(),
        y_train=data.y_train[::12],
        x_test=data.x_test[::12, ::8].contiguous(),
        y_test=data.y_test[::12],
        groups_train=None,
        groups_test=None,
    )
    return normalize(few, "asinh", late=True)


@pytest.fixture(scope="session")
def held_out(tiny):
    """The same with 40 windows for validation."""
    return replace(tiny, x_valid=tiny.x_test[:40], y_valid=tiny.y_test[:40])


def text_of(train, valid, test, words):
    """A text in which the words of each part are to be predicted one by one."""
    parts = {"train": train, "valid": valid, "test": test}
    return Dataset(
        name="text",
        kind="language-model",
        classes=tuple(map(str, range(words))),
        vocabulary=tuple(map(str, range(words))),
        license="",
        citation="",
        **{f"x_{part}": stream[:-1] for part, stream in parts.items()},
        **{f"y_{part}": stream[1:] for part, stream in parts.items()},
    )


@pytest.fixture(scope="session")
def text():
    """400 words drawn at random from 7."""
    words = torch.randint(7, (401,), generator=torch.Generator().manual_seed(0))
    return text_of(words, words[:61], words[:84], 7)


@pytest.fixture(scope="session")
def rule():
    """After word 1 comes 2 or 0, by what was before it."""
    words = torch.tensor([0, 1, 2, 1] * 200 + [0])
    return text_of(words, words[:81], words[:81], 3)


@pytest.fixture
def interruptible():
    """SIGINT interrupts here and in new processes, also where the tests run in the background.

    A shell starts a background command with SIGINT ignored, and its children inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
