"""Arithmetic of one number for each sample: of a float, a NumPy array or a tensor.

+, -, *, / and sqrt of float64 numbers are rounded alike by all three, so that a formula written
once gives the same bits for a sample wherever it is evaluated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fixpoint._torch import inside_transform

Number = Any
"""A float, an array or a tensor, (B,), of float64 numbers; conditions are bool."""


class Arithmetic(NamedTuple):
    """Operations that Python's operators do not offer for all kinds of numbers."""

    where: Callable[[Number, Number, Number], Number]
    sqrt: Callable[[Number], Number]
    zeros_like: Callable[[Number], Number]
    largest: Callable[[Sequence[Number]], Number]
    all: Callable[[Number], bool]
    """Whether the host has read that a condition holds for all samples."""

    def least(self, a: Number, b: Number) -> Number:
        """Return the smaller one; b where a is NaN."""
        return self.where(a < b, a, b)


def _zero(a: float) -> float:
    return 0.0


def _holds(condition: np.ndarray) -> bool:
    return bool(condition.all())


def _largest(numbers: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.maximum, numbers)


FLOATS = Arithmetic(lambda condition, a, b: a if condition else b, math.sqrt, _zero, max, bool)
ARRAYS = Arithmetic(np.where, np.sqrt, np.zeros_like, np.maximum.reduce, _holds)
TENSORS = Arithmetic(torch.where, torch.sqrt, torch.zeros_like, _largest, lambda condition: False)


Formula = Callable[[Arithmetic, Sequence[Number], Sequence[Any]], Sequence[Number]]
"""Of numbers and constants."""


class Evaluation:
    """Formulas of numbers of each sample, evaluated on the host or by tensor operations.

    Args:
        like: a tensor of the samples, (B, ...).
        reads: whether the host may read values; else numbers remain tensors.
    """

    def __init__(self, like: Tensor, *, reads: bool) -> None:
        self.kind = TENSORS if not reads else FLOATS if like.shape[0] == 1 else ARRAYS
        self.dtype = torch.float32 if like.device.type == "mps" else torch.float64

    def read(self, columns: Tensor) -> Any:
        """Return the numbers of a matrix (n, B)."""
        if self.kind is FLOATS:
            return columns.flatten().tolist()
        return columns.double().numpy() if self.kind is ARRAYS else columns.to(self.dtype).unbind()

    def __call__(
        self, formula: Formula, numbers: Sequence[Number], constants: Sequence[Any]
    ) -> Sequence[Number]:
        """Return the result of a formula."""
        if self.kind is not ARRAYS:
            return formula(self.kind, numbers, constants)
        with np.errstate(all="ignore"):
            return formula(ARRAYS, numbers, constants)

    def multiply(self, number: Number, x: Tensor) -> Tensor:
        """Return x, (B, D), with each row multiplied by a number."""
        if self._is_one(number):
            return x
        return x * (number if self.kind is FLOATS else self.column(number).to(x.dtype))

    def add(self, a: Tensor, number: Number, b: Tensor) -> Tensor:
        """Return a + number b, (B, D), with a number for each row."""
        if self.kind is FLOATS:
            return torch.add(a, b, alpha=number)
        if self._is_one(number):
            return a + b
        return torch.addcmul(a, self.column(number).to(b.dtype), b)

    def _is_one(self, number: Number) -> bool:
        return self.kind is not TENSORS and self.kind.all(number == 1)

    def column(self, number: Number) -> Tensor:
        """Return (B, 1)."""
        if self.kind is TENSORS:
            return number.unsqueeze(1)
        return torch.from_numpy(np.reshape(number, (-1, 1)))

    def pack(self, numbers: Sequence[Number]) -> Tensor:
        """Return numbers of each sample as a matrix, (B, n)."""
        if self.kind is TENSORS:
            return torch.stack([x.to(self.dtype) for x in numbers], 1)  # ONNX does not promote
        if self.kind is FLOATS:
            return torch.tensor([numbers], dtype=self.dtype)
        return torch.from_numpy(np.array(numbers)).T


LIBRARY = torch.library.Library("fixpoint", "FRAGMENT")
"""Operations of torch for what the host computes without a visible read of values."""


def computes_on_host(x: Tensor) -> bool:
    """Tell whether numbers of x are at hand on the host, without a wait."""
    plain = type(x) is Tensor and x.device.type == "cpu"
    return plain and not torch.compiler.is_compiling() and not inside_transform()
