"""The archive of UCI HAR: its text files, made into the arrays of har.npz (see `har`)."""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from fixpoint.data.archives.archive import files, inner_zip, read
from fixpoint.data.numeric_table import numbers
from fixpoint.data.schema import Arrays, Schema, check_counts, check_schema

URL = (
    "https://archive.ics.uci.edu/static/public/240/human+activity+recognition+using+smartphones.zip"
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
# body and total acceleration in g, angular velocity in rad/s
CHANNELS = tuple(
    f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"
)

SCHEMA: Schema = {
    f"{key}_{part}": (dtype, (rows, *shape))
    for part, rows in (("train", 7352), ("test", 2947))
    for key, dtype, shape in (
        ("x", "float32", (128, 9)),
        ("y", "uint8", ()),
        ("y2", "uint8", ()),
        ("subject", "uint8", ()),
    )
}
COUNTS = {
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
_SHA256 = {  # of the arrays of the official text files
    "x_train": "3454e1b58586f76211ee2d4937fbc4c9c90771da6cd209699dfa6e6ce9a6c6a6",
    "x_test": "304ef134d8ad3e7f7cab807b1023d6cf8c74f0b9d036d4e21c9be25fe5c5988b",
    "y_train": "222085d9d70948d9e252eb43a101307273edc61588c822a004cdcea259285ac9",
    "y_test": "c6c5639491f71f640401d34ac4a15a109a8023b085f463afef7f2e9f6cefe907",
    "subject_train": "2c395e93c9183f14405c7fbca8167fa4cff788d038a352d3d5e426ed1aa58459",
    "subject_test": "f6aca869c2a54b67d93c6bdb2e12b7e3bceaab643d231a52b0ade48423f05dfb",
}


def parse(paths: Sequence[Path]) -> dict[str, np.ndarray]:
    """Return arrays of har.npz from the official archive, or from the zip archive inside it.

    Raises:
        ValueError: a file is missing, or does not hold what it should.
    """
    texts: dict[str, np.ndarray] = {}
    for path, file in _official(paths):
        name = posixpath.basename(path).lower()
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
        subject = texts[f"subject_{part}.txt"][:, 0]
        if not np.isin(subject, np.arange(1, 31)).all():
            raise ValueError(f"subject_{part}.txt must hold subjects 1 to 30")
        arrays[f"x_{part}"] = np.stack(windows, -1).astype(np.float32)
        arrays[f"y_{part}"] = (activity - 1).astype(np.uint8)
        arrays[f"y2_{part}"] = arrays["har2_map"][arrays[f"y_{part}"]]
        arrays[f"subject_{part}"] = subject.astype(np.uint8)
    return arrays


def verify(arrays: Arrays) -> None:
    """Refuse arrays that are not number for number those of the official files, as a ValueError."""
    remedy = f"give the official one, {URL}"
    check_schema(arrays, SCHEMA, "the archive", remedy)
    check_counts(arrays, COUNTS, "the archive", remedy)
    for key, expected in _SHA256.items():
        array = np.ascontiguousarray(arrays[key], arrays[key].dtype.newbyteorder("<"))
        if hashlib.sha256(array.tobytes()).hexdigest() != expected:
            raise ValueError(f"the archive has other numbers in {key} than published; {remedy}")


def _official(paths: Sequence[Path]) -> Iterator[tuple[str, IO[bytes]]]:
    for name, file in files(paths):
        if posixpath.basename(name).lower() == "uci har dataset.zip":
            yield from inner_zip(file, name, at_most=_INNER_BYTES)
        else:
            yield name, file
