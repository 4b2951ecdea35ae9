"""Tensors that a map closes over, found as arguments of operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from fixpoint.tracing import OuterTensors, other_leaves


def captured_tensors(phi: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return phi(z) and the tensors other than z that its gradient leads to: parameters, inputs.

    They are seen as arguments of the operations inside phi, which no other operation inside phi
    made. A walk through the graph then makes sure: what it finds beyond them, down to the
    leaves, is added.
    """
    seen = OuterTensors()
    with seen:
        fz = phi(z)
    outer = [x for x in seen.outer.values() if x is not z]
    return fz, outer + other_leaves(fz, [z, *outer])


@contextmanager
def stop_gradient_at(tensors: list[Tensor]) -> Iterator[None]:
    """Stop within the block a gradient that reaches one of the tensors."""
    nodes = [x.grad_fn for x in tensors if x.grad_fn is not None]
    handles = [node.register_prehook(lambda grads: (None,) * len(grads)) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
