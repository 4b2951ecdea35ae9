"""torch.nn.RNN, GRU and LSTM with fused kernels: the same weights, arguments and results."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fixpoint._messages import unknown_name
from fixpoint._torch import autocast_enabled, is_exporting, is_ordinary, is_symbol, scan
from fixpoint._validation import boolean
from fixpoint.models.ops.common.dispatch import MAX_SIZE, kernels_for
from fixpoint.models.ops.common.plan import CallPlan, make_plan
from fixpoint.models.ops.recurrence import gru, leaky, lstm
from fixpoint.models.ops.recurrence.autograd import FusedRecurrence, Options
from fixpoint.models.rnn.base_cell import IMPLEMENTATIONS, Span, not_fused
from fixpoint.models.rnn.scan import mask_nonfinite
from fixpoint.models.rnn.stack import Stack, States, not_a_tensor, other_dtype, other_state_dtype


class _Fused(Stack):
    """A layer of torch.nn whose states come from a fused operation where one applies."""

    operation: ClassVar[FusedRecurrence[Any]]
    nonlinearity: str = "tanh"
    """Of the new state, or of the candidate."""

    def _choose(self, implementation: str) -> None:
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(unknown_name("implementation", implementation, IMPLEMENTATIONS))
        self.implementation = implementation
        self._plans: dict[Any, CallPlan] = {}

    def plan(self) -> CallPlan:
        """Return how states are computed on the device of the parameters."""
        layer: Any = self
        device = layer.weight_hh_l0.device
        key = device, self.implementation
        plan = self._plans.get(key)
        if plan is None:
            reason = "it has a proj_size" if layer.proj_size else None
            if device.type == "cuda":
                reason = "cuDNN has kernels of its own"
            elif self.implementation == "auto" and kernels_for(self.hidden_size, device) == "torch":
                reason = f"torch's own is faster without numba and above {MAX_SIZE} units"
            plan = make_plan(self.operation.name, reason, self.hidden_size, device)
            if not torch.compiler.is_compiling():
                self._plans[key] = plan
        return plan

    def _states(self, x: Any, hx: States | None) -> tuple[Any, States] | None:
        """Return the output and last states by the fused path, None where it does not apply.

        In an exported graph with any number of time steps, by a loop over them.
        """
        layer: Any = self
        if not isinstance(x, Tensor | PackedSequence):
            raise TypeError(not_a_tensor(x, "(B, T, d)" if self.batch_first else "(T, B, d)"))
        values = x.data if isinstance(x, PackedSequence) else x
        dtype = layer.weight_hh_l0.dtype
        if values.dtype != dtype and not autocast_enabled(values.device.type):
            raise TypeError(other_dtype(values, dtype))
        if hx is not None:
            self._check_states(hx, values)
        if not isinstance(x, PackedSequence) and is_symbol(x.shape[self._time_axis(x)]):
            return None if layer.proj_size else self._run(x, hx, 0, False)
        if self.implementation == "reference":
            return None
        plan = self.plan()
        reason = plan.reason or self._why_not((values, *(hx or ())))
        if reason is None:
            return self._run(x, hx, 0, False)
        if self.implementation == "fused":
            raise ValueError(not_fused(reason))
        return None

    def _check_states(self, hx: Any, x: Tensor) -> None:
        """Refuse states of another kind or dtype: torch's own answer names neither hx nor it."""
        count = self.tensors_of_state
        several = isinstance(hx, tuple | list) and len(hx) == count
        if not (several and all(isinstance(h, Tensor) for h in hx)):
            expected = "a tensor, h_0" if count == 1 else "a pair of tensors, (h_0, c_0)"
            given = torch.typename(hx[0] if count == 1 else hx)
            raise TypeError(f"hx must be {expected}; got {given}")
        for h in hx:
            if h.dtype != x.dtype and not autocast_enabled(x.device.type):
                raise TypeError(other_state_dtype(h, x))

    def _why_not(self, given: tuple[Any, ...]) -> str | None:
        """Return why these tensors do not take the fused path, None where they do."""
        if is_exporting():
            return "it cannot be traced or exported"
        layer: Any = self
        x, *states = given
        weights = dict(layer.named_parameters())
        named = {f"hx[{i}]": h for i, h in enumerate(states)}
        tensors = {"x": x, **named, **weights}
        if is_ordinary(tensors.values()):
            return None
        return self.operation.unsupported(**tensors, activation="identity")

    def _weights(self, name: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        layer: Any = self
        ih, hh = getattr(layer, f"weight_ih_{name}"), getattr(layer, f"weight_hh_{name}")
        if not layer.bias:
            return ih, hh, None, None
        return ih, hh, getattr(layer, f"bias_ih_{name}"), getattr(layer, f"bias_hh_{name}")

    def _bias(self, inner: Tensor, recurrent: Tensor) -> Tensor:
        """Return the bias of the operation from the two of torch."""
        return inner + recurrent

    def _inputs(
        self, x: Tensor, W: Tensor, bias: Tensor | None, V: Tensor, start: tuple[Tensor, ...]
    ) -> Any:
        """Return the inputs of the operation."""
        return self.operation.inputs(x, W, bias, V, *start)

    def _step(self, x: Tensor, states: States, *weights: Tensor | None) -> States:
        """Make one time step of torch's own cell."""
        raise NotImplementedError

    def _direction(
        self, layer: int, reverse: bool, x: Tensor, start: States, span: Span
    ) -> tuple[Tensor, States]:
        W, V, inner, recurrent = self._weights(f"l{layer}_reverse" if reverse else f"l{layer}")
        if is_exporting():

            def step(states: States, x: Tensor) -> tuple[States, Tensor]:
                new = self._step(x, states, W, V, inner, recurrent)
                return new, new[0].clone()

            last, output = scan(step, start, x)
            return output, last[1:]
        bias = None if inner is None or recurrent is None else self._bias(inner, recurrent)
        count = self.tensors_of_state
        x, first, good = mask_nonfinite(x, start[0] if count == 1 else torch.cat(start, 1))
        inputs = self._inputs(x, W, bias, V, first.chunk(count, 1))
        options = Options(self.nonlinearity, span.last_only, False, span.others)
        found = self.operation.run(inputs, options)[1]  # as `_why_not` has allowed
        if good is not None:
            last, whole = good[-1].unsqueeze(-1), good.unsqueeze(-1)
            asked = options.whole(count)
            found = tuple(
                [
                    torch.where(whole if all_steps else last, v, torch.nan)
                    for v, all_steps in zip(found, asked, strict=True)
                ]
            )
        return found[0], found[1:]


class _OneState(_Fused):
    """A layer with the states h alone."""

    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | None = None
    ) -> tuple[Any, Tensor]:
        found = self._states(input, None if hx is None else (hx,))
        if found is None:
            parent: Any = super()
            return parent.forward(input, hx)
        return found[0], found[1][0]


class RNN(_OneState, nn.RNN):
    """torch.nn.RNN, fused: arguments, weights and results are the same, the speed is not.

    `load_state_dict` takes the weights of a torch.nn.RNN and gives them back. On the CPU the whole
    sequence is one operation, as in all layers here; on other devices, without numba, above 256
    units, exported, under torch.func and autocast it is torch's own. torch.compile leaves it out of
    its graph, as it does torch's. Fused, a sample with a NaN or inf in its input or hx is NaN from
    there on, as is a relu state that overflows, where torch's may recover, and it has no part in
    any gradient.

    Args:
        implementation: "auto", "fused", which raises with the reason where the fused path does not
            apply, or "reference", torch's own.
        options: all others are those of torch.nn.RNN, with its defaults.

    Source: Elman (1990), Finding structure in time.

    Example:
        >>> import torch
        >>> from fixpoint.models import RNN
        >>> theirs, ours = torch.nn.RNN(3, 8), RNN(3, 8)
        >>> _ = ours.load_state_dict(theirs.state_dict())
        >>> x = torch.randn(5, 2, 3)
        >>> torch.allclose(ours(x)[0], theirs(x)[0], atol=1e-6)
        True
    """

    operation = leaky.LEAKY

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        implementation: str = "auto",
    ) -> None:
        where: Any = {"device": device, "dtype": dtype}
        options = bias, batch_first, dropout, boolean(bidirectional=bidirectional)
        super().__init__(input_size, hidden_size, num_layers, nonlinearity, *options, **where)
        self._choose(implementation)

    def _inputs(
        self, x: Tensor, W: Tensor, bias: Tensor | None, V: Tensor, start: tuple[Tensor, ...]
    ) -> Any:
        leak = x.new_zeros(len(x), 1)
        return self.operation.inputs(x, W, bias, V, leak, leak + 1, *start)

    def _step(self, x: Tensor, states: States, *weights: Any) -> States:
        cell = torch.rnn_relu_cell if self.nonlinearity == "relu" else torch.rnn_tanh_cell
        return (cell(x, states[0], *weights),)


class GRU(_OneState, nn.GRU):
    """torch.nn.GRU, fused: arguments, weights and results are the same, the speed is not.

    See `RNN`.

    Args:
        implementation: see `RNN`.
        options: all others are those of torch.nn.GRU, with its defaults.

    Source: Cho et al. (2014), Learning phrase representations using RNN encoder-decoder for
    statistical machine translation.

    Example:
        >>> import torch
        >>> from fixpoint.models import GRU
        >>> theirs, ours = torch.nn.GRU(3, 8), GRU(3, 8)
        >>> _ = ours.load_state_dict(theirs.state_dict())
        >>> x = torch.randn(5, 2, 3)
        >>> torch.allclose(ours(x)[0], theirs(x)[0], atol=1e-6)
        True
    """

    operation = gru.GRU

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        implementation: str = "auto",
    ) -> None:
        where: Any = {"device": device, "dtype": dtype}
        options = bias, batch_first, dropout, boolean(bidirectional=bidirectional)
        super().__init__(input_size, hidden_size, num_layers, *options, **where)
        self._choose(implementation)

    def _bias(self, inner: Tensor, recurrent: Tensor) -> Tensor:
        n = self.hidden_size
        return torch.cat([inner[: 2 * n] + recurrent[: 2 * n], inner[2 * n :], recurrent[2 * n :]])

    def _step(self, x: Tensor, states: States, *weights: Any) -> States:
        return (torch.gru_cell(x, states[0], *weights),)


class LSTM(_Fused, nn.LSTM):
    """torch.nn.LSTM, fused: arguments, weights and results are the same, the speed is not.

    See `RNN`; with a `proj_size` it is torch's own.

    Args:
        implementation: see `RNN`.
        options: all others are those of torch.nn.LSTM, with its defaults.

    Source: Hochreiter, Schmidhuber (1997), Long short-term memory.

    Example:
        >>> import torch
        >>> from fixpoint.models import LSTM
        >>> output, (h_n, c_n) = LSTM(3, 8, num_layers=2)(torch.randn(5, 2, 3))
        >>> output.shape, c_n.shape
        (torch.Size([5, 2, 8]), torch.Size([2, 2, 8]))
    """

    operation = lstm.LSTM
    tensors_of_state = 2

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        implementation: str = "auto",
    ) -> None:
        where: Any = {"device": device, "dtype": dtype}
        options = bias, batch_first, dropout, boolean(bidirectional=bidirectional), proj_size
        super().__init__(input_size, hidden_size, num_layers, *options, **where)
        self._choose(implementation)

    def forward(
        self, input: Tensor | PackedSequence, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Any, tuple[Tensor, Tensor]]:
        found = self._states(input, hx)
        if found is None:
            return super().forward(input, hx)
        h, c = found[1]
        return found[0], (h, c)

    def _step(self, x: Tensor, states: States, *weights: Any) -> States:
        return torch.lstm_cell(x, states, *weights)
