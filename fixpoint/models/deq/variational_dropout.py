"""Dropout with one mask for all evaluations of a map during a solve."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType

import torch
from torch import Size, Tensor, nn

Masks = dict[tuple[nn.Module, Size], Tensor]
"""Masks of one solve: one for each dropout and shape of input."""

MASKS: ContextVar[Mapping[nn.Module, Masks]] = ContextVar("MASKS", default=MappingProxyType({}))
"""Of each dropout in the maps that this thread evaluates the masks."""


class VariationalDropout(nn.Module):
    """Dropout with one mask a solve: z -> z * m / (1 - p), m ~ Bernoulli(1 - p) for each number.

    `torch.nn.Dropout` draws a new mask at each evaluation, so the map whose fixed point a solver
    seeks changes at every iteration and has none. Here the map made by `frozen` owns
    the mask: it is drawn at the map's first evaluation and used through the solve and its
    backward pass, however late that is; the next `frozen`, which `DEQ` makes at each call, draws
    again. Outside of `frozen` it refuses to run in training mode, and is the identity in evaluation
    mode.

    The mask has the shape and device of the input, (B, ...), so each sample has its own; nothing
    is kept in the module.

    Args:
        p: probability that a number is dropped, 0 <= p < 1.
        shared_dims: axes along which the mask is constant. For z (B, C, L) or (B, C, H, W), (2,)
            or (2, 3) drops whole channels; for z (B, L, C), (2,) drops whole tokens.

    Raises:
        ValueError: p is out of range, or an axis is below 1 or not in the input.
        RuntimeError: called in training mode outside of `frozen`.

    Source: Gal and Ghahramani (2016), A theoretically grounded application of dropout in
        recurrent neural networks (one mask for all steps).

    Example:
        >>> import torch
        >>> from fixpoint.models import VariationalDropout, frozen
        >>> dropout, ones = VariationalDropout(0.5), torch.ones(2, 8)
        >>> with frozen(dropout) as phi:
        ...     torch.equal(phi(ones), phi(ones))
        True
    """

    def __init__(self, p: float = 0.5, *, shared_dims: tuple[int, ...] = ()) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"p must be at least 0 and below 1; got {p}")
        if any(dim < 1 for dim in shared_dims):
            raise ValueError(
                f"shared_dims must be axes from 1 on (0 is that of the samples); got {shared_dims}"
            )
        self.p = p
        self.shared_dims = tuple(shared_dims)

    def forward(self, z: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return z
        masks = MASKS.get().get(self)
        if masks is None:
            raise RuntimeError(
                "VariationalDropout was called in training mode outside of a held map, so its mask "
                "would change at every evaluation: solve `with frozen(model) as phi`, or use DEQ; "
                "outside of a fixed point use torch.nn.Dropout"
            )
        key = (self, z.shape)
        if key not in masks:
            with torch.no_grad():
                keep = z.new_empty(self._mask_shape(z)).bernoulli_(1 - self.p)
                masks[key] = keep / (1 - self.p)
        return z * masks[key].to(z.dtype)

    def _mask_shape(self, z: Tensor) -> list[int]:
        shape = list(z.shape)
        for dim in self.shared_dims:
            if dim >= z.dim():
                raise ValueError(
                    f"shared_dims={self.shared_dims} needs an input with an axis {dim}; got shape "
                    f"{tuple(z.shape)}"
                )
            shape[dim] = 1
        return shape

    def extra_repr(self) -> str:
        shared = f", shared_dims={self.shared_dims}" if self.shared_dims else ""
        return f"p={self.p:g}{shared}"
