"""The recurrence h <- a h + b sigma(A h + u_t) over a whole sequence as one operation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fixpoint.models.ops.common import dispatch as op
from fixpoint.models.ops.common.autograd import Options, Recurrence
from fixpoint.models.ops.common.registered import register
from fixpoint.models.ops.leaky.arguments import (
    BackwardArguments,
    ForwardArguments,
    Inputs,
    checked,
)
from fixpoint.models.ops.leaky.reference import loop


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
    inputs = checked(x, W, bias, A, a, b, h0, activation)
    return LEAKY(inputs, Options(activation, last_only, recompute))


class LeakyRecurrence(Recurrence[Inputs]):
    """Saves each inner state S and C = sigma(.), or with recompute the input and few states.

    The backward pass goes through chunks of time, so that the products for the weights find
    their factors in the cache; with recompute through about sqrt(T) steps at a time, whose S and C
    a second forward pass computes first.
    """

    name, reference_name, inputs, has_triton = "leaky", "scan_reference", Inputs, True
    saved_count = 2

    def reference(self, inputs: Inputs, options: Options) -> Tensor:
        return loop(inputs, options.activation, options.last_only)

    def infer(self, inputs: Inputs, options: Options) -> Tensor:
        X, W, bias, A, a, b, h0 = inputs.contiguous()
        (T, K), h = a.shape, op.copy(h0)
        every = T * K + 1 if options.last_only else K
        S, C = op.states(h, T * K // every), h.new_empty(0, *h.shape)
        arguments = ForwardArguments(X, W, bias, A, a, b, h, S, C, options.activation, every)
        op.backend("leaky", h).forward(arguments)
        return h if options.last_only else S[1:]

    def train(self, inputs: Inputs, options: Options) -> tuple[Tensor, tuple[Tensor, ...]]:
        X, W, bias, A, a, b, h0 = inputs.contiguous()
        K, h, last_only = a.shape[1], op.copy(h0), options.last_only
        every = _inner_steps_between_saved_states(inputs, options)
        (count, *_), shape_of_C = self.saved_shapes(inputs, options)
        S, C = op.states(h, count - 1), op.empty(shape_of_C, h)
        arguments = ForwardArguments(X, W, bias, A, a, b, h, S, C, options.activation, every)
        op.backend("leaky", h).forward(arguments)
        return h if last_only else S[K // every :: K // every], (S, C)

    def saved_shapes(self, inputs: Inputs, options: Options) -> tuple[tuple[int, ...], ...]:
        inner, state = inputs.a.numel(), inputs.h0.shape
        every = _inner_steps_between_saved_states(inputs, options)
        return (inner // every + 1, *state), (0 if options.recompute else inner, *state)

    def gradients(
        self,
        inputs: Inputs,
        saved: Sequence[Tensor],
        grad: Tensor,
        needed: Inputs,
        options: Options,
    ) -> Inputs:
        X, W, bias, A, a, b, _ = inputs.contiguous()
        S, C = saved
        (T, K), (B, n), recompute = a.shape, S.shape[1:], options.recompute
        backend, activation = op.backend("leaky", S[0]), options.activation
        G, g = op.output_gradients(grad, options.last_only)
        steps = _recomputed_steps(T) if recompute else op.chunk_length(T, K, g)
        D = op.empty((0 if K == 1 else steps * K, B, n), g)
        dU = op.empty((0 if W is None else steps, B, n), g)
        dX = op.empty(X.shape if W is None or needed.x else (0, B, n), g)
        dW, dbias, dA = g.new_zeros(X.shape[2], n), g.new_zeros(n), torch.zeros_like(A)
        da, db = torch.empty_like(a), torch.empty_like(b)
        if recompute:
            starts = S if options.last_only else S[::steps]
            S, C = op.empty((steps * K + 1, B, n), g), op.empty((steps * K, B, n), g)
        for lo in reversed(range(0, T, steps)):
            at = slice(lo, lo + steps)
            M, part, first = len(a[at]) * K, (A, a[at], b[at]), 0 if recompute else lo * K
            S_at, C_at = S[first : first + M + 1], C[first : first + M]
            if recompute:
                S[0] = starts[lo // steps]
                h = op.copy(S[0])
                backend.forward(
                    ForwardArguments(X[at], W, bias, *part, h, S_at, C_at, activation, 1)
                )
            dU_at = dX[at] if W is None else dU[: M // K]
            D_at, V = (dU_at, dU[:0]) if K == 1 else (D[:M], dU_at)
            da[at], db[at] = backend.backward(
                BackwardArguments(G[at], *part, g, S_at, C_at, D_at, V, activation)
            )
            if needed.A:
                dA.addmm_(D_at.view(-1, n).t(), S_at[:-1].view(-1, n))
            if W is not None:
                _input_gradients(dU_at, X[at], W, dX[at], dW, dbias)
        return Inputs(dX, dW.t().contiguous(), dbias, dA, da, db, g)


LEAKY = LeakyRecurrence()
register(LEAKY)
unsupported = LEAKY.unsupported


def _inner_steps_between_saved_states(inputs: Inputs, options: Options) -> int:
    T, K = inputs.a.shape
    if not options.recompute:
        return 1
    return K * _recomputed_steps(T) if options.last_only else K


def _recomputed_steps(T: int) -> int:
    """Time steps between two states that the backward pass starts from."""
    return max(1, math.isqrt(T))


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
