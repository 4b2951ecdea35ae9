"""The recurrence h <- a h + b sigma(A h + u_t) over a whole sequence as one operation."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.function import Function, once_differentiable
from torch.nn.functional import linear

from fixpoint.models.cells import ACTIVATIONS
from fixpoint.names import unknown_name

_HUGE = 2**25  # bytes; malloc returns smaller blocks without new page faults


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
    b = 1. Equal to `plain_scan`, gradients included, to rounding; several times faster with numba.
    Where no gradient is asked for, nothing but the output is stored.

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
    a, b = _checked(x, A, a, b, h0, activation, W, bias)
    if reason := unsupported(x, A, a, b, h0, activation=activation, W=W, bias=bias):
        raise ValueError(f"the fused scan does not apply: {reason}; use plain_scan")
    inputs = (x, W, bias, A, a, b, h0)
    if torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in inputs):
        return _Scan.apply(*inputs, activation, last_only, recompute)
    return _infer(*inputs, activation, last_only)


def plain_scan(
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
    a, b = _checked(x, A, a, b, h0, activation, W, bias)
    u = x if W is None else linear(x, W, bias)
    sigma, h, states = ACTIVATIONS[activation], h0, []
    for u_t, a_t, b_t in zip(u, a, b, strict=True):
        for a_k, b_k in zip(a_t, b_t, strict=True):
            h = a_k * h + b_k * sigma(torch.addmm(u_t, h, A.t()))
        states.append(h)
    if last_only:
        return h.clone()
    return torch.stack(states) if states else u.new_empty(u.shape)


def unsupported(
    x: Tensor,
    A: Tensor,
    a: Tensor,
    b: Tensor,
    h0: Tensor,
    *,
    activation: str,
    W: Tensor | None = None,
    bias: Tensor | None = None,
) -> str | None:
    """Why `fused_scan` cannot take these arguments, or None where it can."""
    if activation not in ACTIVATIONS:
        return unknown_name("activation", activation, ACTIVATIONS)
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return "it cannot be traced, exported or compiled"
    on_gpu = x.device.type == "cuda"
    if torch.is_autocast_enabled("cuda" if on_gpu else "cpu"):
        return "it keeps the dtype of its arguments and autocast is on"
    tensors = {"x": x, "A": A, "a": a, "b": b, "h0": h0, "W": W, "bias": bias}
    for name, v in tensors.items():
        if v is None:
            continue
        if v.device.type not in ("cpu", "cuda") or v.device != x.device:
            return f"it runs on the CPU or on one CUDA device and {name} is on {v.device}"
        if v.dtype not in (torch.float32, torch.bfloat16 if on_gpu else torch.float64):
            other = "bfloat16 on a CUDA device" if on_gpu else "float64 on the CPU"
            return f"it takes float32 or {other} and {name} is {v.dtype}"
        if v.dtype != x.dtype and not (name in ("a", "b") and x.dtype == torch.bfloat16):
            return f"it takes one dtype, but x is {x.dtype} and {name} is {v.dtype}"
        if is_functorch_wrapped_tensor(v):
            return f"it has no rule for torch.func transforms and {name} is in one"
        if unpack_dual(v).tangent is not None:
            return f"it has no forward-mode derivative and {name} carries a tangent"
    return _no_kernel(h0) if on_gpu else None


def _no_kernel(h0: Tensor) -> str | None:
    """Why no Triton kernel takes this state on a CUDA device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "it needs triton on a CUDA device, and triton is not installed"
    if (capability := torch.cuda.get_device_capability(h0.device)) < (8, 0):
        return f"it needs a CUDA device of capability 8.0, and {h0.device} has {capability}"
    from fixpoint.models._fused_triton import MAX_SIZE

    if (n := h0.shape[1]) > MAX_SIZE:
        return f"it takes at most {MAX_SIZE} units on a CUDA device, and h0 has {n}"
    return None


def _checked(
    x: Tensor,
    A: Tensor,
    a: Tensor | float,
    b: Tensor | float,
    h0: Tensor,
    activation: str,
    W: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """a and b expanded to (T, K), after a check of all arguments."""
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
        return a.expand(T, K), b.expand(T, K)
    except RuntimeError:
        given = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"a and b must expand to (T, K), T = {T}, not from {given}") from None


class _Scan(Function):
    """Saves every inner state S and C = sigma(.), or with recompute the input and few states.

    The backward pass goes through segments of time: the whole sequence at once where S and C are
    saved, else about sqrt(T) steps, whose S and C a second forward sweep fills in first.
    """

    @staticmethod
    def forward(
        ctx: Any,
        X: Tensor,
        W: Tensor | None,
        bias: Tensor | None,
        A: Tensor,
        a: Tensor,
        b: Tensor,
        h0: Tensor,
        activation: str,
        last_only: bool,
        recompute: bool,
    ) -> Tensor:
        X, A, a, b, h = X.contiguous(), A.contiguous(), a.contiguous(), b.contiguous(), _copy(h0)
        (T, B, n), K = (len(X), *h.shape), a.shape[1]
        ctx.activation, ctx.last_only, ctx.recompute = activation, last_only, recompute
        ctx.segment = max(1, math.isqrt(T) if recompute else T)
        # Inner steps between two saved states.
        every = 1 if not recompute else K * ctx.segment if last_only else K
        S = _states(h, T * K // every)
        C = _empty((0 if recompute else T * K, B, n), h)
        _sweeps(h).forward(X, W, bias, A, a, b, h, S, C, activation=activation, every=every)
        ctx.save_for_backward(X, W, bias, A, a, b, S, C)
        return h if last_only else S[K // every :: K // every]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        X, W, bias, A, a, b, S, C = ctx.saved_tensors
        (T, K), (B, n) = a.shape, S.shape[1:]
        sweeps, options = _sweeps(S[0]), {"activation": ctx.activation}
        if ctx.last_only:
            G, g = grad.new_empty(0, B, n), _copy(grad)
        else:
            G, g = grad.contiguous(), grad.new_zeros(B, n)
        dU, dA, da, db = _empty((T, B, n), g), torch.zeros_like(A), *map(torch.empty_like, (a, b))
        steps = min(T, ctx.segment)
        if ctx.recompute:
            starts = S if ctx.last_only else S[:: ctx.segment]
            S, C = _empty((steps * K + 1, B, n), g), _empty((steps * K, B, n), g)
        D = dU if K == 1 else _empty((steps * K, B, n), g)
        for lo in reversed(range(0, T, ctx.segment)):
            at = slice(lo, lo + ctx.segment)
            M, part = len(a[at]) * K, (A, a[at], b[at])
            if ctx.recompute:
                S[0] = starts[lo // ctx.segment]
                h = _copy(S[0])
                sweeps.forward(X[at], W, bias, *part, h, S[: M + 1], C[:M], every=1, **options)
            D_at, V = (dU[at], dU[:0]) if K == 1 else (D[:M], dU[at])
            da[at], db[at] = sweeps.backward(G[at], *part, g, S[: M + 1], C[:M], D_at, V, **options)
            if ctx.needs_input_grad[3]:
                dA.addmm_(D_at.view(-1, n).t(), S[:M].view(-1, n))
        inputs: tuple[Tensor | None, ...] = (dU, None, None)
        if W is not None:
            inputs = _input_gradients(dU, X, W, ctx.needs_input_grad[0])
        gradients = (*inputs, dA, da, db, g, None, None, None)
        return tuple(
            x if wanted else None for x, wanted in zip(gradients, ctx.needs_input_grad, strict=True)
        )


def _input_gradients(
    dU: Tensor, X: Tensor, W: Tensor, wants_X: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of u = x W^T + bias: those of W and bias as one product, [x, 1]^T dU.

    The transposed product is several times slower where there are few input features.
    """
    dU = dU.flatten(0, 1)
    dX = (dU @ W).view(X.shape) if wants_X else None
    x = X.flatten(0, 1)
    both = torch.cat((x, x.new_ones(len(x), 1)), 1).t() @ dU
    return dX, both[:-1].t(), both[-1]


def _infer(
    X: Tensor,
    W: Tensor | None,
    bias: Tensor | None,
    A: Tensor,
    a: Tensor,
    b: Tensor,
    h0: Tensor,
    activation: str,
    last_only: bool,
) -> Tensor:
    """The states alone, or nothing but the last."""
    X, A, a, b, h = X.contiguous(), A.contiguous(), a.contiguous(), b.contiguous(), _copy(h0)
    T, K = a.shape
    every = T * K + 1 if last_only else K
    S, C = _states(h, T * K // every), h.new_empty(0, *h.shape)
    _sweeps(h).forward(X, W, bias, A, a, b, h, S, C, activation=activation, every=every)
    return h if last_only else S[1:]


def _copy(h: Tensor) -> Tensor:
    return h.clone(memory_format=torch.contiguous_format)


def _states(h0: Tensor, count: int) -> Tensor:
    """(count + 1, B, n), the first one h0."""
    S = _empty((count + 1, *h0.shape), h0)
    S[0] = h0
    return S


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """torch.empty, in huge pages if large: page faults of a new buffer cost more than its use."""
    if like.is_cuda or math.prod(shape) * like.element_size() < _HUGE:
        return like.new_empty(shape)
    return torch.from_numpy(np.empty(shape, str(like.dtype).removeprefix("torch.")))


def _sweeps(h: Tensor) -> ModuleType:
    """The module with the `forward` and `backward` sweeps for a state (B, n)."""
    if h.is_cuda:
        return importlib.import_module("fixpoint.models._fused_triton")
    from fixpoint.models import _fused_torch

    compiled = _compiled()
    return compiled if compiled and h.shape[1] <= compiled.MAX_SIZE else _fused_torch


@functools.cache
def _compiled() -> ModuleType | None:
    """The sweeps compiled by numba, imported at the first use, or None where it is missing."""
    if importlib.util.find_spec("numba") is None:
        return None
    return importlib.import_module("fixpoint.models._fused_numba")
