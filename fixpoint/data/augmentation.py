"""Random changes of training windows: rotations of the sensor frame, moves of an image."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from fixpoint.data.dataset import Dataset


def random_rotations(count: int, degrees: float, *, generator: torch.Generator) -> Tensor:
    """Return the rotation matrices, (count, 3, 3), about axes of any direction, each equally
    likely.

    Angles are uniform between 0 and `degrees`. On the CPU, float32.

    Source: Rodrigues (1840): R = I + sin(a) K + (1 - cos(a)) K^2, with K v = axis x v.

    >>> R = random_rotations(5, 30.0, generator=torch.Generator().manual_seed(0))
    >>> torch.allclose(R @ R.mT, torch.eye(3).expand(5, 3, 3), atol=1e-6)
    True
    """
    axis = F.normalize(torch.randn(count, 3, generator=generator), dim=1)
    angle = math.radians(degrees) * torch.rand(count, 1, 1, generator=generator)
    # Column i of K is the axis times unit vector i.
    K = torch.linalg.cross(axis.unsqueeze(1), torch.eye(3).expand(count, 3, 3)).mT
    return torch.eye(3) + angle.sin() * K + (1 - angle.cos()) * (K @ K)


def rotate(
    x: Tensor,
    vectors: tuple[tuple[int, int, int], ...],
    rotations: Tensor,
    sensors: tuple[int, ...] = (),
) -> Tensor:
    """Rotate all vectors of each sequence by its own rotation; other channels are unchanged.

    Args:
        x: sequences (B, T, d), of the dtype of the rotations. A value that is not finite makes all
            channels of its time step NaN.
        vectors: the channels of x, y and z of each vector, as in `Dataset.vectors`.
        rotations: matrices (B, 3, 3); with sensors (B, sensors, 3, 3).
        sensors: the sensor of each vector, as in `Dataset.sensors`.

    Returns:
        Sequences (B, T, d), a new tensor.

    >>> quarter = torch.tensor([[[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]])
    >>> rotate(torch.tensor([[[1.0, 0.0, 2.0, 7.0]]]), ((0, 1, 2),), quarter).tolist()
    [[[0.0, 1.0, 2.0, 7.0]]]
    """
    channels = torch.tensor(vectors, device=x.device)  # (V, 3)
    of_vectors = rotations[:, list(sensors)] if sensors else rotations.unsqueeze(1)
    # One product with a matrix (d, d) for each sequence: less time than to pick the vectors.
    change = torch.eye(x.shape[2], dtype=rotations.dtype, device=x.device).repeat(len(x), 1, 1)
    change[:, channels.unsqueeze(1), channels.unsqueeze(2)] = of_vectors
    return x @ change


def random_moves(count: int, pixels: int, *, generator: torch.Generator) -> Tensor:
    """Return rows and columns to move images by, int64 (count, 2), each of -pixels ... pixels
    equally likely.

    Raises:
        TypeError: count or pixels is not a whole number.
        ValueError: pixels is below 0.

    >>> random_moves(100, 2, generator=torch.Generator().manual_seed(0)).unique().tolist()
    [-2, -1, 0, 1, 2]
    """
    for name, given in (("count", count), ("pixels", pixels)):
        if not hasattr(given, "__index__"):
            raise TypeError(f"{name} must be a whole number; got {given!r}")
    if pixels < 0:
        raise ValueError(f"pixels must be at least 0; got {pixels}")
    return torch.randint(-pixels, pixels + 1, (count, 2), generator=generator)


def move(x: Tensor, image: tuple[int, int], moves: Tensor) -> Tensor:
    """Move each image down and to the right; zeros come in where it leaves.

    Args:
        x: images as sequences of their pixels, row by row, (B, T, d): numbers or bool.
        image: rows and columns, as in `Dataset.image`; T is their product.
        moves: of each image, int64 (B, 2): rows down, columns to the right.

    Returns:
        Sequences (B, T, d), a new tensor.

    Raises:
        TypeError: x or moves is not a tensor, or image not a pair.
        ValueError: x is not of these shapes, or moves are not (B, 2) integers.

    >>> x = torch.tensor([[1, 2, 3, 4, 5, 6]]).unsqueeze(-1)  # 1 2 3 over 4 5 6
    >>> move(x, (2, 3), torch.tensor([[1, -1]])).flatten().tolist()
    [0, 0, 0, 2, 3, 0]
    """
    for name, shape, given in (("x", "(B, T, d)", x), ("moves", "(B, 2)", moves)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} must be a tensor {shape}; got {type(given).__name__}")
    if not hasattr(image, "__len__"):
        raise TypeError(f"image must be rows and columns, as in Dataset.image; got {image!r}")
    if x.dim() != 3 or len(image) != 2 or x.shape[1] != image[0] * image[1]:
        raise ValueError(
            f"x must be (B, T, d), with a time step for each pixel of image, a pair; got "
            f"{tuple(x.shape)} and {image}"
        )
    if moves.shape != (len(x), 2) or moves.is_floating_point():
        raise ValueError(
            f"moves must be integers, ({len(x)}, 2), a pair for each image; got "
            f"{tuple(moves.shape)}, {moves.dtype}"
        )
    places: list[Tensor] = []  # where the pixels of each row, and of each column, come from
    for size, by in zip(image, moves.to(x.device).unbind(1), strict=True):
        places.append(torch.arange(size, device=x.device) - by.unsqueeze(1))
    rows, columns = places[0].unsqueeze(2), places[1].unsqueeze(1)
    whole = (rows >= 0) & (rows < image[0]) & (columns >= 0) & (columns < image[1])
    source = (rows * image[1] + columns).where(whole, 0).flatten(1).unsqueeze(2)
    moved = x.gather(1, source.expand(x.shape))
    return moved.masked_fill(~whole.flatten(1).unsqueeze(2), 0)


def check_vectors(dataset: Dataset) -> None:
    """Raise unless the data have vectors in their original units, which `rotate` needs.

    Raises:
        ValueError: there are none, or `normalize` has changed them.

    >>> from fixpoint.data import load_dataset
    >>> check_vectors(load_dataset("har2-sample"))
    """
    if not dataset.vectors:
        raise ValueError(
            f"training.rotate turns vectors of three channels in their original units, and "
            f"{dataset.name} has none: use har2, har6, har2-sample or dsa19, not normalized or "
            "with normalize(..., late=True), or set training.rotate to 0"
        )


def check_image(dataset: Dataset) -> None:
    """Raise unless the data are images in their original units, which `move` needs.

    Raises:
        ValueError: they are not, or `normalize` has changed them.

    >>> from fixpoint.data import load_dataset
    >>> check_image(load_dataset("har2-sample"))
    Traceback (most recent call last):
    ValueError: training.move moves images whose pixels are the time steps, and har2-sample ...
    """
    if not dataset.image:
        raise ValueError(
            f"training.move moves images whose pixels are the time steps, and {dataset.name} has "
            "none: use pixel-mnist, or an .npz file or Dataset with `image`, not normalized or "
            "with normalize(..., late=True), or set training.move to 0"
        )
