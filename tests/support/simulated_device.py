"""A CUDA device without one: tensors of the CPU that say they are on it, and count what they do.

A test of speed without a clock: how often the host waits for a value (`reads`), how many operations
are launched, and what is copied between host and device. Operations that mix tensors of both raise.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
READS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_dim"}
"""Operations for whose result the host waits."""
CHECKED = {"linalg_eig", "_linalg_eigh", "_linalg_svd", "linalg_cholesky", "linalg_lu_factor"}
"""Those that look for an error on the host, or run there."""


FACTORIES = {"zeros", "ones", "full", "empty", "scalar_tensor", "zeros_like", "new_zeros"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class Counts:
    """What happened on the device since the block began, by name of the operation."""

    def __init__(self) -> None:
        self.reads: collections.Counter[str] = collections.Counter()
        self.copies: collections.Counter[str] = collections.Counter()
        self.operations: collections.Counter[str] = collections.Counter()

    @property
    def launches(self) -> int:
        return sum(self.operations.values())


class OnDevice(Tensor):
    """A tensor whose values are in one of the CPU."""

    stored: Tensor

    @staticmethod
    def __new__(cls, stored: Tensor) -> OnDevice:
        tensor = Tensor._make_wrapper_subclass(
            cls, stored.shape, strides=stored.stride(), dtype=stored.dtype, device="cpu"
        )
        tensor.stored = stored
        return tensor

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.stored})"

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy; copy it to the host")

    def tolist(self) -> Any:
        _counts.reads["tolist"] += 1
        return self.stored.tolist()

    def cpu(self) -> Tensor:
        return to_host(self)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


_counts = Counts()


def to_device(tensor: Tensor) -> Tensor:
    """A leaf on the device with the same values."""
    return OnDevice(tensor.detach().clone()).requires_grad_(tensor.requires_grad)


def module_to_device(module: torch.nn.Module) -> torch.nn.Module:
    """The module, its parameters and buffers on the device."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            tensors |= {name: to_device(x) for name, x in tensors.items() if x is not None}
    return module


def to_host(tensor: Tensor) -> Tensor:
    _counts.copies["to the host"] += 1
    stored = tensor.detach()
    return stored.stored.clone() if isinstance(stored, OnDevice) else stored


@contextlib.contextmanager
def simulated_device(*, capturing: bool = False) -> Iterator[Counts]:
    """A block in which new tensors may be on "cuda", and that counts what its operations do.

    capturing: whether a CUDA graph is said to be captured.
    """
    global _counts
    before, _counts = _counts, Counts()
    properties = mock.Mock(
        multi_processor_count=132, shared_memory_per_block_optin=232448, name="simulated"
    )
    fakes = {
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: properties,
        "_lazy_init": lambda: None,
        "is_current_stream_capturing": lambda: capturing,
        "device_of": lambda _: contextlib.nullcontext(),
    }
    try:
        with contextlib.ExitStack() as stack:
            for name, fake in fakes.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, fake))
            stack.enter_context(_Mode())
            yield _counts
    finally:
        _counts = before


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.split("::")[1]
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    ours = [x for x in tensors if isinstance(x, OnDevice)]
    target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if ours:
        _count(name, args, tensors, ours)
    if target is not None and torch._C._current_graph_task_id() >= 0:
        # To the formulas of derivatives, which are C++, a tensor here is one of the CPU.
        target = CUDA if ours or name in FACTORIES else target
    there = target is not None and target.type == "cuda"
    given = kwargs | {"device": CPU} if there else kwargs
    bare, rest = tree_map_only(OnDevice, lambda x: x.stored, (args, given))
    out = func(*bare, **rest)
    if name == "_to_copy" and target is not None and bool(ours) != there:
        _counts.copies["to the host" if ours else "to the device"] += 1
        if there and not given.get("non_blocking"):
            _counts.reads["a copy that ends first"] += 1
    if not (there or (ours and not (target is not None and target.type == "cpu"))):
        return out
    same = {id(x.stored): x for x in ours}
    return tree_map_only(Tensor, lambda x: same[id(x)] if id(x) in same else OnDevice(x), out)


def _count(name: str, args: Any, tensors: list[Tensor], ours: list[Any]) -> None:
    _counts.operations[name] += 1
    if name in READS or name in CHECKED:
        _counts.reads[name] += 1
    others = [x for x in tensors if not isinstance(x, OnDevice)]
    if name in INDEXING:
        indices = [x for x in args[1] if isinstance(x, Tensor)]
        if any(x.dtype == torch.bool for x in indices):
            _counts.reads["a mask as index"] += 1
        if any(not isinstance(x, OnDevice) for x in indices):
            _counts.copies["an index of the host"] += 1
        return
    if name in ("copy_", "_to_copy"):
        if others and ours:
            _counts.copies["copy_"] += 1
        return
    if any(x.dim() for x in others):  # numbers may be on the host
        shapes = [tuple(x.shape) for x in others]
        raise RuntimeError(f"{name} mixes a tensor on the device with {shapes} on the host")
