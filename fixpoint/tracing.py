"""A map as a function of its argument and of the tensors that it closes over."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fixpoint._torch import (
    function_modes,
    graph_clock,
    is_functorch_wrapped_tensor,
    made_since,
    untraced,
)

MatrixMap = Callable[[Tensor], Tensor]


class Closure(NamedTuple):
    """What one evaluation fz = phi(z) found.

    fz: phi(z).
    captured: the tensors from outside that phi closes over and that ask for derivatives.
    twins: what took their place in this evaluation: leaves, so that the graph of fz ends there.
    leaves: leaves that phi reaches on other ways, as through an `autograd.Function` of its own.
    replay: phi as a pure function of z and the captured tensors, made of the recorded operations;
        None where not all of them could be seen.
    """

    fz: Tensor
    captured: list[Tensor]
    twins: list[Tensor]
    leaves: list[Tensor]
    replay: Callable[..., Tensor] | None


def closure_convert(phi: MatrixMap, z: Tensor) -> Closure:
    """Evaluate phi at z, a leaf, with a graph that holds nothing but the operations of phi.

    Each captured tensor is replaced by a detached twin, so a gradient of fz costs the same
    whatever the captured tensors were computed from, and is partial where one depends on another.
    """
    recorder = _Recorder(z, twins=True)
    with recorder:
        fz = phi(z)
    if fz.is_leaf:
        fz = recorder.twin_of(fz)
    leaves = _other_leaves(fz, [z, *recorder.twins])
    complete = recorder.complete and not leaves and recorder.holds(fz)
    return Closure(
        fz, recorder.captured, recorder.twins, leaves, recorder.replay(fz) if complete else None
    )


def closure_convert_in_transform(phi: MatrixMap, z: Tensor) -> Closure:
    """The same within forward mode or a torch.func transform, whose tensors have no twins.

    What phi makes by operations that the recorder cannot see looks like a captured tensor; a
    second evaluation tells, as phi then makes another one.
    """
    first, second = _Recorder(z, twins=False), _Recorder(z, twins=False)
    with first:
        before = phi(z)
    with second:
        fz = phi(z)
    same = len(first.captured) == len(second.captured) and all(
        a is b for a, b in zip(first.captured, second.captured, strict=True)
    )
    complete = same and first.complete and first.holds(before)
    return Closure(
        fz, second.captured, second.captured, [], second.replay(fz) if complete else None
    )


def substitute(phi: MatrixMap, z: Tensor, captured: list[Tensor], values: list[Tensor]) -> Tensor:
    """phi(z) with other tensors in the place of the captured ones."""
    recorder = _Recorder(z, twins=True)
    for x, value in zip(captured, values, strict=True):
        recorder.take(x, value)
    recorder.closed = True
    with recorder:
        return phi(z)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Hide operations from the closure conversions that are under way around them."""
    recorders = [mode for mode in function_modes() if isinstance(mode, _Recorder)]
    before = [recorder.paused for recorder in recorders]
    for recorder in recorders:
        recorder.paused = True
    try:
        yield
    finally:
        for recorder, paused in zip(recorders, before, strict=True):
            recorder.paused = paused


class _Slot(NamedTuple):
    """The place of a tensor among those of a recorded evaluation."""

    place: int


class _Call(NamedTuple):
    function: Callable[..., Any]
    arguments: Any
    options: Any
    result: Any


class _Recorder(TorchFunctionMode):
    """Notes the operations of one evaluation; replaces tensors from outside, if `twins`."""

    def __init__(self, z: Tensor, *, twins: bool) -> None:
        super().__init__()
        self.with_twins = twins
        self.known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self.captured: list[Tensor] = []
        self.twins: list[Tensor] = []
        self.places: list[int] = []
        self.of_place: dict[int, Tensor] = {}
        self.calls: list[_Call] = []
        self.count = 0
        self.complete = True
        self.paused = False
        self.closed = False  # whether no further tensor may be captured
        self.z = z
        self._add(z)
        self.start = graph_clock()

    def take(self, x: Tensor, value: Tensor) -> None:
        """Let the value take the place of x."""
        place = self._add(x)
        self.captured.append(x)
        self.twins.append(value)
        self.places.append(place)
        self.of_place[place] = value

    def holds(self, x: Tensor) -> bool:
        """Whether x is known: z, captured, or made by a recorded operation."""
        return self._place(x) is not None

    @untraced  # a compiled phi is recorded operation by operation
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        arguments, options = _map(args, self._slot), _map(kwargs, self._slot)
        if self.of_place:
            args, kwargs = _map(args, self._value), _map(kwargs, self._value)
        out = func(*args, **kwargs)
        self.calls.append(_Call(func, arguments, options, _map(out, self._result)))
        return out

    def replay(self, fz: Tensor) -> Callable[..., Tensor]:
        """The recorded evaluation as a function of z and of values for the captured tensors."""
        calls, places, last = self.calls, self.places, self._slot(fz)

        def replayed(z: Tensor, *values: Tensor) -> Tensor:
            found = {0: z, **dict(zip(places, values, strict=True))}

            def fill(x: Any) -> Any:
                return found[x.place] if isinstance(x, _Slot) else x

            for call in calls:
                out = call.function(*_map(call.arguments, fill), **_map(call.options, fill))
                _bind(call.result, out, found)
            return fill(last)

        return replayed

    def twin_of(self, x: Tensor) -> Tensor:
        """The twin of a captured tensor that phi returns itself; any other tensor as it is."""
        self._slot(x)
        twin: Tensor = self._value(x)
        return twin

    def _add(self, x: Tensor) -> int:
        place, self.count = self.count, self.count + 1
        self.known[id(x)] = weakref.ref(x), place
        return place

    def _place(self, x: Tensor) -> int | None:
        found = self.known.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def _slot(self, x: Any) -> Any:
        """The slot of a tensor; the tensor itself where it is a constant."""
        if not isinstance(x, Tensor):
            return x
        place = self._place(x)
        if place is None:
            if self.closed or not self._has_derivatives(x):
                return x
            if self.with_twins and self._is_made_inside(x):
                self.complete = False
                return x
            self.take(x, self._twin(x))
            place = self.places[-1]
        return _Slot(place)

    def _has_derivatives(self, x: Tensor) -> bool:
        if x.requires_grad:
            return True
        return not self.with_twins and (
            is_functorch_wrapped_tensor(x)
            or torch.autograd.forward_ad.unpack_dual(x).tangent is not None
        )

    def _is_made_inside(self, x: Tensor) -> bool:
        """Whether an operation that cannot be seen has made x from z or from a twin."""
        if is_functorch_wrapped_tensor(x):
            return True
        # The clock is that of one thread: a tensor of another thread may look too young.
        leaves = [self.z, *self.twins]
        return made_since(x, self.start) and any(
            leaf is own for leaf in _leaves(x) for own in leaves
        )

    def _twin(self, x: Tensor) -> Tensor:
        if not self.with_twins:
            return x
        with unrecorded():
            return x.detach().requires_grad_()

    def _value(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return self.of_place.get(self._place(x), x)  # type: ignore[arg-type]

    def _result(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return None
        place = self._place(x)  # known where the operation wrote in place
        return _Slot(self._add(x) if place is None else place)


def _map(x: Any, function: Callable[[Any], Any]) -> Any:
    """The same structure of tuples, lists and dicts with the function of each leaf."""
    if isinstance(x, (_Slot, torch.Size)):
        return function(x)
    if isinstance(x, (tuple, list)):
        parts = [_map(part, function) for part in x]
        return parts if type(x) is list else tuple(parts)
    if type(x) is dict:
        return {name: _map(part, function) for name, part in x.items()}
    return function(x)


def _bind(result: Any, out: Any, found: dict[int, Tensor]) -> None:
    """Put the tensors of an operation's output at their places."""
    if isinstance(result, _Slot):
        found[result.place] = out
    elif isinstance(result, (tuple, list)):
        for slot, part in zip(result, out, strict=True):
            _bind(slot, part, found)
    elif isinstance(result, dict):
        for name, slot in result.items():
            _bind(slot, out[name], found)


def _other_leaves(fz: Tensor, known: list[Tensor]) -> list[Tensor]:
    """Leaves that the graph of fz leads to, beside the known ones."""
    own = {id(x) for x in known}
    found = {id(leaf): leaf for leaf in _leaves(fz) if id(leaf) not in own}
    return list(found.values())


def _leaves(x: Tensor) -> Iterator[Tensor]:
    """The leaves that the graph of x leads to."""
    visited, waiting = set(), [x.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        waiting.extend(next_node for next_node, _ in node.next_functions)
