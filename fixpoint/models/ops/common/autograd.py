"""A recurrence over a whole sequence as one differentiable operation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import Function

from fixpoint.models.ops.common import dispatch

Inputs = TypeVar("Inputs", bound=tuple[Any, ...])


class Options(NamedTuple):
    """The options of a fused recurrence; see `fused_scan`."""

    activation: str
    last_only: bool
    recompute: bool = False


class Recurrence(Generic[Inputs]):
    """A fused recurrence: subclasses implement its passes on a NamedTuple of tensors.

    Attributes:
        name: its folder in `ops`.
        reference_name: the public function with the same values by plain operations.
        inputs: the NamedTuple.
        has_triton: whether it has kernels for CUDA devices.
        saved_count: tensors that `train` returns beside the output.
    """

    name: ClassVar[str]
    reference_name: ClassVar[str]
    inputs: ClassVar[Any]
    has_triton: ClassVar[bool] = False
    saved_count: ClassVar[int]

    def reference(self, inputs: Inputs, options: Options) -> Tensor:
        """The output by plain operations."""
        raise NotImplementedError

    def infer(self, inputs: Inputs, options: Options) -> Tensor:
        """The output alone."""
        raise NotImplementedError

    def train(self, inputs: Inputs, options: Options) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output and the tensors that `gradients` needs beside the inputs."""
        raise NotImplementedError

    def saved_shapes(self, inputs: Inputs, options: Options) -> tuple[tuple[int, ...], ...]:
        """The shapes of the tensors that `train` returns beside the output."""
        raise NotImplementedError

    def gradients(
        self,
        inputs: Inputs,
        saved: Sequence[Tensor],
        grad: Tensor,
        needed: Inputs,
        options: Options,
    ) -> Inputs:
        """Gradients of all inputs; those not `needed`, a NamedTuple of bool, may be left out."""
        raise NotImplementedError

    def unsupported(self, *, activation: str, **tensors: Tensor | None) -> str | None:
        """Why the fused operation cannot take these arguments, or None where it can."""
        kernel = self.name if self.has_triton else None
        return dispatch.unsupported_reason(tensors, activation, kernel=kernel)

    def __call__(self, inputs: Any, options: Options) -> Tensor:
        """The output, differentiable.

        Raises:
            ValueError: `unsupported` gives a reason.
        """
        if reason := self.unsupported(**inputs._asdict(), activation=options.activation):
            name = "fused" if self.name == "leaky" else self.name
            raise ValueError(f"the {name} scan does not apply: {reason}; use {self.reference_name}")
        inputs = inputs._replace(x=inputs.x.contiguous())  # once for both passes
        differentiable = torch.is_grad_enabled() and any(
            v is not None and v.requires_grad for v in inputs
        )
        if torch.compiler.is_compiling():
            return self._registered(inputs, options, differentiable)
        if differentiable:
            return _Scan.apply(self, options, *inputs)
        return self.infer(inputs, options)

    def _registered(self, inputs: Any, options: Options, differentiable: bool) -> Tensor:
        """The same by the operations of `registered`: torch.compile cannot trace kernels."""
        output: Tensor
        if differentiable:
            output, *_ = getattr(torch.ops.fixpoint, f"{self.name}_train")(*inputs, *options)
        else:
            output = getattr(torch.ops.fixpoint, self.name)(*inputs, *options)
        return output


class _Scan(Function):
    """Any `Recurrence`; a gradient of a gradient goes through its reference."""

    @staticmethod
    def forward(
        ctx: Any, recurrence: Recurrence[Any], options: Options, *tensors: Tensor | None
    ) -> Tensor:
        output, saved = recurrence.train(recurrence.inputs._make(tensors), options)
        ctx.recurrence, ctx.options = recurrence, options
        ctx.save_for_backward(*tensors, *saved)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        recurrence, options = ctx.recurrence, ctx.options
        needed = recurrence.inputs._make(ctx.needs_input_grad[2:])
        inputs = recurrence.inputs._make(ctx.saved_tensors[: len(needed)])
        if torch.is_grad_enabled():
            return (None, None, *_differentiable_gradients(recurrence, inputs, grad, options))
        saved = ctx.saved_tensors[len(needed) :]
        gradients = recurrence.gradients(inputs, saved, grad, needed, options)
        return (None, None, *only_needed(gradients, needed))


def only_needed(gradients: Iterable[Tensor | None], needed: Iterable[Any]) -> list[Tensor | None]:
    return [g if asked else None for g, asked in zip(gradients, needed, strict=True)]


def _differentiable_gradients(
    recurrence: Recurrence[Any], inputs: Any, grad: Tensor, options: Options
) -> list[Tensor | None]:
    return differentiable_gradients(
        lambda *tensors: recurrence.reference(recurrence.inputs._make(tensors), options),
        inputs,
        grad,
    )


def differentiable_gradients(
    reference: Any, inputs: Sequence[Tensor | None], grad: Tensor
) -> list[Tensor | None]:
    """Gradients of reference(*inputs) that may be differentiated again, None where not needed."""
    # Views, as one input may be computed from another and would collect that path too.
    fresh = [v if v is None else v.view_as(v) for v in inputs]
    needed = {i: v for i, v in enumerate(fresh) if v is not None and v.requires_grad}
    output = reference(*fresh)
    found = torch.autograd.grad(
        output, list(needed.values()), grad, create_graph=True, allow_unused=True
    )
    gradients = dict(zip(needed, found, strict=True))
    return [gradients.get(i) for i in range(len(inputs))]


def check_shapes(
    tensors: dict[str, Tensor | None], expected: dict[str, tuple[int, ...]], given: str
) -> None:
    """Compare shapes by name.

    Raises:
        ValueError: with the shape that was expected and `given`, the shapes that it follows from.
    """
    for name, v in tensors.items():
        if v is not None and v.shape != expected[name]:
            raise ValueError(f"{name} must be {expected[name]}, not {tuple(v.shape)}; {given}")
