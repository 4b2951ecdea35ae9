"""Arithmetic of one number for each sample: of a float, a NumPy array or a tensor.

+, -, *, / and sqrt of float64 numbers are rounded alike by all three, so that a formula written
once gives the same bits for a sample wherever it is evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

Number = Any
"""A float, an array or a tensor, (B,), of float64 numbers; conditions are bool."""


class Arithmetic(NamedTuple):
    """What operators do not offer for all kinds of numbers."""

    where: Callable[[Number, Number, Number], Number]
    sqrt: Callable[[Number], Number]
    zeros_like: Callable[[Number], Number]

    def least(self, a: Number, b: Number) -> Number:
        """The smaller one; b where a is NaN."""
        return self.where(a < b, a, b)


FLOATS = Arithmetic(lambda condition, a, b: a if condition else b, math.sqrt, lambda a: 0.0)
ARRAYS = Arithmetic(np.where, np.sqrt, np.zeros_like)
TENSORS = Arithmetic(torch.where, torch.sqrt, torch.zeros_like)
