"""The two passes of the leaky recurrence by the kernels of `triton_recurrence`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from fixpoint.models.ops.common import triton_recurrence as kernels
from fixpoint.models.ops.leaky.arguments import BackwardArguments, ForwardArguments

MAX_SIZE = kernels.MAX_SIZE
LEAKY = 0


def forward(arguments: ForwardArguments) -> None:
    X, W, bias, A, a, b, h, S, C, activation, every = arguments
    U, scalars = X if W is None else linear(X, W, bias), (a.flatten(), b.flatten())
    kernels.forward(
        kernels.Forward(
            LEAKY, activation, (U,), (A,), scalars, None, a.shape[1], h, S, h[:0], (C,), every
        )
    )


def backward(arguments: BackwardArguments) -> tuple[Tensor, Tensor]:
    G, A, a, b, g, S, C, D, V, activation = arguments
    scalars, K = (a.flatten(), b.flatten()), a.shape[1]
    dw, _ = kernels.backward(
        kernels.Backward(LEAKY, activation, G, (A,), scalars, K, g, S, (C,), (D,))
    )
    if len(V):
        torch.sum(D.unflatten(0, (-1, K)), 1, out=V)
    da, db = dw.view(2, *a.shape)
    return da, db
