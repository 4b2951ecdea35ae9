"""UGRNN: a gated RNN with one gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fixpoint.models._parameters import small_normal_
from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.models.rnn.base_cell import CellOptions, Gated, GatedCell
from fixpoint.models.rnn.base_layer import Recurrent

if TYPE_CHECKING:
    from typing_extensions import Unpack


class UGRNNCell(GatedCell):
    """h' = z h + (1 - z) c, z = sigmoid(W1 x + V1 h + b_z), c = tanh(W2 x + V2 h + b_h).

    Args:
        nonlinearity: that of c.
        bias: have b_z and b_h, 0 at the start; 1 in EdgeML's code.
        input_size, hidden_size, implementation, time: see `RecurrentCell`.

    Attributes:
        W, V, b: weights of z and c stacked, those of z first: (2 n, d), (2 n, n), (2 n,).

    Source: Collins, Sohl-Dickstein, Sussillo (2017), Capacity and trainability in recurrent
        neural networks.

    Example:
        >>> import torch
        >>> from fixpoint.models import UGRNNCell
        >>> UGRNNCell(3, 5)(torch.randn(2, 3)).shape
        torch.Size([2, 5])
    """

    W: Tensor
    V: Tensor
    b: Tensor | None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        **options: Unpack[CellOptions],
    ) -> None:
        super().__init__(input_size, hidden_size, **options)
        self.new_parameter("W", 2 * hidden_size, input_size, start=small_normal_)
        self.new_parameter("V", 2 * hidden_size, hidden_size, start=small_normal_)
        self.new_bias("b", 2 * hidden_size, start=nn.init.zeros_, bias=bias)

    def recurrence(self, T: int, start: int = 0) -> Gated:
        return Gated(self.V, self.W, self.b, self.W.new_ones(()), self.W.new_zeros(()))

    def single_step(self, x: Tensor, h: Tensor, t: int | None) -> Tensor:
        gate, candidate = torch.addmm(linear(x, self.W, self.b), h, self.V.mT).chunk(2, 1)
        return torch.lerp(ACTIVATIONS[self.nonlinearity](candidate), h, gate.sigmoid())


class UGRNN(Recurrent):
    """Layers of `UGRNNCell`, called like `torch.nn.RNN`.

    Arguments: see `Recurrent`, and `UGRNNCell` for those of the cell.

    Example:
        >>> import torch
        >>> from fixpoint.models import UGRNN
        >>> output, h_n = UGRNN(9, 64, batch_first=True)(torch.randn(4, 128, 9))
        >>> output.shape, h_n.shape
        (torch.Size([4, 128, 64]), torch.Size([1, 4, 64]))
    """

    cell_class = UGRNNCell
