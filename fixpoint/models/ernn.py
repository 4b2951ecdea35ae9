"""The equilibrated recurrent neural network as a layer like torch.nn.RNN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fixpoint.backward import Backward, Unrolled
from fixpoint.fixed_point import FixedPoint
from fixpoint.models.cells import CELLS, Cell
from fixpoint.models.scan import Trajectory, check_pair, scan
from fixpoint.names import unknown_name
from fixpoint.solvers import InexactNewton, IterativeSolver, make_solver


class ERNN(nn.Module):
    r"""Equilibrated recurrent layer, called like `torch.nn.RNN`.

    Each hidden state is an (approximate) solution of h = phi(h, h_{t-1}, x_t), started at
    h^(0) = h_{t-1}. By default the paper's benchmark model: the Jordan cell with K = `max_iter`
    steps of `InexactNewton`,

        h^(k) = h^(k-1) + eta_t^(k) [sigma((I + U)(V h^(k-1) + W x_t + b)) - h^(k-1)].

    With so few small steps the state is far from equilibrium; see `JordanCell`.

    Args:
        input_size: features d of x_t.
        hidden_size: units n of h_t.
        nonlinearity: sigma: relu, tanh, sigmoid or identity. None takes the cell's own: relu for
            "jordan", tanh for the self-feedback cells.
        bias: have b.
        batch_first: x and output are (B, T, ...) instead of (T, B, ...).
        cell: "jordan", "self-feedback", "identity-feedback", "linear", or a `Cell`, which then
            brings its own nonlinearity, bias and rank.
        max_iter: K, where no solver is given.
        timesteps: T for an eta of its own at each time step, as in the paper; None shares eta
            over time. Longer sequences are refused.
        rank: rank of U, Jordan cell only; None for a full U.
        solver: a solver or its name; `InexactNewton(max_iter, timesteps=timesteps)` if not given.
        backward: `Unrolled()` if not given.

    Inputs: x, hx
        x: (T, B, d), (B, T, d) with `batch_first`, or (T, d) unbatched.
        hx: h_0, (1, B, n) or (1, n) unbatched; zeros if not given. Not modified.

    Outputs: output, h_n
        output: h_1 .. h_T, (T, B, n), (B, T, n) or (T, n).
        h_n: h_T, (1, B, n) or (1, n).

    Raises:
        ValueError: a value is unknown or a pair refused, when built; a wrong shape, or a sequence
            longer than `timesteps`, when called.

    Source: Zhang, Kag, Sullivan, Saligrama (2019), Equilibrated Recurrent Neural Network.

    Example:
        >>> import torch
        >>> from fixpoint.models import ERNN
        >>> layer = ERNN(9, 80, rank=8, timesteps=128, batch_first=True)
        >>> output, h_n = layer(torch.randn(4, 128, 9))
        >>> output.shape, h_n.shape
        (torch.Size([4, 128, 80]), torch.Size([1, 4, 80]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        nonlinearity: str | None = None,
        bias: bool = True,
        batch_first: bool = False,
        cell: str | Cell = "jordan",
        max_iter: int = 1,
        timesteps: int | None = None,
        rank: int | None = None,
        solver: str | IterativeSolver | None = None,
        backward: Backward | None = None,
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.batch_first = batch_first
        if isinstance(cell, Cell):
            self.cell = _own_cell(cell, input_size, hidden_size, nonlinearity, rank)
        else:
            self.cell = _make_cell(cell, input_size, hidden_size, nonlinearity, bias, rank)
        if solver is None:
            solver = InexactNewton(max_iter, timesteps=timesteps)
        elif max_iter != 1 or timesteps is not None:
            raise ValueError(
                "max_iter and timesteps configure the default solver, but a solver was given: set "
                "them on the solver"
            )
        self.fixed_point = FixedPoint(make_solver(solver), backward or Unrolled())
        check_pair(self.cell, self.fixed_point)

    def forward(self, x: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        trajectory = self.trajectory(x, hx)
        return trajectory.output, trajectory.h_n

    def trajectory(self, x: Tensor, hx: Tensor | None = None) -> Trajectory:
        """The outputs in the layout of `forward` together with how each step was solved."""
        self._check(x, hx)
        unbatched = x.dim() == 2
        time_first = x.unsqueeze(1) if unbatched else x.transpose(0, 1) if self.batch_first else x
        h0 = None if hx is None else hx if unbatched else hx[0]
        path = scan(self.cell, self.fixed_point, time_first, h0)
        output = path.output
        if unbatched:
            output = output.squeeze(1)
        elif self.batch_first:
            output = output.transpose(0, 1)
        h_n = path.h_n if unbatched else path.h_n.unsqueeze(0)
        return path._replace(output=output, h_n=h_n)

    def _check(self, x: Tensor, hx: Tensor | None) -> None:
        layout = "(B, T, d)" if self.batch_first else "(T, B, d)"
        if x.dim() not in (2, 3):
            raise ValueError(f"x must be {layout}, or (T, d) unbatched; got {tuple(x.shape)}")
        if x.shape[-1] != self.input_size:
            raise ValueError(
                f"x must have input_size={self.input_size} features last; got {tuple(x.shape)}: "
                f"transpose x to {layout}, or build the layer with input_size={x.shape[-1]}"
            )
        time = 1 if self.batch_first and x.dim() == 3 else 0
        if x.shape[time] == 0:
            raise ValueError(f"x must have at least one time step; got {tuple(x.shape)}")
        weight = self.cell.W
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"x must have the dtype of the layer, {weight.dtype}; got {x.dtype}: convert x by "
                "x.to(...), or the layer by layer.to(...)"
            )
        if hx is not None:
            batch = () if x.dim() == 2 else (x.shape[1 - time],)
            expected = (1, *batch, self.hidden_size)
            if tuple(hx.shape) != expected:
                raise ValueError(f"hx must be {expected}; got {tuple(hx.shape)}")
            if hx.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
                raise TypeError(
                    f"hx must have the dtype of x, {x.dtype}; got {hx.dtype}: convert it"
                )

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}" + (
            ", batch_first=True" if self.batch_first else ""
        )


def _make_cell(
    name: str,
    input_size: int,
    hidden_size: int,
    nonlinearity: str | None,
    bias: bool,
    rank: int | None,
) -> Cell:
    if name not in CELLS:
        raise ValueError(unknown_name("cell", name, CELLS))
    options: dict[str, Any] = {"bias": bias}
    if nonlinearity is not None:
        options["nonlinearity"] = nonlinearity
    if rank is not None:
        options["rank"] = rank
    for option, owners in (("rank", ("jordan",)), ("nonlinearity", tuple(set(CELLS) - {"linear"}))):
        if option in options and name not in owners:
            raise ValueError(f"the {name} cell has no {option}; leave it out")
    return CELLS[name](input_size, hidden_size, **options)


def _own_cell(
    cell: Cell, input_size: int, hidden_size: int, nonlinearity: str | None, rank: int | None
) -> Cell:
    if (cell.input_size, cell.hidden_size) != (input_size, hidden_size):
        raise ValueError(
            f"the cell has sizes {cell.input_size} and {cell.hidden_size}, the layer {input_size} "
            f"and {hidden_size}: build both alike"
        )
    if nonlinearity is not None or rank is not None:
        raise ValueError("nonlinearity and rank configure a named cell: set them on the given cell")
    return cell
