"""Conditions of a fused operation, the kernel module that it takes, and its buffers."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from fixpoint._messages import unknown_name
from fixpoint._torch import (
    autocast_enabled,
    constant_in_graphs,
    has_values,
    inside_dispatch_mode,
    inside_transform,
    is_exporting,
    is_functorch_wrapped_tensor,
    is_plain,
)
from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.models.ops.common.buffers import empty
from fixpoint.models.ops.common.protocol import Backend

# Units n; above, a compiled block has too few rows and call overhead is no longer felt.
MAX_SIZE = 256
# Bytes of gradients in a chunk of time: few enough to be in the cache for the products that
# follow, and enough that the cost of a chunk itself is small.
CHUNK_BYTES = 2**21


def unsupported_reason(
    tensors: dict[str, Tensor | None], activation: str, *, kernel: str | None = None
) -> str | None:
    """Return why a fused operation cannot take these, x first among the tensors, or None if it can.

    `kernel` names the folder with its Triton kernels for CUDA devices, where there are any.
    """
    if activation not in ACTIVATIONS:
        return unknown_name("activation", activation, ACTIVATIONS)
    if is_exporting() or torch.jit.is_tracing():
        return "it cannot be traced or exported"
    if (compiling := torch.compiler.is_compiling()) and inside_transform():
        return "it has no rule for torch.func transforms and is in one"
    given = {name: v for name, v in tensors.items() if v is not None}
    x = given["x"]
    on_gpu = kernel is not None and x.device.type == "cuda"
    if torch.is_autocast_enabled("cuda" if on_gpu else "cpu"):
        return "it keeps the dtype of its arguments and autocast is on"
    somewhere = "cpu" if has_values(x) else x.device.type
    for name, v in given.items():
        if not (compiling or is_plain(v) or not has_values(v)):
            return f"it takes plain tensors and {name} is a {type(v).__name__}"
        if v.device.type != somewhere and not (on_gpu and v.device == x.device):
            where = "the CPU or on one CUDA device" if kernel else "the CPU"
            return f"it runs on {where} and {name} is on {v.device}"
        if v.dtype not in (torch.float32, torch.bfloat16 if on_gpu else torch.float64):
            other = "bfloat16 on a CUDA device" if on_gpu else "float64"
            return f"it takes float32 or {other} and {name} is {v.dtype}"
        if v.dtype != x.dtype and not (name in ("a", "b") and x.dtype == torch.bfloat16):
            return f"it takes one dtype, but x is {x.dtype} and {name} is {v.dtype}"
        if compiling:
            continue
        if is_functorch_wrapped_tensor(v):
            return f"it has no rule for torch.func transforms and {name} is in one"
        if unpack_dual(v).tangent is not None:
            return f"it has no forward-mode derivative and {name} carries a tangent"
    return _no_kernel(given["h0"], kernel) if on_gpu and kernel else None


def _no_kernel(h0: Tensor, kernel: str) -> str | None:
    """Return why no Triton kernel takes this state on a CUDA device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "it needs triton on a CUDA device, and triton is not installed"
    if (capability := torch.cuda.get_device_capability(h0.device)) < (8, 0):
        return f"it needs a CUDA device of capability 8.0, and {h0.device} has {capability}"
    largest = module(kernel, "triton_kernels").MAX_SIZE
    if (n := h0.shape[1]) > largest:
        return f"it takes at most {largest} units on a CUDA device, and h0 has {n}"
    return None


def by_registered_operation(x: Tensor) -> bool:
    """Tell whether a tracer or mode, or a tensor without values, needs the operation of
    `registered`.
    """
    return torch.compiler.is_compiling() or inside_dispatch_mode() or not has_values(x)


def copy(h: Tensor) -> Tensor:
    return h.clone(memory_format=torch.contiguous_format)


def states(h0: Tensor, count: int) -> Tensor:
    """Return (count + 1, B, n), the first one h0."""
    S = empty((count + 1, *h0.shape), h0)
    S[0] = h0
    return S


def output_gradients(grad: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    """Return gradients of the states after each time step, or none, and of the last state."""
    if whole:
        return grad.contiguous(), grad.new_zeros(grad.shape[1:])
    return grad.new_empty(0, *grad.shape), copy(grad)


def chunk_length(T: int, K: int, g: Tensor) -> int:
    """Time steps in a chunk of the backward pass, for a gradient g of each of the T K states."""
    if g.is_cuda:
        return max(1, T)  # one launch
    return max(1, min(T, CHUNK_BYTES // max(1, K * g.numel() * g.element_size())))


def backend(name: str, h: Tensor) -> Backend[Any, Any, Any]:
    """Return the kernel module of an operation for a state h, (B, n)."""
    return _backend(name, h.shape[1], h.device)


@functools.cache
def _backend(name: str, n: int, device: torch.device) -> Backend[Any, Any, Any]:
    return module(name, f"{kernels_for(n, device)}_kernels")


def kernels_for(n: int, device: torch.device) -> str:
    """Tell whose kernels states of n units take: those of numba, torch or Triton."""
    if device.type == "cuda":
        return "triton"
    return "numba" if n <= MAX_SIZE and has_numba() else "torch"


@constant_in_graphs
def has_numba() -> bool:
    """Tell whether numba is there, and SciPy, without which it multiplies no matrices."""
    return _are_installed("numba", "scipy")


@functools.cache
def _are_installed(*names: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in names)


@functools.cache
def module(name: str, kind: str) -> Any:
    """Return a file of an operation, imported at the first use."""
    folder = "equilibrium" if name == "equilibrium" else "recurrence"
    return importlib.import_module(f"fixpoint.models.ops.{folder}.{kind}")


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Return a block in which operations keep the dtype of their arguments."""
    enabled = autocast_enabled(device)
    return torch.autocast(device, enabled=False) if enabled else nullcontext()
