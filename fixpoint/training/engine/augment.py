"""Random changes of the training windows, as a recipe asks for them."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fixpoint.data import (
    Dataset,
    check_image,
    check_vectors,
    move,
    random_moves,
    random_rotations,
    rotate,
)
from fixpoint.training.recipe.schema import Training


def augments(training: Training) -> bool:
    """Return whether the training windows are changed, which needs their original units."""
    return bool(training.rotate or training.move)


def check_augmentation(training: Training, data: Dataset) -> None:
    """Raise unless the data have what the recipe changes.

    Raises:
        ValueError: there are no vectors to rotate, no images to move, or these would be moved out
            of sight.
    """
    if training.rotate:
        check_vectors(data)
    if training.move:
        check_image(data)
        rows, columns = image = cast("tuple[int, int]", data.image)
        if training.move >= min(image):
            raise ValueError(
                f"training.move must be less than {min(image)}, as the images of {data.name} have "
                f"{rows} x {columns} pixels; got {training.move}"
            )


def augment(
    x: Tensor, data: Dataset, training: Training, *, count: int, part: slice, order: torch.Generator
) -> Tensor:
    """Return stored rows of the training part, changed at random.

    Changes are drawn for the whole batch, so that any number of processes draws the same.

    Args:
        x: rows of a batch, (B, T, d).
        data: what they are of.
        training: the recipe.
        count: rows of the whole batch.
        part: which of them `x` is.
        order: what the changes are drawn by.
    """
    if training.rotate:
        turns = _rotations(data, training.rotate, count, order)[part].to(x.device)
        x = rotate(x.float(), data.vectors, turns, data.sensors)
    if training.move:
        moves = random_moves(count, training.move, generator=order)[part]
        x = move(x, cast("tuple[int, int]", data.image), moves)
    return x


def _rotations(data: Dataset, degrees: float, count: int, order: torch.Generator) -> Tensor:
    """Return one of each window, (count, 3, 3), or of each of its sensors, (count, sensors, 3,
    3).
    """
    if not data.sensors:
        return random_rotations(count, degrees, generator=order)
    each = max(data.sensors) + 1
    return random_rotations(count * each, degrees, generator=order).unflatten(0, (count, each))
