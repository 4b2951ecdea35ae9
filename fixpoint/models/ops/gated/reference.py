"""The gated recurrence as a loop of plain operations, which defines it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.models.ops.gated.arguments import Inputs, checked


def gated_scan_reference(
    x: Tensor,
    V: Tensor,
    p: Tensor | float,
    q: Tensor | float,
    h0: Tensor,
    *,
    activation: str,
    W: Tensor | None = None,
    bias: Tensor | None = None,
    last_only: bool = False,
) -> Tensor:
    """The same as `gated_scan`, as a loop of plain operations: the reference.

    Example:
        >>> u, V, h0 = torch.randn(7, 4, 10), torch.randn(10, 5), torch.zeros(4, 5)
        >>> gated_scan_reference(u, V, 1.0, 0.0, h0, activation="tanh", last_only=True).shape
        torch.Size([4, 5])
    """
    return loop(checked(x, W, bias, V, p, q, h0, activation), activation, last_only)


def loop(inputs: Inputs, activation: str, last_only: bool) -> Tensor:
    x, W, bias, V, p, q, h0 = inputs
    u = x if W is None else linear(x, W)
    n, sigma, h, states = len(V.t()), ACTIVATIONS[activation], h0, []
    b_z, b_c = h0.new_zeros(2, n) if bias is None else bias.view(2, n)
    for u_t in u:
        product = torch.addmm(u_t, h, V.t())
        z = torch.sigmoid(product[:, :n] + b_z)
        c = sigma(product[:, -n:] + b_c)
        h = z * h + (p * (1 - z) + q) * c
        states.append(h)
    if last_only:
        return h.clone()
    return torch.stack(states) if states else h0.new_empty(0, *h0.shape)
