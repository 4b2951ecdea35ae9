"""All private torch API that the package uses, in one place."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    maybe_get_level,
    peek_interpreter_stack,
)
from torch._functorch.pyfunctorch import (
    temporarily_clear_interpreter_stack,
    temporarily_pop_interpreter_stack,
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
    "FakeTensor",
    "TorchDispatchMode",
    "as_many_levels",
    "autocast_enabled",
    "batched",
    "carries_tangents",
    "constant_in_graphs",
    "floats_as_constants",
    "flop_registries",
    "function_modes",
    "gradients",
    "graph_clock",
    "graph_pass",
    "has_derivatives_at",
    "has_ended",
    "has_tangent",
    "has_values",
    "inside_dispatch_mode",
    "inside_forward_mode",
    "inside_transform",
    "inside_vmap",
    "is_exporting",
    "is_functorch_wrapped_tensor",
    "is_ordinary",
    "is_plain",
    "is_recorded",
    "is_symbol",
    "level_zero",
    "made_since",
    "no_gradients",
    "outside_graph",
    "prepare_loops",
    "primal",
    "scan",
    "stored",
    "tangents_of_outer_levels",
    "to_host",
    "tracks",
    "transform_level",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_structure",
    "tree_unflatten",
    "unbatched",
    "untraced",
    "version",
    "versions",
    "while_loop",
    "without_ended",
    "wrapper_level",
]

R = TypeVar("R")


def while_loop(condition: Any, body: Any, carried: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Run the body while the condition holds, as one operation of a graph."""
    from torch._higher_order_ops import while_loop

    return while_loop(condition, body, carried)


def scan(step: Any, start: Any, inputs: Tensor) -> tuple[Any, Tensor]:
    """Return the last carry and all outputs of step(carry, input), as one operation of a graph."""
    from torch._higher_order_ops import scan

    start = tree_map(torch.clone, start)  # of one tensor given twice it would make one carry
    last, outputs = scan(step, start, inputs)
    return last, outputs


def untraced(f: Callable[..., R]) -> Callable[..., R]:
    """Return f, which the compiler neither traces nor traces anything within.

    As `torch._disable_dynamo`, whose first call imports the compiler, which takes two seconds:
    where it has not been imported, nothing is traced.
    """
    disabled = torch._disable_dynamo(f)
    frames = torch._C._dynamo.eval_frame
    if not hasattr(frames, "_FrameExecStrategy"):
        return disabled

    def call(*arguments: Any, **options: Any) -> R:
        may_trace = "torch._dynamo" in sys.modules
        return (disabled if may_trace else f)(*arguments, **options)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    action = frames._FrameAction
    strategy = frames._FrameExecStrategy(action.SKIP, action.DEFAULT)
    frames.set_code_exec_strategy(call.__code__, strategy)
    return functools.wraps(f)(call)


is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
"""Whether torch.export traces; torch before 2.7 does not tell it from torch.compile."""


def is_symbol(size: int) -> bool:
    """Tell whether a graph is being exported in which this size is any."""
    return is_exporting() and isinstance(size, torch.SymInt)


Function = TypeVar("Function", bound=Callable[..., Any])


def constant_in_graphs(function: Function) -> Function:
    """Apply `torch.compiler.assume_constant_result`, which imports the whole compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_graphs
def prepare_loops() -> None:
    """Keep two faults of the compiler out of a `while_loop`, for the whole process.

    Inductor writes a result in the body into a carry or a captured tensor that is still read, and
    gradients are silently wrong: each buffer has a place of its own. Dynamo notes an attribute of
    a captured tensor, as `W.T`, outside of the loop and of the transform that reads it: it belongs
    where it is read.
    """
    from torch._dynamo.variables.misc import GetAttrVariable
    from torch._inductor import config

    config.inplace_buffers = False
    GetAttrVariable.create_getattr_proxy = staticmethod(_attribute)  # type: ignore[assignment]


def _attribute(tensor: Any, name: str) -> Any:
    """Add the node that reads an attribute of a tensor to the innermost graph of dynamo."""
    attribute = getattr(tensor, name)
    graph = getattr(getattr(tensor, "tracer", None), "output_graph", None)
    if graph is not None and hasattr(attribute, "tracer"):
        attribute.tracer = graph.current_tracer
    return attribute


@contextmanager
def floats_as_constants() -> Iterator[None]:
    """Let dynamo take Python floats that are read as constants, guarded by their values.

    With `dynamic=True` they would be symbols, which a `while_loop` does not take.
    """
    _take_floats_as_constants(True)
    try:
        yield
    finally:
        _take_floats_as_constants(False)


@constant_in_graphs
def _take_floats_as_constants(take: bool) -> None:
    """Set it for a while, unless it was set from outside; dynamo may trace the same code again."""
    from torch._dynamo import config

    global _changed
    if take and not config.specialize_float:
        config.specialize_float = _changed = True
    elif not take and _changed:
        config.specialize_float = _changed = False


_changed = False
"""Whether `floats_as_constants` has changed the setting of dynamo."""


@constant_in_graphs
def inside_transform() -> bool:
    """Tell whether a torch.func transform (jvp, vmap, jacrev, ...) is active."""
    return peek_interpreter_stack() is not None


@contextmanager
def level_zero() -> Iterator[list[Any]]:
    """Leave all torch.func transforms that are active; yields them, for `as_many_levels`."""
    if peek_interpreter_stack() is None:
        yield []
    else:
        with temporarily_clear_interpreter_stack() as stack:
            yield stack


@contextmanager
def as_many_levels(stack: list[Any]) -> Iterator[None]:
    """Enter as many transforms as `level_zero` has left, so that further ones have other numbers.

    Not those themselves: under an outer torch.no_grad they let no graph be made at level 0.
    """
    with torch.enable_grad():  # which a level keeps for those below
        for _ in stack:
            torch._C._functorch._grad_increment_nesting()
    try:
        yield
    finally:
        for _ in stack:
            torch._C._functorch._grad_decrement_nesting()


def transform_level() -> int:
    """Count how many torch.func transforms are active."""
    top = peek_interpreter_stack()
    return 0 if top is None else top.level()


def has_ended(x: Tensor) -> bool:
    """Tell whether the transform that has wrapped x has ended, as with torch.func.vjp."""
    level: int = maybe_get_level(x)
    return level == -2


def without_ended(x: Tensor) -> Tensor:
    """Return x without the wrappers of transforms that have ended: only so has a view a graph."""
    while has_ended(x):
        x = get_unwrapped(x)
    return x


def wrapper_level(x: Tensor) -> int:
    """Return the number of the active transform that has wrapped x; -1 where none has."""
    return maybe_get_level(without_ended(x))


def has_derivatives_at(x: Tensor, most: int) -> bool:
    """Tell whether x has derivatives of a torch.func transform of at most this level, or a tangent
    outside of them all.
    """
    while is_functorch_wrapped_tensor(x):
        level = maybe_get_level(x)
        if 0 < level <= most and (x.requires_grad or has_tangent(x)):
            return True
        x = get_unwrapped(x)
    return has_tangent(x)


def has_tangent(x: Tensor) -> bool:
    """Ask at the level of x, where alone its tangent is seen."""
    if forward_ad._current_level < 0:
        return False
    with ExitStack() as stack:
        while transform_level() > max(maybe_get_level(x), 0):
            stack.enter_context(temporarily_pop_interpreter_stack())
        return forward_ad.unpack_dual(x).tangent is not None


def primal(x: Tensor) -> Tensor:
    """Return x as a leaf without gradient and tangent, outside of all transforms.

    Raises:
        RuntimeError: torch.func.vmap hides an axis of x.
    """
    while is_functorch_wrapped_tensor(x):
        if is_batchedtensor(x):
            raise RuntimeError("torch.func.vmap hides an axis of a tensor that has no batch here")
        x = get_unwrapped(x)
    with level_zero():
        if forward_ad._current_level >= 0:
            x = forward_ad.unpack_dual(x).primal
        return x.detach()


def stored(x: Tensor) -> Tensor:
    """Return the tensor below all wrappers of torch.func; its axes are those of all instances."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def inside_vmap(x: Tensor) -> bool:
    """Tell whether x has an axis that torch.func.vmap hides."""
    while is_functorch_wrapped_tensor(x):
        if is_batchedtensor(x):
            return True
        x = get_unwrapped(x)
    return False


def outside_graph(f: Callable[..., R], *arguments: Any) -> R:
    """Return f(*arguments), which torch.compile leaves out of its graph.

    Where the compiler has not been imported, which takes two seconds, nothing is traced.
    """
    if "torch._dynamo" not in sys.modules:
        return f(*arguments)
    return torch.compiler.disable(f)(*arguments)


outside_graph._torchdynamo_disable = True  # type: ignore[attr-defined]
outside_graph._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "a graph holds solves by Picard, DampedPicard, InexactNewton, Anderson, Broyden(memory=m) and "
    'SQUAREM, without record and noise, with Implicit() or Phantom(), failed="zero" or "keep", and '
    "fixed numbers of steps (rtol=0, atol=0) with Unrolled(); groups leave it, and options belong "
    "to the solver, not the call"
)


def version(x: Tensor) -> int:
    """Count how often x was changed in place, 0 where torch does not count it."""
    return 0 if x.is_inference() else x._version


def versions(a: Tensor, b: Tensor) -> tuple[int, int] | None:
    """Count how often each was changed in place; None where torch does not count it."""
    return None if a.is_inference() or b.is_inference() else (a._version, b._version)


def to_host(x: Tensor) -> np.ndarray:
    """Copy the numbers of a tensor to the host, those of torch.func's wrappers too."""
    if peek_interpreter_stack() is not None:
        while is_functorch_wrapped_tensor(x):
            x = get_unwrapped(x)
        with temporarily_clear_interpreter_stack():
            return x.detach().cpu().numpy()
    array: np.ndarray = (x.detach() if x.is_cpu else x.detach().cpu()).numpy()
    return array


def from_host(x: np.ndarray, device: torch.device) -> Tensor:
    """Return numbers on a device; on the CPU they share the memory of x.

    The host does not wait for a CUDA device, which has a copy of its own when this returns.
    """
    tensor = torch.from_numpy(x)
    if device.type == "cpu":
        return tensor
    return tensor.to(device, non_blocking=device.type == "cuda")


def inside_forward_mode() -> bool:
    """Tell whether a level of forward-mode differentiation, of torch.func or not, is entered."""
    return inside_transform() or forward_ad._current_level >= 0


def tracks() -> bool:
    """Tell whether derivatives are computed, in reverse or forward mode."""
    return torch.is_grad_enabled() or inside_forward_mode()


def is_recorded(x: Tensor) -> bool:
    """Tell whether operations on x become a graph that cannot read values: compiled, or of CUDA."""
    if torch.compiler.is_compiling():
        return True
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def carries_tangents() -> bool:
    """Call `inside_forward_mode`, which no compiler traces."""
    return not torch.compiler.is_compiling() and inside_forward_mode()


@contextmanager
def no_gradients() -> Iterator[None]:
    """Stop reverse-mode graphs and forward-mode tangents; `torch.no_grad` stops the first."""
    with torch.no_grad():
        if torch.compiler.is_compiling():
            yield
        else:
            with forward_ad._set_fwd_grad_enabled(False):
                yield


@contextmanager
def tangents_of_outer_levels(ctx: Any) -> Iterator[tuple[Any, ...]]:
    """Let the jvp of an autograd.Function make tangents of the forward levels around its own.

    Torch makes none within a jvp, so that a second derivative in forward mode is silently wrong.
    Yields the saved tensors without tangents of the jvp's own level, which it computes itself.
    These are not to be found within vmap: a Function that saves numbers writes its own vmap.
    """

    def without(x: Tensor | None) -> Tensor | None:
        if x is None or not (x.is_floating_point() or x.is_complex()):
            return x
        return forward_ad.unpack_dual(x).primal

    with forward_ad._set_fwd_grad_enabled(True):
        yield tuple(map(without, ctx.saved_tensors))


@contextmanager
def gradients(*, reverse: bool) -> Iterator[None]:
    """Let forward-mode tangents and, if `reverse`, reverse-mode graphs be made within
    `no_gradients`.
    """
    with torch.set_grad_enabled(reverse), forward_ad._set_fwd_grad_enabled(True):
        yield


def graph_clock() -> int:
    """Return a number that grows with each graph node made by this thread."""
    return torch._C._autograd._get_sequence_nr()


def graph_pass() -> int:
    """Return the number of the backward pass under way, for its hooks; -1 outside of one."""
    return torch._C._current_graph_task_id()


def made_since(x: Tensor, clock: int) -> bool:
    """Tell whether the graph node of x was made after that reading of the clock."""
    return x.grad_fn is not None and x.grad_fn._sequence_nr() >= clock


def function_modes() -> list[TorchFunctionMode]:
    """Return the entered modes, the innermost last."""
    return list(_get_current_function_mode_stack())


def unbatched(x: Tensor) -> Tensor | None:
    """Return what `is_grads_batched` and `vectorize=True` hide, with the batch first; None
    elsewhere.
    """
    if not is_legacy_batchedtensor(x):
        return None
    return torch._remove_batch_dim(x, _batch_level(), 0, 0)


def batched(x: Tensor) -> Tensor:
    """Return the inverse of `unbatched`."""
    return torch._add_batch_dim(x, 0, _batch_level())


def _batch_level() -> int:
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


def inside_dispatch_mode() -> bool:
    """Tell whether a mode sees each operation: a counter of FLOPs, fake tensors, a checkpoint
    policy.
    """
    return torch._C._len_torch_dispatch_stack() > 0


def autocast_enabled(device: str) -> bool:
    """Tell whether autocast is on for a type of device; "meta" has none."""
    return device != "meta" and torch.is_autocast_enabled(device)


def is_traced_by_fx() -> bool:
    """Tell whether make_fx records operations, as torch.func.linearize lets it."""
    if torch.compiler.is_compiling():  # which cannot trace the question
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def has_values(x: Tensor) -> bool:
    """Tell whether x holds numbers that may be read: a meta or fake tensor has a shape alone, and
    make_fx lets none be read.
    """
    return x.device.type != "meta" and not (isinstance(x, FakeTensor) or is_traced_by_fx())


def is_readable(x: Tensor) -> bool:
    """Tell whether numbers of x may be read now, and not in a graph that is recorded."""
    return has_values(x) and not is_recorded(x)


def is_plain(x: Tensor) -> bool:
    """Tell whether x is a tensor or parameter, or a subclass that leaves operations as they are."""
    return type(x).__torch_dispatch__ is Tensor.__torch_dispatch__


def is_ordinary(tensors: Iterable[Tensor | None]) -> bool:
    """Tell whether these are tensors of numbers on the CPU, all float32 or all float64, on which
    operations act at once: no subclass, and no compiler, tracer, mode, autocast, transform or
    forward mode.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    dtype = None
    for v in tensors:
        if v is None:
            continue
        if type(v) not in _PLAIN or not v.is_cpu or v.dtype != (dtype or v.dtype):
            return False
        dtype = v.dtype
    return not (
        dtype not in (torch.float32, torch.float64)
        or torch.jit.is_tracing()
        or torch.is_autocast_enabled("cpu")
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


_PLAIN = (Tensor, torch.nn.Parameter)


def flop_registries() -> list[dict[Any, Any]]:
    """Return the formulas of torch.utils.flop_counter and those of entered counters, which copied
    them.
    """
    module: Any = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return []
    counters = [
        mode.counter.flop_registry
        for mode in _get_current_dispatch_mode_stack()
        if isinstance(mode, module._FlopCounterMode)
    ]
    return [module.flop_registry, *counters]
