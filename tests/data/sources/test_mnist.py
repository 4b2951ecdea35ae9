"""Pixel-MNIST: its files, and the full data where it is at hand."""

import gzip
import struct

import numpy as np
import pytest
import torch
from support.factories import truncated, write_zip

from fixpoint.data import load_dataset, normalize
from fixpoint.data.sources import mnist
from fixpoint.data.sources.mnist import permuted_mnist

NAMES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    made = {}
    for part, n in (("train", 6), ("test", 3)):
        made[f"x_{part}"] = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        made[f"y_{part}"] = rng.integers(0, 10, n, dtype=np.uint8)
    return made


def idx(array):
    magic = {1: 2049, 3: 2051}[array.ndim]
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.tobytes()


@pytest.mark.parametrize("form", ["gz", "plain", "dots", "zip"])
def test_the_four_files_are_read(form, arrays, tmp_path):
    data = {name: idx(arrays[key]) for key, name in NAMES.items()}
    if form == "zip":
        paths = [write_zip(tmp_path / "all.zip", data)]
    else:
        paths = []
        for name, content in data.items():
            name = name.replace("-idx", ".idx") if form == "dots" else name
            paths.append(tmp_path / (f"{name}.gz" if form == "gz" else name))
            paths[-1].write_bytes(gzip.compress(content) if form == "gz" else content)
    read = mnist.parse(paths)
    for key, array in arrays.items():
        np.testing.assert_array_equal(read[key], array)


def write(folder, key, data):
    (folder / NAMES[key]).write_bytes(data)
    return folder / NAMES[key]


def test_a_wrong_file_of_mnist_is_named(arrays, tmp_path):
    paths = [write(tmp_path, key, idx(array)) for key, array in arrays.items()]
    with pytest.raises(ValueError, match="t10k-labels-idx1-ubyte not given: give all four"):
        mnist.SOURCE.make(paths[:-1])
    with pytest.raises(
        ValueError, match=r"x_train must be uint8 \(60000, 28, 28\), got uint8 \(6,"
    ):
        mnist.SOURCE.make(paths)
    images = idx(arrays["x_test"])
    for bad in (images[:-1], images + b"0", b"", images[:6], idx(arrays["y_test"])):
        write(tmp_path, "x_test", bad)
        with pytest.raises(ValueError, match="t10k-images-idx3-ubyte is not an IDX file of images"):
            mnist.SOURCE.make(paths)
    packed = tmp_path / f"{NAMES['x_test']}.gz"
    packed.write_bytes(gzip.compress(images))
    with pytest.raises(ValueError, match="is truncated or corrupt"):
        mnist.SOURCE.make([truncated(packed)])


def test_the_full_data_is_byte_for_byte_the_official_one(full):
    arrays = full("mnist.npz")
    mnist.verify(arrays)
    images = arrays["x_test"].copy()
    images[3, 14, 14] ^= 1
    with pytest.raises(ValueError, match="t10k-images-idx3-ubyte is not the published one"):
        mnist.verify({**arrays, "x_test": images})


def test_pixels_come_one_by_one(full):
    arrays = full("mnist.npz")
    data = load_dataset("pixel-mnist")
    assert data.x_train.shape == (60_000, 784, 1)
    assert data.x_train.dtype == torch.uint8  # 47 MB, not 188
    x = data.inputs(data.x_test[:5])
    np.testing.assert_allclose(x[..., 0], arrays["x_test"][:5].reshape(5, 784) / 255, rtol=1e-6)
    assert data.image == (28, 28)
    scaled = normalize(data, "channel")
    assert scaled.image == (28, 28)  # stored as they were
    x = scaled.inputs(scaled.x_train).double()
    assert x.mean().abs() < 1e-5
    assert (x.std() - 1).abs() < 1e-5


def permutation_of(x, y):
    """Whether the columns of x are those of y in some order."""
    one, two = (sorted(map(tuple, part[..., 0].T.tolist())) for part in (x, y))
    return one == two


def test_one_order_for_all_digits(full):
    full("mnist.npz")
    data, plain = load_dataset("permuted-mnist"), load_dataset("pixel-mnist")
    assert permutation_of(data.x_train[::50], plain.x_train[::50])
    assert permutation_of(data.x_test[::50], plain.x_test[::50])
    assert data.image is None
    joined = torch.cat([data.x_train[::50], data.x_test[::50]])
    assert permutation_of(joined, torch.cat([plain.x_train[::50], plain.x_test[::50]]))
    assert not torch.equal(data.x_test[:9], plain.x_test[:9])
    assert torch.equal(data.y_test, plain.y_test)
    assert not torch.equal(permuted_mnist(seed=1).x_test[:9], data.x_test[:9])
