"""The two sweeps of the gated recurrence in plain torch, without allocation in the loop.

One product V h (G = 1) serves the gate and the candidate, or each has its own (G = 2).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from fixpoint.models.ops.leaky.torch import PULL, SIGMA

_aten = torch.ops.aten


def forward(
    X: Tensor,
    W: Tensor | None,
    bias: Tensor,
    V: Tensor,
    p: float,
    q: float,
    h: Tensor,
    S: Tensor,
    Z: Tensor,
    C: Tensor,
    *,
    activation: str,
) -> None:
    """Advance h in place by T steps.

    Args:
        X: u (G, T, B, n) where W is None, else x (T, B, d) of u_g = x W_g^T; W: (G, n, d).
        bias: (2, n), of the gate and of the candidate; V: (G, n, n); h: (B, n).
        S: (T + 1, B, n), S[t + 1] receives h after time step t; (1, B, n) to keep nothing.
        Z, C: (T, B, n) receive the gate and the candidate; (0, B, n) to keep nothing.
    """
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
        SIGMA[activation](c.add_(bias[1]))
        torch.mul(z, -p, out=r).add_(p + q)
        h.mul_(z).addcmul_(r, c)
        if len(S) > 1:
            S[t + 1].copy_(h)


def backward(
    G: Tensor,
    V: Tensor,
    p: float,
    q: float,
    g: Tensor,
    S: Tensor,
    Z: Tensor,
    C: Tensor,
    D: Tensor,
    *,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Carry g, the gradient of the last state, in place to the first; return dp, dq, dbias (2, n).

    Args:
        G: (T, B, n), gradients of the states after each time step, or (0, B, n) for none.
        S, Z, C: of `forward`.
        D: (G, T, B, n) receives the gradient with respect to each product V_g h.
    """
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
        PULL[activation](rest.mul_(p).add_(q).mul_(g), c, candidate)
        dbias[0] += gate.sum(0)
        dbias[1] += candidate.sum(0)
        g.mul_(z)
        if len(V) == 1:
            candidate += gate
        for d, v in zip(D[:, t], V, strict=True):
            g.addmm_(d, v)
    dp, dq = sums.sum(1)
    return dp, dq, dbias
