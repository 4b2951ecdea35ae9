"""Small operations on (B, D) matrices, row by row."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Return x, or its float32 where it is narrower, as squares of float16 overflow at 256."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return inner product of each sample, (B, 1)."""
    return (a * b).sum(1, keepdim=True)


def either(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Choose as `torch.where`, in operations that onnxruntime has for booleans too."""
    if a.dtype == torch.bool:
        return (condition & a) | (~condition & b)
    return torch.where(condition, a, b)


def choose_rows(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return rows of new where mask, (B,), else of old, (B, D)."""
    return torch.where(mask[:, None], new, old)
