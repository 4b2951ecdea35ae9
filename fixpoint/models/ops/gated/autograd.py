"""The gated recurrence of FastGRNN and UGRNN over a whole sequence as one operation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fixpoint.models.ops.common import dispatch as op
from fixpoint.models.ops.common.autograd import Options, Recurrence
from fixpoint.models.ops.common.registered import register
from fixpoint.models.ops.gated.arguments import (
    BackwardArguments,
    ForwardArguments,
    Inputs,
    checked,
)
from fixpoint.models.ops.gated.reference import loop


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
    inputs = checked(x, W, bias, V, p, q, h0, activation)
    return GATED(inputs, Options(activation, last_only))


class GatedRecurrence(Recurrence[Inputs]):
    """Saves each state, gate and candidate."""

    name, reference_name, inputs, saved_count = "gated", "gated_scan_reference", Inputs, 3
    has_triton = True

    def reference(self, inputs: Inputs, options: Options) -> Tensor:
        return loop(inputs, options.activation, options.last_only)

    def infer(self, inputs: Inputs, options: Options) -> Tensor:
        h, last_only = op.copy(inputs.h0), options.last_only
        S, nothing = op.states(h, 0 if last_only else len(inputs.x)), h.new_empty(0, *h.shape)
        _forward(inputs, h, S, nothing, nothing, options.activation)
        return h if last_only else S[1:]

    def train(self, inputs: Inputs, options: Options) -> tuple[Tensor, tuple[Tensor, ...]]:
        h = op.copy(inputs.h0)
        S = op.states(h, len(inputs.x))
        Z, C = (op.empty((len(inputs.x), *h.shape), h) for _ in range(2))
        _forward(inputs, h, S, Z, C, options.activation)
        return h if options.last_only else S[1:], (S, Z, C)

    def saved_shapes(self, inputs: Inputs, options: Options) -> tuple[tuple[int, ...], ...]:
        T, state = len(inputs.x), inputs.h0.shape
        return (T + 1, *state), (T, *state), (T, *state)

    def gradients(
        self,
        inputs: Inputs,
        saved: Sequence[Tensor],
        grad: Tensor,
        needed: Inputs,
        options: Options,
    ) -> Inputs:
        x, W, _, V, p, q, _ = inputs
        S, Z, C = saved
        x, V = x.contiguous(), V.contiguous()
        T, B, n = C.shape
        G, g = op.output_gradients(grad, options.last_only)
        weights, backend = _by_gate(V, n), op.backend("gated", S[0])
        gates, factors = len(weights), (_factor(p), _factor(q))
        steps = op.chunk_length(T, gates, g)
        D = op.empty((gates * steps, B, n), g)
        dx = op.empty((T if needed.x else 0, *x.shape[1:]), g)
        dW, dV = g.new_zeros(gates, x.shape[2], n), torch.zeros_like(weights)
        sums = torch.zeros_like(p), torch.zeros_like(q), g.new_zeros(2, n)
        for lo in reversed(range(0, T, steps)):
            at = slice(lo, min(lo + steps, T))
            d = D[: gates * (at.stop - lo)].unflatten(0, (gates, at.stop - lo))
            S_at, Z_at, C_at = S[lo : at.stop + 1], Z[at], C[at]
            parts = backend.backward(
                BackwardArguments(
                    G[at], weights, *factors, g, S_at, Z_at, C_at, d, options.activation
                )
            )
            for total, part in zip(sums, parts, strict=True):
                total += part
            for k in range(gates if needed.V else 0):
                dV[k].addmm_(d[k].view(-1, n).t(), S_at[:-1].view(-1, n))
            _input_gradients(d, x[at], W, dx[at], dW)
        dp, dq, dbias = sums
        return Inputs(dx, dW.mT.flatten(0, 1), dbias.flatten(), dV.flatten(0, 1), dp, dq, g)


GATED = GatedRecurrence()
register(GATED)
unsupported = GATED.unsupported


def _forward(inputs: Inputs, h: Tensor, S: Tensor, Z: Tensor, C: Tensor, activation: str) -> None:
    x, W, bias, V, p, q, _ = inputs
    n, x = h.shape[1], x.contiguous()
    op.backend("gated", h).forward(
        ForwardArguments(
            x if W is not None else _gate_first(x, n),
            None if W is None else _by_gate(W, n),
            h.new_zeros(2, n) if bias is None else bias.contiguous().view(2, n),
            _by_gate(V.contiguous(), n),
            _factor(p),
            _factor(q),
            h,
            S,
            Z,
            C,
            activation,
        )
    )


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


def _factor(p: Tensor) -> float | Tensor:
    """p as the kernels take it: the host does not wait for a CUDA device."""
    return p if p.is_cuda else p.item()


def _by_gate(weight: Tensor, n: int) -> Tensor:
    """(G n, m) as (G, n, m)."""
    return weight.unflatten(0, (-1, n))


def _gate_first(u: Tensor, n: int) -> Tensor:
    """(T, B, G n) as (G, T, B, n)."""
    return u.unflatten(2, (-1, n)).movedim(2, 0).contiguous()
