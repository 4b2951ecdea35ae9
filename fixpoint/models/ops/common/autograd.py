"""Gradients of fused operations: those needed, and those that are differentiated again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fixpoint._torch import batched, unbatched

Gradients = Iterable[Tensor | None]


def asks_for_gradients(tensors: Iterable[Tensor | None]) -> bool:
    """Tell whether a gradient of any of these may be asked for."""
    if torch.is_grad_enabled():
        for v in tensors:
            if v is not None and v.requires_grad:
                return True
    return False


def of_each_instance(
    gradients: Callable[..., Gradients], grads: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return gradients(*grads), or those of each of the instances that `is_grads_batched` hides."""
    instances = [unbatched(g) for g in grads]
    sizes = {len(x) for x in instances if x is not None}
    if not sizes:
        return list(gradients(*grads))
    of_all = [
        gradients(*(g if x is None else x[i] for g, x in zip(grads, instances, strict=True)))
        for i in range(sizes.pop())
    ]
    by_input = zip(*of_all, strict=True)
    return [
        batched(torch.stack(found)) if isinstance(found[0], Tensor) else None for found in by_input
    ]


def only_needed(gradients: Iterable[Tensor | None], needed: Iterable[Any]) -> list[Tensor | None]:
    return [g if asked else None for g, asked in zip(gradients, needed, strict=True)]


def differentiable_gradients(
    reference: Any, inputs: Sequence[Tensor | None], grad: Tensor | Sequence[Tensor]
) -> list[Tensor | None]:
    """Return gradients of reference(*inputs) that may be differentiated again, None where not
    needed.
    """
    # Views, as one input may be computed from another and would collect that path too.
    fresh = [v if v is None else v.view_as(v) for v in inputs]
    needed = {i: v for i, v in enumerate(fresh) if v is not None and v.requires_grad}
    output = reference(*fresh)
    found = torch.autograd.grad(
        output, list(needed.values()), grad, create_graph=True, allow_unused=True
    )
    gradients = dict(zip(needed, found, strict=True))
    return [gradients.get(i) for i in range(len(inputs))]
