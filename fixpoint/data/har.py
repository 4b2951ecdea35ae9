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

import posixpath
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import torch

from fixpoint.data.archive import files, inner_zip, read
from fixpoint.data.cache import read_npz
from fixpoint.data.checks import Arrays, Schema, check_counts, check_schema
from fixpoint.data.dataset import Dataset
from fixpoint.data.download import Archive
from fixpoint.data.source import Source
from fixpoint.data.text import numbers

URL = (
    "https://archive.ics.uci.edu/static/public/240/human+activity+recognition+using+smartphones.zip"
)
LICENCE = (
    "CC BY 4.0 (UCI repository); the archive's README adds: 'Any commercial use is prohibited.'"
)
CITATION = (
    "D. Anguita, A. Ghio, L. Oneto, X. Parra, J. L. Reyes-Ortiz. A Public Domain Dataset for Human "
    "Activity Recognition Using Smartphones. ESANN 2013. Data: doi:10.24432/C54S4K"
)

ACTIVITIES = (
    "walking",
    "walking_upstairs",
    "walking_downstairs",
    "sitting",
    "standing",
    "laying",
)
HAR2_CLASS = (0, 1, 0, 1, 0, 1)  # of each activity
HAR2_CLASSES = (
    "walking|walking_downstairs|standing",
    "walking_upstairs|sitting|laying",
)
# body and total acceleration in g, angular velocity in rad/s
CHANNELS = tuple(
    f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"
)

_SCHEMA: Schema = {
    f"{key}_{part}": (dtype, (rows, *shape))
    for part, rows in (("train", 7352), ("test", 2947))
    for key, dtype, shape in (
        ("x", "float32", (128, 9)),
        ("y", "uint8", ()),
        ("y2", "uint8", ()),
        ("subject", "uint8", ()),
    )
}
_COUNTS = {
    "y_train": [1226, 1073, 986, 1286, 1374, 1407],
    "y_test": [496, 471, 420, 491, 532, 537],
    "y2_train": [3586, 3766],
    "y2_test": [1448, 1499],
}


# the text files that are read, with their columns
_ROWS = {
    f"{name}_{part}.txt": columns
    for part in ("train", "test")
    for name, columns in [("y", 1), ("subject", 1), *((channel, 128) for channel in CHANNELS)]
}
_INNER_BYTES = 2**27


def har2() -> Dataset:
    """HAR-2: 7352 train and 2947 test windows (128, 9), two classes of three activities each.

    Raises:
        FileNotFoundError: har.npz is not there.
        ValueError: har.npz is damaged or is another data set.
    """
    return har_dataset("har2", read_har(), labels="y2", classes=HAR2_CLASSES)


def har6() -> Dataset:
    """HAR-6: the rows of HAR-2 in the same order, with their six activities as classes.

    Raises:
        FileNotFoundError: har.npz is not there.
        ValueError: har.npz is damaged or is another data set.
    """
    return har_dataset("har6", read_har(), labels="y", classes=ACTIVITIES)


def read_har(path: Path | None = None) -> dict[str, np.ndarray]:
    """Arrays of har.npz, as this module describes them; `path` None looks in the data folder."""
    path = path or SOURCE.find()[0]
    arrays = read_npz(path, _SCHEMA)
    check_counts(arrays, _COUNTS, str(path), f"make it again from {URL}")
    return arrays


def parse(paths: Sequence[Path]) -> dict[str, np.ndarray]:
    """Arrays of har.npz from the official archive, or from the zip archive inside it.

    Raises:
        ValueError: a file is missing, or does not hold what it should.
    """
    texts: dict[str, np.ndarray] = {}
    for path, file in _official(paths):
        name = posixpath.basename(path)
        if name in _ROWS:
            texts[name] = numbers(read(file, path), path, columns=_ROWS[name])
    missing = [name for name in _ROWS if name not in texts]
    if missing:
        raise ValueError(f"the archive lacks {missing[0]}: give the official one, {URL}")
    arrays = {
        "channels": np.array(CHANNELS),
        "activities": np.array(ACTIVITIES),
        "har2_map": np.array(HAR2_CLASS, np.uint8),
    }
    for part in ("train", "test"):
        activity = texts[f"y_{part}.txt"][:, 0]
        windows = [texts[f"{channel}_{part}.txt"] for channel in CHANNELS]
        for name, rows in [
            *((f"{channel}_{part}.txt", w) for channel, w in zip(CHANNELS, windows, strict=True)),
            (f"subject_{part}.txt", texts[f"subject_{part}.txt"]),
        ]:
            if len(rows) != len(activity):
                raise ValueError(
                    f"{name} must have {len(activity)} lines, as y_{part}.txt has, got {len(rows)}"
                )
        if not np.isin(activity, np.arange(1, 7)).all():
            raise ValueError(f"y_{part}.txt must hold activities 1 to 6")
        arrays[f"x_{part}"] = np.stack(windows, -1).astype(np.float32)
        arrays[f"y_{part}"] = (activity - 1).astype(np.uint8)
        arrays[f"y2_{part}"] = arrays["har2_map"][arrays[f"y_{part}"]]
        arrays[f"subject_{part}"] = texts[f"subject_{part}.txt"][:, 0].astype(np.uint8)
    return arrays


def verify(arrays: Arrays) -> None:
    """Refuse arrays that do not have the official numbers of windows, as a ValueError."""
    remedy = f"give the official one, {URL}"
    check_schema(arrays, _SCHEMA, "the archive", remedy)
    check_counts(arrays, _COUNTS, "the archive", remedy)


def _official(paths: Sequence[Path]) -> Iterator[tuple[str, IO[bytes]]]:
    for name, file in files(paths):
        if posixpath.basename(name) == "UCI HAR Dataset.zip":
            yield from inner_zip(file, name, at_most=_INNER_BYTES)
        else:
            yield name, file


def har_dataset(
    name: str, arrays: Arrays, *, labels: str, classes: tuple[str, ...], subset: str = ""
) -> Dataset:
    """The data set whose classes are the arrays `labels`_train and `labels`_test."""

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
        subset=subset,
        licence=LICENCE,
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
