"""Layers and directions in the contract of torch.nn.RNN: batches, layouts, packed sequences."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fixpoint._torch import autocast_enabled
from fixpoint.models._parameters import first_parameter
from fixpoint.models.rnn.base_cell import Span

States = tuple[Tensor, ...]
"""(D L, B, n) each, or of one layer in one direction (B, n): h, and with it c of an LSTM."""


class Stack:
    """Layers stacked as in `torch.nn.RNN`, of any kind: a subclass implements `_direction`."""

    input_size: int
    hidden_size: int
    num_layers: int
    batch_first: bool
    dropout: float
    bidirectional: bool
    training: bool
    tensors_of_state: ClassVar[int] = 1
    """1 for h; 2 for h and c, as in an LSTM."""

    def _direction(
        self, layer: int, reverse: bool, x: Tensor, start: States, span: Span
    ) -> tuple[Tensor, States]:
        """Run one layer in one direction: all h, (T, B, n), or with last_only the last, (B, n).

        With them the further states: all of them, (T, B, n), where the span asks for `others`,
        else the last ones.
        """
        raise NotImplementedError

    @property
    def _directions(self) -> int:
        return 2 if self.bidirectional else 1

    def _time_axis(self, x: Tensor) -> int:
        return 1 if self.batch_first and x.dim() == 3 else 0

    def _time_first(
        self, x: Tensor, hx: States | None, *, batch_first: bool
    ) -> tuple[Tensor, States | None]:
        """Return x as (T, B, d) and states as (D L, B, n), after a check."""
        layout = "(B, T, d)" if batch_first else "(T, B, d)"
        if not isinstance(x, Tensor):
            raise TypeError(not_a_tensor(x, layout))
        if x.dim() not in (2, 3):
            raise ValueError(f"x must be {layout}, or (T, d) unbatched; got {tuple(x.shape)}")
        if x.shape[-1] != self.input_size:
            raise ValueError(
                f"x must have input_size={self.input_size} features last; got {tuple(x.shape)}: "
                f"transpose x to {layout}, or build the layer with input_size={x.shape[-1]}"
            )
        time = 1 if batch_first and x.dim() == 3 else 0
        if x.shape[time] == 0:
            raise ValueError(f"x must have at least one time step; got {tuple(x.shape)}")
        dtype = first_parameter(self).dtype  # type: ignore[arg-type]
        if x.dtype != dtype and not autocast_enabled(x.device.type):
            raise TypeError(other_dtype(x, dtype))
        for h in hx or ():
            batch = () if x.dim() == 2 else (x.shape[1 - time],)
            expected = (self.num_layers * self._directions, *batch, self.hidden_size)
            if not isinstance(h, Tensor):
                raise TypeError(f"hx must be a tensor {expected}; got {torch.typename(h)}")
            if tuple(h.shape) != expected:
                raise ValueError(f"hx must be {expected}; got {tuple(h.shape)}")
            if h.dtype != x.dtype and not autocast_enabled(x.device.type):
                raise TypeError(other_state_dtype(h, x))
        if x.dim() == 2:
            return x.unsqueeze(1), hx and tuple([h.unsqueeze(1) for h in hx])
        return x.transpose(0, 1) if batch_first else x, hx

    def _run(self, x: Any, hx: States | None, first: int, last_only: bool) -> tuple[Any, States]:
        """Return the output and last states in the layout of x, from time index `first` on."""
        if isinstance(x, PackedSequence):
            return self._run_packed(x, hx, first, last_only)
        x_, hx_ = self._time_first(x, hx, batch_first=self.batch_first)
        output, last = self._layers(x_, hx_, Span(first, last_only))
        if x.dim() == 2:
            return output.squeeze(-2), tuple([h.squeeze(1) for h in last])
        return output.transpose(0, 1) if self.batch_first and not last_only else output, last

    def _run_packed(
        self, x: PackedSequence, hx: States | None, first: int, last_only: bool
    ) -> tuple[Any, States]:
        in_order = x._replace(sorted_indices=None, unsorted_indices=None)
        padded, lengths = pad_packed_sequence(in_order)
        self._time_first(padded, hx, batch_first=False)
        if hx is not None and x.sorted_indices is not None:
            hx = tuple([h.index_select(1, x.sorted_indices) for h in hx])
        ends = lengths.to(padded.device)
        output, last = self._layers(padded, hx, Span(first, False, True), ends)
        if x.unsorted_indices is not None:
            last = tuple([h.index_select(1, x.unsorted_indices) for h in last])
        if not last_only:
            return x._replace(data=pack_padded_sequence(output, lengths).data), last
        output = _at_end(output, ends)
        if x.unsorted_indices is not None:
            output = output.index_select(0, x.unsorted_indices)
        return output, last

    def _layers(
        self, x: Tensor, hx: States | None, span: Span, lengths: Tensor | None = None
    ) -> tuple[Tensor, States]:
        """Return all layers on x, (T, B, d); sequences end after `lengths`, (B,), or all after T.

        With last_only the output is that of the last step, (B, D n).
        """
        T, B, _ = x.shape
        zeros = (x.new_zeros(B, self.hidden_size),) * self.tensors_of_state if hx is None else ()
        backwards = None if lengths is None else _backwards(T, lengths)
        last: list[States] = []
        for layer in range(self.num_layers):
            top = layer == self.num_layers - 1
            no_output = span.last_only and top and not self.bidirectional
            here = span if no_output or not span.last_only else span._replace(last_only=False)
            outputs = []
            for reverse in (False, True) if self.bidirectional else (False,):
                place = len(last)
                start = zeros if hx is None else tuple([h[place] for h in hx])
                seen = _reverse(x, backwards) if reverse else x
                states, others = self._direction(layer, reverse, seen, start, here)
                if lengths is not None:
                    last.append((_at_end(states, lengths), *(_at_end(c, lengths) for c in others)))
                else:
                    last.append((states if no_output else states[-1], *others))
                outputs.append(_reverse(states, backwards) if reverse else states)
            x = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
            if self.dropout and not top:
                x = F.dropout(x, self.dropout, self.training)
        output = x[-1] if span.last_only and not no_output else x
        return output, tuple(map(torch.stack, zip(*last, strict=True)))


def not_a_tensor(x: object, layout: str) -> str:
    return f"x must be a tensor {layout}; got {type(x).__name__}: torch.as_tensor(x) makes one"


def other_dtype(x: Tensor, dtype: torch.dtype) -> str:
    return (
        f"x must have the dtype of the layer, {dtype}; got {x.dtype}: convert x by "
        "x.to(...), or the layer by layer.to(...)"
    )


def other_state_dtype(h: Tensor, x: Tensor) -> str:
    return f"hx must have the dtype of x, {x.dtype}; got {h.dtype}: convert it"


def _backwards(T: int, lengths: Tensor) -> Tensor:
    """Return which time step comes at each place of a sequence read backwards, (T, B)."""
    steps = torch.arange(T, device=lengths.device).unsqueeze(1)
    return torch.where(steps < lengths, lengths - 1 - steps, steps)


def _reverse(x: Tensor, steps: Tensor | None) -> Tensor:
    """Return x, (T, B, d), read backwards: whole, or with the time steps of each sample in that
    order.
    """
    return x.flip(0) if steps is None else x.take_along_dim(steps.unsqueeze(2), 0)


def _at_end(states: Tensor, lengths: Tensor) -> Tensor:
    """Return the state at the end of each sequence, (B, n)."""
    return states[lengths - 1, torch.arange(states.shape[1], device=states.device)]
