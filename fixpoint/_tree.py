"""A tree of (B, ...) tensors seen as one (B, D) matrix: the only form that solvers know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fixpoint._torch import tree_flatten, tree_structure, tree_unflatten

Tree = Any
"""A tensor, or a (nested) tuple, list or dict of tensors, whose leaves are (B, ...)."""
Map = Callable[[Tree], Tree]
"""z -> phi(z): same structure, shapes and dtype; each batch row on its own."""

SINGLE = tree_structure(0)
"""The structure of a tree that is one tensor."""


class Packing:
    """How the tree `z0` lies in a (B, D) matrix.

    With `batched=False` the leaves have no batch axis and B = 1.

    Raises:
        TypeError: a leaf is not a floating-point tensor, or dtypes or devices differ.
        ValueError: no leaves, a 0-d leaf of a batched tree, or batch sizes that differ.
    """

    def __init__(self, z0: Tree, *, batched: bool = True) -> None:
        single = isinstance(z0, Tensor)
        leaves, self.structure = ([z0], SINGLE) if single else tree_flatten(z0)
        _check_leaves(leaves, batched)
        self.batched = batched
        self.shapes = [leaf.shape for leaf in leaves]
        self.dtype = leaves[0].dtype
        self.rows = leaves[0].shape[0] if batched else 1
        self.columns = [leaf.numel() // max(self.rows, 1) for leaf in leaves]
        if self.rows == 0:
            self.columns = [shape[1:].numel() for shape in self.shapes]
        self.is_matrix = single and batched and z0.dim() == 2

    def pack(self, tree: Tree) -> Tensor:
        """The tree as one (B, D) matrix; no copy where the tree is one tensor."""
        if self.is_matrix and isinstance(tree, Tensor) and tree.shape == self.shapes[0]:
            return self._same_dtype(tree)
        leaves = [self._same_dtype(leaf) for leaf in self._matching_leaves(tree)]
        if self.is_matrix:
            return leaves[0]
        flat = [x.reshape(self.rows, d) for x, d in zip(leaves, self.columns, strict=True)]
        return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)

    def unpack(self, matrix: Tensor) -> Tree:
        """The (B, D) matrix as a tree of views."""
        if self.is_matrix:
            return matrix
        parts = matrix.split(self.columns, dim=1)
        leaves = [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]
        return tree_unflatten(leaves, self.structure)

    def wrap(self, phi: Map) -> Callable[[Tensor], Tensor]:
        """phi as a map of (B, D) matrices."""
        if self.is_matrix:
            return lambda z: self.pack(phi(z))
        return lambda z: self.pack(phi(self.unpack(z)))

    def _matching_leaves(self, tree: Tree) -> list[Tensor]:
        leaves, structure = tree_flatten(tree)
        if structure != self.structure:
            raise ValueError(
                f"phi must return the structure of its input, {self.structure}; it returned "
                f"{structure}"
            )
        shapes = [leaf.shape if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]
        if shapes != self.shapes:
            expected, given = ([_plain(s) for s in group] for group in (self.shapes, shapes))
            raise ValueError(
                f"phi must return the shapes of its input, {expected}; it returned {given}"
            )
        return leaves

    def _same_dtype(self, leaf: Tensor) -> Tensor:
        if leaf.dtype == self.dtype:
            return leaf
        if torch.is_autocast_enabled(leaf.device.type):
            return leaf.to(self.dtype)
        raise TypeError(
            f"phi must return the dtype of its input, {self.dtype}; it returned {leaf.dtype}: "
            "cast inside phi, or start from a z0 of that dtype"
        )


def _check_leaves(leaves: list[Any], batched: bool) -> None:
    if not leaves:
        raise ValueError("z0 must hold at least one tensor; it holds none")
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"z0 must be a tree of tensors; it holds a {type(leaf).__name__}")
        if not leaf.dtype.is_floating_point:
            raise TypeError(
                f"z0 must be a floating-point tensor, not {leaf.dtype}: pass z0.float() or "
                "z0.double()"
            )
        if batched and leaf.dim() == 0:
            raise ValueError(
                "each tensor of z0 needs a leading batch axis; got a 0-d tensor: pass "
                "batched=False for a single unbatched problem"
            )
    if len(leaves) == 1:
        return
    if batched and len({leaf.shape[0] for leaf in leaves}) > 1:
        sizes = [leaf.shape[0] for leaf in leaves]
        raise ValueError(
            f"all tensors of z0 must have the same batch size; got {sizes}: pass batched=False "
            "if they have no batch axis"
        )
    for what, kinds in (
        ("dtype", {leaf.dtype for leaf in leaves}),
        ("device", {leaf.device for leaf in leaves}),
    ):
        if len(kinds) > 1:
            given = sorted(map(str, kinds))
            raise TypeError(f"all tensors of z0 must have one {what}; got {given}: convert them")


def _plain(shape: Any) -> Any:
    return tuple(shape) if isinstance(shape, torch.Size) else shape
