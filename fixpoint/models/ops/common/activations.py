"""The activations sigma, by name: as functions, in place, and their derivatives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_aten = torch.ops.aten

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": lambda z: z,
}
ACTIVATIONS_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "tanh": torch.tanh_,
    "sigmoid": torch.sigmoid_,
    "identity": lambda z: z,
}
ACTIVATION_GRAD: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "relu": lambda y, c, out: _aten.threshold_backward(y, c, 0, grad_input=out),
    "tanh": lambda y, c, out: _aten.tanh_backward(y, c, grad_input=out),
    "sigmoid": lambda y, c, out: _aten.sigmoid_backward(y, c, grad_input=out),
    "identity": lambda y, c, out: out.copy_(y),
}
"""(y, c, out): out = y sigma'(.) from the value c = sigma(.)."""
