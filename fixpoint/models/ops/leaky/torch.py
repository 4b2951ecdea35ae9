"""The two sweeps of the fused recurrence in plain torch, without allocation in the loop.

m = t K + k + 1 counts inner steps, M = T K of them; S[0] is the state before the first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

_aten = torch.ops.aten
SIGMA: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "tanh": torch.tanh_,
    "sigmoid": torch.sigmoid_,
    "identity": lambda x: x,
}
# (y, c, out): out = y sigma'(.) from c = sigma(.)
PULL: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "relu": lambda y, c, out: _aten.threshold_backward(y, c, 0, grad_input=out),
    "tanh": lambda y, c, out: _aten.tanh_backward(y, c, grad_input=out),
    "sigmoid": lambda y, c, out: _aten.sigmoid_backward(y, c, grad_input=out),
    "identity": lambda y, c, out: out.copy_(y),
}


def forward(
    X: Tensor,
    W: Tensor | None,
    bias: Tensor | None,
    A: Tensor,
    a: Tensor,
    b: Tensor,
    h: Tensor,
    S: Tensor,
    C: Tensor,
    *,
    activation: str,
    every: int,
) -> None:
    """Advance h in place by M inner steps h <- a_tk h + b_tk sigma(A h + u_t).

    Args:
        X: u (T, B, n) where W is None, else x (T, B, d) of u = x W^T + bias; W: (n, d); bias: (n,).
        A: (n, n); a, b: (T, K); h: (B, n).
        S: (M // every + 1, B, n); S[i] receives h after i * every inner steps, i >= 1.
        C: (M, B, n) receives sigma(A h + u_t), or (0, B, n) to keep nothing.
    """
    K = a.shape[1]
    U = X if W is None else linear(X, W, bias)
    scratch, At = torch.empty_like(h), A.t()
    for m, (at, bt) in enumerate(_scalars(a, b)):
        c = C[m] if len(C) else scratch
        SIGMA[activation](torch.addmm(U[m // K], h, At, out=c))
        h.mul_(at).add_(c, alpha=bt)
        if (m + 1) % every == 0:
            S[(m + 1) // every].copy_(h)


def backward(
    G: Tensor,
    A: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    S: Tensor,
    C: Tensor,
    D: Tensor,
    V: Tensor,
    *,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """Carry g, the gradient of the last state, in place to the first; return da, db (T, K).

    Args:
        G: (T, B, n), gradients of the states after each time step, or (0, B, n) for none.
        S: (M + 1, B, n) and C: (M, B, n) of `forward` with every=1.
        D: (M, B, n) receives the gradient with respect to A h + u_t.
        V: (T, B, n) receives the sum of D over k, or (0, B, n) where K = 1 makes it D.
    """
    K = a.shape[1]
    da, db = torch.empty_like(a), torch.empty_like(b)
    scalars = list(_scalars(a, b))
    for m in reversed(range(len(scalars))):
        (at, bt), (t, k) = scalars[m], divmod(m, K)
        if k == K - 1 and len(G):
            g += G[t]
        da[t, k] = torch.dot(g.view(-1), S[m].view(-1))
        db[t, k] = torch.dot(g.view(-1), C[m].view(-1))
        PULL[activation](g, C[m], D[m]).mul_(bt)
        g.mul_(at).addmm_(D[m], A)
        if len(V):
            V[t].copy_(D[m]) if k == K - 1 else V[t].add_(D[m])
    return da, db


def _scalars(a: Tensor, b: Tensor) -> list[tuple[float, float]]:
    return list(zip(a.flatten().tolist(), b.flatten().tolist(), strict=True))
