"""The passes of a recurrence as registered operations: torch.compile leaves each whole.

Traced as plain operations, a recurrence has some nine nodes a time step, and compiles for minutes.
Without a compiler the calls of the dispatcher cost more than they bring; see `FusedRecurrence`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fixpoint.models.ops.common.autograd import only_needed
from fixpoint.models.ops.recurrence.autograd import (
    FusedRecurrence,
    Options,
    differentiable,
    saved_shapes,
)

OPTIONS = "str activation, bool last_only, bool recompute, bool others"
"""The fields of `Options`."""


def register(recurrence: FusedRecurrence[Any]) -> None:
    """Define `fixpoint::NAME`, NAME_train and NAME_backward; `FusedRecurrence` calls the first two.

    NAME_train returns the outputs and what NAME_backward needs besides the inputs. A gradient of a
    gradient goes through the recurrence's reference.
    """
    fields = recurrence.inputs._fields
    count, states = len(fields), sum(1 for name in fields if name.endswith("0"))
    given = ", ".join(f"Tensor? {name}" for name in fields)

    def unpacked(arguments: Sequence[Any]) -> tuple[Any, Options]:
        # a compiler may have chosen another layout
        tensors = [v if v is None else v.contiguous() for v in arguments[:count]]
        return recurrence.inputs._make(tensors), Options(*arguments[count:])

    def infer(*arguments: Any) -> Any:
        outputs, _ = recurrence.evaluate(*unpacked(arguments), keep=False)
        return outputs if states > 1 else outputs[0]

    def train(*arguments: Any) -> list[Tensor]:
        outputs, saved = recurrence.evaluate(*unpacked(arguments), keep=True)
        return [*outputs, *saved]

    def backward(
        grads: list[Tensor], needed: list[bool], saved: list[Tensor], *arguments: Any
    ) -> list[Tensor]:
        inputs, options = unpacked(arguments)
        wanted = recurrence.inputs._make(needed)
        found = recurrence.gradients(inputs, saved, grads, wanted, options)
        return [
            g.contiguous() if asked else grads[0].new_empty(0)
            for g, asked in zip(found, needed, strict=True)
        ]

    def output_shapes(inputs: Any, options: Options) -> list[tuple[int, ...]]:
        one = tuple(inputs.h0.shape)
        return [(len(inputs.x), *one) if whole else one for whole in options.whole(states)]

    def fake_infer(*arguments: Any) -> Any:
        inputs, options = unpacked(arguments)
        outputs = tuple(inputs.h0.new_empty(size) for size in output_shapes(inputs, options))
        return outputs if states > 1 else outputs[0]

    def fake_train(*arguments: Any) -> list[Tensor]:
        inputs, options = unpacked(arguments)
        step, operands = recurrence.step_of(inputs), recurrence.operands(inputs)
        shapes = output_shapes(inputs, options) + saved_shapes(step, operands, options)[1]
        return [inputs.h0.new_empty(size) for size in shapes]

    def fake_backward(
        grads: list[Tensor], needed: list[bool], saved: list[Tensor], *arguments: Any
    ) -> list[Tensor]:
        inputs, _ = unpacked(arguments)
        return [
            v.new_empty(v.shape) if asked else grads[0].new_empty(0)
            for v, asked in zip(inputs, needed, strict=True)
        ]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        ctx.options = Options(*inputs[count:])
        ctx.save_for_backward(*inputs[:count], *output[states:])

    def gradient(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
        none = (None,) * len(Options._fields)
        tensors = ctx.saved_tensors  # once: checkpoints give them once
        tensors, kept = tensors[:count], tensors[count:]
        grads = grads[:states]
        if torch.is_grad_enabled():
            inputs, options = unpacked((*tensors, *ctx.options))
            return (*differentiable(recurrence, inputs, grads, options), *none)
        needed = ctx.needs_input_grad[:count]
        found = backward_op(grads, list(needed), list(kept), *tensors, *ctx.options)
        return (*only_needed(found, needed), *none)

    def define(suffix: str, body: Any, fake: Any, schema: str) -> Any:
        name = f"fixpoint::{recurrence.name}{suffix}"
        operation = torch.library.custom_op(name, body, mutates_args=(), schema=schema)
        operation.register_fake(fake)
        return operation

    one = ", ".join(["Tensor"] * states)
    define("", infer, fake_infer, f"({given}, {OPTIONS}) -> {f'({one})' if states > 1 else one}")
    train_op = define("_train", train, fake_train, f"({given}, {OPTIONS}) -> Tensor[]")
    train_op.register_autograd(gradient, setup_context=setup_context)
    schema = f"(Tensor[] grads, bool[] needed, Tensor[] saved, {given}, {OPTIONS}) -> Tensor[]"
    backward_op = define("_backward", backward, fake_backward, schema)
