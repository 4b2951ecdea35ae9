"""The recurrences that run on a device, read from trained layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fixpoint import models
from fixpoint.export.equilibrium import Equilibrium
from fixpoint.export.recurrence import Factors, Recurrence
from fixpoint.models import ERNN, UGRNN, EquilibriumMap, FastGRNN, FastRNN, JordanMap, Recurrent
from fixpoint.solvers import Broyden, InexactNewton

POSSIBLE = (
    "ERNN with a fixed number of steps of InexactNewton (the Jordan map, or any map with "
    "max_iter=1), FastRNN, FastGRNN, UGRNN, RNN, GRU and LSTM, of any number of layers in one "
    "direction"
)


def read_layers(
    layer: nn.Module, timesteps: int, *, fold: bool, equilibria: bool = False
) -> tuple[Recurrence, ...]:
    """Return the recurrence of each layer of a module, the first one first.

    Args:
        fold: see `read_network`.
        equilibria: whether solves to a tolerance are possible too.

    Raises:
        ValueError: it has another form; the message says which are possible.
    """
    if getattr(layer, "bidirectional", False):
        raise ValueError(
            f"{type(layer).__name__} reads each window in both directions; supported are {POSSIBLE}"
        )
    read = next((read for kind, read in _READERS.items() if isinstance(layer, kind)), None)
    if read is None:
        raise ValueError(f"{type(layer).__name__} has no device program; supported are {POSSIBLE}")
    if equilibria and isinstance(layer, ERNN) and layer.fixed_point.solver.has_tolerance:
        read = _equilibrium
    source: Any = layer
    if isinstance(layer, Recurrent) and hasattr(layer, "l0"):
        cells = [getattr(layer, f"l{i}") for i in range(source.num_layers)]
        return tuple(read(cell, timesteps, fold) for cell in cells)
    return tuple(read(_Weights(source, i), timesteps, fold) for i in range(source.num_layers))


class _Weights:
    """One layer of a module with the weights of torch.nn.RNNBase.

    Attributes:
        W, V: weights of the input and of the state, a block of rows for each gate.
        b_input, b_state: their biases (blocks, n).
    """

    def __init__(self, layer: Any, index: int) -> None:
        n = self.hidden_size = layer.hidden_size
        self.nonlinearity = getattr(layer, "nonlinearity", "tanh")
        self.W, self.V = (getattr(layer, f"weight_{of}_l{index}") for of in ("ih", "hh"))
        names = [f"bias_{of}_l{index}" for of in ("ih", "hh")]
        zero = self.W.new_zeros(len(self.W))
        given = [getattr(layer, name) if layer.bias else zero for name in names]
        self.b_input, self.b_state = (bias.reshape(-1, n) for bias in given)


def _ernn(cell: Any, timesteps: int, fold: bool) -> Recurrence:
    solver, phi = cell.fixed_point.solver, cell.map
    if solver.has_tolerance or not isinstance(solver, InexactNewton):
        raise ValueError(
            f"{type(solver).__name__} solves to a tolerance, in a number of updates that depends "
            "on the input: export it --to onnx, or train with --solver inexact-newton and "
            "--max-iter 1 or 2, whose time is fixed, and export that run"
        )
    several = solver.max_iter > 1 and phi.uses_previous_state
    if solver.max_iter < 1 or several or not phi.defines("as_leaky_step"):
        raise ValueError(
            f"{type(phi).__name__} with max_iter={solver.max_iter} has no device program; "
            f"supported are {POSSIBLE}"
        )
    eta = torch.atleast_2d(solver.steps_until(timesteps))
    recurrent, inputs, feedback, bias = _map(phi, fold)
    return Recurrence(
        recurrent=recurrent,
        input=inputs,
        feedback=feedback,
        bias=_rows(bias, phi.hidden_size),
        nonlinearity=phi.nonlinearity,
        leak=eta,
        gain=eta,
    )


def _equilibrium(cell: Any, timesteps: int, fold: bool) -> Recurrence:
    solver = cell.fixed_point.solver
    if not solver.compiles or isinstance(solver, Broyden):
        raise ValueError(
            f"{type(solver).__name__} cannot be in a graph for any batch: train with --solver "
            "anderson, picard, damped-picard or squarem, and export that run"
        )
    return Equilibrium.of(cell.map, cell.fixed_point)


def _map(phi: EquilibriumMap, fold: bool) -> tuple[Factors, Factors, Factors, Tensor | None]:
    """Return V, W, U and b of a map; the Jordan map's U may be multiplied into the others."""
    if fold or type(phi) is not JordanMap or phi.rank == 0:
        weights = phi.as_leaky_step()
        assert weights is not None  # where it has a fused path
        V, W, b = weights
        return (V,), (W,), (), b
    U = (phi.U,) if phi.rank is None else (phi.U1, phi.U2)
    return (phi.V,), (phi.W,), U, phi.b


def _fastrnn(cell: Any, timesteps: int, fold: bool) -> Recurrence:
    return Recurrence(
        recurrent=_factors(cell.V, fold),
        input=_factors(cell.W, fold),
        bias=_rows(cell.b, cell.hidden_size),
        nonlinearity=cell.nonlinearity,
        leak=1 - cell.beta.sigmoid().reshape(1, 1),
        gain=cell.alpha.sigmoid().reshape(1, 1),
    )


def _fastgrnn(cell: Any, timesteps: int, fold: bool) -> Recurrence:
    bias = _rows(cell.b_z, cell.hidden_size), _rows(cell.b_h, cell.hidden_size)
    return Recurrence(
        kind="mixed",
        recurrent=_factors(cell.V, fold),
        input=_factors(cell.W, fold),
        bias=torch.cat(bias),
        nonlinearity=cell.nonlinearity,
        mix=torch.stack([cell.zeta.sigmoid(), cell.nu.sigmoid()]),
    )


def _ugrnn(cell: Any, timesteps: int, fold: bool) -> Recurrence:
    n = cell.hidden_size
    return Recurrence(
        kind="mixed",
        recurrent=(cell.V,),
        input=(cell.W,),
        bias=cell.V.new_zeros(2, n) if cell.b is None else cell.b.reshape(2, n),
        nonlinearity=cell.nonlinearity,
        mix=cell.V.new_tensor([1.0, 0.0]),
    )


def _rnn(weights: _Weights, timesteps: int, fold: bool) -> Recurrence:
    one = weights.V.new_ones(1, 1)
    return Recurrence(
        recurrent=(weights.V,),
        input=(weights.W,),
        bias=weights.b_input + weights.b_state,
        nonlinearity=weights.nonlinearity,
        leak=one,
        gain=one,
    )


def _gru(weights: _Weights, timesteps: int, fold: bool) -> Recurrence:
    gates = weights.b_input[:2] + weights.b_state[:2]
    return Recurrence(
        kind="gru",
        recurrent=(weights.V,),
        input=(weights.W,),
        bias=torch.cat([gates, weights.b_input[2:]]),
        recurrent_bias=weights.b_state[2:],
    )


def _lstm(weights: _Weights, timesteps: int, fold: bool) -> Recurrence:
    return Recurrence(
        kind="lstm",
        recurrent=(weights.V,),
        input=(weights.W,),
        bias=weights.b_input + weights.b_state,
    )


_READERS: dict[Any, Callable[..., Recurrence]] = {
    ERNN: _ernn,
    FastRNN: _fastrnn,
    FastGRNN: _fastgrnn,
    UGRNN: _ugrnn,
    (nn.RNN, models.RNN): _rnn,
    (nn.GRU, models.GRU): _gru,
    (nn.LSTM, models.LSTM): _lstm,
}


def _factors(weight: Any, fold: bool) -> Factors:
    """Return the factors of a matrix of low rank, or their product where that has fewer entries."""
    if weight.rank is None:
        return (weight.full,)
    factors = (weight.left, weight.right)
    rows, columns = len(weight.left), weight.right.shape[1]
    smaller = rows * columns <= sum(factor.numel() for factor in factors)
    return (weight(),) if fold and smaller else factors


def _rows(bias: Tensor | None, size: int) -> Tensor:
    return torch.zeros(1, size) if bias is None else bias.reshape(1, size)
