"""Samples that are done take no part in the gradient of what the others still do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fixpoint._torch import tree_map


def stop_finished(active: Tensor | None, tree: Any) -> Any:
    """Return the (B, ...) tensors without gradient in the rows that are not active, (B,).

    A finished sample is frozen, but `update` still computes with its rows; there differences are
    0 and quotients may be inf. Its zero gradient would become NaN on that way, and a weight sums
    over all rows. `where` lets none of it pass.
    """

    if active is None:
        return tree

    def stop(x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.requires_grad):
            return x
        return torch.where(active.view(-1, *(1,) * (x.dim() - 1)), x, x.detach())

    return tree_map(stop, tree)
