"""Samples without a finite value, kept out of the gradients of all others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from fixpoint._groups import groups_of
from fixpoint._modes import map_nested, unrecorded
from fixpoint._torch import has_values, stored, tangents_of_outer_levels, untraced


def guard_rows(lost: Tensor | None, columns: Sequence[int] = ()) -> AbstractContextManager[Any]:
    """Keep the rows `lost`, (B,), of each tensor (B, ...) finite within the block.

    A lost row has a zero gradient, but 0 * NaN is NaN, and a weight sums over all rows. So NaN and
    inf in a lost row are replaced by 0, in each operation's arguments and results and in their
    gradients. Rows of a tensor are those of samples only if no other row has such numbers: else
    the tensor is left as it is. Where a sample is a group of rows, the same for tensors (N, ...).
    Where all samples are lost, as the one of a state without a batch axis, all tensors are kept
    finite, whatever their shape.

    Args:
        columns: of the map, which have the groups; see `Columns`.
    """
    if lost is None:
        return nullcontext()
    groups = groups_of(columns)
    whole = has_values(lost) and bool(stored(lost).all())
    return _RowGuard([lost] if groups is None else [lost, lost[groups.number]], whole)


class _RowGuard(TorchFunctionMode):
    def __init__(self, masks: list[Tensor], whole: bool) -> None:
        super().__init__()
        self.whole = whole
        self.lost = {len(mask): mask for mask in masks}
        self.cleaned: dict[int, tuple[Tensor, Tensor]] = {}  # arguments, with what replaces them

    @untraced
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is clean_rows:
            return func(*args, **(kwargs or {}))
        args, kwargs = map_nested((args, kwargs or {}), self._argument)
        given = {id(x) for x in [*args, *kwargs.values()]}
        out = func(*args, **kwargs)
        # A tensor that was written in place must remain the same one.
        return map_nested(out, lambda x: x if id(x) in given else self._clean(x))

    def _argument(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.grad_fn is not None:
            return x
        found = self.cleaned.get(id(x))
        if found is None or found[0] is not x:
            found = self.cleaned[id(x)] = x, self._clean(x)
        return found[1]

    def _clean(self, x: Any) -> Any:
        if not self._may_have_rows(x):
            return x
        with unrecorded():
            if not x.requires_grad and bool(stored(x).isfinite().all()):
                return x
        return clean_rows(x, None if self.whole else self.lost[len(x)])

    def _may_have_rows(self, x: Any) -> bool:
        return (
            isinstance(x, Tensor)
            and (x.is_floating_point() or x.is_complex())
            and x.layout == torch.strided
            and (self.whole or (x.dim() > 0 and x.shape[0] in self.lost))
        )


def clean_rows(x: Tensor, lost: Tensor | None) -> Tensor:
    """Return x and its derivatives with 0 for the lost rows that are not finite; None: for all
    numbers that are not.
    """
    if has_torch_function((x,)):
        return handle_torch_function(clean_rows, (x,), x, lost)
    if torch.compiler.is_compiling():  # which traces no jvp
        return _CleanRowsInGraph.apply(x, lost)
    return _CleanRows.apply(x, lost)


class _CleanRowsInGraph(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, lost: Tensor | None) -> Tensor:
        return _with_finite_rows(x, lost)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _with_finite_rows(g, ctx.saved_tensors[0]), None


class _CleanRows(_CleanRowsInGraph):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        with tangents_of_outer_levels(ctx) as (lost,):
            return _with_finite_rows(tangent, lost)


def _with_finite_rows(x: Tensor, lost: Tensor | None) -> Tensor:
    if lost is None:
        return torch.where(x.isfinite(), x, 0.0)
    bad = ~x.isfinite().reshape(x.shape[0], -1).all(1)
    rows = bad & lost & ~(bad & ~lost).any()
    return torch.where(rows.view(-1, *(1,) * (x.dim() - 1)), 0.0, x)
