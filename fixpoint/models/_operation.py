"""What the fused operations share: when they apply, their buffers and the choice of sweeps."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.forward_ad import unpack_dual

from fixpoint.models.cells import ACTIVATIONS
from fixpoint.names import unknown_name

HUGE = 2**25  # bytes; malloc returns smaller blocks without new page faults
# Units n; above, a compiled block has too few rows and call overhead is no longer felt.
MAX_SIZE = 256
# Bytes of gradients in a segment of time: few enough to be in the cache for the products that
# follow, and so many that a segment's own cost vanishes.
SEGMENT = 2**21


def refusal(tensors: dict[str, Tensor | None], activation: str) -> str | None:
    """Why a fused operation cannot take these, x first among the tensors, or None if it can."""
    if activation not in ACTIVATIONS:
        return unknown_name("activation", activation, ACTIVATIONS)
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return "it cannot be traced, exported or compiled"
    if torch.is_autocast_enabled("cpu"):
        return "it keeps the dtype of its arguments and autocast is on"
    given = {name: v for name, v in tensors.items() if v is not None}
    for name, v in given.items():
        if v.device.type != "cpu":
            return f"it runs on the CPU and {name} is on {v.device}"
        if v.dtype not in (torch.float32, torch.float64):
            return f"it takes float32 or float64 and {name} is {v.dtype}"
        if v.dtype != given["x"].dtype:
            return f"it takes one dtype, but x is {given['x'].dtype} and {name} is {v.dtype}"
        if is_functorch_wrapped_tensor(v):
            return f"it has no rule for torch.func transforms and {name} is in one"
        if unpack_dual(v).tangent is not None:
            return f"it has no forward-mode derivative and {name} carries a tangent"
    return None


def differentiable_gradients(
    plain: Callable[..., Tensor], inputs: Sequence[Tensor | None], grad: Tensor
) -> list[Tensor | None]:
    """Gradients of plain(*inputs) that may be differentiated again, None where none is wanted.

    For the backward pass of a fused operation under create_graph, by its twin of plain operations.
    """
    # Views, as one input may be computed from another and would collect that path too.
    fresh = [v if v is None else v.view_as(v) for v in inputs]
    wanted = {i: v for i, v in enumerate(fresh) if v is not None and v.requires_grad}
    output = plain(*fresh)
    found = torch.autograd.grad(
        output, list(wanted.values()), grad, create_graph=True, allow_unused=True
    )
    gradients = dict(zip(wanted, found, strict=True))
    return [gradients.get(i) for i in range(len(inputs))]


def copy(h: Tensor) -> Tensor:
    return h.clone(memory_format=torch.contiguous_format)


def states(h0: Tensor, count: int) -> Tensor:
    """(count + 1, B, n), the first one h0."""
    S = empty((count + 1, *h0.shape), h0)
    S[0] = h0
    return S


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """torch.empty, in huge pages if large: page faults of a new buffer cost more than its use."""
    if math.prod(shape) * like.element_size() < HUGE:
        return like.new_empty(shape)
    return torch.from_numpy(np.empty(shape, str(like.dtype).removeprefix("torch.")))


def received(grad: Tensor, last_only: bool) -> tuple[Tensor, Tensor]:
    """Gradients of the states after each time step, or none of them; and of the last state."""
    if last_only:
        return grad.new_empty(0, *grad.shape), copy(grad)
    return grad.contiguous(), grad.new_zeros(grad.shape[1:])


def segment(T: int, size: int) -> int:
    """Time steps in a segment of the backward pass, where those of one step take `size` bytes."""
    return max(1, min(T, SEGMENT // max(1, size)))


def sweeps(name: str, n: int) -> ModuleType:
    """The module with the sweeps of an operation for n units."""
    module = compiled(name)
    if module is None or n > MAX_SIZE:
        return importlib.import_module(f"fixpoint.models._{name}_torch")
    return module


@functools.cache
def compiled(name: str) -> ModuleType | None:
    """The sweeps compiled by numba, imported at the first use, or None where it is missing."""
    if importlib.util.find_spec("numba") is None:
        return None
    return importlib.import_module(f"fixpoint.models._{name}_numba")
