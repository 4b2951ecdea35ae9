"""The leaky recurrence as a loop of plain operations, which defines it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.models.ops.leaky.arguments import Inputs, checked


def scan_reference(
    x: Tensor,
    A: Tensor,
    a: Tensor | float,
    b: Tensor | float,
    h0: Tensor,
    *,
    activation: str,
    W: Tensor | None = None,
    bias: Tensor | None = None,
    last_only: bool = False,
) -> Tensor:
    """The same as `fused_scan`, as a loop of plain operations: the reference."""
    return loop(checked(x, W, bias, A, a, b, h0, activation), activation, last_only)


def loop(inputs: Inputs, activation: str, last_only: bool) -> Tensor:
    x, W, bias, A, a, b, h = inputs
    u = x if W is None else linear(x, W, bias)
    sigma, states = ACTIVATIONS[activation], []
    for u_t, a_t, b_t in zip(u, a, b, strict=True):
        for a_k, b_k in zip(a_t, b_t, strict=True):
            h = a_k * h + b_k * sigma(torch.addmm(u_t, h, A.t()))
        states.append(h)
    if last_only:
        return h.clone()
    return torch.stack(states) if states else u.new_empty(u.shape)
