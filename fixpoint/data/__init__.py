"""Data sets: `load_dataset(name)`, and what is done to them before training."""

from __future__ import annotations

from collections.abc import Callable

from fixpoint.data.dataset import Dataset, drop_nonfinite, normalise
from fixpoint.data.har import har2, har6
from fixpoint.data.sample import har2_sample
from fixpoint.names import unknown_name

__all__ = ["DATASETS", "Dataset", "drop_nonfinite", "load_dataset", "normalise"]

DATASETS: dict[str, Callable[[], Dataset]] = {
    "har2-sample": har2_sample,
    "har2": har2,
    "har6": har6,
}


def load_dataset(name: str) -> Dataset:
    """Data set of that name, in its own units (see `normalise`).

    Raises:
        ValueError: no data set has that name, or its file is damaged.
        FileNotFoundError: its file is not there; the message says where to get it.
    """
    if name not in DATASETS:
        raise ValueError(unknown_name("data set", name, DATASETS))
    return DATASETS[name]()
