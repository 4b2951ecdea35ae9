"""Data sets: `load_dataset(name)`, and their preparation for training."""

from __future__ import annotations

from fixpoint.data.augmentation import (
    check_image,
    check_vectors,
    move,
    random_moves,
    random_rotations,
    rotate,
)
from fixpoint.data.bptt import stream_batches
from fixpoint.data.custom import load
from fixpoint.data.dataset import Dataset, Kind
from fixpoint.data.preprocessing import (
    Normalization,
    drop_nonfinite,
    find_normalization,
    in_units,
    normalize,
    normalize_by,
)
from fixpoint.data.recordings import Cutting
from fixpoint.data.registry import DATASETS, SOURCES, fingerprint, load_dataset
from fixpoint.data.splits import validation_split

__all__ = [
    "DATASETS",
    "SOURCES",
    "Cutting",
    "Dataset",
    "Kind",
    "Normalization",
    "check_image",
    "check_vectors",
    "drop_nonfinite",
    "find_normalization",
    "fingerprint",
    "in_units",
    "load",
    "load_dataset",
    "move",
    "normalize",
    "normalize_by",
    "random_moves",
    "random_rotations",
    "rotate",
    "stream_batches",
    "validation_split",
]
