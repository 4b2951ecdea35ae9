"""The two passes of the gated recurrence in plain torch, without allocation in the loop."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from fixpoint.models.ops.common.activations import ACTIVATION_GRAD, ACTIVATIONS_IN_PLACE
from fixpoint.models.ops.gated.arguments import BackwardArguments, ForwardArguments

_aten = torch.ops.aten


def forward(arguments: ForwardArguments) -> None:
    X, W, bias, V, p, q, h, S, Z, C, activation = arguments
    U = X if W is None else torch.stack([linear(X, w) for w in W])
    z, c, r, Vt = torch.empty_like(h), torch.empty_like(h), torch.empty_like(h), V.mT
    for t in range(U.shape[1]):
        if len(Z):
            z, c = Z[t], C[t]
        torch.addmm(U[-1, t], h, Vt[-1], out=c)
        if len(V) == 1:
            z.copy_(c)
        else:
            torch.addmm(U[0, t], h, Vt[0], out=z)
        z.add_(bias[0]).sigmoid_()
        ACTIVATIONS_IN_PLACE[activation](c.add_(bias[1]))
        torch.mul(z, -p, out=r).add_(p + q)
        h.mul_(z).addcmul_(r, c)
        if len(S) > 1:
            S[t + 1].copy_(h)


def backward(arguments: BackwardArguments) -> tuple[Tensor, Tensor, Tensor]:
    G, V, p, q, g, S, Z, C, D, activation = arguments
    sums, dbias = g.new_zeros(2, len(C)), g.new_zeros(2, V.shape[1])
    gate, rest, scratch = torch.empty_like(g), torch.empty_like(g), torch.empty_like(g)
    for t in reversed(range(len(C))):
        z, c, candidate = Z[t], C[t], D[-1, t]
        if len(V) == 2:
            gate = D[0, t]
        if len(G):
            g += G[t]
        torch.neg(z, out=rest).add_(1)
        torch.mul(g, c, out=scratch)
        sums[0, t] = torch.dot(scratch.view(-1), rest.view(-1))
        sums[1, t] = scratch.sum()
        torch.sub(S[t], c, alpha=p, out=scratch).mul_(g)
        _aten.sigmoid_backward(scratch, z, grad_input=gate)
        ACTIVATION_GRAD[activation](rest.mul_(p).add_(q).mul_(g), c, candidate)
        dbias[0] += gate.sum(0)
        dbias[1] += candidate.sum(0)
        g.mul_(z)
        if len(V) == 1:
            candidate += gate
        for d, v in zip(D[:, t], V, strict=True):
            g.addmm_(d, v)
    dp, dq = sums.sum(1)
    return dp, dq, dbias
