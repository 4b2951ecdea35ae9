"""The passes of a recurrence as registered operations: torch.compile leaves each whole.

Traced as plain operations, a recurrence has some nine nodes a time step, and compiles for minutes.
Without a compiler the calls of the dispatcher cost more than they bring; see `Recurrence`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fixpoint.models.ops.common.autograd import (
    Options,
    Recurrence,
    differentiable_gradients,
    only_needed,
)

OPTIONS = "str activation, bool last_only, bool recompute"
"""The fields of `Options`."""


def register(recurrence: Recurrence[Any]) -> None:
    """Define `fixpoint::NAME`, NAME_train and NAME_backward, the first two called by `Recurrence`.

    NAME_train returns the output and what NAME_backward needs beside the inputs. A gradient of a
    gradient goes through the recurrence's reference.
    """
    count = len(recurrence.inputs._fields)
    given = ", ".join(f"Tensor? {name}" for name in recurrence.inputs._fields)
    saved = [f"saved_{i}" for i in range(recurrence.saved_count)]
    outputs = ", ".join(["Tensor"] * (1 + recurrence.saved_count))

    def unpacked(arguments: Sequence[Any]) -> tuple[Any, Options]:
        return recurrence.inputs._make(arguments[:count]), Options._make(arguments[count:])

    def infer(*arguments: Any) -> Tensor:
        return recurrence.infer(*unpacked(arguments)).clone()

    def train(*arguments: Any) -> tuple[Tensor, ...]:
        output, saved = recurrence.train(*unpacked(arguments))
        return output.clone(), *saved  # outputs must not share memory

    def backward(grad: Tensor, needed: list[bool], *arguments: Any) -> list[Tensor]:
        (*kept,), rest = arguments[: len(saved)], arguments[len(saved) :]
        inputs, options = unpacked(rest)
        found = recurrence.gradients(inputs, kept, grad, recurrence.inputs._make(needed), options)
        return [
            g.contiguous() if asked else grad.new_empty(0)
            for g, asked in zip(found, needed, strict=True)
        ]

    def shape(inputs: Any, options: Options) -> tuple[int, ...]:
        return tuple(inputs.h0.shape) if options.last_only else (len(inputs.x), *inputs.h0.shape)

    def fake_infer(*arguments: Any) -> Tensor:
        inputs, options = unpacked(arguments)
        return inputs.h0.new_empty(shape(inputs, options))

    def fake_train(*arguments: Any) -> tuple[Tensor, ...]:
        inputs, options = unpacked(arguments)
        shapes = (shape(inputs, options), *recurrence.saved_shapes(inputs, options))
        return tuple(inputs.h0.new_empty(size) for size in shapes)

    def fake_backward(grad: Tensor, needed: list[bool], *arguments: Any) -> list[Tensor]:
        inputs, _ = unpacked(arguments[len(saved) :])
        return [
            v.new_empty(v.shape) if asked else grad.new_empty(0)
            for v, asked in zip(inputs, needed, strict=True)
        ]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options = inputs[count:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:count], *output[1:])

    def gradient(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        none = (None,) * len(OPTIONS.split(","))
        if grad is None:
            return (None,) * count + none
        tensors, kept = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        if torch.is_grad_enabled():
            reference = lambda *given: recurrence.reference(*unpacked((*given, *ctx.options)))  # noqa: E731
            return (*differentiable_gradients(reference, tensors, grad), *none)
        needed = ctx.needs_input_grad[:count]
        found = backward_op(grad, list(needed), *kept, *tensors, *ctx.options)
        return (*only_needed(found, needed), *none)

    def define(suffix: str, body: Any, fake: Any, schema: str) -> Any:
        name = f"fixpoint::{recurrence.name}{suffix}"
        operation = torch.library.custom_op(name, body, mutates_args=(), schema=schema)
        operation.register_fake(fake)
        return operation

    define("", infer, fake_infer, f"({given}, {OPTIONS}) -> Tensor")
    train_op = define("_train", train, fake_train, f"({given}, {OPTIONS}) -> ({outputs})")
    train_op.register_autograd(gradient, setup_context=setup_context)
    kept = "".join(f", Tensor {name}" for name in saved)
    schema = f"(Tensor grad, bool[] needed{kept}, {given}, {OPTIONS}) -> Tensor[]"
    backward_op = define("_backward", backward, fake_backward, schema)
