"""FastGRNN: a gated RNN with the weights of an RNN."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.models.rnn.base_cell import CellOptions, Gated, GatedCell
from fixpoint.models.rnn.base_layer import Recurrent
from fixpoint.models.rnn.low_rank import Weight

if TYPE_CHECKING:
    from typing_extensions import Unpack


class FastGRNNCell(GatedCell):
    """h' = z h + (sigmoid(zeta) (1 - z) + sigmoid(nu)) c, with one W and V for z and c.

    z = sigmoid(W x + V h + b_z), c = tanh(W x + V h + b_h). This is the plain cell, called
    FastGRNN-LSQ in the papers: minus low rank, sparsity and quantisation.

    Args:
        nonlinearity: that of c.
        bias: have b_z and b_h, 1 at the start as in the authors' code.
        rank: rank of W and V, each full where None or no less than a side.
        input_size, hidden_size, implementation, time: see `RecurrentCell`.

    Attributes:
        zeta, nu: raw scalars, 1 and -4 at the start.

    Source: Kusupati et al. (2018), FastGRNN: a fast, accurate, stable and tiny kilobyte sized
        gated recurrent neural network, Eq. 4.

    Example:
        >>> import torch
        >>> from fixpoint.models import FastGRNNCell
        >>> FastGRNNCell(3, 5)(torch.randn(2, 3)).shape
        torch.Size([2, 5])
    """

    b_z: Tensor | None
    b_h: Tensor | None
    zeta: Tensor
    nu: Tensor

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        rank: int | None = None,
        **options: Unpack[CellOptions],
    ) -> None:
        super().__init__(input_size, hidden_size, **options)
        self.W = Weight(hidden_size, input_size, rank, **self._where)
        self.V = Weight(hidden_size, hidden_size, rank, **self._where)
        self.new_bias("b_z", hidden_size, start=nn.init.ones_, bias=bias)
        self.new_bias("b_h", hidden_size, start=nn.init.ones_, bias=bias)
        self.new_parameter("zeta", start=nn.init.ones_)
        self.new_parameter("nu", start=partial(nn.init.constant_, val=-4.0))

    def recurrence(self, T: int, start: int = 0) -> Gated:
        bias = None if self.b_z is None or self.b_h is None else torch.cat([self.b_z, self.b_h])
        return Gated(self.V(), self.W(), bias, self.zeta.sigmoid(), self.nu.sigmoid())

    def single_step(self, x: Tensor, h: Tensor, t: int | None) -> Tensor:
        gate = candidate = torch.addmm(linear(x, self.W()), h, self.V().mT)
        b_z, b_h = self.b_z, self.b_h
        if b_z is not None and b_h is not None:
            gate, candidate = gate + b_z, candidate + b_h
        z, c = gate.sigmoid(), ACTIVATIONS[self.nonlinearity](candidate)
        p, q = self.zeta.sigmoid(), self.nu.sigmoid()
        return torch.addcmul(z * h, torch.addcmul(p + q, p, z, value=-1), c)


class FastGRNN(Recurrent):
    """Layers of `FastGRNNCell`, called like `torch.nn.RNN`.

    Arguments: see `Recurrent`, and `FastGRNNCell` for those of the cell.

    Example:
        >>> import torch
        >>> from fixpoint.models import FastGRNN
        >>> output, h_n = FastGRNN(9, 64, batch_first=True)(torch.randn(4, 128, 9))
        >>> output.shape, h_n.shape
        (torch.Size([4, 128, 64]), torch.Size([1, 4, 64]))
    """

    cell_class = FastGRNNCell
