"""All private torch API that the package uses, in one place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    peek_interpreter_stack,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
)

__all__ = [
    "TorchDispatchMode",
    "autocast_enabled",
    "batched",
    "carries_tangents",
    "constant_in_graphs",
    "flop_registries",
    "function_modes",
    "graph_clock",
    "has_values",
    "inside_dispatch_mode",
    "inside_forward_mode",
    "inside_transform",
    "inside_vmap",
    "is_exporting",
    "is_functorch_wrapped_tensor",
    "is_plain",
    "made_since",
    "no_gradients",
    "outside_graph",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_structure",
    "tree_unflatten",
    "unbatched",
    "untraced",
    "values",
    "version",
]

untraced = torch._disable_dynamo
"""Decorator of a function that torch.compile calls and does not trace."""


is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
"""Whether torch.export traces; torch before 2.7 does not tell it from torch.compile."""


Function = TypeVar("Function", bound=Callable[..., Any])


def constant_in_graphs(function: Function) -> Function:
    """`torch.compiler.assume_constant_result`, which imports the whole compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_graphs
def inside_transform() -> bool:
    """Whether a torch.func transform (jvp, vmap, jacrev, ...) is active."""
    return peek_interpreter_stack() is not None


def inside_vmap(x: Tensor) -> bool:
    """Whether x has an axis that torch.func.vmap hides."""
    while is_functorch_wrapped_tensor(x):
        if is_batchedtensor(x):
            return True
        x = get_unwrapped(x)
    return False


R = TypeVar("R")


def outside_graph(f: Callable[..., R], *arguments: Any) -> R:
    """f(*arguments), which torch.compile leaves out of its graph.

    `torch.compiler.disable` as a decorator would import the compiler with the package.
    """
    return torch.compiler.disable(f)(*arguments)


outside_graph._torchdynamo_disable = True  # type: ignore[attr-defined]
outside_graph._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "when a solve to a tolerance ends depends on values, and Implicit, Newton and "
    "LevenbergMarquardt differentiate phi; a fixed number of steps (rtol=0, atol=0) of the other "
    "solvers with Unrolled() or Phantom() compiles to one graph"
)


def version(x: Tensor) -> int:
    """How often x was changed in place, 0 where torch does not count it."""
    return 0 if x.is_inference() else x._version


def values(x: Tensor) -> list[float]:
    """The numbers of a vector on the host; `tolist` of torch 2.6 refuses those of torch.func."""
    return [e.item() for e in x] if is_functorch_wrapped_tensor(x) else x.tolist()


def inside_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation, of torch.func or not, is entered."""
    return inside_transform() or forward_ad._current_level >= 0


def carries_tangents() -> bool:
    """`inside_forward_mode`, which no compiler traces."""
    return not torch.compiler.is_compiling() and inside_forward_mode()


@contextmanager
def no_gradients() -> Iterator[None]:
    """Neither reverse-mode graphs nor forward-mode tangents; `torch.no_grad` stops the first."""
    with torch.no_grad():
        if torch.compiler.is_compiling():
            yield
        else:
            with forward_ad._set_fwd_grad_enabled(False):
                yield


def graph_clock() -> int:
    """A number that grows with each graph node made by this thread."""
    return torch._C._autograd._get_sequence_nr()


def made_since(x: Tensor, clock: int) -> bool:
    """Whether the graph node of x was made after that reading of the clock."""
    return x.grad_fn is not None and x.grad_fn._sequence_nr() >= clock


def function_modes() -> list[TorchFunctionMode]:
    """The entered modes, the innermost last."""
    return list(_get_current_function_mode_stack())


def unbatched(x: Tensor) -> Tensor | None:
    """What `is_grads_batched` and `vectorize=True` hide, with the batch first; None elsewhere."""
    if not is_legacy_batchedtensor(x):
        return None
    return torch._remove_batch_dim(x, _batch_level(), 0, 0)


def batched(x: Tensor) -> Tensor:
    """The inverse of `unbatched`."""
    return torch._add_batch_dim(x, 0, _batch_level())


def _batch_level() -> int:
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


def inside_dispatch_mode() -> bool:
    """Whether a mode sees each operation: a counter of FLOPs, fake tensors, a checkpoint policy."""
    return torch._C._len_torch_dispatch_stack() > 0


def autocast_enabled(device: str) -> bool:
    """Whether autocast is on for a type of device; "meta" has none."""
    return device != "meta" and torch.is_autocast_enabled(device)


def has_values(x: Tensor) -> bool:
    """Whether x holds numbers: a meta or fake tensor has a shape alone."""
    return x.device.type != "meta" and not isinstance(x, FakeTensor)


def is_plain(x: Tensor) -> bool:
    """Whether x is a tensor or parameter, or a subclass that leaves operations as they are."""
    return type(x).__torch_dispatch__ is Tensor.__torch_dispatch__


def flop_registries() -> list[dict[Any, Any]]:
    """The formulas of torch.utils.flop_counter and those of entered counters, which copied them."""
    module: Any = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return []
    counters = [
        mode.counter.flop_registry
        for mode in _get_current_dispatch_mode_stack()
        if isinstance(mode, module._FlopCounterMode)
    ]
    return [module.flop_registry, *counters]
