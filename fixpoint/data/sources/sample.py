"""A part of HAR-2 that comes with the package, for examples, tests and a first look.

Six windows of each of 30 subjects and six activities, spread evenly over each recording: 756 train
windows of 21 subjects, 324 test windows of the other 9, balanced over subjects, activities and the
two classes. The s.d. of an accuracy of 95 % on 324 windows is 1.2 %: enough to see whether a model
works, too few to rank good models; use har2 for that.

Values are integers times a step: 0.001 g and 0.002 rad/s, so the error is at most 0.0005 g and
0.001 rad/s. From one sample to the next a phone on a person who sits, stands or lies still reads
0.0014 g to 0.0024 g and 0.002 rad/s to 0.004 rad/s apart (median of each channel).
"""

from __future__ import annotations

from importlib import resources

import numpy as np

from fixpoint.data.dataset import Dataset
from fixpoint.data.schema import Schema
from fixpoint.data.sources.har import HAR2_CLASSES, har_dataset
from fixpoint.data.storage import read_npz

_SCHEMA: Schema = {"scale": ("float32", (9,))} | {
    f"{key}_{part}": (dtype, (rows, *shape))
    for part, rows in (("train", 756), ("test", 324))
    for key, dtype, shape in (
        ("x", "int16", (9, 128)),
        ("y", "uint8", ()),
        ("y2", "uint8", ()),
        ("subject", "uint8", ()),
        ("row", "int16", ()),
    )
}


def har2_sample() -> Dataset:
    """Return the sample: 756 train and 324 test windows (128, 9), two classes of three activities
    each.
    """
    return har_dataset(
        "har2-sample",
        read_sample(),
        labels="y2",
        classes=HAR2_CLASSES,
        subset="1080 of the 10299 windows of har2, rounded",
    )


def read_sample() -> dict[str, np.ndarray]:
    """Return arrays named as in har.npz, so `y_test` has the activities, by which errors can be
    sorted.

    Beside them `row_train` and `row_test`, the place of each window in har.npz, and `scale` (9,),
    the step of each channel.
    """
    with resources.as_file(
        resources.files("fixpoint.data") / "samples" / "har2_sample.npz"
    ) as path:
        arrays = read_npz(path, _SCHEMA)
    for key in ("x_train", "x_test"):
        steps = arrays[key].transpose(0, 2, 1)  # (N, T, d)
        arrays[key] = np.ascontiguousarray(steps * arrays["scale"])
    return arrays
