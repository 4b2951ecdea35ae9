"""The tensors of the gated recurrence, and the arguments of its two passes.

One product V h (G = 1) serves the gate and the candidate, or each has its own (G = 2).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fixpoint._messages import unknown_name
from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.models.ops.common.autograd import check_shapes


class Inputs(NamedTuple):
    """The tensors of `gated_scan`."""

    x: Tensor
    W: Tensor | None
    bias: Tensor | None
    V: Tensor
    p: Tensor
    q: Tensor
    h0: Tensor


class ForwardArguments(NamedTuple):
    """Advance h in place by T steps.

    X: u (G, T, B, n) where W is None, else x (T, B, d) of u_g = x W_g^T; W: (G, n, d).
    bias: (2, n), of the gate and of the candidate; V: (G, n, n); h: (B, n).
    p, q: tensors on a CUDA device, else numbers.
    S: (T + 1, B, n), S[t + 1] receives h after time step t; (1, B, n) to keep nothing.
    Z, C: (T, B, n) receive the gate and the candidate; (0, B, n) to keep nothing.
    """

    X: Tensor
    W: Tensor | None
    bias: Tensor
    V: Tensor
    p: Any
    q: Any
    h: Tensor
    S: Tensor
    Z: Tensor
    C: Tensor
    activation: str


class BackwardArguments(NamedTuple):
    """Carry g, the gradient of the last state, in place to the first; return dp, dq, dbias (2, n).

    G: (T, B, n), gradients of the states after each time step, or (0, B, n) for none.
    p, q: tensors on a CUDA device, else numbers. S, Z, C: of the forward pass.
    D: (G, T, B, n) receives the gradient with respect to each product V_g h.
    """

    G: Tensor
    V: Tensor
    p: Any
    q: Any
    g: Tensor
    S: Tensor
    Z: Tensor
    C: Tensor
    D: Tensor
    activation: str


def checked(
    x: Tensor,
    W: Tensor | None,
    bias: Tensor | None,
    V: Tensor,
    p: Tensor | float,
    q: Tensor | float,
    h0: Tensor,
    activation: str,
) -> Inputs:
    """All tensors, after a check."""
    if activation not in ACTIVATIONS:
        raise ValueError(unknown_name("activation", activation, ACTIVATIONS))
    if x.dim() != 3 or h0.dim() != 2:
        given = f"{tuple(x.shape)} and {tuple(h0.shape)}"
        raise ValueError(f"x must be (T, B, u or d) and h0 (B, n), but they are {given}")
    (T, _, d), (B, n) = x.shape, h0.shape
    if V.shape not in ((n, n), (2 * n, n)):
        raise ValueError(f"V must be {(n, n)} or {(2 * n, n)}, not {tuple(V.shape)}")
    rows = len(V)
    expected = {"x": (T, B, rows if W is None else d), "W": (rows, d), "bias": (2 * n,)}
    given = f"h0 is {tuple(h0.shape)} and V is {tuple(V.shape)}"
    check_shapes({"x": x, "W": W, "bias": bias}, expected, given)
    p, q = (v if isinstance(v, Tensor) else x.new_tensor(v) for v in (p, q))
    for name, v in {"p": p, "q": q}.items():
        if v.dim():
            raise ValueError(f"{name} must be a number or have no axes, not {tuple(v.shape)}")
    return Inputs(x, W, bias, V, p, q, h0)
