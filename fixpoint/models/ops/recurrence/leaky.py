"""The leaky recurrence h <- a h + b sigma(A h + u_t)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fixpoint._messages import unknown_name
from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.models.ops.common.pointwise import sigma, slope
from fixpoint.models.ops.recurrence.arguments import Gradients, Operands
from fixpoint.models.ops.recurrence.autograd import FusedRecurrence, Options, check_shapes
from fixpoint.models.ops.recurrence.registered import register
from fixpoint.models.ops.recurrence.step import Activation


class LeakyStep(Activation):
    """h' = a h + b c, c = sigma(A h + u + bias)."""

    states, kept, products, drives = 1, 1, (0,), (0,)

    def step(self, h: Any, p: Any, u: Any, b: Any, w: Any) -> Any:
        c = sigma(self.activation, p[0] + (u[0] + b[0]))
        return (w[0] * h[0] + w[1] * c,), (c,)

    def pullback(self, g: Any, h: Any, kept: Any, w: Any) -> Any:
        (x,), (c,) = g, kept
        d = slope(self.activation, w[1] * x, c)
        return (w[0] * x,), (d,), (d,), (x * h[0], x * c)


class LeakyInputs(NamedTuple):
    """The tensors of `fused_scan`, with a and b expanded to (T, K)."""

    x: Tensor
    W: Tensor | None
    bias: Tensor | None
    A: Tensor
    a: Tensor
    b: Tensor
    h0: Tensor


class LeakyRecurrence(FusedRecurrence[LeakyInputs]):
    """Leaky recurrence; with recompute its backward pass takes about sqrt(T) steps at a time."""

    name, reference_name, inputs, has_triton = "leaky", "scan_reference", LeakyInputs, True
    step = LeakyStep

    def operands(self, inputs: LeakyInputs) -> Operands:
        x, W, bias, A, a, b, h0 = inputs
        row = h0.new_zeros(1, len(A)) if bias is None else bias.unsqueeze(0)
        matrix = None if W is None else W.unsqueeze(0)
        scalars = a.flatten(), b.flatten()
        return Operands(x, matrix, row, A.unsqueeze(0), scalars, a.shape[1], (h0,))

    def of_inputs(self, inputs: LeakyInputs, found: Gradients) -> LeakyInputs:
        a, b = found.w.unflatten(1, inputs.a.shape)
        W = None if found.W is None else found.W[0]
        # two tensors: outputs of registered operations must not share memory
        return LeakyInputs(
            found.x, W, found.bias[0], found.V[0], a.clone(), b.clone(), found.start[0]
        )


LEAKY = LeakyRecurrence()
register(LEAKY)
unsupported = LEAKY.unsupported


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
    """Return states of h <- a_tk h + b_tk sigma(A h + u_t), K inner steps k in each time step t.

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

    Raises:
        ValueError: unknown activation, shapes that do not fit, or `unsupported` gives a reason.

    Example:
        >>> x, W, A = torch.randn(7, 4, 3), torch.randn(5, 3), torch.randn(5, 5)
        >>> h0 = torch.zeros(4, 5)
        >>> fused_scan(x, A, 0.9, 0.1, h0, activation="relu", W=W).shape
        torch.Size([7, 4, 5])
    """
    inputs = checked(x, W, bias, A, a, b, h0, activation)
    return LEAKY(inputs, Options(activation, last_only, recompute))[0]


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
    """Return the same as `fused_scan`, as a loop of plain operations: the reference."""
    inputs = checked(x, W, bias, A, a, b, h0, activation)
    return LEAKY.reference(inputs, Options(activation, last_only))[0]


def checked(
    x: Tensor,
    W: Tensor | None,
    bias: Tensor | None,
    A: Tensor,
    a: Tensor | float,
    b: Tensor | float,
    h0: Tensor,
    activation: str,
) -> LeakyInputs:
    """Return all tensors, after a check."""
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
        return LeakyInputs(x, W, bias, A, a.expand(T, K), b.expand(T, K), h0)
    except RuntimeError:
        given = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"a and b must expand to (T, K), T = {T}, not from {given}") from None
