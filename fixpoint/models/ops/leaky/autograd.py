"""The recurrence h <- a h + b sigma(A h + u_t) over a whole sequence as one operation."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.nn.functional import linear

from fixpoint._messages import unknown_name
from fixpoint.models.maps import ACTIVATIONS
from fixpoint.models.ops.common import dispatch as op


def fused_scan(
    x: Tensor,
    A: Tensor,
    a: Tensor | float,
    b: Tensor | float,
    h0: Tensor,
    *,
    activation: str,
    W: Tensor | None = None,
    bias: Tensor | None = None,
    last_only: bool = False,
    recompute: bool = False,
) -> Tensor:
    """States of h <- a_tk h + b_tk sigma(A h + u_t), K inner steps k in each time step t.

    ERNN is a = 1 - eta, b = eta; FastRNN a = sigmoid(beta), b = sigmoid(alpha); torch.nn.RNN a = 0,
    b = 1. Equal to `scan_reference`, gradients included, to rounding; several times faster with
    numba. Where no gradient is asked for, nothing but the output is stored. A gradient of a
    gradient (create_graph) goes through `scan_reference`.

    On a CUDA device one Triton kernel runs through the whole sequence, another back; n at most 256.
    It takes float32 and bfloat16, whose states and sums it keeps in float32 between the steps.

    Args:
        x: u, (T, B, n); with W, the input (T, B, d) of u = x W^T + bias, which is faster than to
            compute u first.
        A: (n, n).
        a, b: anything that expands to (T, K): (T, K), (K,), (T, 1), a number. They may be float32
            where the rest is bfloat16.
        h0: the state before the first step, (B, n).
        activation: sigma, a name in `ACTIVATIONS`.
        W, bias: (n, d) and (n,).
        last_only: return only the state after the last step.
        recompute: keep the input and one state of each time step (with last_only: of about sqrt(T)
            of them) for the backward pass instead of 2 K, for one more forward pass.

    Returns:
        (T, B, n), the state after the K inner steps of each time step; (B, n) with last_only.
        The backward pass uses these states: clone them before a change in place.

    Raises:
        ValueError: unknown activation, shapes that do not fit, or `unsupported` gives a reason.

    Example:
        >>> x, W, A = torch.randn(7, 4, 3), torch.randn(5, 3), torch.randn(5, 5)
        >>> h0 = torch.zeros(4, 5)
        >>> fused_scan(x, A, 0.9, 0.1, h0, activation="relu", W=W).shape
        torch.Size([7, 4, 5])
    """
    inputs = _checked(x, W, bias, A, a, b, h0, activation)
    if reason := unsupported(**inputs._asdict(), activation=activation):
        raise ValueError(f"the fused scan does not apply: {reason}; use scan_reference")
    if torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in inputs):
        return _Scan.apply(activation, last_only, recompute, *inputs)
    return _infer(inputs, activation, last_only)


def scan_reference(
    x: Tensor,
    A: Tensor,
    a: Tensor | float,
    b: Tensor | float,
    h0: Tensor,
    *,
    activation: str,
    W: Tensor | None = None,
    bias: Tensor | None = None,
    last_only: bool = False,
) -> Tensor:
    """The same as `fused_scan`, as a loop of plain operations: the reference."""
    return _plain(_checked(x, W, bias, A, a, b, h0, activation), activation, last_only)


def unsupported(*, activation: str, **tensors: Tensor | None) -> str | None:
    """Why `fused_scan` cannot take these arguments, or None where it can."""
    return op.unsupported_reason(tensors, activation, kernel="leaky")


class _Inputs(NamedTuple):
    """The tensors of `fused_scan`, with a and b expanded to (T, K)."""

    x: Tensor
    W: Tensor | None
    bias: Tensor | None
    A: Tensor
    a: Tensor
    b: Tensor
    h0: Tensor

    def contiguous(self) -> _Inputs:
        return _Inputs._make(v if v is None else v.contiguous() for v in self)


def _plain(inputs: _Inputs, activation: str, last_only: bool) -> Tensor:
    x, W, bias, A, a, b, h = inputs
    u = x if W is None else linear(x, W, bias)
    sigma, states = ACTIVATIONS[activation], []
    for u_t, a_t, b_t in zip(u, a, b, strict=True):
        for a_k, b_k in zip(a_t, b_t, strict=True):
            h = a_k * h + b_k * sigma(torch.addmm(u_t, h, A.t()))
        states.append(h)
    if last_only:
        return h.clone()
    return torch.stack(states) if states else u.new_empty(u.shape)


def _checked(
    x: Tensor,
    W: Tensor | None,
    bias: Tensor | None,
    A: Tensor,
    a: Tensor | float,
    b: Tensor | float,
    h0: Tensor,
    activation: str,
) -> _Inputs:
    """All tensors, after a check."""
    if activation not in ACTIVATIONS:
        raise ValueError(unknown_name("activation", activation, ACTIVATIONS))
    if x.dim() != 3 or h0.dim() != 2:
        given = f"{tuple(x.shape)} and {tuple(h0.shape)}"
        raise ValueError(f"x must be (T, B, n or d) and h0 (B, n), but they are {given}")
    if W is None and bias is not None:
        raise ValueError("bias was given without W: add it to x, which is then u itself")
    (T, _, d), n = x.shape, h0.shape[1]
    wanted = {"x": (T, len(h0), n if W is None else d), "A": (n, n), "W": (n, d), "bias": (n,)}
    for name, v in {"x": x, "A": A, "W": W, "bias": bias}.items():
        if v is not None and v.shape != wanted[name]:
            given = f"{tuple(v.shape)}; h0 is {tuple(h0.shape)}"
            raise ValueError(f"{name} must be {wanted[name]}, not {given}")
    scalar = torch.promote_types(x.dtype, torch.float32)  # 0.99 is 0.988 in bfloat16
    a, b = (v if isinstance(v, Tensor) else x.new_full((), v, dtype=scalar) for v in (a, b))
    K = max((v.shape[-1] for v in (a, b) if v.dim()), default=1)
    if K < 1:
        raise ValueError(f"a and b must have a K of at least 1, not {tuple(a.shape)}")
    try:
        return _Inputs(x, W, bias, A, a.expand(T, K), b.expand(T, K), h0)
    except RuntimeError:
        given = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"a and b must expand to (T, K), T = {T}, not from {given}") from None


class _Scan(Function):
    """Saves every inner state S and C = sigma(.), or with recompute the input and few states.

    The backward pass goes through segments of time, so that the products for the weights find
    their factors in the cache; with recompute through about sqrt(T) steps at a time, whose S and C
    a second forward sweep fills in first.
    """

    @staticmethod
    def forward(
        ctx: Any, activation: str, last_only: bool, recompute: bool, *tensors: Tensor | None
    ) -> Tensor:
        X, W, bias, A, a, b, h0 = _Inputs._make(tensors).contiguous()
        (T, B, n), K, h = (len(X), *h0.shape), a.shape[1], op.copy(h0)
        ctx.activation, ctx.last_only = activation, last_only
        ctx.segment = max(1, math.isqrt(T)) if recompute else 0  # 0: free to choose
        # Inner steps between two saved states.
        every = 1 if not recompute else K * ctx.segment if last_only else K
        S = op.states(h, T * K // every)
        C = op.empty((0 if recompute else T * K, B, n), h)
        sweeps, options = op.sweeps("leaky", h), {"activation": activation, "every": every}
        sweeps.forward(X, W, bias, A, a, b, h, S, C, **options)
        ctx.save_for_backward(*tensors, S, C)
        return h if last_only else S[K // every :: K // every]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, S, C = ctx.saved_tensors
        if torch.is_grad_enabled():

            def plain(*tensors: Tensor | None) -> Tensor:
                return _plain(_Inputs._make(tensors), ctx.activation, ctx.last_only)

            return (None, None, None, *op.differentiable_gradients(plain, inputs, grad))
        X, W, bias, A, a, b, _ = _Inputs._make(inputs).contiguous()
        wanted = _Inputs._make(ctx.needs_input_grad[3:])
        (T, K), (B, n) = a.shape, S.shape[1:]
        sweeps, options = op.sweeps("leaky", S[0]), {"activation": ctx.activation}
        G, g = op.received(grad, ctx.last_only)
        steps = ctx.segment or op.segment(T, K, g)
        D = op.empty((0 if K == 1 else steps * K, B, n), g)
        dU = op.empty((0 if W is None else steps, B, n), g)
        dX = op.empty(X.shape if W is None or wanted.x else (0, B, n), g)
        dW, dbias, dA = g.new_zeros(X.shape[2], n), g.new_zeros(n), torch.zeros_like(A)
        da, db = torch.empty_like(a), torch.empty_like(b)
        if ctx.segment:
            starts = S if ctx.last_only else S[::steps]
            S, C = op.empty((steps * K + 1, B, n), g), op.empty((steps * K, B, n), g)
        for lo in reversed(range(0, T, steps)):
            at = slice(lo, lo + steps)
            M, part, first = len(a[at]) * K, (A, a[at], b[at]), 0 if ctx.segment else lo * K
            S_at, C_at = S[first : first + M + 1], C[first : first + M]
            if ctx.segment:
                S[0] = starts[lo // steps]
                sweeps.forward(X[at], W, bias, *part, op.copy(S[0]), S_at, C_at, every=1, **options)
            dU_at = dX[at] if W is None else dU[: M // K]
            D_at, V = (dU_at, dU[:0]) if K == 1 else (D[:M], dU_at)
            da[at], db[at] = sweeps.backward(G[at], *part, g, S_at, C_at, D_at, V, **options)
            if wanted.A:
                dA.addmm_(D_at.view(-1, n).t(), S_at[:-1].view(-1, n))
            if W is not None:
                _input_gradients(dU_at, X[at], W, dX[at], dW, dbias)
        gradients = _Inputs(dX, dW.t(), dbias, dA, da, db, g)
        asked = (x if needed else None for x, needed in zip(gradients, wanted, strict=True))
        return (None, None, None, *asked)


def _input_gradients(
    dU: Tensor, X: Tensor, W: Tensor, dX: Tensor, dWt: Tensor, dbias: Tensor
) -> None:
    """Of u = x W^T + bias: write that of x where dX is not empty, add those of W^T and bias.

    x^T dU rather than dU^T x, which is several times slower where there are few input features.
    """
    d, x = dU.flatten(0, 1), X.flatten(0, 1)
    if len(dX):
        torch.mm(d, W, out=dX.view(x.shape))
    dWt.addmm_(x.t(), d)
    dbias += d.sum(0)


def _infer(inputs: _Inputs, activation: str, last_only: bool) -> Tensor:
    """The states alone, or nothing but the last."""
    X, W, bias, A, a, b, h0 = inputs.contiguous()
    (T, K), h = a.shape, op.copy(h0)
    every = T * K + 1 if last_only else K
    S, C = op.states(h, T * K // every), h.new_empty(0, *h.shape)
    op.sweeps("leaky", h).forward(X, W, bias, A, a, b, h, S, C, activation=activation, every=every)
    return h if last_only else S[1:]
