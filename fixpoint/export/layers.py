"""The recurrences that run on a device, read from trained layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fixpoint.models import (
    ACTIVATIONS,
    ERNN,
    EquilibriumMap,
    FastGRNN,
    FastRNN,
    JordanMap,
    Recurrent,
)
from fixpoint.solvers import InexactNewton

Factors = tuple[Tensor, ...]
"""A matrix as a product of one or two factors, the left one first."""

Observer = Callable[[str, Tensor], Tensor]
"""Called with the name and value of each intermediate result; gives what is computed with."""


POSSIBLE = (
    "ERNN with a fixed number of steps of InexactNewton (the Jordan cell, or any cell with "
    "max_iter=1), FastRNN, FastGRNN and RNN, of one layer in one direction"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Recurrence:
    """h <- h + gain sigma(p) - leak h, K times a step, or the gated one of FastGRNN.

    p = g + U g with g = V h + W x + b; without feedback U p = g. Gated, where `mix` is set:
    h <- z h + (zeta (1 - z) + nu) c with z = sigmoid(p + b_z) and c = sigma(p + b_h).

    Args:
        recurrent, input: factors of V (n, n) and W (n, d).
        feedback: factors of U (n, n), or none.
        bias: b (1, n); gated: b_z and b_h (2, n).
        nonlinearity: sigma, a name in `ACTIVATIONS`.
        leak, gain: (T, K), or (1, K) where all time steps have the same.
        mix: zeta and nu, (2,).
    """

    recurrent: Factors
    input: Factors
    feedback: Factors = ()
    bias: Tensor
    nonlinearity: str
    leak: Tensor | None = None
    gain: Tensor | None = None
    mix: Tensor | None = None

    @property
    def updates(self) -> int:
        """K, updates of h in one time step."""
        return 1 if self.gain is None else self.gain.shape[1]

    @property
    def timesteps(self) -> int:
        """Time steps with a leak and gain of their own; 1 where all have the same."""
        return 1 if self.gain is None else len(self.gain)

    @property
    def matrices(self) -> dict[str, Tensor]:
        """Every factor by its name: V, W and U, of two factors V1 and V2, ..."""
        named: dict[str, Tensor] = {}
        for name, factors in (("V", self.recurrent), ("W", self.input), ("U", self.feedback)):
            for i, factor in enumerate(factors):
                named[name if len(factors) == 1 else f"{name}{i + 1}"] = factor
        return named

    @property
    def multiplications(self) -> int:
        """Products of a weight and a value in one time step."""
        n = self.bias.shape[1]
        inputs = sum(factor.numel() for factor in self.input)
        products = sum(factor.numel() for factor in (*self.recurrent, *self.feedback))
        return inputs + self.updates * (products + (2 if self.mix is None else 3) * n)

    def step(
        self, x: Tensor, h: Tensor, t: int | Tensor, watch: Observer = lambda name, value: value
    ) -> Tensor:
        """h_t, (B, n), of x_t, (B, d), and h_{t-1}, (B, n)."""
        sigma = ACTIVATIONS[self.nonlinearity]
        driven = watch("p", _apply(self.input, watch("x", x), "W", watch))
        for k in range(self.updates):
            p = driven + watch("p", _apply(self.recurrent, watch("h", h), "V", watch))
            if self.mix is not None:
                z = watch("p", p + self.bias[0]).sigmoid()
                c = sigma(watch("p", p + self.bias[1]))
                h = z * h + (self.mix[0] * (1 - z) + self.mix[1]) * c
                continue
            p = p + self.bias[0]
            if self.feedback:
                p = p + watch("p", _apply(self.feedback, watch("g", p), "U", watch))
            leak, gain = (row(v, t)[k] for v in (self.leak, self.gain) if v is not None)
            h = h + gain * sigma(watch("p", p)) - leak * h
        return h

    def to(self, dtype: torch.dtype) -> Recurrence:
        """The same in another precision, apart from any graph."""
        changes: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                changes[name] = value.detach().to(dtype)
            elif isinstance(value, tuple):
                changes[name] = tuple(part.detach().to(dtype) for part in value)
        return replace(self, **changes)


def row(values: Tensor, t: int | Tensor) -> Tensor:
    """The values of time step t; one row is that of every time step."""
    return values[0] if len(values) == 1 else values[t]


def read_layer(layer: nn.Module, timesteps: int, *, fold: bool) -> Recurrence:
    """The recurrence of a layer.

    Raises:
        ValueError: it has another form; the message says which are possible.
    """
    if isinstance(layer, Recurrent | nn.RNNBase) and (layer.num_layers > 1 or layer.bidirectional):
        directions = 2 if layer.bidirectional else 1
        raise ValueError(
            f"{type(layer).__name__} has {layer.num_layers} layers and {directions} directions; "
            f"possible are {POSSIBLE}"
        )
    for kind, read in _READERS.items():
        if isinstance(layer, kind):
            return read(layer, timesteps, fold)
    raise ValueError(f"{type(layer).__name__} has no device program; possible are {POSSIBLE}")


def _ernn(layer: Any, timesteps: int, fold: bool) -> Recurrence:
    solver, cell = layer.fixed_point.solver, layer.cell
    if solver.has_tolerance or not isinstance(solver, InexactNewton):
        raise ValueError(
            f"{type(solver).__name__} solves to a tolerance, in a number of updates that depends "
            "on the input: train with --solver inexact-newton and --max-iter 1 or 2, whose time is "
            "fixed, and export that run"
        )
    several = solver.max_iter > 1 and cell.uses_previous_state
    if solver.max_iter < 1 or several or not cell.defines("as_leaky_step"):
        raise ValueError(
            f"{type(cell).__name__} with max_iter={solver.max_iter} has no device program; "
            f"possible are {POSSIBLE}"
        )
    eta = torch.atleast_2d(solver.steps_until(timesteps))
    recurrent, inputs, feedback, bias = _map(cell, fold)
    return Recurrence(
        recurrent=recurrent,
        input=inputs,
        feedback=feedback,
        bias=_rows(bias, cell.hidden_size),
        nonlinearity=cell.nonlinearity,
        leak=eta,
        gain=eta,
    )


def _map(cell: EquilibriumMap, fold: bool) -> tuple[Factors, Factors, Factors, Tensor | None]:
    """V, W, U and b of a cell; the Jordan cell's U may be multiplied into the others."""
    if fold or type(cell) is not JordanMap or cell.rank == 0:
        weights = cell.as_leaky_step()
        assert weights is not None  # where it has a fused path
        V, W, b = weights
        return (V,), (W,), (), b
    U = (cell.U,) if cell.rank is None else (cell.U1, cell.U2)
    return (cell.V,), (cell.W,), U, cell.b


def _fastrnn(layer: FastRNN, timesteps: int, fold: bool) -> Recurrence:
    cell: Any = layer.l0
    return Recurrence(
        recurrent=_factors(cell.V, fold),
        input=_factors(cell.W, fold),
        bias=_rows(cell.b, cell.hidden_size),
        nonlinearity=cell.nonlinearity,
        leak=1 - cell.beta.sigmoid().reshape(1, 1),
        gain=cell.alpha.sigmoid().reshape(1, 1),
    )


def _fastgrnn(layer: FastGRNN, timesteps: int, fold: bool) -> Recurrence:
    cell: Any = layer.l0
    bias = _rows(cell.b_z, cell.hidden_size), _rows(cell.b_h, cell.hidden_size)
    return Recurrence(
        recurrent=_factors(cell.V, fold),
        input=_factors(cell.W, fold),
        bias=torch.cat(bias),
        nonlinearity=cell.nonlinearity,
        mix=torch.stack([cell.zeta.sigmoid(), cell.nu.sigmoid()]),
    )


def _rnn(layer: Any, timesteps: int, fold: bool) -> Recurrence:
    n = layer.hidden_size
    bias = layer.bias_ih_l0 + layer.bias_hh_l0 if layer.bias else None
    one = layer.weight_hh_l0.new_ones(1, 1)
    return Recurrence(
        recurrent=(layer.weight_hh_l0,),
        input=(layer.weight_ih_l0,),
        bias=_rows(bias, n),
        nonlinearity=layer.nonlinearity,
        leak=one,
        gain=one,
    )


_READERS: dict[type[nn.Module], Callable[..., Recurrence]] = {
    ERNN: _ernn,
    FastRNN: _fastrnn,
    FastGRNN: _fastgrnn,
    nn.RNN: _rnn,
}


def _factors(weight: Any, fold: bool) -> Factors:
    """The factors of a matrix of low rank, or their product where that has fewer entries."""
    if weight.rank is None:
        return (weight.full,)
    factors = (weight.left, weight.right)
    rows, columns = len(weight.left), weight.right.shape[1]
    smaller = rows * columns <= sum(factor.numel() for factor in factors)
    return (weight(),) if fold and smaller else factors


def _rows(bias: Tensor | None, size: int) -> Tensor:
    return torch.zeros(1, size) if bias is None else bias.reshape(1, size)


def _apply(factors: Factors, value: Tensor, name: str, watch: Observer) -> Tensor:
    """The product of the factors with value (B, columns); the value between them is name + "2"."""
    if len(factors) == 2:
        value = watch(name + "2", value @ factors[1].mT)
    return value @ factors[0].mT
