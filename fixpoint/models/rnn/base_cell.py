"""One step of a recurrence, and the same over a sequence, fused where that applies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from fixpoint._messages import unknown_name
from fixpoint._torch import carries_tangents, is_exporting
from fixpoint._validation import at_least
from fixpoint.models._signature import ShowsAllOptions
from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.models.ops.common.dispatch import without_autocast
from fixpoint.models.ops.gated.autograd import gated_scan
from fixpoint.models.ops.gated.autograd import unsupported as gated_unsupported
from fixpoint.models.ops.gated.reference import gated_scan_reference
from fixpoint.models.ops.leaky.autograd import fused_scan, unsupported
from fixpoint.models.ops.leaky.reference import scan_reference
from fixpoint.models.rnn.parallel import (
    ParallelForm,
    checked_time,
    gated_form,
    is_traced,
    leaky_form,
    parallel_pays,
    solve_states,
    warn_of_fallback,
)
from fixpoint.models.rnn.scan import mask_nonfinite
from fixpoint.solution import Solution

if TYPE_CHECKING:
    from typing_extensions import Unpack

IMPLEMENTATIONS = ("auto", "reference", "fused")


class CellOptions(TypedDict, total=False):
    """Options of every cell with a fused path."""

    nonlinearity: str
    implementation: str
    time: str


class LeakyOptions(CellOptions, total=False):
    """Options of every `LeakyCell`."""

    recompute: bool


class RecurrentCell(ShowsAllOptions, nn.Module):
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
        time: "sequential" runs one step after the other. "parallel" solves all steps at once
            (`fixpoint.sequence.solve_sequence`): states and gradients are the same to rounding.
            "auto" does so where no fused path applies and it is expected to be faster. It pays
            for a cell of many small operations and long sequences, never beside a fused path on
            the CPU. In forward mode, under torch.func and torch.export the steps are sequential.

    Attributes:
        time_solution: `Solution` of the last parallel solve, without its z; None before.

    Inputs: x, hx
        x: (B, d) or (d,).
        hx: (B, n) or (n,), zeros if not given.

    Outputs: h', of the shape of hx.

    Example:
        >>> import torch
        >>> from fixpoint.models import FastRNNCell
        >>> cell = FastRNNCell(3, 8)
        >>> cell(torch.randn(4, 3), torch.zeros(4, 8)).shape
        torch.Size([4, 8])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        implementation: str = "auto",
        time: str = "sequential",
    ) -> None:
        super().__init__()
        self.input_size = at_least(1, input_size=input_size)
        self.hidden_size = at_least(1, hidden_size=hidden_size)
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(unknown_name("implementation", implementation, IMPLEMENTATIONS))
        self.implementation = implementation
        self.time = checked_time(time)
        self.time_solution: Solution | None = None
        self._warned_of_fallback = False

    def states(self, x: Tensor, h0: Tensor, *, last_only: bool) -> Tensor:
        """h_1 .. h_T, (T, B, n), or h_T, (B, n), for finite x, (T, B, d), and h0, (B, n)."""
        raise NotImplementedError

    def no_fused_path(self) -> str | None:
        """Why no input takes the fused path, or None where some do."""
        return f"{type(self).__name__} has no fused path"

    def no_parallel_path(self) -> str | None:
        """Why the steps cannot be solved at once, or None where they can."""
        return None

    def parallel_form(self, x: Tensor, h0: Tensor) -> ParallelForm:
        """The recurrence for x, (T, B, d), and h0, (B, n), as a step on rows of time and batch."""

        def step(h: Tensor, x: Tensor) -> Tensor:
            return self.states(x.unsqueeze(0), h, last_only=True)

        return ParallelForm(step, x, "auto")

    def sequence(self, x: Tensor, h0: Tensor, *, last_only: bool = False) -> Tensor:
        """h_1 .. h_T, (T, B, n), or h_T, (B, n), for x, (T, B, d), and h0, (B, n)."""
        dtype = h0.dtype
        if torch.is_autocast_enabled(x.device.type):
            own = next(self.parameters()).dtype
            x, h0 = x.to(own), h0.to(own)
        x, h0, good = mask_nonfinite(x, h0)
        h = self._states_in_time(x, h0, last_only).to(dtype)
        if good is None:
            return h
        return torch.where((good[-1] if last_only else good).unsqueeze(-1), h, torch.nan)

    def _states_in_time(self, x: Tensor, h0: Tensor, last_only: bool) -> Tensor:
        """`states`, for all time steps at once where `time` says so."""
        with without_autocast(x.device.type):
            form = self._parallel_form_to_take(x, h0) if len(x) > 1 else None
            if form is not None:
                states, solution = solve_states(form, h0)
        if form is None:
            return self.states(x, h0, last_only=last_only)
        self.time_solution = solution
        if self.time == "parallel" and not self._warned_of_fallback:
            self._warned_of_fallback = warn_of_fallback(solution, type(self).__name__)
        return states[-1] if last_only else states

    def _parallel_form_to_take(self, x: Tensor, h0: Tensor) -> ParallelForm | None:
        if self.time == "parallel":
            sequential = carries_tangents() or is_exporting()
            return None if sequential else self.parallel_form(x, h0)
        fused = self.implementation != "reference" and self.no_fused_path() is None
        if self.time == "sequential" or fused or is_traced() or self.no_parallel_path():
            return None
        form = self.parallel_form(x, h0)
        return form if parallel_pays(form, h0) else None

    def forward(self, x: Tensor, hx: Tensor | None = None) -> Tensor:
        rows, h = self.rows(x, hx)
        h = self.sequence(rows.unsqueeze(0), h, last_only=True)
        return h.reshape(*x.shape[:-1], self.hidden_size)

    def at_time(self, t: int, x: Tensor, hx: Tensor | None = None) -> Tensor:
        """`forward` at time index t, from 0, which only a cell with steps of their own uses."""
        h: Tensor = self(x, hx)
        return h

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
        return rows, rows.new_zeros(rows.shape[0], n) if hx is None else hx.reshape(-1, n)

    def extra_repr(self) -> str:
        parts = [f"{self.input_size}, {self.hidden_size}, implementation={self.implementation!r}"]
        if self.time != "sequential":
            parts.append(f"time={self.time!r}")
        reason = None if self.implementation == "reference" else self.no_fused_path()
        return ", ".join(parts + ([f"not fused: {reason}"] if reason else []))


class FusedCell(RecurrentCell):
    """A cell whose states come from a fused operation or from its twin of plain operations.

    A subclass names the operations and implements `recurrence`. Under autocast to bfloat16 on a
    CUDA device the fused path multiplies in bfloat16 and keeps states and sums in float32; under
    any other it computes in the dtype of the parameters.

    Args:
        nonlinearity: sigma, a name in `ACTIVATIONS`.
        input_size, hidden_size, implementation, time: see `RecurrentCell`.
    """

    fused_operation: Callable[..., Tensor]
    plain_operation: Callable[..., Tensor]
    unsupported_reason: Callable[..., str | None]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        nonlinearity: str = "tanh",
        implementation: str = "auto",
        time: str = "sequential",
    ) -> None:
        super().__init__(input_size, hidden_size, implementation=implementation, time=time)
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
        lower = dtype_of_products(device)
        with without_autocast(device):
            part = {"x": x, **self._arguments(x, h0)}
            if lower is not None:  # a and b are not: 0.99 is 0.988 in bfloat16
                products = part.keys() - {"a", "b", "activation"}
                part |= {k: part[k].to(lower) for k in products if part[k] is not None}
            if reason := self.unsupported_reason(**part):
                return reason, None
            return None, self.fused_operation(**part, last_only=last_only, **self.fused_options)

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
        input_size, hidden_size, nonlinearity, implementation, time: see `FusedCell`.
    """

    fused_operation = staticmethod(fused_scan)
    plain_operation = staticmethod(scan_reference)
    unsupported_reason = staticmethod(unsupported)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        recompute: bool = False,
        **options: Unpack[CellOptions],
    ) -> None:
        super().__init__(input_size, hidden_size, **options)
        if recompute and self.implementation == "reference":
            raise ValueError(
                'recompute=True belongs to the fused path, and implementation="reference" has '
                "none: leave one of them out"
            )
        self.fused_options["recompute"] = recompute

    def recurrence(self, T: int) -> Leaky:
        raise NotImplementedError

    def parallel_form(self, x: Tensor, h0: Tensor) -> ParallelForm:
        weights = self.recurrence(len(x))._asdict()
        return leaky_form(x, len(h0), activation=self.nonlinearity, **weights)


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
        input_size, hidden_size, implementation, time: see `FusedCell`.
    """

    fused_operation = staticmethod(gated_scan)
    plain_operation = staticmethod(gated_scan_reference)
    unsupported_reason = staticmethod(gated_unsupported)

    def recurrence(self, T: int) -> Gated:
        raise NotImplementedError

    def parallel_form(self, x: Tensor, h0: Tensor) -> ParallelForm:
        weights = self.recurrence(len(x))._asdict()
        return gated_form(x, activation=self.nonlinearity, **weights)


def dtype_of_products(device: str) -> torch.dtype | None:
    """bfloat16 where autocast to it is on and a kernel multiplies in it, else None."""
    if device != "cuda" or not torch.is_autocast_enabled(device):
        return None
    asked = torch.get_autocast_dtype(device)
    return asked if asked == torch.bfloat16 else None


def not_fused(reason: str | None) -> str:
    return f'implementation="fused" does not apply: {reason}; use "auto" or "reference"'
