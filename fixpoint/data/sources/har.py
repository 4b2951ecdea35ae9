"""UCI HAR: six activities of 30 people with a phone at the waist (HAR-6), or two classes (HAR-2).

`har.npz` holds the official release, row for row and float32:

- `x_train` (7352, 128, 9), `x_test` (2947, 128, 9): the text files of `Inertial Signals`, stacked
  in the order of `CHANNELS`; windows of 2.56 s at 50 Hz, each half overlapping the next;
- `y_train`, `y_test` uint8: activity 0..5, one less than in `y_train.txt` and `y_test.txt`;
- `y2_train`, `y2_test` uint8: `HAR2_CLASS[y]`;
- `subject_train`, `subject_test` uint8: subject 1..30. No subject is on both sides;
- `channels` (9,), `activities` (6,), `har2_map` (6,): the names, and the class of each activity.

The two classes are {sitting, laying, walking upstairs}, called 1 by our choice, and {standing,
walking, walking downstairs}, 0.

Source: Anguita et al., 2013 (see `CITATION`); the two classes: Kusupati et al., 2018, FastGRNN: A
Fast, Accurate, Stable and Tiny Kilobyte Sized Gated Recurrent Neural Network, supplement B.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fixpoint.data.archives.download import Archive
from fixpoint.data.archives.har_archive import (
    ACTIVITIES,
    CHANNELS,
    COUNTS,
    HAR2_CLASS,
    SCHEMA,
    URL,
    parse,
    verify,
)
from fixpoint.data.dataset import Dataset
from fixpoint.data.schema import Arrays, check_counts
from fixpoint.data.sources.source import Source
from fixpoint.data.storage import read_npz

__all__ = [
    "ACTIVITIES",
    "CHANNELS",
    "HAR2_CLASS",
    "HAR2_CLASSES",
    "URL",
    "VECTORS",
    "har2",
    "har6",
    "har_dataset",
    "read_har",
]

LICENSE = (
    "CC BY 4.0 (UCI repository); the archive's README adds: 'Any commercial use is prohibited.'"
)
CITATION = (
    "D. Anguita, A. Ghio, L. Oneto, X. Parra, J. L. Reyes-Ortiz. A Public Domain Dataset for Human "
    "Activity Recognition Using Smartphones. ESANN 2013. Data: doi:10.24432/C54S4K"
)

VECTORS = ((0, 1, 2), (3, 4, 5), (6, 7, 8))
"""The channels of the body's acceleration, of its rate of rotation, and of the whole acceleration,
gravity included: x, y and z of each in the frame of the phone."""

HAR2_CLASSES = (
    "walking|walking_downstairs|standing",
    "walking_upstairs|sitting|laying",
)


def har2() -> Dataset:
    """Return HAR-2: 7352 train and 2947 test windows (128, 9), two classes of three activities
    each.

    Raises:
        FileNotFoundError: har.npz does not exist.
        ValueError: har.npz is damaged, or belongs to another data set.
    """
    return har_dataset("har2", read_har(), labels="y2", classes=HAR2_CLASSES)


def har6() -> Dataset:
    """Return HAR-6: the rows of HAR-2 in the same order, with their six activities as classes.

    Raises:
        FileNotFoundError: har.npz does not exist.
        ValueError: har.npz is damaged, or belongs to another data set.
    """
    return har_dataset("har6", read_har(), labels="y", classes=ACTIVITIES)


def read_har(path: Path | None = None) -> dict[str, np.ndarray]:
    """Return arrays of har.npz, as this module describes them; `path` None looks in the data
    folder.
    """
    path = path or SOURCE.find()[0]
    arrays = read_npz(path, SCHEMA)
    check_counts(arrays, COUNTS, str(path), f"make it again from {URL}")
    return arrays


def har_dataset(
    name: str, arrays: Arrays, *, labels: str, classes: tuple[str, ...], subset: str = ""
) -> Dataset:
    """Return the data set whose classes are the arrays `labels`_train and `labels`_test."""

    def int64(key: str) -> torch.Tensor:
        return torch.from_numpy(arrays[key].astype(np.int64))

    return Dataset(
        name=name,
        x_train=torch.from_numpy(arrays["x_train"]),
        y_train=int64(f"{labels}_train"),
        x_test=torch.from_numpy(arrays["x_test"]),
        y_test=int64(f"{labels}_test"),
        classes=classes,
        groups_train=int64("subject_train"),
        groups_test=int64("subject_test"),
        vectors=VECTORS,
        subset=subset,
        license=LICENSE,
        citation=CITATION,
    )


SOURCE = Source(
    name="har2",
    file="har.npz",
    archives=(
        Archive(
            url=URL,
            file="uci-har.zip",
            checksum="sha256:c00b803081a5c797cd5e4b83700a9810b38d53d9d84e01917e090e1fdbc81031",
        ),
    ),
    page=URL,
    needs="the zip archive",
    parse=parse,
    verify=verify,
)
