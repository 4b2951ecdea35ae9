"""The two passes of the gated recurrence by the kernels of `triton_recurrence`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from fixpoint.models.ops.common import triton_recurrence as kernels
from fixpoint.models.ops.gated.arguments import BackwardArguments, ForwardArguments

MAX_SIZE = kernels.MAX_SIZE


def forward(arguments: ForwardArguments) -> None:
    X, W, bias, V, p, q, h, S, Z, C, activation = arguments
    U = X.unbind() if W is None else [linear(X, w) for w in W]
    kernels.forward(
        kernels.Forward(
            len(V), activation, tuple(U), V.unbind(), _of_steps(p, q, len(U[0])), bias, 1, h, S,
            h[:0], (Z, C), 1,
        )
    )  # fmt: skip


def backward(arguments: BackwardArguments) -> tuple[Tensor, Tensor, Tensor]:
    G, V, p, q, g, S, Z, C, D, activation = arguments
    dw, dbias = kernels.backward(
        kernels.Backward(
            len(V), activation, G, V.unbind(), _of_steps(p, q, len(C)), 1, g, S, (Z, C), D.unbind()
        )
    )
    assert dbias is not None
    dp, dq = dw.sum(1)
    return dp, dq, dbias


def _of_steps(p: Tensor, q: Tensor, T: int) -> tuple[Tensor, Tensor]:
    """Scalars of each step: tensors on the device, which the host does not read."""
    p, q = torch.stack((p, q)).unsqueeze(1).repeat(1, T)
    return p, q
