"""The two passes of the leaky recurrence in plain torch, without allocation in the loop."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from fixpoint.models.ops.common.activations import ACTIVATION_GRAD, ACTIVATIONS_IN_PLACE
from fixpoint.models.ops.leaky.arguments import BackwardArguments, ForwardArguments


def forward(arguments: ForwardArguments) -> None:
    X, W, bias, A, a, b, h, S, C, activation, every = arguments
    K = a.shape[1]
    U = X if W is None else linear(X, W, bias)
    scratch, At = torch.empty_like(h), A.t()
    for m, (at, bt) in enumerate(_scalars(a, b)):
        c = C[m] if len(C) else scratch
        ACTIVATIONS_IN_PLACE[activation](torch.addmm(U[m // K], h, At, out=c))
        h.mul_(at).add_(c, alpha=bt)
        if (m + 1) % every == 0:
            S[(m + 1) // every].copy_(h)


def backward(arguments: BackwardArguments) -> tuple[Tensor, Tensor]:
    G, A, a, b, g, S, C, D, V, activation = arguments
    K = a.shape[1]
    da, db = torch.empty_like(a), torch.empty_like(b)
    scalars = list(_scalars(a, b))
    for m in reversed(range(len(scalars))):
        (at, bt), (t, k) = scalars[m], divmod(m, K)
        if k == K - 1 and len(G):
            g += G[t]
        da[t, k] = torch.dot(g.view(-1), S[m].view(-1))
        db[t, k] = torch.dot(g.view(-1), C[m].view(-1))
        ACTIVATION_GRAD[activation](g, C[m], D[m]).mul_(bt)
        g.mul_(at).addmm_(D[m], A)
        if len(V):
            V[t].copy_(D[m]) if k == K - 1 else V[t].add_(D[m])
    return da, db


def _scalars(a: Tensor, b: Tensor) -> list[tuple[float, float]]:
    return list(zip(a.flatten().tolist(), b.flatten().tolist(), strict=True))
