"""Random rotations of the frame of a sensor, to train on more ways of wearing it than were seen."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from fixpoint.data.dataset import Dataset


def random_rotations(count: int, degrees: float, *, generator: torch.Generator) -> Tensor:
    """Rotation matrices, (count, 3, 3), about axes of any direction, each equally likely.

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


def rotate(x: Tensor, vectors: tuple[tuple[int, int, int], ...], rotations: Tensor) -> Tensor:
    """Turn all vectors of each sequence by its own rotation; other channels stay as they are.

    Args:
        x: sequences (B, T, d).
        vectors: the channels of x, y and z of each vector, as in `Dataset.vectors`.
        rotations: matrices (B, 3, 3).

    Returns:
        Sequences (B, T, d), a new tensor.

    >>> quarter = torch.tensor([[[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]])
    >>> rotate(torch.tensor([[[1.0, 0.0, 2.0, 7.0]]]), ((0, 1, 2),), quarter).tolist()
    [[[0.0, 1.0, 2.0, 7.0]]]
    """
    channels = torch.tensor(vectors, device=x.device).flatten()
    turned = x.clone()
    # (B, T V, 3) @ (B, 3, 3): all vectors of a sequence in one product
    flat = x[..., channels].reshape(len(x), -1, 3) @ rotations.mT
    turned[..., channels] = flat.view(*x.shape[:2], -1)
    return turned


def check_vectors(dataset: Dataset) -> None:
    """Refuse to rotate data that hold no vectors in their own units.

    Raises:
        ValueError: there are none, or `normalize` changed them already.

    >>> from fixpoint.data import load_dataset
    >>> check_vectors(load_dataset("har2-sample"))
    """
    if not dataset.vectors:
        raise ValueError(
            f"training.rotate turns vectors of three channels in their own units, and "
            f"{dataset.name} has none: it is for har2, har6 and har2-sample, normalized late if at "
            "all; set it to 0 for others"
        )
