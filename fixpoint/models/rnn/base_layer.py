"""The contract of torch.nn.RNN for any cell, with time steps of a stream."""

from __future__ import annotations

import copy
import numbers
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from fixpoint._validation import at_least, boolean
from fixpoint.models._signature import OptionsMixin
from fixpoint.models.rnn.base_cell import RecurrentCell, Span
from fixpoint.models.rnn.stack import Stack, States

NO_STREAM = (
    "a bidirectional layer needs the end of the sequence for its first output: build it with "
    "bidirectional=False to step through a stream"
)


class StreamState(NamedTuple):
    """State of a layer after some time steps, for the next one or the next piece.

    hx: last states, (L, B, n), or (L, n) unbatched.
    t: index of the next time step; 0 to begin again from these states.
    """

    hx: Tensor
    t: int


class Recurrent(Stack, OptionsMixin, nn.Module):
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
        hx: h_0, (D L, B, n), or (D L, n) unbatched; zeros if not given. Not modified. Or the
            `StreamState` of the piece before: then one is returned. A layer with steps of their own
            at each time index needs that to continue: it warns of a tensor, with which it begins
            again at t = 0.
        last_only: give the output of the last time step alone; see `last_output`.

    Outputs: output, h_n
        output: h_1 .. h_T of the last layer, (T, B, D n), (B, T, D n), (T, D n) or packed.
        h_n: last states, of the shape of hx.

    Attributes:
        l0, l0_reverse, l1, ...: the cells; each runs through `__call__`, so hooks of it run.
        bias: whether there are biases. nonlinearity: that of the cells.

    Raises:
        ValueError: an unknown value or an invalid combination, when built; a wrong shape, when
            called.
        TypeError: an unknown option, or a bias, batch_first or bidirectional other than a bool,
            when built; a wrong dtype, when called.

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
        if isinstance(dropout, bool) or not isinstance(dropout, numbers.Real):
            raise TypeError(f"dropout must be a fraction between 0 and 1; got {dropout!r}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be a fraction between 0 and 1; got {dropout}")
        if dropout and num_layers == 1:
            warnings.warn(
                f"dropout={dropout:g} is applied between layers and has no effect with "
                "num_layers=1",
                stacklevel=2,
            )
        self.batch_first, self.dropout = boolean(batch_first=batch_first), float(dropout)
        self.bidirectional = boolean(bidirectional=bidirectional)
        options["bias"] = self.bias = boolean(bias=bias)
        if nonlinearity is not None:
            options["nonlinearity"] = nonlinearity
        self._names: list[str] = []
        size = input_size
        for layer in range(num_layers):
            for direction in ("", "_reverse")[: self._directions]:
                cell = self.cell_class(size, hidden_size, **options)
                self._names.append(f"l{layer}{direction}")
                self.add_module(self._names[-1], cell)
                options = copy.deepcopy(options)
            size = hidden_size * self._directions
        self.nonlinearity: str | None = getattr(cell, "nonlinearity", None)

    def cells(self) -> list[Any]:
        """Return the cells, layer by layer, the forward direction first."""
        return [self._modules[name] for name in self._names]

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The parameters of each cell, as `torch.nn.RNN` lists them."""
        return [list(cell.parameters()) for cell in self.cells()]

    def flatten_parameters(self) -> None:
        """Leave all as it is, as `torch.nn.RNN` does where cuDNN has no part."""

    def reset_parameters(self) -> None:
        """Draw all parameters again, as the constructor does, also after `to_empty`."""
        for cell in self.cells():
            cell.reset_parameters()

    def forward(
        self,
        x: Tensor | PackedSequence,
        hx: Tensor | StreamState | None = None,
        *,
        last_only: bool = False,
    ) -> tuple[Any, Any]:
        states, first = (None, 0) if hx is None else self._start_of(hx)
        if first and isinstance(x, PackedSequence):
            self._check_lengths(x)
        output, (h_n,) = self._run(x, states, first, last_only)
        if isinstance(hx, StreamState):
            return output, StreamState(h_n, first + self._steps(x))
        return output, h_n

    def last_output(
        self, x: Tensor | PackedSequence, hx: Tensor | StreamState | None = None
    ) -> Tensor:
        """Return the output of the last time step alone, (B, D n) or (D n,): cheaper than
        `forward`.

        That of a packed sequence is after the last step of each sample.
        """
        output: Tensor = self(x, hx, last_only=True)[0]
        return output

    def _start_of(self, hx: Tensor | StreamState) -> tuple[States, int]:
        """Return the first states and the time index of the first step."""
        if isinstance(hx, StreamState):
            if self.bidirectional:
                raise ValueError(NO_STREAM)
            if hx.t < 0:
                raise _unusable(hx)
            return (hx.hx,), hx.t
        own = self.cells()[0].timesteps
        if own is not None:
            warnings.warn(
                f"{type(self).__name__} has steps of their own at each time index (timesteps="
                f"{own}), and with a tensor hx begins again at t = 0: to continue a sequence pass "
                "the StreamState of its part before (StreamState(hx, t) at first), and to "
                "begin again StreamState(hx, 0)",
                stacklevel=5,
            )
        return (hx,), 0

    def _steps(self, x: Tensor | PackedSequence) -> int:
        if isinstance(x, PackedSequence):
            self._check_lengths(x)
            return len(x.batch_sizes)
        return x.shape[self._time_axis(x)]

    def _check_lengths(self, x: PackedSequence) -> None:
        """Refuse lengths with a `StreamState`, which has one time index for all samples."""
        if self.cells()[0].timesteps is not None and x.batch_sizes[0] != x.batch_sizes[-1]:
            raise ValueError(
                "a StreamState has one time index, so that the sequences of a packed piece must be "
                "of one length where a layer has steps of their own at each time index"
            )

    def _direction(
        self, layer: int, reverse: bool, x: Tensor, start: States, span: Span
    ) -> tuple[Tensor, States]:
        cell = self._modules[f"l{layer}_reverse" if reverse else f"l{layer}"]
        return cell(x, start[0], span=span), ()  # type: ignore[misc]

    def step(self, x: Tensor, state: StreamState | None = None) -> tuple[Tensor, StreamState]:
        """Advance a stream by one time step: the output that `forward` has at it, and the state
        after it.

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
            raise ValueError(NO_STREAM)
        if state is not None and (not isinstance(state, StreamState) or state.t < 0):
            raise _unusable(state)
        t, hx = (0, None) if state is None else (state.t, state.hx)
        cells, states = self.cells(), []
        own = cells[0].timesteps is not None
        for layer, cell in enumerate(cells):
            h = None if hx is None else hx[layer]
            x = cell(x, h, t=t) if own else cell(x, h)
            states.append(x)
            if self.dropout and layer < self.num_layers - 1:
                x = F.dropout(x, self.dropout, self.training)
        return x, StreamState(torch.stack(states), t + 1)

    def extra_repr(self) -> str:
        parts = [f"{self.input_size}, {self.hidden_size}"]
        defaults = {"num_layers": 1, "batch_first": False, "dropout": 0.0, "bidirectional": False}
        parts += [f"{k}={getattr(self, k)}" for k, v in defaults.items() if getattr(self, k) != v]
        return ", ".join(parts)


def _unusable(state: Any) -> Exception:
    """Return what to raise for a state that is none, or with a time index below 0."""
    if isinstance(state, StreamState):
        return ValueError(
            f"t of a StreamState must be at least 0; got {state.t}: 0 begins a sequence"
        )
    return TypeError(
        f"state must be a StreamState; got {torch.typename(state)}: give what the step before "
        "returned, or StreamState(hx, t)"
    )
