"""The contract of torch.nn.RNN for any cell: layers, directions, batches, packed sequences."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fixpoint.models.cells import ACTIVATIONS
from fixpoint.models.fused import fused_scan, plain_scan, unsupported
from fixpoint.models.gated import gated_scan, plain_gated_scan
from fixpoint.models.gated import unsupported as gated_unsupported
from fixpoint.models.scan import isolate
from fixpoint.names import unknown_name
from fixpoint.solvers.checks import at_least

IMPLEMENTATIONS = ("auto", "reference", "fused")


class RecurrentCell(nn.Module):
    """One step h_t from x_t and h_{t-1}, and the same over a whole sequence.

    A subclass implements `states`. Called like `torch.nn.RNNCell` it makes one step. A sample with
    a NaN or inf in x_t or h_0 has NaN states from there on and no part in any gradient; its
    batch-mates are untouched. Under autocast states are carried in the dtype of the parameters
    and returned in that of hx, or of x without.

    Args:
        input_size: features d of x_t.
        hidden_size: units n of h_t.
        implementation: "reference" is the loop of plain operations. "auto" takes the fused path
            where it applies, "fused" raises with the reason where it does not.

    Inputs: x, hx
        x: (B, d) or (d,).
        hx: (B, n) or (n,), zeros if not given.

    Outputs: h', of the shape of hx.
    """

    def __init__(self, input_size: int, hidden_size: int, *, implementation: str = "auto") -> None:
        super().__init__()
        self.input_size = at_least(1, input_size=input_size)
        self.hidden_size = at_least(1, hidden_size=hidden_size)
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(unknown_name("implementation", implementation, IMPLEMENTATIONS))
        self.implementation = implementation

    def states(self, x: Tensor, h0: Tensor, *, last_only: bool) -> Tensor:
        """h_1 .. h_T, (T, B, n), or h_T, (B, n), for finite x, (T, B, d), and h0, (B, n)."""
        raise NotImplementedError

    def no_fused_path(self) -> str | None:
        """Why no input takes the fused path, or None where some do."""
        return f"{type(self).__name__} has no fused path"

    def sequence(self, x: Tensor, h0: Tensor, *, last_only: bool = False) -> Tensor:
        """h_1 .. h_T, (T, B, n), or h_T, (B, n), for x, (T, B, d), and h0, (B, n)."""
        dtype = h0.dtype
        if torch.is_autocast_enabled(x.device.type):
            own = next(self.parameters()).dtype
            x, h0 = x.to(own), h0.to(own)
        if _all_finite(x, h0):
            return self.states(x, h0, last_only=last_only).to(dtype)
        x, h0, good = isolate(x, h0)
        h = self.states(x, h0, last_only=last_only).to(dtype)
        return torch.where((good[-1] if last_only else good).unsqueeze(-1), h, torch.nan)

    def forward(self, x: Tensor, hx: Tensor | None = None) -> Tensor:
        rows, h = self.rows(x, hx)
        h = self.sequence(rows.unsqueeze(0), h, last_only=True)
        return h.reshape(*x.shape[:-1], self.hidden_size)

    def rows(self, x: Tensor, hx: Tensor | None) -> tuple[Tensor, Tensor]:
        """x and hx of one step as (B, d) and (B, n), after a check."""
        d, n = self.input_size, self.hidden_size
        if x.dim() not in (1, 2) or x.shape[-1] != d:
            raise ValueError(
                f"x must be (B, {d}) or ({d},), the input of one step; got {tuple(x.shape)}: for "
                "whole sequences use the layer"
            )
        shape = (*x.shape[:-1], n)
        if hx is not None and hx.shape != shape:
            raise ValueError(f"hx must be {shape} for x of {tuple(x.shape)}; got {tuple(hx.shape)}")
        rows = x.reshape(-1, d)
        return rows, rows.new_zeros(len(rows), n) if hx is None else hx.reshape(-1, n)

    def extra_repr(self) -> str:
        parts = [f"{self.input_size}, {self.hidden_size}, implementation={self.implementation!r}"]
        reason = None if self.implementation == "reference" else self.no_fused_path()
        return ", ".join(parts + ([f"not fused: {reason}"] if reason else []))


class FusedCell(RecurrentCell):
    """A cell whose states come from a fused operation or from its twin of plain operations.

    A subclass names the operations and implements `recurrence`. Under autocast the fused path
    computes in the dtype of the parameters.

    Args:
        nonlinearity: sigma, a name in `ACTIVATIONS`.
        input_size, hidden_size, implementation: see `RecurrentCell`.
    """

    fused_operation: Callable[..., Tensor]
    plain_operation: Callable[..., Tensor]
    refusal: Callable[..., str | None]

    def __init__(
        self, input_size: int, hidden_size: int, *, nonlinearity: str, implementation: str
    ) -> None:
        super().__init__(input_size, hidden_size, implementation=implementation)
        if nonlinearity not in ACTIVATIONS:
            raise ValueError(unknown_name("nonlinearity", nonlinearity, ACTIVATIONS))
        self.nonlinearity = nonlinearity
        self.fused_options: dict[str, bool] = {}

    def recurrence(self, T: int) -> NamedTuple:
        """What both operations take beside the input, the start and the nonlinearity."""
        raise NotImplementedError

    def no_fused_path(self) -> str | None:
        return None

    def states(self, x: Tensor, h0: Tensor, *, last_only: bool) -> Tensor:
        reason = self.no_fused_path()
        if self.implementation != "reference" and reason is None:
            reason, h = self._fused(x, h0, last_only)
            if h is not None:
                return h
        if self.implementation == "fused":
            raise ValueError(not_fused(reason))
        return self.plain_states(x, h0, last_only=last_only)

    def _fused(self, x: Tensor, h0: Tensor, last_only: bool) -> tuple[str | None, Tensor | None]:
        """Either the reason against the fused path, or the states."""
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False) if autocast else nullcontext():
            part = self._arguments(x, h0)
            if reason := self.refusal(x=x, **part):
                return reason, None
            return None, self.fused_operation(x, **part, last_only=last_only, **self.fused_options)

    def plain_states(self, x: Tensor, h0: Tensor, *, last_only: bool) -> Tensor:
        """`states` by plain operations, the reference."""
        return self.plain_operation(x, **self._arguments(x, h0), last_only=last_only)

    def _arguments(self, x: Tensor, h0: Tensor) -> dict[str, Any]:
        weights = self.recurrence(len(x))._asdict()
        return {"h0": h0, "activation": self.nonlinearity, **weights}


class Leaky(NamedTuple):
    """h <- a h + b sigma(A h + W x_t + bias); see `fused_scan`."""

    A: Tensor
    W: Tensor
    bias: Tensor | None
    a: Tensor
    b: Tensor


class LeakyCell(FusedCell):
    """A cell of the form h <- a h + b sigma(A h + W x_t + bias).

    Args:
        recompute: the fused path keeps one state of each time step for the backward pass instead
            of two arrays of each inner step, for one more forward pass.
        input_size, hidden_size, nonlinearity, implementation: see `FusedCell`.
    """

    fused_operation = staticmethod(fused_scan)
    plain_operation = staticmethod(plain_scan)
    refusal = staticmethod(unsupported)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        nonlinearity: str,
        implementation: str = "auto",
        recompute: bool = False,
    ) -> None:
        super().__init__(
            input_size, hidden_size, nonlinearity=nonlinearity, implementation=implementation
        )
        if recompute and implementation == "reference":
            raise ValueError(
                'recompute=True belongs to the fused path, and implementation="reference" has '
                "none: leave one of them out"
            )
        self.fused_options["recompute"] = recompute

    def recurrence(self, T: int) -> Leaky:
        raise NotImplementedError


class Gated(NamedTuple):
    """h <- z h + (p (1 - z) + q) c with a gate z and a candidate c; see `gated_scan`."""

    V: Tensor
    W: Tensor
    bias: Tensor | None
    p: Tensor
    q: Tensor


class GatedCell(FusedCell):
    """A cell of the form h <- z h + (p (1 - z) + q) c with a gate z and a candidate c.

    Args:
        nonlinearity: that of c.
        input_size, hidden_size, implementation: see `FusedCell`.
    """

    fused_operation = staticmethod(gated_scan)
    plain_operation = staticmethod(plain_gated_scan)
    refusal = staticmethod(gated_unsupported)

    def recurrence(self, T: int) -> Gated:
        raise NotImplementedError


class Recurrent(nn.Module):
    """Layers and directions of one kind of cell, called like `torch.nn.RNN`.

    A subclass names its `cell_class`; its cells are the submodules l0, l0_reverse, l1, ...

    Args:
        input_size: features d of x_t.
        hidden_size: units n of h_t in each direction.
        num_layers: L; each layer reads the outputs of the one before.
        nonlinearity: that of the cells; None takes their own.
        bias: have biases.
        batch_first: x and output are (B, T, ...) instead of (T, B, ...).
        dropout: share of the outputs of each layer but the last set to 0 in training mode.
        bidirectional: D = 2 directions, the second reads each sequence backwards.
        options: those of the cell. Modules among them are copied for each further cell.

    Inputs: x, hx
        x: (T, B, d), (B, T, d) with `batch_first`, (T, d) unbatched, or a `PackedSequence`.
        hx: h_0, (D L, B, n), or (D L, n) unbatched; zeros if not given. Not modified.

    Outputs: output, h_n
        output: h_1 .. h_T of the last layer, (T, B, D n), (B, T, D n), (T, D n) or packed.
        h_n: last states, of the shape of hx.

    Raises:
        ValueError: a value is unknown or a pair refused, when built; a wrong shape, when called.
        TypeError: an option is unknown, when built; a wrong dtype, when called.
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
            raise ValueError(f"dropout must be a share between 0 and 1; got {dropout}")
        if dropout and num_layers == 1:
            warnings.warn(
                f"dropout={dropout:g} acts between layers and num_layers=1 has no between: it "
                "does nothing",
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

    def _time_first(self, x: Tensor, hx: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x as (T, B, d) and hx as (D L, B, n), after a check."""
        self._check(x, hx)
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
        self._check(padded, hx, "(T, B, d)")
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
        backwards = _backwards(T, lengths, x.device) if self.bidirectional else None
        last: list[Tensor] = []
        for layer in range(self.num_layers):
            top = layer == self.num_layers - 1
            no_output = last_only and top and not self.bidirectional
            outputs = []
            for direction in self._directions:
                h0 = x.new_zeros(B, self.hidden_size) if hx is None else hx[len(last)]
                cell: RecurrentCell = getattr(self, f"l{layer}{direction}")
                seen = _reorder(x, backwards) if direction else x
                states = cell.sequence(seen, h0, last_only=no_output)
                last.append(states if no_output else _last(states, lengths))
                outputs.append(_reorder(states, backwards) if direction else states)
            x = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
            if self.dropout and not top:
                x = F.dropout(x, self.dropout, self.training)
        return (x[-1] if last_only and not no_output else x), torch.stack(last)

    def _check(self, x: Tensor, hx: Tensor | None, layout: str | None = None) -> None:
        batch_first = self.batch_first and layout is None
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


def _all_finite(x: Tensor, h0: Tensor) -> bool:
    """Whether x and h0 are certainly finite, where that can be asked without a device sync."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or x.device.type != "cpu":
        return False
    x, h0 = x.detach(), h0.detach()
    if is_functorch_wrapped_tensor(x) or is_functorch_wrapped_tensor(h0):
        return False
    return math.isfinite(x.sum().item() + h0.sum().item())


def not_fused(reason: str | None) -> str:
    return f'implementation="fused" does not apply: {reason}; use "auto" or "reference"'


def _backwards(T: int, lengths: Tensor | None, device: torch.device) -> Tensor:
    """Which time step comes at each place of a sequence read backwards, (T, B) or (T, 1)."""
    steps = torch.arange(T, device=device).unsqueeze(1)
    if lengths is None:
        return steps.flip(0)
    return torch.where(steps < lengths, lengths - 1 - steps, steps)


def _reorder(x: Tensor, steps: Tensor | None) -> Tensor:
    """x, (T, B, d), with its time steps in that order for each sample."""
    assert steps is not None
    return x.take_along_dim(steps.unsqueeze(2).expand(-1, x.shape[1], -1), 0)


def _last(states: Tensor, lengths: Tensor | None) -> Tensor:
    """The state at the end of each sequence, (B, n)."""
    if lengths is None:
        return states[-1]
    return states[lengths - 1, torch.arange(states.shape[1], device=states.device)]
