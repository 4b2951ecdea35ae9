"""The tensors of the leaky recurrence, and the arguments of its two passes.

m = t K + k counts inner steps, M = T K of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fixpoint._messages import unknown_name
from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.models.ops.common.autograd import check_shapes


class Inputs(NamedTuple):
    """The tensors of `fused_scan`, with a and b expanded to (T, K)."""

    x: Tensor
    W: Tensor | None
    bias: Tensor | None
    A: Tensor
    a: Tensor
    b: Tensor
    h0: Tensor

    def contiguous(self) -> Inputs:
        return Inputs._make(v if v is None else v.contiguous() for v in self)


class ForwardArguments(NamedTuple):
    """Advance h in place by M inner steps h <- a_tk h + b_tk sigma(A h + u_t).

    X: u (T, B, n) where W is None, else x (T, B, d) of u = x W^T + bias; W: (n, d); bias: (n,).
    A: (n, n); a, b: (T, K); h: (B, n).
    S: (M // every + 1, B, n); S[0] is the state before the first step, S[i] receives h after
        i * every inner steps.
    C: (M, B, n) receives sigma(A h + u_t), or (0, B, n) to keep nothing.
    """

    X: Tensor
    W: Tensor | None
    bias: Tensor | None
    A: Tensor
    a: Tensor
    b: Tensor
    h: Tensor
    S: Tensor
    C: Tensor
    activation: str
    every: int


class BackwardArguments(NamedTuple):
    """Carry g, the gradient of the last state, in place to the first; return da, db (T, K).

    G: (T, B, n), gradients of the states after each time step, or (0, B, n) for none.
    S: (M + 1, B, n) and C: (M, B, n) of the forward pass with every=1.
    D: (M, B, n) receives the gradient with respect to A h + u_t.
    V: (T, B, n) receives the sum of D over k, or (0, B, n) where K = 1 makes it D.
    """

    G: Tensor
    A: Tensor
    a: Tensor
    b: Tensor
    g: Tensor
    S: Tensor
    C: Tensor
    D: Tensor
    V: Tensor
    activation: str


def checked(
    x: Tensor,
    W: Tensor | None,
    bias: Tensor | None,
    A: Tensor,
    a: Tensor | float,
    b: Tensor | float,
    h0: Tensor,
    activation: str,
) -> Inputs:
    """All tensors, after a check."""
    if activation not in ACTIVATIONS:
        raise ValueError(unknown_name("activation", activation, ACTIVATIONS))
    if x.dim() != 3 or h0.dim() != 2:
        given = f"{tuple(x.shape)} and {tuple(h0.shape)}"
        raise ValueError(f"x must be (T, B, n or d) and h0 (B, n), but they are {given}")
    if W is None and bias is not None:
        raise ValueError("bias was given without W: add it to x, which is then u itself")
    (T, _, d), (B, n) = x.shape, h0.shape
    expected = {"x": (T, B, n if W is None else d), "A": (n, n), "W": (n, d), "bias": (n,)}
    check_shapes({"x": x, "A": A, "W": W, "bias": bias}, expected, f"h0 is {tuple(h0.shape)}")
    scalar = torch.promote_types(x.dtype, torch.float32)  # 0.99 is 0.988 in bfloat16
    a, b = (v if isinstance(v, Tensor) else x.new_full((), v, dtype=scalar) for v in (a, b))
    K = max([v.shape[-1] for v in (a, b) if v.dim()] or [1])
    if K < 1:
        raise ValueError(f"a and b must have a K of at least 1, not {tuple(a.shape)}")
    try:
        return Inputs(x, W, bias, A, a.expand(T, K), b.expand(T, K), h0)
    except RuntimeError:
        given = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"a and b must expand to (T, K), T = {T}, not from {given}") from None
