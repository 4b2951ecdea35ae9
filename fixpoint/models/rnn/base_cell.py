"""One step of a recurrence, and the same over a sequence, fused where that applies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.nn.functional import linear

from fixpoint._messages import unknown_name
from fixpoint._torch import autocast_enabled, carries_tangents, has_values, is_exporting
from fixpoint._torch import scan as scan_in_graph
from fixpoint._validation import at_least, boolean
from fixpoint.models._parameters import Resettable, Start, first_parameter
from fixpoint.models._signature import OptionsMixin
from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.models.ops.common.dispatch import without_autocast
from fixpoint.models.ops.common.plan import CallPlan, make_plan
from fixpoint.models.ops.recurrence.autograd import FusedRecurrence, Options
from fixpoint.models.ops.recurrence.gated import GATED, GatedInputs, gated_scan_reference
from fixpoint.models.ops.recurrence.leaky import LEAKY, LeakyInputs, scan_reference
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
from fixpoint.models.rnn.scan import all_finite, mask_nonfinite
from fixpoint.solution import Solution

if TYPE_CHECKING:
    from typing_extensions import Unpack

IMPLEMENTATIONS = ("auto", "reference", "fused")


class CellOptions(TypedDict, total=False):
    """Options of every cell with a fused path."""

    nonlinearity: str
    implementation: str
    time: str
    device: torch.device | str | None
    dtype: torch.dtype | None


class LeakyOptions(CellOptions, total=False):
    """Options of every `LeakyCell`."""

    recompute: bool


class Span(NamedTuple):
    """The time steps of a whole sequence, as a layer asks a cell for them.

    start: time index of the first one. last_only: without the states before the last.
    others: with all of further states, as c of an LSTM, not the last alone.
    """

    start: int = 0
    last_only: bool = False
    others: bool = False


class RecurrentCell(OptionsMixin, Resettable):
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
            for a cell of many small operations and long sequences, never next to a fused path on
            the CPU. In forward mode, under torch.func and torch.export the steps are sequential.
        device, dtype: of the parameters.

    Attributes:
        timesteps: T of a cell with steps of their own at each time index, else None.
        time_solution: `Solution` of the last parallel solve, without its z; None before.

    Inputs: x, hx
        x: (B, d) or (d,).
        hx: (B, n) or (n,), zeros if not given.
        span: given by a layer, whose x is a whole sequence, (T, B, d), and hx (B, n).

    Outputs: h', of the shape of hx.

    Example:
        >>> import torch
        >>> from fixpoint.models import FastRNNCell
        >>> cell = FastRNNCell(3, 8)
        >>> cell(torch.randn(4, 3), torch.zeros(4, 8)).shape
        torch.Size([4, 8])
    """

    timesteps: int | None = None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        implementation: str = "auto",
        time: str = "sequential",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(device=device, dtype=dtype)
        self.input_size = at_least(1, input_size=input_size)
        self.hidden_size = at_least(1, hidden_size=hidden_size)
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(unknown_name("implementation", implementation, IMPLEMENTATIONS))
        self.implementation = implementation
        self.time = checked_time(time)
        self.time_solution: Solution | None = None
        self._warned_of_fallback = False
        self._plans: dict[Any, CallPlan] = {}

    def new_bias(self, name: str, size: int, *, start: Start, bias: bool) -> None:
        """Make the parameter, or None without bias."""
        if boolean(bias=bias):
            self.new_parameter(name, size, start=start)
        else:
            self.register_parameter(name, None)

    def states(self, x: Tensor, h0: Tensor, *, last_only: bool) -> Tensor:
        """Return h_1 .. h_T, (T, B, n), or h_T, (B, n), for finite x, (T, B, d), and h0, (B, n).

        That of a cell with `timesteps` takes `start`, the time index of the first step, too.
        """
        raise NotImplementedError

    def plan(self, device: torch.device | None = None) -> CallPlan:
        """Return how states are computed in this grad mode on a device, by default that of the
        parameters.
        """
        device = first_parameter(self).device if device is None else device
        key = device, torch.is_grad_enabled()
        plan = self._plans.get(key)
        if plan is None:
            plan = self.make_plan(device)
            if not torch.compiler.is_compiling():
                self._plans[key] = plan
        return plan

    def make_plan(self, device: torch.device) -> CallPlan:
        """Return the plan for a device; `plan` makes it once."""
        reason = f"{type(self).__name__} has no fused path"
        return make_plan("", reason, self.hidden_size, device)

    def no_fused_path(self) -> str | None:
        """Return why no input takes the fused path, or None where some do."""
        return self.plan().reason

    def no_parallel_path(self) -> str | None:
        """Return why the steps cannot be solved at once, or None where they can."""
        return None

    def parallel_form(self, x: Tensor, h0: Tensor) -> ParallelForm:
        """Return the recurrence for x, (T, B, d), and h0, (B, n), as a step on rows of time and
        batch.

        That of a cell with `timesteps` takes `start`, the time index of the first step, too.
        """

        def step(h: Tensor, x: Tensor) -> Tensor:
            return self.states(x.unsqueeze(0), h, last_only=True)

        return ParallelForm(step, x, "auto")

    def sequence(self, x: Tensor, h0: Tensor, span: Span = Span()) -> Tensor:  # noqa: B008
        """Return h_1 .. h_T, (T, B, n), or h_T, (B, n), for x, (T, B, d), and h0, (B, n)."""
        dtype = h0.dtype
        if autocast_enabled(x.device.type):
            own = first_parameter(self).dtype
            x, h0 = x.to(own), h0.to(own)
        x, h0, good = mask_nonfinite(x, h0)
        if is_exporting() and isinstance(x.shape[0], torch.SymInt):
            h = self._states_of_any_length(x, h0, span)
        else:
            at = {} if self.timesteps is None else {"start": span.start}
            h = None if self.time == "sequential" else self._states_at_once(x, h0, span, at)
            if h is None:
                h = self.states(x, h0, last_only=span.last_only, **at)
        if h.dtype != dtype:
            h = h.to(dtype)
        if good is None:
            return h
        return torch.where((good[-1] if span.last_only else good).unsqueeze(-1), h, torch.nan)

    def _states_at_once(
        self, x: Tensor, h0: Tensor, span: Span, at: dict[str, int]
    ) -> Tensor | None:
        """Return `states`, solved for all time steps at once, or None where they are not to be."""
        if len(x) == 1 or not has_values(x):
            return None
        with without_autocast(x.device.type):
            form = self._parallel_form_to_take(x, h0, at)
            if form is None:
                return None
            states, solution = solve_states(form, h0)
        self.time_solution = solution
        if self.time == "parallel" and not self._warned_of_fallback:
            self._warned_of_fallback = warn_of_fallback(solution, type(self).__name__)
        return states[-1] if span.last_only else states

    def _states_of_any_length(self, x: Tensor, h0: Tensor, span: Span) -> Tensor:
        """Return `states` for a number of time steps that is a symbol of an exported graph."""
        if self.timesteps is not None:
            raise ValueError(
                f"{type(self).__name__} has steps of their own at each of {self.timesteps} time "
                "steps: export it with a fixed number of them"
            )

        def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.states(x.unsqueeze(0), h, last_only=True)
            return h, h.clone()

        last, states = scan_in_graph(step, h0, x)
        return last if span.last_only else states

    def _parallel_form_to_take(
        self, x: Tensor, h0: Tensor, at: dict[str, int]
    ) -> ParallelForm | None:
        if self.time == "parallel":
            sequential = carries_tangents() or is_exporting()
            return None if sequential else self.parallel_form(x, h0, **at)
        fused = self.implementation != "reference" and self.no_fused_path() is None
        if fused or is_traced() or self.no_parallel_path():
            return None
        form = self.parallel_form(x, h0, **at)
        return form if parallel_pays(form, h0) else None

    def forward(
        self, x: Tensor, hx: Tensor | None = None, *, span: Span | None = None, t: int | None = None
    ) -> Tensor:
        if span is not None and hx is not None:
            return self.sequence(x, hx, span)
        rows, h = self.rows(x, hx)
        finite = all_finite(rows, h)  # and on the CPU
        if finite and not torch.is_autocast_enabled("cpu"):
            new = self.single_step(rows, h, t)
        elif torch.is_grad_enabled() or autocast_enabled(x.device.type):
            # which keeps the samples that are not finite out of all gradients, and the dtypes
            new = self.sequence(rows.unsqueeze(0), h, Span(start=t or 0, last_only=True))
        else:
            new = self.single_step(rows, h, t)
            new = new + (0 * rows).sum(1, keepdim=True) + (0 * h).sum(1, keepdim=True)
        return new.squeeze(0) if x.dim() == 1 else new

    def single_step(self, x: Tensor, h: Tensor, t: int | None) -> Tensor:
        """Return h', (B, n), of x, (B, d), and h, (B, n), at time t where a cell has some."""
        return self.sequence(x.unsqueeze(0), h, Span(start=t or 0, last_only=True))

    def rows(self, x: Tensor, hx: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x and hx of one step as (B, d) and (B, n), after a check."""
        d, n = self.input_size, self.hidden_size
        if x.dim() not in (1, 2) or x.shape[-1] != d:
            raise ValueError(
                f"x must be (B, {d}) or ({d},), the input of one step; got {tuple(x.shape)}: for "
                "whole sequences use the layer"
            )
        shape = (*x.shape[:-1], n)
        dtype = first_parameter(self).dtype
        for name, v in (("x", x), ("hx", hx)):
            if v is not None and v.dtype != dtype and not autocast_enabled(x.device.type):
                raise TypeError(
                    f"{name} must have the dtype of the cell, {dtype}; got {v.dtype}: convert "
                    f"{name} by {name}.to(...), or the cell by cell.to(...)"
                )
        if hx is not None and hx.shape != shape:
            raise ValueError(f"hx must be {shape} for x of {tuple(x.shape)}; got {tuple(hx.shape)}")
        if x.dim() == 1:
            x, hx = x.unsqueeze(0), None if hx is None else hx.unsqueeze(0)
        return x, x.new_zeros(len(x), n) if hx is None else hx

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}}  # those of another process may not hold

    def extra_repr(self) -> str:
        parts = [f"{self.input_size}, {self.hidden_size}, implementation={self.implementation!r}"]
        if self.time != "sequential":
            parts.append(f"time={self.time!r}")
        if self.implementation != "reference":
            parts.append(str(self.plan()))
        return ", ".join(parts)


class FusedCell(RecurrentCell):
    """A cell whose states come from a fused operation or from its twin of plain operations.

    A subclass names the operations and implements `recurrence`. Under autocast to bfloat16 on a
    CUDA device the fused path multiplies in bfloat16 and keeps states and sums in float32; under
    any other it computes in the dtype of the parameters.

    Args:
        nonlinearity: sigma, a name in `ACTIVATIONS`.
        input_size, hidden_size, implementation, time, device, dtype: see `RecurrentCell`.
    """

    operation: ClassVar[FusedRecurrence[Any]]
    reference: ClassVar[Callable[..., Tensor]]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        nonlinearity: str = "tanh",
        implementation: str = "auto",
        time: str = "sequential",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        where: Any = {"device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, implementation=implementation, time=time, **where)
        if nonlinearity not in ACTIVATIONS:
            raise ValueError(unknown_name("nonlinearity", nonlinearity, ACTIVATIONS))
        self.nonlinearity = nonlinearity
        self.recompute = False

    def recurrence(self, T: int, start: int = 0) -> Any:
        """Return the tensors that both operations take besides the input and the first state.

        start: time index of the first step, for a cell with `timesteps`.
        """
        raise NotImplementedError

    def inputs(self, x: Tensor, h0: Tensor, weights: Any) -> Any:
        """Return the tensors of the fused operation."""
        raise NotImplementedError

    def make_plan(self, device: torch.device) -> CallPlan:
        return make_plan(self.operation.name, None, self.hidden_size, device)

    def states(self, x: Tensor, h0: Tensor, *, last_only: bool, start: int = 0) -> Tensor:
        if self.implementation != "reference":
            plan = self.plan(x.device)
            reason = plan.reason
            if reason is None:
                reason, h = self._fused(plan, x, h0, last_only, start)
                if h is not None:
                    return h
            if self.implementation == "fused":
                raise ValueError(not_fused(reason))
        return self.plain_states(x, h0, last_only=last_only, start=start)

    def _fused(
        self,
        plan: CallPlan,
        x: Tensor,
        h0: Tensor,
        last_only: bool,
        start: int,
        lower: torch.dtype | None = None,
    ) -> tuple[str | None, Tensor | None]:
        """Return either the reason against the fused path, or the states.

        lower: the dtype of products under autocast, which is off here.
        """
        device = x.device.type
        if autocast_enabled(device):
            lower = dtype_of_products(device)
            with without_autocast(device):
                return self._fused(plan, x, h0, last_only, start, lower)
        inputs = self.inputs(x, h0, self.recurrence(x.shape[0], start))
        if lower is not None:  # a and b are not: 0.99 is 0.988 in bfloat16
            cast = {k: v.to(lower) for k, v in inputs._asdict().items() if v is not None}
            inputs = inputs._replace(**{k: v for k, v in cast.items() if k not in ("a", "b")})
        options = Options(self.nonlinearity, last_only, self.recompute)
        reason, outputs = self.operation.run(inputs, options)
        return reason, outputs[0] if reason is None else None

    def plain_states(self, x: Tensor, h0: Tensor, *, last_only: bool, start: int = 0) -> Tensor:
        """Return `states` by plain operations, the reference."""
        weights = self.recurrence(len(x), start)._asdict()
        options = {"activation": self.nonlinearity, "last_only": last_only}
        h: Tensor = type(self).reference(x, h0=h0, **weights, **options)
        return h


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

    operation = LEAKY
    reference = staticmethod(scan_reference)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        recompute: bool = False,
        **options: Unpack[CellOptions],
    ) -> None:
        super().__init__(input_size, hidden_size, **options)
        if boolean(recompute=recompute) and self.implementation == "reference":
            raise ValueError(
                'recompute=True belongs to the fused path, and implementation="reference" has '
                "none: leave one of them out"
            )
        self.recompute = recompute

    def recurrence(self, T: int, start: int = 0) -> Leaky:
        raise NotImplementedError

    def inputs(self, x: Tensor, h0: Tensor, weights: Leaky) -> LeakyInputs:
        A, W, bias, a, b = weights
        T, K = x.shape[0], max(a.shape[-1] if a.dim() else 1, b.shape[-1] if b.dim() else 1)
        return LeakyInputs(x, W, bias, A, a.expand(T, K), b.expand(T, K), h0)

    def single_step(self, x: Tensor, h: Tensor, t: int | None) -> Tensor:
        A, W, bias, a, b = self.recurrence(1)
        c = ACTIVATIONS[self.nonlinearity](torch.addmm(linear(x, W, bias), h, A.mT))
        return (h * a).addcmul(c, b)

    def parallel_form(self, x: Tensor, h0: Tensor, start: int = 0) -> ParallelForm:
        weights = self.recurrence(len(x), start)._asdict()
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

    operation = GATED
    reference = staticmethod(gated_scan_reference)

    def recurrence(self, T: int, start: int = 0) -> Gated:
        raise NotImplementedError

    def inputs(self, x: Tensor, h0: Tensor, weights: Gated) -> GatedInputs:
        V, W, bias, p, q = weights
        return GatedInputs(x, W, bias, V, p, q, h0)

    def parallel_form(self, x: Tensor, h0: Tensor) -> ParallelForm:
        weights = self.recurrence(len(x))._asdict()
        return gated_form(x, activation=self.nonlinearity, **weights)


def dtype_of_products(device: str) -> torch.dtype | None:
    """Return bfloat16 where autocast to it is on and a kernel multiplies in it, else None."""
    if device != "cuda" or not autocast_enabled(device):
        return None
    asked = torch.get_autocast_dtype(device)
    return asked if asked == torch.bfloat16 else None


def not_fused(reason: str | None) -> str:
    return f'implementation="fused" does not apply: {reason}; use "auto" or "reference"'
