"""Pixel-MNIST: handwritten digits, one pixel a step; permuted-MNIST: in one shuffled order.

`mnist.npz` holds the official release: `x_train` (60000, 28, 28), `x_test` (10000, 28, 28) uint8,
`y_train` and `y_test` uint8, in the original order.

Source: LeCun et al., 1998 (see `CITATION`); the permutation: Le, Jaitly, Hinton, 2015, A Simple Way
to Initialize Recurrent Networks of Rectified Linear Units, section 4.2.
"""

from __future__ import annotations

import hashlib
import math
import posixpath
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fixpoint.data.archives.archive import files, read
from fixpoint.data.archives.download import Archive
from fixpoint.data.dataset import Dataset
from fixpoint.data.schema import Arrays, Schema, check_counts, check_schema
from fixpoint.data.sources.source import Source
from fixpoint.data.storage import read_npz

MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist"
PAGE = "http://yann.lecun.com/exdb/mnist/"
LICENSE = "commonly given as CC BY-SA 3.0; the authors' page names none"
CITATION = (
    "Y. LeCun, L. Bottou, Y. Bengio, P. Haffner. Gradient-Based Learning Applied to Document "
    "Recognition. Proceedings of the IEEE 86(11), 1998"
)

_FILES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}
_MD5 = {
    "x_train": "6bbc9ace898e44ae57da46a324031adb",
    "y_train": "a25bea736e30d166cdddb491f175f624",
    "x_test": "2646ac647ad5339dbf082846283269ea",
    "y_test": "27ae3e4e09519cfbb04c329615203637",
}
_SCHEMA: Schema = {
    "x_train": ("uint8", (60_000, 28, 28)),
    "y_train": ("uint8", (60_000,)),
    "x_test": ("uint8", (10_000, 28, 28)),
    "y_test": ("uint8", (10_000,)),
}
_COUNTS = {
    "y_train": [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
    "y_test": [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
}


def pixel_mnist() -> Dataset:
    """Return Pixel-MNIST: 60000 train and 10000 test digits (784, 1), row by row, stored as uint8.

    The values are grey levels from 0 to 1.

    Raises:
        FileNotFoundError: mnist.npz does not exist.
        ValueError: mnist.npz is damaged, or belongs to another data set.
    """
    return _digits("pixel-mnist", None)


def permuted_mnist(seed: int = 0) -> Dataset:
    """Return Permuted-MNIST: the digits of Pixel-MNIST, with the pixels of all in one shuffled
    order.

    Args:
        seed: of the order; other seeds are other data sets.

    Raises:
        FileNotFoundError: mnist.npz does not exist.
        ValueError: mnist.npz is damaged, or belongs to another data set.
    """
    # RandomState draws the same in every version of NumPy
    return _digits("permuted-mnist", np.random.RandomState(seed).permutation(784))


def _digits(name: str, order: np.ndarray | None) -> Dataset:
    path, _ = SOURCE.find()
    arrays = read_npz(path, _SCHEMA)
    check_counts(arrays, _COUNTS, str(path), f"make it again from {PAGE}")

    def pixels(part: str) -> torch.Tensor:
        flat = arrays[f"x_{part}"].reshape(-1, 784)
        return torch.from_numpy(flat if order is None else flat[:, order])[..., None]

    return Dataset(
        name=name,
        x_train=pixels("train"),
        y_train=torch.from_numpy(arrays["y_train"].astype(np.int64)),
        x_test=pixels("test"),
        y_test=torch.from_numpy(arrays["y_test"].astype(np.int64)),
        classes=tuple("0123456789"),
        scale=torch.tensor(1 / 255),
        image=(28, 28) if order is None else None,
        license=LICENSE,
        citation=CITATION,
    )


def parse(paths: Sequence[Path]) -> dict[str, np.ndarray]:
    """Return arrays of mnist.npz from the four official files, each as it is or as .gz.

    Raises:
        ValueError: one is missing, or is not an IDX file of images or labels.
    """
    arrays = {}
    for path, file in files(paths):
        name = posixpath.basename(path).lower().removesuffix(".gz")
        for key, wanted in _FILES.items():
            if name in (wanted, wanted.replace("-idx", ".idx")):
                arrays[key] = _read_idx(read(file, path), path, axes=3 if key[0] == "x" else 1)
    missing = [name for key, name in _FILES.items() if key not in arrays]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} not given: give all four files of {PAGE}, each by --archive"
        )
    return arrays


def verify(arrays: Arrays) -> None:
    """Refuse arrays that are not byte for byte those of the official files, as a ValueError."""
    remedy = f"give the official files, {PAGE}"
    check_schema(arrays, _SCHEMA, "the archive", remedy)
    check_counts(arrays, _COUNTS, "the archive", remedy)
    for key, expected in _MD5.items():
        if hashlib.md5(_idx(arrays[key]), usedforsecurity=False).hexdigest() != expected:
            raise ValueError(f"{_FILES[key]} is not the published one (md5 {expected}); {remedy}")


def _read_idx(data: bytes, name: str, *, axes: int) -> np.ndarray:
    start = 4 + 4 * axes
    whole = len(data) >= start and data[:4] == bytes([0, 0, 8, axes])
    shape = [int(size) for size in np.frombuffer(data[4:start], ">u4")] if whole else []
    if not whole or len(data) != start + math.prod(shape):
        kind = "images" if axes == 3 else "labels"
        raise ValueError(
            f"{name} is not an IDX file of {kind}, or is truncated ({len(data)} bytes): give the "
            f"official one, {PAGE}"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy()


def _idx(array: np.ndarray) -> bytes:
    """Return the array as an idx file."""
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return head + array.tobytes()


SOURCE = Source(
    name="pixel-mnist",
    file="mnist.npz",
    archives=tuple(
        Archive(url=f"{MIRROR}/{name}.gz", file=f"{name}.gz", checksum=None)
        for name in _FILES.values()
    ),
    page=PAGE,
    needs="the four files",
    parse=parse,
    verify=verify,
)
