"""A value with the derivatives of another one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from fixpoint._torch import tangents_of_outer_levels


def with_gradient_of(value: Tensor, other: Tensor) -> Tensor:
    """Return the value, with the derivatives of another tensor, in reverse and forward mode."""
    if torch.compiler.is_compiling():
        change = other - other.detach()  # NaN where the other is not finite
        return value.detach() + torch.where(change == 0, change, 0.0)
    if has_torch_function((value, other)):
        return handle_torch_function(with_gradient_of, (value, other), value, other)
    return _WithGradientOf.apply(value, other)


class _WithGradientOf(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, other: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        return None, g

    @staticmethod
    def jvp(ctx: Any, value: Tensor | None, other: Tensor | None) -> Tensor | None:
        with tangents_of_outer_levels(ctx):
            return None if other is None else other.clone()
