"""The gated recurrence of FastGRNN and UGRNN over a whole sequence as one operation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.nn.functional import linear

from fixpoint._messages import unknown_name
from fixpoint.models.maps import ACTIVATIONS
from fixpoint.models.ops.common import dispatch as op


def gated_scan(
    x: Tensor,
    V: Tensor,
    p: Tensor | float,
    q: Tensor | float,
    h0: Tensor,
    *,
    activation: str,
    W: Tensor | None = None,
    bias: Tensor | None = None,
    last_only: bool = False,
) -> Tensor:
    r"""States of h <- z h + (p (1 - z) + q) c with a gate z and a candidate c.

    With V (n, n), as in FastGRNN (p = sigmoid(zeta), q = sigmoid(nu)), both share one product:

        z = sigmoid(V h + u_t + b_z),  c = sigma(V h + u_t + b_c).

    With V (2 n, n), as in UGRNN (p = 1, q = 0), each has its own, the gate's first:

        z = sigmoid(V_1 h + u_t1 + b_z),  c = sigma(V_2 h + u_t2 + b_c).

    Equal to `gated_scan_reference`, gradients included, to rounding; several times faster with
    numba. Where no gradient is asked for, nothing but the output is stored. A gradient of a
    gradient (create_graph) goes through `gated_scan_reference`.

    The backward pass carries g = dL/dh from the last step to the first. At each step

        dz = g (h - p c) z (1 - z),  dc = g (p (1 - z) + q) sigma'(.),
        dp += sum g c (1 - z),  dq += sum g c,  db_z += sum_B dz,  db_c += sum_B dc,

    d = dz + dc with a shared product, else d = [dz, dc], is the gradient of V h and of u_t, and
    g <- g z + d V + the gradient of this state itself. Then dV = sum_t d^T h, dW = sum_t d^T x_t.

    Args:
        x: u, (T, B, n) or (T, B, 2 n) as V has rows; with W, the input (T, B, d) of u = x W^T,
            which is faster than to compute u first.
        V: (n, n) or (2 n, n).
        p, q: numbers, or tensors without axes.
        h0: the state before the first step, (B, n).
        activation: sigma, a name in `ACTIVATIONS`.
        W: (n, d) or (2 n, d), as many rows as V.
        bias: [b_z, b_c], (2 n,).
        last_only: return only the state after the last step.

    Returns:
        (T, B, n), the state after each time step; (B, n) with last_only. The backward pass uses
        these states: clone them before a change in place.

    Raises:
        ValueError: unknown activation, shapes that do not fit, or `unsupported` gives a reason.

    Source: Kusupati et al. (2018), FastGRNN: a fast, accurate, stable and tiny kilobyte sized gated
    recurrent neural network; Collins, Sohl-Dickstein, Sussillo (2017), Capacity and trainability in
    recurrent neural networks (UGRNN).

    Example:
        >>> x, W, V = torch.randn(7, 4, 3), torch.randn(5, 3), torch.randn(5, 5)
        >>> h0, bias = torch.zeros(4, 5), torch.zeros(10)
        >>> gated_scan(x, V, 0.7, 0.02, h0, activation="tanh", W=W, bias=bias).shape
        torch.Size([7, 4, 5])
    """
    inputs = _checked(x, W, bias, V, p, q, h0, activation)
    if reason := unsupported(**inputs._asdict(), activation=activation):
        raise ValueError(f"the gated scan does not apply: {reason}; use gated_scan_reference")
    if torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in inputs):
        return _GatedScan.apply(activation, last_only, *inputs)
    return _infer(inputs, activation, last_only)


def gated_scan_reference(
    x: Tensor,
    V: Tensor,
    p: Tensor | float,
    q: Tensor | float,
    h0: Tensor,
    *,
    activation: str,
    W: Tensor | None = None,
    bias: Tensor | None = None,
    last_only: bool = False,
) -> Tensor:
    """The same as `gated_scan`, as a loop of plain operations: the reference.

    Example:
        >>> u, V, h0 = torch.randn(7, 4, 10), torch.randn(10, 5), torch.zeros(4, 5)
        >>> gated_scan_reference(u, V, 1.0, 0.0, h0, activation="tanh", last_only=True).shape
        torch.Size([4, 5])
    """
    return _plain(_checked(x, W, bias, V, p, q, h0, activation), activation, last_only)


def unsupported(*, activation: str, **tensors: Tensor | None) -> str | None:
    """Why `gated_scan` cannot take these arguments, or None where it can."""
    return op.unsupported_reason(tensors, activation)


class _Inputs(NamedTuple):
    """The tensors of `gated_scan`."""

    x: Tensor
    W: Tensor | None
    bias: Tensor | None
    V: Tensor
    p: Tensor
    q: Tensor
    h0: Tensor


def _plain(inputs: _Inputs, activation: str, last_only: bool) -> Tensor:
    x, W, bias, V, p, q, h0 = inputs
    u = x if W is None else linear(x, W)
    n, sigma, h, states = len(V.t()), ACTIVATIONS[activation], h0, []
    b_z, b_c = h0.new_zeros(2, n) if bias is None else bias.view(2, n)
    for u_t in u:
        product = torch.addmm(u_t, h, V.t())
        z = torch.sigmoid(product[:, :n] + b_z)
        c = sigma(product[:, -n:] + b_c)
        h = z * h + (p * (1 - z) + q) * c
        states.append(h)
    if last_only:
        return h.clone()
    return torch.stack(states) if states else h0.new_empty(0, *h0.shape)


def _checked(
    x: Tensor,
    W: Tensor | None,
    bias: Tensor | None,
    V: Tensor,
    p: Tensor | float,
    q: Tensor | float,
    h0: Tensor,
    activation: str,
) -> _Inputs:
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
    p, q = (v if isinstance(v, Tensor) else x.new_tensor(v) for v in (p, q))
    wanted = {"x": (T, B, rows if W is None else d), "W": (rows, d), "bias": (2 * n,)}
    for name, v in {"x": x, "W": W, "bias": bias}.items():
        if v is not None and v.shape != wanted[name]:
            given = f"{tuple(v.shape)}; h0 is {tuple(h0.shape)} and V is {tuple(V.shape)}"
            raise ValueError(f"{name} must be {wanted[name]}, not {given}")
    for name, v in {"p": p, "q": q}.items():
        if v.dim():
            raise ValueError(f"{name} must be a number or have no axes, not {tuple(v.shape)}")
    return _Inputs(x, W, bias, V, p, q, h0)


class _GatedScan(Function):
    """Saves each state, gate and candidate."""

    @staticmethod
    def forward(ctx: Any, activation: str, last_only: bool, *tensors: Tensor | None) -> Tensor:
        inputs = _Inputs._make(tensors)
        h = op.copy(inputs.h0)
        S = op.states(h, len(inputs.x))
        Z, C = (op.empty((len(inputs.x), *h.shape), h) for _ in range(2))
        _sweep(inputs, h, S, Z, C, activation)
        ctx.activation, ctx.last_only = activation, last_only
        ctx.save_for_backward(*tensors, S, Z, C)
        return h if last_only else S[1:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, S, Z, C = ctx.saved_tensors
        if torch.is_grad_enabled():

            def plain(*tensors: Tensor | None) -> Tensor:
                return _plain(_Inputs._make(tensors), ctx.activation, ctx.last_only)

            return (None, None, *op.differentiable_gradients(plain, inputs, grad))
        x, W, _, V, p, q, _ = _Inputs._make(inputs)
        x, V = x.contiguous(), V.contiguous()
        wanted = _Inputs._make(ctx.needs_input_grad[2:])
        T, B, n = C.shape
        G, g = op.received(grad, ctx.last_only)
        weights, sweeps = _parts(V, n), op.sweeps("gated", S[0])
        gates, factors = len(weights), (p.item(), q.item())
        steps = op.segment(T, gates, g)
        D = op.empty((gates * steps, B, n), g)
        dx = op.empty((T if wanted.x else 0, *x.shape[1:]), g)
        dW, dV = g.new_zeros(gates, x.shape[2], n), torch.zeros_like(weights)
        sums = torch.zeros_like(p), torch.zeros_like(q), g.new_zeros(2, n)
        for lo in reversed(range(0, T, steps)):
            at = slice(lo, min(lo + steps, T))
            d = D[: gates * (at.stop - lo)].unflatten(0, (gates, at.stop - lo))
            S_at, Z_at, C_at = S[lo : at.stop + 1], Z[at], C[at]
            parts = sweeps.backward(
                G[at], weights, *factors, g, S_at, Z_at, C_at, d, activation=ctx.activation
            )
            for total, part in zip(sums, parts, strict=True):
                total += part
            for k in range(gates if wanted.V else 0):
                dV[k].addmm_(d[k].view(-1, n).t(), S_at[:-1].view(-1, n))
            _input_gradients(d, x[at], W, dx[at], dW)
        dp, dq, dbias = sums
        gradients = _Inputs(dx, dW.mT.flatten(0, 1), dbias.flatten(), dV.flatten(0, 1), dp, dq, g)
        asked = (v if needed else None for v, needed in zip(gradients, wanted, strict=True))
        return (None, None, *asked)


def _input_gradients(d: Tensor, x: Tensor, W: Tensor | None, dx: Tensor, dW: Tensor) -> None:
    """Of u_g = x W_g^T, from d (G, T, B, n): write that of x, add those of W_g^T to dW (G, d, n).

    x^T d rather than d^T x, which is several times slower where there are few input features.
    """
    if W is None:
        if len(dx):
            dx.unflatten(2, d.shape[::3]).copy_(d.movedim(0, 2))
        return
    d, x = d.flatten(1, 2), x.flatten(0, 1)
    for part, total in zip(d, dW, strict=True):
        total.addmm_(x.t(), part)
    if len(dx):
        dx.zero_()
        for part, weight in zip(d, W.chunk(len(d)), strict=True):
            dx.view(x.shape).addmm_(part, weight)


def _infer(inputs: _Inputs, activation: str, last_only: bool) -> Tensor:
    """The states alone, or nothing but the last."""
    h = op.copy(inputs.h0)
    S, nothing = op.states(h, 0 if last_only else len(inputs.x)), h.new_empty(0, *h.shape)
    _sweep(inputs, h, S, nothing, nothing, activation)
    return h if last_only else S[1:]


def _sweep(inputs: _Inputs, h: Tensor, S: Tensor, Z: Tensor, C: Tensor, activation: str) -> None:
    """The forward sweep; see `_gated_torch.forward`."""
    x, W, bias, V, p, q, _ = inputs
    n, x = h.shape[1], x.contiguous()
    X = x if W is not None else _apart(x, n)
    shift = h.new_zeros(2, n) if bias is None else bias.contiguous().view(2, n)
    W = None if W is None else _parts(W, n)
    op.sweeps("gated", h).forward(
        X,
        W,
        shift,
        _parts(V.contiguous(), n),
        p.item(),
        q.item(),
        h,
        S,
        Z,
        C,
        activation=activation,
    )


def _parts(weight: Tensor, n: int) -> Tensor:
    """(G n, m) as (G, n, m)."""
    return weight.unflatten(0, (-1, n))


def _apart(u: Tensor, n: int) -> Tensor:
    """(T, B, G n) as (G, T, B, n)."""
    return u.unflatten(2, (-1, n)).movedim(2, 0).contiguous()
