"""All private torch API that the package uses, in one place."""

from __future__ import annotations

from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
)

__all__ = [
    "TorchDispatchMode",
    "inside_transform",
    "is_functorch_wrapped_tensor",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_structure",
    "tree_unflatten",
    "version",
]


def inside_transform() -> bool:
    """Whether a torch.func transform (jvp, vmap, jacrev, ...) is active."""
    return peek_interpreter_stack() is not None


def version(x: Tensor) -> int:
    """How often x was changed in place, 0 where torch does not count it."""
    return 0 if x.is_inference() else x._version
