"""Functions of numbers or tensors that the step of a recurrence is written in.

Called from Python they take tensors; within a kernel numba and Triton put their own for numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fixpoint.models.ops.common.activations import ACTIVATIONS

CODES = {name: code for code, name in enumerate(ACTIVATIONS)}
"""The numbers by which kernels know the activations."""
IDENTITY, RELU, TANH, SIGMOID, QUANT_TANH, QUANT_SIGM = range(len(CODES))

_FUNCTIONS = tuple(ACTIVATIONS.values())
_SLOPES: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    IDENTITY: lambda d, c: d,
    RELU: lambda d, c: torch.where(c <= 0, 0.0, d),
    TANH: lambda d, c: d * (1 - c * c),
    SIGMOID: lambda d, c: d * (c * (1 - c)),
    QUANT_TANH: lambda d, c: torch.where(c.abs() < 1, d, 0.0),
    QUANT_SIGM: lambda d, c: torch.where((c > 0) & (c < 1), 0.5 * d, 0.0),
}


def sigma(code: int, x: Any) -> Any:
    """Return the activation of that code at x."""
    return _FUNCTIONS[code](x)


def slope(code: int, d: Any, c: Any) -> Any:
    """Return d sigma'(.) from c = sigma(.)."""
    return _SLOPES[code](d, c)


def one_minus(x: Any) -> Any:
    """Return 1 - x, in the dtype of x also within a kernel."""
    return 1 - x


def zero_like(x: Any) -> Any:
    """Return 0 in the dtype of x."""
    return torch.zeros_like(x)
