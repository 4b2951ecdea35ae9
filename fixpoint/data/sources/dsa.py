"""DSA-19: nineteen daily and sports activities of eight people with five sensors on the body.

`dsa.npz` holds all 9120 segments of 5 s at 25 Hz, [segment, channel, time], as int16 steps:

- `x_train`, `x_test` (4560, 45, 125) int16, times `scale` (45,): m/s^2, rad/s and, of the magnetic
  field, units of the earth's. The steps, 0.01, 0.002 and 0.0005, are below the sensors' noise;
- `y_train`, `y_test` uint8: activity 0..18;
- `subject_train`, `subject_test` uint8: subject 1..8; `segment_train`, `segment_test`: 1..60;
- `channels` (45,), `activities` (19,).

Subjects 1 to 4 are train and 5 to 8 are test. FastGRNN gives only the sizes, 4560 and 4560, and not
which four of the eight people are which: this choice is ours.

Source: Altun et al., 2010 (see `CITATION`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fixpoint.data.archives.archive import files, read
from fixpoint.data.archives.download import Archive
from fixpoint.data.dataset import Dataset
from fixpoint.data.numeric_table import numbers
from fixpoint.data.schema import Arrays, Schema, check_counts, check_schema
from fixpoint.data.sources.source import Source
from fixpoint.data.storage import read_npz

URL = "https://archive.ics.uci.edu/static/public/256/daily+and+sports+activities.zip"
LICENSE = "CC BY 4.0 (UCI repository)"
CITATION = (
    "K. Altun, B. Barshan, O. Tuncel. Comparative study on classifying human activities with "
    "miniature inertial and magnetic sensors. Pattern Recognition 43(10), 2010"
)

ACTIVITIES = (
    "sitting",
    "standing",
    "lying on back",
    "lying on right side",
    "ascending stairs",
    "descending stairs",
    "standing in an elevator still",
    "moving around in an elevator",
    "walking in a parking lot",
    "walking on a treadmill 4 km/h flat",
    "walking on a treadmill 4 km/h 15 deg inclined",
    "running on a treadmill 8 km/h",
    "exercising on a stepper",
    "exercising on a cross trainer",
    "cycling on an exercise bike horizontal",
    "cycling on an exercise bike vertical",
    "rowing",
    "jumping",
    "playing basketball",
)
# torso, right and left arm, right and left leg; m/s^2, rad/s, earth's field
CHANNELS = tuple(
    f"{place}_{axis}{kind}"
    for place in ("T", "RA", "LA", "RL", "LL")
    for kind in ("acc", "gyro", "mag")
    for axis in "xyz"
)
VECTORS = tuple((3 * i, 3 * i + 1, 3 * i + 2) for i in range(15))
SENSORS = tuple(i // 3 for i in range(15))
_STEP = np.array(5 * ([0.01] * 3 + [0.002] * 3 + [0.0005] * 3), dtype=np.float32)

_SCHEMA: Schema = {"scale": ("float32", (45,))} | {
    f"{key}_{part}": (dtype, (4560, *shape))
    for part in ("train", "test")
    for key, dtype, shape in (
        ("x", "int16", (45, 125)),
        ("y", "uint8", ()),
        ("subject", "uint8", ()),
    )
}
_COUNTS = {"y_train": [240] * 19, "y_test": [240] * 19}
_SEGMENT = re.compile(r"(?:^|/)a(\d\d)/p(\d)/s(\d\d)\.txt$", re.IGNORECASE)


def dsa19() -> Dataset:
    """Return DSA-19: 4560 train and 4560 test segments (125, 45) of 19 classes, stored as int16.

    Raises:
        FileNotFoundError: dsa.npz does not exist.
        ValueError: dsa.npz is damaged, or belongs to another data set.
    """
    path, _ = SOURCE.find()
    arrays = read_npz(path, _SCHEMA)
    check_counts(arrays, _COUNTS, str(path), f"make it again from {URL}")

    def int64(key: str) -> torch.Tensor:
        return torch.from_numpy(arrays[key].astype(np.int64))

    return Dataset(
        name="dsa19",
        x_train=torch.from_numpy(arrays["x_train"]).transpose(1, 2),
        y_train=int64("y_train"),
        x_test=torch.from_numpy(arrays["x_test"]).transpose(1, 2),
        y_test=int64("y_test"),
        classes=ACTIVITIES,
        groups_train=int64("subject_train"),
        groups_test=int64("subject_test"),
        scale=torch.from_numpy(arrays["scale"]),
        vectors=VECTORS,
        sensors=SENSORS,
        license=LICENSE,
        citation=CITATION,
    )


def parse(paths: Sequence[Path]) -> dict[str, np.ndarray]:
    """Return arrays of dsa.npz from the official archive of text files aAA/pP/sSS.txt.

    Raises:
        ValueError: a segment does not have 125 lines of 45 numbers, or a number is out of range.
    """
    segments: dict[tuple[int, ...], np.ndarray] = {}
    for path, file in files(paths):
        if match := _SEGMENT.search(path):
            segments[tuple(int(digits) for digits in match.groups())] = _steps(
                numbers(read(file, path), path, columns=45, delimiter=","), path
            )
    arrays = {"scale": _STEP, "channels": np.array(CHANNELS), "activities": np.array(ACTIVITIES)}
    for part, subjects in (("train", range(1, 5)), ("test", range(5, 9))):
        keys = sorted(key for key in segments if key[1] in subjects)
        if not keys:
            raise ValueError(
                f"the archive has no segment of the {part} subjects {subjects[0]} to "
                f"{subjects[-1]}: give the official one, {URL}"
            )
        arrays[f"x_{part}"] = np.stack([segments[key] for key in keys])
        activity, subject, segment = np.array(keys, np.uint8).T
        arrays[f"y_{part}"] = activity - 1
        arrays[f"subject_{part}"] = subject
        arrays[f"segment_{part}"] = segment
    return arrays


def verify(arrays: Arrays) -> None:
    """Refuse arrays that do not have the official numbers of segments, as a ValueError."""
    remedy = f"give the official one, {URL}"
    check_schema(arrays, _SCHEMA, "the archive", remedy)
    check_counts(arrays, _COUNTS, "the archive", remedy)


def _steps(values: np.ndarray, path: str) -> np.ndarray:
    """Return values (125, 45) of a segment as steps (45, 125), int16."""
    if len(values) != 125:
        raise ValueError(f"{path} must have 125 lines, got {len(values)}")
    steps = np.rint(values / _STEP.astype(np.float64))
    if np.abs(steps).max() > np.iinfo(np.int16).max:
        raise ValueError(
            f"{path} holds {np.abs(values).max():g}, which no sensor of this data set reads; "
            f"give the official archive, {URL}"
        )
    return steps.T.astype(np.int16)


SOURCE = Source(
    name="dsa19",
    file="dsa.npz",
    archives=(Archive(url=URL, file="uci-dsa.zip", checksum=None),),
    page=URL,
    needs="the zip archive",
    parse=parse,
    verify=verify,
)
