"""The two passes of any recurrence in plain torch operations; with gradients, the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fixpoint.models.ops.recurrence.arguments import BackwardArguments, ForwardArguments, Operands


def loop(step: Any, operands: Operands, *, last_only: bool, others: bool = False) -> list[Tensor]:
    """Return states by differentiable operations: all of them, (T, B, n), or the last, (B, n)."""
    K, V, b, y = operands.K, operands.V, operands.bias.unbind(), operands.start
    drives, states = [u.unbind() for u in operands.drives()], []
    for m, w in enumerate(_scalars(operands.w, len(operands.x) * K)):
        p = [y[0] @ v.mT for v in V.unbind()]
        y, _ = step.step(y, p, [u[m // K] for u in drives], b, w)
        if (m + 1) % K == 0:
            states.append(y)
    wanted = [not last_only] + [others] * (len(y) - 1)
    if not states:
        pairs = zip(y, wanted, strict=True)
        return [h.new_empty(0, *h.shape) if whole else h.clone() for h, whole in pairs]
    of_each = zip(wanted, zip(*states, strict=True), strict=True)
    return [torch.stack(each) if whole else each[-1] for whole, each in of_each]


def forward(arguments: ForwardArguments) -> None:
    step, operands, y, S, O, kept, every = arguments
    K, V, b, drives = operands.K, operands.V.mT, operands.bias.unbind(), operands.drives()
    for m, w in enumerate(_numbers(operands.w, len(operands.x) * K)):
        t, k = divmod(m, K)
        new, values = step.step(y, [y[0] @ v for v in V], [u[t] for u in drives], b, w)
        for h, value in zip(y, new, strict=True):
            h.copy_(value)
        if (m + 1) % every == 0:
            _write(S, (m + 1) // every, new)
        if k == K - 1:
            _write(O, t, new)
        _write(kept, m, values)


def backward(arguments: BackwardArguments) -> tuple[Tensor, Tensor]:
    step, G, V, w, K, biases, g, S, kept, D = arguments
    M, n = len(D[0]), V.shape[1]
    dw, dbias = g[0].new_zeros(len(w), M), g[0].new_zeros(biases, n)
    numbers = list(_numbers(w, M))
    for m in reversed(range(M)):
        t, k = divmod(m, K)
        if k == K - 1:
            for y, e in zip(g, G, strict=True):
                if len(e):
                    y += e[t]
        h, values = tuple(s[m] for s in S), tuple(c[m] for c in kept)
        dh, d, db, scalars = step.pullback(g, h, values, numbers[m])
        for i, v in zip(step.products, V, strict=True):
            dh = (dh[0] + d[i] @ v, *dh[1:])
        for y, value in zip(g, dh, strict=True):
            y.copy_(value)
        _write(D, m, d)
        for i, value in enumerate(scalars):
            dw[i, m] = value.sum()
        for i, value in enumerate(db):
            dbias[i] += value.sum(0)
    return dw, dbias


def _write(to: tuple[Tensor, ...], at: int, values: Any) -> None:
    for v, value in zip(to, values, strict=True):
        if len(v):
            v[at].copy_(value)


def _scalars(w: tuple[Tensor, ...], M: int) -> list[Any]:
    return list(zip(*(v.unbind() for v in w), strict=True)) if w else [()] * M


def _numbers(w: tuple[Tensor, ...], M: int) -> list[Any]:
    return list(zip(*(v.tolist() for v in w), strict=True)) if w else [()] * M
