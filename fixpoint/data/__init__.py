"""Data sets: `load_dataset(name)`, and what is done to them before training."""

from __future__ import annotations

from fixpoint.data.augmentation import check_vectors, random_rotations, rotate
from fixpoint.data.bptt import stream_batches
from fixpoint.data.custom import load
from fixpoint.data.dataset import Dataset, Kind
from fixpoint.data.preprocessing import drop_nonfinite, normalise
from fixpoint.data.registry import DATASETS, SOURCES, fingerprint, load_dataset
from fixpoint.data.splits import validation_split

__all__ = [
    "DATASETS",
    "SOURCES",
    "Dataset",
    "Kind",
    "check_vectors",
    "drop_nonfinite",
    "fingerprint",
    "load",
    "load_dataset",
    "normalise",
    "random_rotations",
    "rotate",
    "stream_batches",
    "validation_split",
]
