"""A tree of (B, ...) tensors seen as one (B, D) matrix: the only form that solvers know."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fixpoint._groups import Columns, Groups
from fixpoint._torch import autocast_enabled, tree_flatten, tree_structure, tree_unflatten

Tree = Any
"""A tensor, or a (nested) tuple, list or dict of tensors, whose leaves are (B, ...)."""
Map = Callable[[Tree], Tree]
"""z -> phi(z): same structure, shapes and dtype; each batch row on its own."""

SINGLE = tree_structure(0)
"""The structure of a tree that is one tensor."""


class Packing:
    """Layout of the tree `z0` in a (B, D) matrix; complex numbers are pairs of real ones.

    With `batched=False` the leaves have no batch axis and B = 1. With `groups`, (N,), the leaves
    are (N, ...), and a row of the matrix is all that belongs to a group; see `Groups`.

    Raises:
        TypeError: a leaf is not a floating-point or complex tensor, dtypes or devices differ, or
            groups is not a tensor of integers.
        ValueError: no leaves, a 0-d leaf of a batched tree, batch sizes that differ, or groups that
            are not numbers 0 .. G - 1 of the rows.
    """

    def __init__(
        self,
        z0: Tree,
        *,
        batched: bool = True,
        groups: Tensor | None = None,
        name: str = "phi",
    ) -> None:
        self.name = name  # of the map, in messages
        single = isinstance(z0, Tensor)
        leaves, self.structure = ([z0], SINGLE) if single else tree_flatten(z0)
        _check_leaves(leaves, batched)
        self.batched = batched
        self.shapes = [leaf.shape for leaf in leaves]
        # A graph takes the number of rows from the tensors that it is given.
        self.features = [shape[1:] if batched else shape for shape in self.shapes]
        self.dtypes = [leaf.dtype for leaf in leaves]
        self.dtype = _real_dtype(leaves[0])
        self.rows = leaves[0].shape[0] if batched else 1
        self.columns: Sequence[int] = [
            math.prod(shape) * (2 if dtype.is_complex else 1)
            for shape, dtype in zip(self.features, self.dtypes, strict=True)
        ]
        self.is_matrix = single and batched and z0.dim() == 2 and not z0.is_complex()
        self.groups: Groups | None = None
        if groups is not None:
            self._group(groups, leaves[0].device)

    def _group(self, groups: Tensor, device: torch.device) -> None:
        if not self.batched:
            raise ValueError(
                "groups are samples of a batch, and batched=False makes all rows one sample: leave "
                "one of them out"
            )
        self.groups, self.is_matrix = Groups(groups, self.rows, device), False
        self.columns = Columns([d * self.groups.largest for d in self.columns], self.groups)

    @property
    def advice(self) -> str:
        """A question to ask where the solve fails and z0 may have no batch axis."""
        if (
            self.groups is not None
            or not self.batched
            or len(self.shapes) > 1
            or len(self.shapes[0]) > 1
            or self.rows < 2
        ):
            return ""
        return (
            f"z0 of shape {tuple(self.shapes[0])} was read as {self.rows} samples of one number: "
            "did you mean z0[None] or batched=False?"
        )

    def pack(self, tree: Tree) -> Tensor:
        """Return the tree as one (B, D) matrix, whose rows are contiguous: sums along the rows of
        another layout depend on B. No copy where the tree is such a matrix.
        """
        plain = self.is_matrix and isinstance(tree, Tensor) and not torch.compiler.is_compiling()
        if plain and tree.shape == self.shapes[0] and tree.dtype == self.dtype:
            return tree.contiguous()
        leaves = [
            self._same_dtype(leaf, dtype)
            for leaf, dtype in zip(self._matching_leaves(tree), self.dtypes, strict=True)
        ]
        if self.is_matrix:
            return leaves[0].contiguous()
        leaves = [torch.stack((x.real, x.imag), -1) if x.is_complex() else x for x in leaves]
        if self.groups is None:
            flat = [
                x.reshape(x.shape[0] if self.batched else 1, d)
                for x, d in zip(leaves, self.columns, strict=True)
            ]
        else:
            flat = [self.groups.join(x.flatten(1) if x.dim() > 1 else x[:, None]) for x in leaves]
        return flat[0].contiguous() if len(flat) == 1 else torch.cat(flat, dim=1)

    def unpack(self, matrix: Tensor) -> Tree:
        """Return the (B, D) matrix as a tree of views."""
        if self.is_matrix:
            return matrix
        parts, rows = matrix.split(list(self.columns), dim=1), matrix.shape[: int(self.batched)]
        if self.groups is not None:
            parts, rows = [self.groups.split(x) for x in parts], self.shapes[0][:1]
        leaves = [
            (_as_complex(part) if dtype.is_complex else part).reshape((*rows, *shape))
            for part, shape, dtype in zip(parts, self.features, self.dtypes, strict=True)
        ]
        return tree_unflatten(leaves, self.structure)

    def rows_of(self, matrices: Tensor) -> Tensor:
        """Return states, (..., B, D), with the rows of z0, (..., N, D of a row)."""
        if self.groups is None:
            return matrices
        parts = matrices.split(list(self.columns), dim=-1)
        return torch.cat([self.groups.split(x) for x in parts], -1)

    def matrix_of(self, rows: Tensor) -> Tensor:
        """Return the state, (B, D), of the rows of z0, (N, D of a row)."""
        if self.groups is None:
            return rows
        widths = [d // max(self.groups.largest, 1) for d in self.columns]
        return torch.cat([self.groups.join(x) for x in rows.split(widths, 1)], 1)

    def start(self, z0: Tree) -> Tensor:
        """Return z0 as one (B, D) matrix that gradients may lead through."""
        z = self.pack(z0)
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return z
        # Autograd refuses a tensor made in inference mode, and a reshaped view of one.
        return z.clone() if z.is_inference() else z

    def wrap(self, phi: Map) -> PackedMap:
        """Return phi as a map of (B, D) matrices."""
        if not callable(phi):
            raise TypeError(
                f"{self.name} must be a function of z; got {torch.typename(phi)}: pass the "
                "function or module itself, not a value of it"
            )
        return PackedMap(phi, self)

    def _matching_leaves(self, tree: Tree) -> list[Tensor]:
        leaves, structure = tree_flatten(tree)
        if structure != self.structure:
            raise ValueError(
                f"{self.name} must return what it is given, {_described(self.structure)}; it "
                f"returned {_described(structure)}"
            )
        if not self._matches(leaves):
            for leaf in leaves:
                if not isinstance(leaf, Tensor):
                    raise TypeError(self._no_tensor(leaf))
            expected = [tuple(shape) for shape in self.shapes]
            given = [tuple(leaf.shape) for leaf in leaves]
            raise ValueError(
                f"{self.name} must return the shapes of its input, {expected}; it returned {given}"
            )
        return leaves

    def _no_tensor(self, leaf: Any) -> str:
        """Say which leaf of phi(z) is not a tensor, and what to do."""
        remedy = "add its return" if leaf is None else "compute with torch alone, as gradients need"
        return (
            f"{self.name} must return {_described(self.structure)}; it returned "
            f"{torch.typename(leaf)}: {remedy}"
        )

    def _matches(self, leaves: list[Any]) -> bool:
        """Tell whether these are tensors of the shapes of z0."""
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            return False
        if not torch.compiler.is_compiling():
            return [leaf.shape for leaf in leaves] == self.shapes
        first = int(self.batched)
        given = [tuple(leaf.shape[first:]) for leaf in leaves]
        return given == [tuple(shape) for shape in self.features]

    def _same_dtype(self, leaf: Tensor, dtype: torch.dtype) -> Tensor:
        if leaf.dtype == dtype:
            return leaf
        lowered = autocast_enabled(leaf.device.type)
        if lowered and leaf.dtype.is_floating_point and dtype.is_floating_point:
            return leaf.to(dtype)
        raise TypeError(
            f"{self.name} must return the dtype of its input, {dtype}; it returned {leaf.dtype}: "
            f"cast inside {self.name}, or start from a z0 of that dtype"
        )


class PackedMap:
    """phi as a map of (B, D) matrices.

    Attributes:
        columns: numbers of each leaf of the tree that phi maps.
    """

    def __init__(self, phi: Map, packing: Packing) -> None:
        self.phi, self.packing = phi, packing
        self.columns = packing.columns

    def __call__(self, z: Tensor) -> Tensor:
        return self.packing.pack(self.phi(self.packing.unpack(z)))


def _real_dtype(leaf: Tensor) -> torch.dtype:
    """Return the dtype of the leaf, or of the parts of its complex numbers."""
    return leaf.real.dtype if leaf.is_complex() else leaf.dtype


def _as_complex(part: Tensor) -> Tensor:
    """Return pairs of real and imaginary parts, (B, 2 d), as complex numbers, (B, d)."""
    pairs = part.unflatten(1, (-1, 2))
    return torch.complex(pairs[..., 0], pairs[..., 1])


def no_tensor(name: str, leaf: Any) -> TypeError:
    """Return what to raise for a leaf of z0, or of another tree of tensors, that is none."""
    remedy = f"the map comes before {name}" if callable(leaf) else "torch.as_tensor makes one"
    return TypeError(
        f"{name} must be a tensor, or a tree of tensors; it holds {torch.typename(leaf)}: {remedy}"
    )


def _check_leaves(leaves: list[Any], batched: bool) -> None:
    if not leaves:
        raise ValueError("z0 must hold at least one tensor; it holds none")
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise no_tensor("z0", leaf)
        if not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
            raise TypeError(
                f"z0 must be a floating-point or complex tensor, not {leaf.dtype}: pass "
                "z0.float() or z0.double()"
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
        ("dtype", {_real_dtype(leaf) for leaf in leaves}),
        ("device", {leaf.device for leaf in leaves}),
    ):
        if len(kinds) > 1:
            given = sorted(map(str, kinds))
            raise TypeError(f"all tensors of z0 must have one {what}; got {given}: convert them")


def _described(structure: Any) -> str:
    """Return the kind of a tree in words: its containers, with a word for each tensor."""
    if structure == SINGLE:
        return "a tensor"
    return repr(tree_unflatten([_Tensor() for _ in range(structure.num_leaves)], structure))


class _Tensor:
    def __repr__(self) -> str:
        return "tensor"
