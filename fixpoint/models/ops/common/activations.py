"""The activations sigma, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import hardtanh


def quant_sigm(x: Tensor) -> Tensor:
    """Return (x + 1) / 2 cut off at 0 and 1."""
    return hardtanh(0.5 * x + 0.5, 0.0, 1.0)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "quantTanh": hardtanh,
    "quantSigm": quant_sigm,
}
"""quantTanh, quantSigm: tanh and sigmoid in straight pieces, as EdgeML names them."""
