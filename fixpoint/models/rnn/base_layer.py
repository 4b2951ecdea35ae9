"""The contract of torch.nn.RNN for any cell: layers, directions, batches, packed sequences."""

from __future__ import annotations

import copy
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fixpoint._validation import at_least
from fixpoint.models._signature import ShowsAllOptions
from fixpoint.models.rnn.base_cell import RecurrentCell


class StreamState(NamedTuple):
    """What `Recurrent.step` needs of the time steps before.

    hx: last states, (L, B, n), or (L, n) unbatched.
    t: index of the next time step.
    """

    hx: Tensor
    t: int


class Recurrent(ShowsAllOptions, nn.Module):
    """Layers and directions of one kind of cell, called like `torch.nn.RNN`.

    A subclass names its `cell_class`; its cells are the submodules l0, l0_reverse, l1, ...

    Args:
        input_size: features d of x_t.
        hidden_size: units n of h_t in each direction.
        num_layers: L; each layer reads the outputs of the one before.
        nonlinearity: that of the cells; None takes their own.
        bias: have biases.
        batch_first: x and output are (B, T, ...) instead of (T, B, ...).
        dropout: fraction of the outputs of each layer but the last set to 0 in training mode.
        bidirectional: D = 2 directions, the second reads each sequence backwards.
        options: those of the cell. Modules among them are copied for each further cell.

    Inputs: x, hx
        x: (T, B, d), (B, T, d) with `batch_first`, (T, d) unbatched, or a `PackedSequence`.
        hx: h_0, (D L, B, n), or (D L, n) unbatched; zeros if not given. Not modified.

    Outputs: output, h_n
        output: h_1 .. h_T of the last layer, (T, B, D n), (B, T, D n), (T, D n) or packed.
        h_n: last states, of the shape of hx.

    Raises:
        ValueError: an unknown value or an invalid combination, when built; a wrong shape, when
            called.
        TypeError: an unknown option, when built; a wrong dtype, when called.

    Example:
        >>> import torch
        >>> from fixpoint.models import FastRNN, Recurrent
        >>> layer = FastRNN(3, 8, num_layers=2, bidirectional=True)
        >>> output, h_n = layer(torch.randn(5, 4, 3))
        >>> isinstance(layer, Recurrent), tuple(output.shape), tuple(h_n.shape)
        (True, (5, 4, 16), (4, 4, 8))
    """

    cell_class: type[RecurrentCell]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str | None = None,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.input_size = at_least(1, input_size=input_size)
        self.hidden_size = at_least(1, hidden_size=hidden_size)
        self.num_layers = at_least(1, num_layers=num_layers)
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be a fraction between 0 and 1; got {dropout}")
        if dropout and num_layers == 1:
            warnings.warn(
                f"dropout={dropout:g} is applied between layers and has no effect with "
                "num_layers=1",
                stacklevel=2,
            )
        self.batch_first, self.dropout, self.bidirectional = batch_first, dropout, bidirectional
        options["bias"] = bias
        if nonlinearity is not None:
            options["nonlinearity"] = nonlinearity
        size = input_size
        for layer in range(num_layers):
            for direction in self._directions:
                cell = self.cell_class(size, hidden_size, **options)
                self.add_module(f"l{layer}{direction}", cell)
                options = copy.deepcopy(options)
            size = hidden_size * len(self._directions)

    @property
    def _directions(self) -> tuple[str, ...]:
        return ("", "_reverse") if self.bidirectional else ("",)

    def forward(
        self, x: Tensor | PackedSequence, hx: Tensor | None = None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        if isinstance(x, PackedSequence):
            return self._packed(x, hx)
        output, h_n = self._run(*self._time_first(x, hx))
        return self._as_given(x, output), h_n.squeeze(1) if x.dim() == 2 else h_n

    def last_output(self, x: Tensor, hx: Tensor | None = None) -> Tensor:
        """The output of the last time step alone, (B, D n) or (D n,): cheaper than `forward`."""
        last = self._run(*self._time_first(x, hx), last_only=True)[0]
        return last.squeeze(0) if x.dim() == 2 else last

    def step(self, x: Tensor, state: StreamState | None = None) -> tuple[Tensor, StreamState]:
        """One time step of a stream: the output that `forward` has at it, and the state after it.

        Args:
            x: x_t, (B, d) or (d,).
            state: what the step before returned; None before the first one.

        Returns:
            The output of the last layer, (B, n) or (n,), and the state for the next step.

        Raises:
            ValueError: the layer is bidirectional, or x has another shape.

        Example:
            >>> import torch
            >>> from fixpoint.models import FastGRNN
            >>> layer, state = FastGRNN(3, 5, num_layers=2), None
            >>> for x in torch.randn(4, 3):
            ...     output, state = layer.step(x, state)
            >>> output.shape, state.t
            (torch.Size([5]), 4)
        """
        if self.bidirectional:
            raise ValueError(
                "a bidirectional layer needs the end of the sequence for its first output: build "
                "it with bidirectional=False to step through a stream"
            )
        t, states = 0 if state is None else state.t, []
        for layer in range(self.num_layers):
            cell: RecurrentCell = getattr(self, f"l{layer}")
            x = cell.at_time(t, x, None if state is None else state.hx[layer])
            states.append(x)
            if self.dropout and layer < self.num_layers - 1:
                x = F.dropout(x, self.dropout, self.training)
        return x, StreamState(torch.stack(states), t + 1)

    def _time_first(self, x: Tensor, hx: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x as (T, B, d) and hx as (D L, B, n), after a check."""
        self._check(x, hx, batch_first=self.batch_first)
        if x.dim() == 2:
            return x.unsqueeze(1), None if hx is None else hx.unsqueeze(1)
        return x.transpose(0, 1) if self.batch_first else x, hx

    def _as_given(self, x: Tensor, output: Tensor) -> Tensor:
        """The output, (T, B, D n), in the layout of x."""
        if x.dim() == 2:
            return output.squeeze(1)
        return output.transpose(0, 1) if self.batch_first else output

    def _packed(self, x: PackedSequence, hx: Tensor | None) -> tuple[PackedSequence, Tensor]:
        in_order = x._replace(sorted_indices=None, unsorted_indices=None)
        padded, lengths = pad_packed_sequence(in_order)
        self._check(padded, hx, batch_first=False)
        if hx is not None and x.sorted_indices is not None:
            hx = hx.index_select(1, x.sorted_indices)
        output, h_n = self._run(padded, hx, lengths.to(padded.device))
        if x.unsorted_indices is not None:
            h_n = h_n.index_select(1, x.unsorted_indices)
        return x._replace(data=pack_padded_sequence(output, lengths).data), h_n

    def _run(
        self,
        x: Tensor,
        hx: Tensor | None,
        lengths: Tensor | None = None,
        *,
        last_only: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """All layers on x, (T, B, d); sequences end after `lengths`, (B,), or all after T.

        With last_only the output is that of the last step, (B, D n).
        """
        T, B, _ = x.shape
        backwards = None if lengths is None else _backwards(T, lengths)
        last: list[Tensor] = []
        for layer in range(self.num_layers):
            top = layer == self.num_layers - 1
            no_output = last_only and top and not self.bidirectional
            outputs = []
            for direction in self._directions:
                h0 = x.new_zeros(B, self.hidden_size) if hx is None else hx[len(last)]
                cell: RecurrentCell = getattr(self, f"l{layer}{direction}")
                seen = _reverse(x, backwards) if direction else x
                states = cell.sequence(seen, h0, last_only=no_output)
                last.append(states if no_output else _last(states, lengths))
                outputs.append(_reverse(states, backwards) if direction else states)
            x = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
            if self.dropout and not top:
                x = F.dropout(x, self.dropout, self.training)
        return (x[-1] if last_only and not no_output else x), torch.stack(last)

    def _check(self, x: Tensor, hx: Tensor | None, *, batch_first: bool) -> None:
        layout = "(B, T, d)" if batch_first else "(T, B, d)"
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
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = next(self.parameters()).dtype
        if x.dtype != dtype and not autocast:
            raise TypeError(
                f"x must have the dtype of the layer, {dtype}; got {x.dtype}: convert x by "
                "x.to(...), or the layer by layer.to(...)"
            )
        if hx is None:
            return
        batch = () if x.dim() == 2 else (x.shape[1 - time],)
        expected = (self.num_layers * len(self._directions), *batch, self.hidden_size)
        if tuple(hx.shape) != expected:
            raise ValueError(f"hx must be {expected}; got {tuple(hx.shape)}")
        if hx.dtype != x.dtype and not autocast:
            raise TypeError(f"hx must have the dtype of x, {x.dtype}; got {hx.dtype}: convert it")

    def extra_repr(self) -> str:
        parts = [f"{self.input_size}, {self.hidden_size}"]
        defaults = {"num_layers": 1, "batch_first": False, "dropout": 0.0, "bidirectional": False}
        parts += [f"{k}={getattr(self, k)}" for k, v in defaults.items() if getattr(self, k) != v]
        return ", ".join(parts)


def _backwards(T: int, lengths: Tensor) -> Tensor:
    """Which time step comes at each place of a sequence read backwards, (T, B)."""
    steps = torch.arange(T, device=lengths.device).unsqueeze(1)
    return torch.where(steps < lengths, lengths - 1 - steps, steps)


def _reverse(x: Tensor, steps: Tensor | None) -> Tensor:
    """x, (T, B, d), read backwards: whole, or with the time steps of each sample in that order."""
    return x.flip(0) if steps is None else x.take_along_dim(steps.unsqueeze(2), 0)


def _last(states: Tensor, lengths: Tensor | None) -> Tensor:
    """The state at the end of each sequence, (B, n)."""
    if lengths is None:
        return states[-1]
    return states[lengths - 1, torch.arange(states.shape[1], device=states.device)]
