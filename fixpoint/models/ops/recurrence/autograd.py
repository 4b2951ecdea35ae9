"""A recurrence over a whole sequence as one differentiable operation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import Function

from fixpoint._denormals import without_denormals
from fixpoint._torch import is_ordinary
from fixpoint.models.ops.common import dispatch as op
from fixpoint.models.ops.common.autograd import (
    asks_for_gradients,
    differentiable_gradients,
    of_each_instance,
    only_needed,
)
from fixpoint.models.ops.common.pointwise import CODES
from fixpoint.models.ops.recurrence.arguments import (
    BackwardArguments,
    ForwardArguments,
    Gradients,
    Operands,
)
from fixpoint.models.ops.recurrence.flops import count_flops
from fixpoint.models.ops.recurrence.input_gradients import InputGradients
from fixpoint.models.ops.recurrence.step import gradients_of
from fixpoint.models.ops.recurrence.torch_kernels import loop

InputsT = TypeVar("InputsT", bound=tuple[Any, ...])


class Options(NamedTuple):
    """The options of a fused recurrence; see `fused_scan`.

    others: give all of the further states, as c of an LSTM, not the last one alone.
    """

    activation: str
    last_only: bool
    recompute: bool = False
    others: bool = False

    def whole(self, states: int) -> tuple[bool, ...]:
        """Tell for each state whether all of it are asked for, not the last one alone."""
        return (not self.last_only, *(self.others,) * (states - 1))


class FusedRecurrence(Generic[InputsT]):
    """A fused recurrence: a subclass brings its `Step` and the tensors of a NamedTuple.

    The backward pass goes through chunks of time, so that the products for the weights find their
    factors in the cache; with recompute through about sqrt(T) steps at a time, which a second
    forward pass makes again.

    Attributes:
        name: in `torch.ops.fixpoint`.
        reference_name: the public function with the same values by plain operations.
        inputs: the NamedTuple.
        step: the `Step`; None where `step_of` chooses it by the inputs.
        has_triton: whether it has kernels for CUDA devices.
    """

    name: ClassVar[str]
    reference_name: ClassVar[str]
    inputs: ClassVar[Any]
    step: ClassVar[Any] = None
    has_triton: ClassVar[bool] = False

    def step_of(self, inputs: InputsT) -> Any:
        """Return the kind of `Step` of these inputs."""
        return self.step

    def operands(self, inputs: InputsT) -> Operands:
        """Return the tensors in the form of the kernels."""
        raise NotImplementedError

    def of_inputs(self, inputs: InputsT, found: Gradients) -> InputsT:
        """Return gradients of the tensors, from those of the operands."""
        raise NotImplementedError

    def _ready(self, inputs: InputsT, options: Options) -> Any:
        return self.step_of(inputs)(CODES[options.activation])

    def reference(self, inputs: InputsT, options: Options) -> list[Tensor]:
        """Return the outputs by plain operations."""
        step, operands = self._ready(inputs, options), self.operands(inputs)
        return loop(step, operands, last_only=options.last_only, others=options.others)

    def evaluate(
        self, inputs: InputsT, options: Options, *, keep: bool
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the outputs and, with `keep`, what `gradients` needs besides the inputs."""
        kind = self.step or self.step_of(inputs)
        step, operands = kind(CODES[options.activation]), self.operands(inputs)
        y = tuple(map(Tensor.clone, operands.start))
        T, like, every = operands.x.shape[0], y[0], 1
        shapes: Sequence[tuple[int, ...]] = [(0, *like.shape)] * (step.states + step.kept)
        if keep:
            every, shapes = saved_shapes(step, operands, options)
        saved = tuple(map(op.empty, shapes, repeat(like)))
        S, O, outputs = saved[: step.states], [], []
        for s, h, whole in zip(S, y, options.whole(len(y)), strict=True):
            s[:1] = h
            O.append(op.empty((T * whole, *h.shape), h))
            outputs.append(O[-1] if whole else h)
        kept = saved[step.states :]
        arguments = ForwardArguments(step, operands, y, S, tuple(O), kept, every)
        op.backend(self.name, like).forward(arguments)
        return tuple(outputs), saved

    @without_denormals
    def gradients(
        self,
        inputs: InputsT,
        saved: Sequence[Tensor],
        grads: Sequence[Tensor],
        needed: InputsT,
        options: Options,
    ) -> InputsT:
        """Return gradients of all inputs; those not `needed`, a NamedTuple of bool, may be left
        out.
        """
        step, operands = self._ready(inputs, options), self.operands(inputs)
        S, kept, K = tuple(saved[: step.states]), tuple(saved[step.states :]), operands.K
        G, g = zip(*map(op.output_gradients, grads, options.whole(len(grads))), strict=True)
        T, (B, n), count = len(operands.x), g[0].shape, gradients_of(type(step))
        steps = _recomputed_steps(T) if options.recompute else op.chunk_length(T, K * count, g[0])
        D = tuple([op.empty((steps * K, B, n), g[0]) for _ in range(count)])
        sums, dw = InputGradients(type(step), operands, needed), []
        V = operands.V.contiguous()
        for lo in reversed(range(0, T, steps)):
            at = slice(lo, min(lo + steps, T))
            inner = slice(lo * K, at.stop * K)
            if options.recompute:
                S_at, kept_at = self._again(step, operands, S, at, options)
            else:
                S_at = tuple([s[inner.start : inner.stop + 1] for s in S])
                kept_at = tuple([c[inner] for c in kept])
            d = tuple([v[: inner.stop - inner.start] for v in D])
            G_at, w = tuple([v[at] for v in G]), tuple([v[inner] for v in operands.w])
            found, bias = op.backend(self.name, g[0]).backward(
                BackwardArguments(step, G_at, V, w, K, len(operands.bias), g, S_at, kept_at, d)
            )
            dw.append(found)
            sums.add(at, d, S_at[0], bias)
        total = torch.cat(dw[::-1], 1) if dw else g[0].new_zeros(len(operands.w), 0)
        return self.of_inputs(inputs, sums.all(total, g))

    def _again(
        self, step: Any, operands: Operands, S: tuple[Tensor, ...], at: slice, options: Options
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return all states of some time steps and what is kept in them, from the state before."""
        K, steps = operands.K, at.stop - at.start
        place = at.start // _recomputed_steps(len(operands.x)) if options.last_only else at.start
        y, like = tuple([op.copy(s[place]) for s in S]), S[0][0]
        inner = slice(at.start * K, at.stop * K)
        part = operands._replace(x=operands.x[at], w=tuple([v[inner] for v in operands.w]))
        S_at = tuple([op.states(h, steps * K) for h in y])
        kept = tuple([op.empty((steps * K, *like.shape), like) for _ in range(step.kept)])
        O = tuple([op.empty((0, *like.shape), like) for _ in y])
        op.backend(self.name, like).forward(ForwardArguments(step, part, y, S_at, O, kept, 1))
        return S_at, kept

    def unsupported(self, *, activation: str, **tensors: Tensor | None) -> str | None:
        """Return why the fused operation cannot take these arguments, or None where it can."""
        kernel = self.name if self.has_triton else None
        return op.unsupported_reason(tensors, activation, kernel=kernel)

    def __call__(self, inputs: Any, options: Options) -> tuple[Tensor, ...]:
        """Return the outputs, differentiable.

        Raises:
            ValueError: `unsupported` gives a reason.
        """
        if reason := self.unsupported(**inputs._asdict(), activation=options.activation):
            name = "fused" if self.name == "leaky" else self.name
            raise ValueError(f"the {name} scan does not apply: {reason}; use {self.reference_name}")
        return self.run(inputs, options)[1]

    def run(self, inputs: Any, options: Options) -> tuple[str | None, tuple[Tensor, ...]]:
        """Return the reason against these tensors, of fitting shapes, or None and the outputs."""
        registered = False
        if not is_ordinary(inputs):
            if reason := self.unsupported(**inputs._asdict(), activation=options.activation):
                return reason, ()
            registered = op.by_registered_operation(inputs.x)
        # once for both passes
        inputs = self.inputs._make([v if v is None else v.contiguous() for v in inputs])
        differentiable = asks_for_gradients(inputs)
        if registered:
            return None, self._registered(inputs, options, differentiable)
        if differentiable:
            return None, _Scan.apply(self, options, *inputs)
        return None, self.evaluate(inputs, options, keep=False)[0]

    def _registered(
        self, inputs: Any, options: Options, differentiable: bool
    ) -> tuple[Tensor, ...]:
        """Return the same by the operations of `registered`, which tracers and modes can see."""
        if not torch.compiler.is_compiling():
            count_flops(self)
        states = sum([name.endswith("0") for name in inputs._fields])
        name = f"{self.name}_train" if differentiable else self.name
        outputs = getattr(torch.ops.fixpoint, name)(*inputs, *options)
        return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs[:states])


class _Scan(Function):
    """Any `FusedRecurrence`; a gradient of a gradient goes through its reference."""

    @staticmethod
    def forward(
        ctx: Any, recurrence: FusedRecurrence[Any], options: Options, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        outputs, saved = recurrence.evaluate(recurrence.inputs._make(tensors), options, keep=True)
        ctx.recurrence, ctx.options = recurrence, options
        ctx.save_for_backward(*tensors, *saved)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        recurrence, options = ctx.recurrence, ctx.options
        needed = recurrence.inputs._make(ctx.needs_input_grad[2:])
        tensors = ctx.saved_tensors  # once: checkpoints give them once
        inputs = recurrence.inputs._make(tensors[: len(needed)])
        if torch.is_grad_enabled():
            return (None, None, *differentiable(recurrence, inputs, grads, options))
        saved = tensors[len(needed) :]

        def gradients(*grads: Tensor) -> list[Tensor | None]:
            found = recurrence.gradients(inputs, saved, grads, needed, options)
            return only_needed(found, needed)

        return (None, None, *of_each_instance(gradients, grads))


def differentiable(
    recurrence: FusedRecurrence[Any], inputs: Any, grads: Sequence[Tensor], options: Options
) -> list[Tensor | None]:
    """Return gradients that may be differentiated again, through the reference."""
    return differentiable_gradients(
        lambda *tensors: recurrence.reference(recurrence.inputs._make(tensors), options),
        inputs,
        grads,
    )


def saved_shapes(
    step: Any, operands: Operands, options: Options
) -> tuple[int, list[tuple[int, ...]]]:
    """Return the inner steps between two saved states, and the shapes of what `evaluate` keeps."""
    T, K, state = operands.x.shape[0], operands.K, operands.start[0].shape
    every, count = 1, T * K
    if options.recompute:
        every, count = K * _recomputed_steps(T) if options.last_only else K, 0
    return every, [(T * K // every + 1, *state)] * step.states + [(count, *state)] * step.kept


def _recomputed_steps(T: int) -> int:
    """Time steps between two states that the backward pass starts from."""
    return max(1, math.isqrt(T))


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
