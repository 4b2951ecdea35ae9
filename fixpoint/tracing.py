"""A map as a function of its argument and of the tensors that it closes over.

One evaluation is recorded, outside of all torch.func transforms. Each tensor from outside that
asks for derivatives is replaced by a leaf of its own, its twin, so the graph of phi(z) holds only
the operations of phi. The result is a pure function f(z, *captured): the recorded operations
again, or phi evaluated with other tensors in the place of the captured ones.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fixpoint._modes import RecordingMode, map_nested, unrecorded
from fixpoint._torch import (
    TorchDispatchMode,
    as_many_levels,
    autocast_enabled,
    graph_clock,
    graph_pass,
    has_derivatives_at,
    has_ended,
    has_tangent,
    inside_forward_mode,
    is_functorch_wrapped_tensor,
    level_zero,
    made_since,
    no_gradients,
    primal,
    stored,
    transform_level,
    tree_leaves,
    untraced,
    wrapper_level,
)
from fixpoint.row_guard import guard_rows

MatrixMap = Callable[[Tensor], Tensor]
R = TypeVar("R")
PureMap = Callable[..., Tensor]
"""f(z, *captured), (B, D) like z."""

OTHER_TENSORS = (
    "phi closes over other tensors than in its solve, as a lambda does after its loop variables "
    "have changed, or a branch that it did not take there: bind loop variables (lambda z, h=h: "
    "...), or use Unrolled()"
)
UNSEEN = (
    "phi holds an operation that torch.func cannot see, such as an autograd.Function of its own or "
    "torch.func.grad with respect to a tensor that phi closes over: "
    "differentiate with torch.autograd.grad outside of torch.func and forward mode, or use "
    "Unrolled() with a fixed number of steps (rtol = atol = 0)"
)


class Closure(NamedTuple):
    """One evaluation fz = phi(z) and the tensors it depends on.

    fz: phi(z).
    captured: the tensors from outside that phi closes over and that ask for derivatives.
    twins: the leaves in their places, at which the graph of fz ends.
    opaque: tensors that phi reaches on other ways, as through an `autograd.Function` of its own,
        and that have no twins; the graph of fz leads through them.
    again: f(z, *captured) as phi evaluated again with other tensors in the places of the captured
        ones; it reaches the opaque tensors by itself.
    function: f as the recorded operations, or `again` where not all of them could be seen.
    """

    fz: Tensor
    captured: list[Tensor]
    twins: list[Tensor]
    opaque: list[Tensor]
    again: PureMap
    function: PureMap


def closure_convert(phi: MatrixMap, z: Tensor, *, lost: Tensor | None = None) -> Closure:
    """Evaluate phi at z, a leaf, with a graph that holds nothing but the operations of phi.

    A gradient of fz costs the same whatever the captured tensors were computed from, and is
    partial where one depends on another. Rows that are `lost`, (B,), touch no other row's gradient.
    """
    recorder, opaque = _Recorder(z), []
    fz = recorder.evaluate(phi, lost)
    if other_leaves(stored(fz), [z, *recorder.twins]):
        seen = OuterTensors()
        recorder = _Recorder(z, hidden=seen)
        with seen:
            fz = recorder.evaluate(phi, lost)
        own = [z, *recorder.twins]
        found = [*seen.outer.values(), *_reached(stored(fz), recorder.captured)]
        opaque = list({id(x): x for x in found if all(x is not other for other in own)}.values())
        opaque += other_leaves(stored(fz), [*own, *opaque])
    if opaque and inside_forward_mode():
        raise RuntimeError(UNSEEN)
    again = _substituted(phi, recorder.captured, lost, autocast_state(z))
    replay = None if opaque else recorder.replay(fz)
    return Closure(stored(fz), recorder.captured, recorder.twins, opaque, again, replay or again)


def closure_convert_in_vmap(phi: MatrixMap, z: Tensor) -> Closure:
    """Return the same where torch.func.vmap hides an axis, which no leaf can leave out.

    Whatever phi makes by operations that the recorder cannot see looks like a captured tensor; a
    second evaluation tells, as phi then makes another one.
    """
    first, recorder = (_Recorder(z, twins=False) for _ in range(2))
    before, fz = first.evaluate(phi), recorder.evaluate(phi)
    same = len(first.captured) == len(recorder.captured) and all(
        a is b for a, b in zip(first.captured, recorder.captured, strict=True)
    )
    replay = recorder.replay(fz)
    if not same or (replay is None and not recorder.nested) or not first.holds(before):
        raise RuntimeError(UNSEEN)
    again = _substituted(phi, recorder.captured, None, autocast_state(z))
    return Closure(fz, recorder.captured, recorder.captured, [], again, replay or again)


def substitute(
    phi: MatrixMap, z: Tensor, captured: list[Tensor], values: list[Tensor], *given: Tensor
) -> Tensor:
    """Return phi(z) with other tensors in the place of the captured ones; `given` ones may be
    there.
    """
    mode = _Substitution([z, *given], captured, values)
    with mode:
        fz = phi(z)
    found: Tensor = mode.values.get(id(fz), fz)  # phi may return a captured tensor itself
    return found


def _substituted(
    phi: MatrixMap, captured: list[Tensor], lost: Tensor | None, autocast: AutocastState
) -> PureMap:
    """Return phi as a function of z and the captured tensors, evaluated again each time."""

    def function(z: Tensor, *values: Tensor) -> Tensor:
        with _autocast(autocast), guard_rows(lost, getattr(phi, "columns", ())):
            return substitute(phi, z, captured, list(values[: len(captured)]))

    return function


class _Primals(TorchFunctionMode):
    """Operations on tensors without tangent and without the transforms around the solve."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = transform_level()
        self.made: dict[int, weakref.ref[Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*map_nested(args, self._primal), **map_nested(kwargs or {}, self._primal))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.made[id(x)] = weakref.ref(x)
        return out

    def _primal(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if is_functorch_wrapped_tensor(x):
            made = self.made.get(id(x))
            # torch.func.vjp inside phi computes its products when its transform has ended.
            inside = has_ended(x) or wrapper_level(x) > self.outer
            return x if inside or (made is not None and made() is x) else stored(x)
        return primal(x) if _is_transformed(x) else x


def at_level_zero(run: Callable[[MatrixMap], R], phi: MatrixMap) -> R:
    """Return run(phi) outside of all transforms of torch.func, phi without their derivatives.

    phi itself is evaluated within them, since it may apply further ones.
    """

    def phi_of_primals(z: Tensor) -> Tensor:
        with as_many_levels(stack), _Primals():
            return stored(phi(z))

    phi_of_primals.columns = getattr(phi, "columns", ())  # type: ignore[attr-defined]
    with level_zero() as stack, no_gradients():
        return run(phi_of_primals)


class _Slot:
    """The place of a tensor among those of a recorded evaluation."""

    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        self.place = place


class AutocastState(NamedTuple):
    """The dtype that autocast lowers to on a kind of device; None where it is off."""

    kind: str
    dtype: torch.dtype | None


class _Call(NamedTuple):
    function: Callable[..., Any]
    arguments: Any
    options: Any
    result: Any
    autocast: AutocastState


class _Substitution(RecordingMode):
    """Mode that puts values in the place of captured tensors."""

    def __init__(self, given: list[Tensor], captured: list[Tensor], values: list[Tensor]) -> None:
        super().__init__()
        self.values = {id(x): value for x, value in zip(captured, values, strict=True)}
        self.own = {id(x): weakref.ref(x) for x in [*given, *values]}
        self.start = graph_clock()

    @untraced
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        out = func(*map_nested(args, self._value), **map_nested(kwargs, self._value))
        if isinstance(out, Tensor) and out.is_leaf and out.requires_grad:
            self.own[id(out)] = weakref.ref(out)
        return out

    def _value(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        value = self.values.get(id(x))
        if value is None and x.requires_grad and transform_level() == 0:
            own = self.own.get(id(x))
            if not (made_since(x, self.start) or (own is not None and own() is x)):
                raise RuntimeError(OTHER_TENSORS)
        return x if value is None else value


class _Recorder(RecordingMode):
    """Mode that notes the operations of one evaluation; replaces tensors from outside, if `twins`.

    Args:
        z: where phi is evaluated.
        hidden: does not see how twins are made.
    """

    def __init__(
        self, z: Tensor, *, twins: bool = True, hidden: OuterTensors | None = None
    ) -> None:
        super().__init__()
        self.with_twins, self.hidden = twins, hidden
        self.known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self.captured: list[Tensor] = []
        self.twins: list[Tensor] = []
        self.places: list[int] = []
        self.of_place: dict[int, Tensor] = {}
        self.calls: list[_Call] = []
        self.count = 0
        self.complete = True
        self.returned: _Slot | None = None  # of a captured tensor that phi returns itself
        self.nested = False  # whether phi applies transforms of torch.func itself
        self.z, self.kind = z, z.device.type
        self._add(z)
        self.start, self.outer = graph_clock(), transform_level()

    def evaluate(self, phi: MatrixMap, lost: Tensor | None = None) -> Tensor:
        """Return phi(z), recorded."""
        with self, guard_rows(lost, getattr(phi, "columns", ())):
            fz = phi(self.z)
        if not fz.is_leaf:
            return fz
        slot, twin = self._slot(fz), self._value(fz)
        if twin is not fz:
            self.returned = slot
        leaf: Tensor = twin
        return leaf

    def holds(self, x: Tensor) -> bool:
        """Tell whether x is known: z, captured, or made by a recorded operation."""
        return self._place(x) is not None

    @untraced  # a compiled phi is recorded operation by operation
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        arguments, options = map_nested(args, self._slot), map_nested(kwargs, self._slot)
        if self.of_place:
            args, kwargs = map_nested(args, self._value), map_nested(kwargs, self._value)
        dtype = torch.get_autocast_dtype(self.kind) if autocast_enabled(self.kind) else None
        out = func(*args, **kwargs)
        result = map_nested(out, self._result)
        if out is None or _has_slots(result):  # else phi has read a number, a shape or a dtype
            autocast = AutocastState(self.kind, dtype)
            self.calls.append(_Call(func, arguments, options, result, autocast))
        return out

    def replay(self, fz: Tensor) -> PureMap | None:
        """Return the recorded evaluation as a function of z and of values for the captured tensors.

        None where not all of its operations could be seen.
        """
        if not (self.complete and (self.holds(fz) or self.returned is not None)):
            return None
        places, last = self.places, self.returned or self._slot(fz)
        groups = itertools.groupby(self.calls, lambda call: call.autocast)
        parts = [(autocast, list(calls)) for autocast, calls in groups]

        def replayed(z: Tensor, *values: Tensor) -> Tensor:
            found = {0: z, **dict(zip(places, values, strict=True))}

            def fill(x: Any) -> Any:
                return found[x.place] if isinstance(x, _Slot) else x

            with torch.set_grad_enabled(torch.is_grad_enabled()):  # phi may have changed it
                for autocast, calls in parts:
                    with _autocast(autocast):
                        for call in calls:
                            out = call.function(
                                *map_nested(call.arguments, fill), **map_nested(call.options, fill)
                            )
                            _bind(call.result, out, found)
            return fill(last)

        return replayed

    def _add(self, x: Tensor) -> int:
        place, self.count = self.count, self.count + 1
        self.known[id(x)] = weakref.ref(x), place
        return place

    def _place(self, x: Tensor) -> int | None:
        found = self.known.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def _slot(self, x: Any) -> Any:
        """Return the slot of a tensor; the tensor itself where it is a constant."""
        if not isinstance(x, Tensor):
            return x
        place = self._place(x)
        if place is None:
            if not (x.requires_grad or _is_transformed(x)):
                return x
            if self._is_made_inside(x):
                self.complete = False
                return x
            place = self._take(x)
        return _Slot(place)

    def _take(self, x: Tensor) -> int:
        """Let a twin take the place of x."""
        place = self._add(x)
        twin = self._twin(x) if self.with_twins else x
        self.captured.append(x)
        self.twins.append(twin)
        self.places.append(place)
        self.of_place[place] = twin
        return place

    def _is_made_inside(self, x: Tensor) -> bool:
        """Tell whether an operation that cannot be seen has made x from z or from a twin."""
        if is_functorch_wrapped_tensor(x) and wrapper_level(x) > self.outer:
            self.nested = True
            # A captured tensor that a transform inside phi wraps cannot have a twin.
            if self.with_twins and has_derivatives_at(x, self.outer):
                raise RuntimeError(UNSEEN)
            return True
        if not self.with_twins:
            return False
        x = stored(x)  # a transform around the solve wraps what one inside phi returns
        # The clock is that of one thread: a tensor of another thread may look too young.
        leaves = [self.z, *self.twins]
        return made_since(x, self.start) and any(
            leaf is own for leaf in _leaves(x) for own in leaves
        )

    def _twin(self, x: Tensor) -> Tensor:
        with unrecorded(), level_zero(), self.hidden.paused() if self.hidden else nullcontext():
            twin = primal(x)
            return twin.requires_grad_() if is_differentiable(twin) else twin

    def _value(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return self.of_place.get(self._place(x), x)  # type: ignore[arg-type]

    def _result(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return None
        place = self._place(x)  # known where the operation wrote in place
        return _Slot(self._add(x) if place is None else place)


class OuterTensors(TorchDispatchMode):
    """Collector of tensors that ask for gradients and come from outside, by identity."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, weakref.ref[Tensor]] = {}
        self.outer: dict[int, Tensor] = {}
        self.off = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self.off = self.off, True
        try:
            yield
        finally:
            self.off = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.off:
            return func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and x.requires_grad and not self._is_made(x):
                self.outer[id(x)] = x
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.made[id(x)] = weakref.ref(x)
        return out

    def _is_made(self, x: Tensor) -> bool:
        made = self.made.get(id(x))
        return made is not None and made() is x


@contextmanager
def stop_gradient_at(tensors: list[Tensor], root: Tensor) -> Iterator[None]:
    """Stop within the block a gradient of `root` that reaches one of the tensors.

    So derivatives with respect to them are partial, though one may depend on another. Backward
    passes of other threads through the same tensors are left alone.
    """
    nodes = [x.grad_fn for x in tensors if x.grad_fn is not None]
    passes: list[int] = []
    handles = []
    if nodes and root.grad_fn is not None:
        handles = [root.grad_fn.register_prehook(lambda grads: passes.append(graph_pass()))]

    def stop(grads: tuple[Tensor | None, ...]) -> tuple[None, ...] | None:
        return (None,) * len(grads) if graph_pass() in passes else None

    handles += [node.register_prehook(stop) for node in nodes if node is not root.grad_fn]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def autocast_state(z: Tensor) -> AutocastState:
    """Return the autocast state of the device of z."""
    kind = z.device.type
    return AutocastState(kind, torch.get_autocast_dtype(kind) if autocast_enabled(kind) else None)


@contextmanager
def _autocast(state: AutocastState) -> Iterator[None]:
    """Set that autocast state for the operations of the block."""
    kind, dtype = state
    if dtype == (torch.get_autocast_dtype(kind) if autocast_enabled(kind) else None):
        yield
    else:
        # Without a cache: what it would keep are casts of weights that may change.
        with torch.autocast(kind, dtype=dtype, enabled=dtype is not None, cache_enabled=False):
            yield


def _is_transformed(x: Tensor) -> bool:
    """Tell whether x belongs to a transform of torch.func or carries a tangent."""
    return is_functorch_wrapped_tensor(x) or has_tangent(x)


def is_differentiable(x: Tensor) -> bool:
    """Tell whether the numbers of x have derivatives."""
    return x.is_floating_point() or x.is_complex()


def _has_slots(result: Any) -> bool:
    if isinstance(result, dict):
        return any(map(_has_slots, result.values()))
    if isinstance(result, (tuple, list)):
        return any(map(_has_slots, result))
    return isinstance(result, _Slot)


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


def other_leaves(fz: Tensor, known: list[Tensor]) -> list[Tensor]:
    """Return leaves that the graph of fz leads to other than through the known tensors."""
    own = {id(x) for x in known}
    found = {id(leaf): leaf for leaf in _leaves(fz, _edges(known)) if id(leaf) not in own}
    return list(found.values())


def _reached(fz: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Return those of the tensors, made by operations, that the graph of fz leads to directly.

    These are what an `autograd.Function` in phi has been given.
    """
    edges = _edges(tensors)
    ends = set(_walk(fz, edges)) & edges.keys()
    return [x for edge, x in edges.items() if edge in ends]


def _edges(tensors: list[Tensor]) -> dict[Any, Tensor]:
    """Return the tensors with a node of their own by the place where a graph leads to them."""
    return {
        (x.grad_fn, x.output_nr): x
        for x in tensors
        if not is_functorch_wrapped_tensor(x) and x.grad_fn is not None
    }


def _leaves(x: Tensor, edges: Container[Any] = ()) -> Iterator[Tensor]:
    """Yield the leaves that the graph of x leads to, other than through these edges."""
    for node, _ in _walk(x, edges):
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf


def _walk(x: Tensor, edges: Container[Any]) -> Iterator[tuple[Any, int]]:
    """Yield the places that the graph of x leads to; those of the edges end it."""
    visited, waiting = set(), [(x.grad_fn, x.output_nr)]
    while waiting:
        place = waiting.pop()
        node, _ = place
        if node is None or place in visited:
            continue
        visited.add(place)
        yield place
        if place not in edges:
            waiting.extend(node.next_functions)
