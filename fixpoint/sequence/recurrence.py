"""The recurrence of a whole sequence as one map of all its states, and step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fixpoint._torch import tree_flatten, tree_leaves, tree_map, tree_unflatten
from fixpoint._tree import Tree

Step = Callable[..., Tensor]
"""f(h_prev, x) -> h, or with a joint equilibrium phi(h, h_prev, x) -> h, on rows (R, n)."""
RowMap = Callable[[Tensor, Tensor], Tensor]
"""(h, h_prev) -> h, (R, n) each, for given inputs."""


class SequenceProblem(NamedTuple):
    """h_t = f(h_{t-1}, x_t), or with `joint` h_t = phi(h_t, h_{t-1}, x_t), for t = 1 .. T.

    f: the step, on any number of rows; each row on its own.
    x: tree of tensors (T, B, ...).
    h0: (B, n).
    joint: whether f takes h_t as its first argument.
    """

    f: Step
    x: Tree
    h0: Tensor
    joint: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """(T, B, n)."""
        T = tree_leaves(self.x)[0].shape[0]
        return (T, *self.h0.shape)

    def step_at(self, x: Tree) -> RowMap:
        """Return the map of rows (h, h_prev) for the inputs x of these rows."""
        if self.joint:
            return lambda h, h_prev: self._checked(self.f(h, h_prev, x), h_prev)
        return lambda h, h_prev: self._checked(self.f(h_prev, x), h_prev)

    def flat_x(self) -> Tree:
        """Return x with the batch and time axes as one axis of B T rows."""
        return _map(as_rows, self.x)

    def with_rows(self) -> SequenceProblem:
        """Return the recurrence with x in the memory order of rows, made once for all updates."""
        x = _map(lambda leaf: leaf.transpose(0, 1).contiguous().transpose(0, 1), self.x)
        return self._replace(x=x)

    def evaluate(self, h: Tensor, h_prev: Tensor) -> Tensor:
        """Return f of all B T rows in one call, (T, B, n), from h and h_prev, (T, B, n)."""
        step = self.step_at(self.flat_x())
        return as_states(step(as_rows(h), as_rows(h_prev)), len(h))

    def before(self, h: Tensor) -> Tensor:
        """Return h_0 .. h_{T-1} of the states h_1 .. h_T, (T, B, n)."""
        rows = h.transpose(0, 1)
        return torch.cat([self.h0.unsqueeze(1), rows[:, :-1]], 1).transpose(0, 1)

    def of_samples(self, z: Tensor) -> Tensor:
        """Evaluate f at all states h_1 .. h_T of each sample, (B, T n)."""
        h = states_of(z, self.shape[0])
        return as_samples(self.evaluate(h, self.before(h)))

    def make_what_is_kept(self) -> None:
        """Evaluate f once, with gradient: what it makes once and keeps has its graph then."""
        x = _map(lambda leaf: leaf[0], self.x)
        self.step_at(x)(self.h0.detach(), self.h0.detach())

    def steps(self) -> list[RowMap]:
        """Return the map of rows (h, h_prev) at each t."""
        leaves, structure = tree_flatten(self.x)
        per_step = zip(*(leaf.unbind(0) for leaf in leaves), strict=True)
        return [self.step_at(tree_unflatten(x, structure)) for x in per_step]

    def select(self, samples: Tensor) -> SequenceProblem:
        """Return the recurrence of some samples, given by their indices."""
        x = _map(lambda leaf: leaf.index_select(1, samples), self.x)
        return self._replace(x=x, h0=self.h0.index_select(0, samples)).with_rows()

    def window(self, times: slice, h0: Tensor) -> SequenceProblem:
        """Return the recurrence of a stretch of time, from the state before it."""
        return self._replace(x=_map(lambda leaf: leaf[times], self.x), h0=h0)

    def _checked(self, h: Tensor, h_prev: Tensor) -> Tensor:
        if h.shape != h_prev.shape:
            raise ValueError(
                f"f must return a state of the shape of h_prev, {tuple(h_prev.shape)}; it returned "
                f"{tuple(h.shape)}: f sees rows of time and batch alike"
            )
        if h.dtype != h_prev.dtype:
            raise TypeError(
                f"f must return the dtype of h_prev, {h_prev.dtype}; it returned {h.dtype}: cast "
                "inside f, or give h0 in that dtype"
            )
        return h


def as_rows(x: Tensor) -> Tensor:
    """Return (T, B, ...) as rows, (B T, ...): a view where the memory has that order."""
    return x.transpose(0, 1).flatten(0, 1)


def as_states(rows: Tensor, T: int) -> Tensor:
    """Return rows, (B T, ...), as (T, B, ...), the inverse of `as_rows`."""
    return rows.unflatten(0, (len(rows) // T, T)).transpose(0, 1)


def as_samples(H: Tensor) -> Tensor:
    """Return the states (T, B, n) as T n numbers for each sample, (B, T n)."""
    return H.transpose(0, 1).reshape(H.shape[1], len(H) * H.shape[2])


def states_of(z: Tensor, T: int) -> Tensor:
    """Return samples, (B, T n), as states (T, B, n), the inverse of `as_samples`."""
    return z.view(len(z), T, z.shape[1] // T).transpose(0, 1)


def make_recurrence(f: Step, x: Tree, h0: Tensor, *, joint: bool) -> SequenceProblem:
    """Return the recurrence, after a check of its tensors.

    Raises:
        ValueError: shapes do not fit.
        TypeError: h0 or a leaf of x is not a floating-point tensor.
    """
    if not isinstance(h0, Tensor) or not h0.is_floating_point():
        given = h0.dtype if isinstance(h0, Tensor) else type(h0).__name__
        raise TypeError(f"h0 must be a floating-point tensor (B, n); got {given}")
    if h0.dim() != 2:
        raise ValueError(f"h0 must be (B, n); got {tuple(h0.shape)}")
    leaves = tree_leaves(x)
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        raise TypeError("x must be a tensor (T, B, ...), or a tree of such tensors")
    T = leaves[0].shape[0] if leaves[0].dim() else 0
    for leaf in leaves:
        if leaf.dim() < 2 or leaf.shape[:2] != (T, len(h0)):
            raise ValueError(
                f"each tensor of x must be (T, B, ...) with the B = {len(h0)} of h0 and one T; got "
                f"{tuple(leaf.shape)}"
            )
    if T == 0:
        raise ValueError("x must have at least one time step; it has none")
    return SequenceProblem(f, x, h0, joint)


def _map(function: Callable[[Tensor], Tensor], tree: Tree) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    return tree_map(function, tree)
