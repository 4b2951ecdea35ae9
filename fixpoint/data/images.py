"""Rows and columns of images whose pixels are time steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def as_image(image: Any, shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns as ints, where each pixel is a time step.

    Args:
        image: two whole numbers, Python's or NumPy's.
        shape: of x, (N, T, d), where T is their product.

    Raises:
        ValueError: they are not two whole numbers above 0, or x has another shape.

    >>> as_image(np.array([8, 8]), (160, 64, 1))
    (8, 8)
    >>> as_image((8, 8), (160, 8, 8))
    Traceback (most recent call last):
    ValueError: image (8, 8) needs x (N, 64, d), its pixels row by row, but x is (160, 8, 8): ...
    """
    one_axis = isinstance(image, tuple | list) or (isinstance(image, np.ndarray) and image.ndim)
    sizes = list(image) if one_axis else []
    whole = all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in sizes)
    T = shape[1] if len(shape) > 1 else 0
    if len(sizes) == 2 and whole and min(sizes) > 0:
        rows, columns = map(int, sizes)
        if len(shape) == 3 and rows * columns == T:
            return rows, columns
        in_rows = tuple(shape[1:3]) == (rows, columns)
        if in_rows or len(shape) in (2, 4):
            d = shape[3] if in_rows and len(shape) == 4 else 1
            remedy = f": reshape x to (N, {rows * columns}, {d})"
            raise ValueError(
                f"image {rows, columns} needs x (N, {rows * columns}, d), its pixels row by row, "
                f"but x is {tuple(shape)}" + (remedy if in_rows or rows * columns == T else "")
            )
    raise ValueError(
        f"image must be rows and columns, {T} pixels for as many time steps, got {image!r}"
    )
