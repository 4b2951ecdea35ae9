"""Which tensors a map closes over: what the gradient of an implicit solve has to reach."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fixpoint._torch import TorchDispatchMode, tree_leaves


def captured_tensors(phi: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, list[Tensor]]:
    """phi(z) and the tensors other than z that its gradient leads to: parameters, inputs.

    They are seen as arguments of the operations inside phi, which no other operation inside phi
    made. A walk through the graph then makes sure: what it finds beyond them, down to the
    leaves, is added.
    """
    seen = _Arguments()
    with seen:
        fz = phi(z)
    outer = [x for x in seen.outer.values() if x is not z]
    return fz, outer + _missing_leaves(fz, [z, *outer])


@contextmanager
def stop_gradient_at(tensors: list[Tensor]) -> Iterator[None]:
    """Within the block a gradient that reaches one of the tensors goes no further.

    So derivatives with respect to them are partial, though one may depend on another.
    """
    nodes = [x.grad_fn for x in tensors if x.grad_fn is not None]
    handles = [node.register_prehook(lambda grads: (None,) * len(grads)) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Arguments(TorchDispatchMode):
    """Collects tensors that ask for gradients and come from outside, by identity."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, weakref.ref[Tensor]] = {}
        self.outer: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
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


def _missing_leaves(fz: Tensor, known: list[Tensor]) -> list[Tensor]:
    """Leaves that the graph of fz leads to other than through the known tensors."""
    edges = {torch.autograd.graph.get_gradient_edge(x)[:2] for x in known}
    found: dict[int, Tensor] = {}
    visited = set()
    waiting = [(fz.grad_fn, fz.output_nr)]
    while waiting:
        node, number = waiting.pop()
        if node is None or (node, number) in edges or (node, number) in visited:
            continue
        visited.add((node, number))
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
        waiting.extend(node.next_functions)
    return list(found.values())
