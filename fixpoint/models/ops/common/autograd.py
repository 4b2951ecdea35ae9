"""Gradients of fused operations: those needed, and those that are differentiated again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


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
