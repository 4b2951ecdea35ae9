"""FastRNN: an RNN with a learned leak."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from fixpoint.models.rnn.base_cell import Leaky, LeakyCell, LeakyOptions
from fixpoint.models.rnn.base_layer import Recurrent
from fixpoint.models.rnn.low_rank import Weight

if TYPE_CHECKING:
    from typing_extensions import Unpack


class FastRNNCell(LeakyCell):
    """h' = sigmoid(beta) h + sigmoid(alpha) sigma(W x + V h + b): a leaky RNN.

    Args:
        input_size, hidden_size, nonlinearity, implementation, recompute, time: see `LeakyCell`.
        bias: have b.
        rank: rank of W and V, each full where None or no less than a side.

    Attributes:
        alpha, beta: raw scalars, -3 and 3 at the start.

    Source: Kusupati et al. (2018), FastGRNN: a fast, accurate, stable and tiny kilobyte sized
        gated recurrent neural network, Eq. 2.

    Example:
        >>> import torch
        >>> from fixpoint.models import FastRNNCell
        >>> FastRNNCell(3, 5)(torch.randn(2, 3)).shape
        torch.Size([2, 5])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        rank: int | None = None,
        **options: Unpack[LeakyOptions],
    ) -> None:
        super().__init__(input_size, hidden_size, **options)
        self.W = Weight(hidden_size, input_size, rank)
        self.V = Weight(hidden_size, hidden_size, rank)
        self.b = nn.Parameter(torch.zeros(hidden_size)) if bias else None
        self.alpha = nn.Parameter(torch.tensor(-3.0))
        self.beta = nn.Parameter(torch.tensor(3.0))

    def recurrence(self, T: int) -> Leaky:
        return Leaky(self.V(), self.W(), self.b, self.beta.sigmoid(), self.alpha.sigmoid())


class FastRNN(Recurrent):
    """Layers of `FastRNNCell`, called like `torch.nn.RNN`.

    Arguments: see `Recurrent`, and `FastRNNCell` for those of the cell.

    Example:
        >>> import torch
        >>> from fixpoint.models import FastRNN
        >>> output, h_n = FastRNN(9, 64, batch_first=True)(torch.randn(4, 128, 9))
        >>> output.shape, h_n.shape
        (torch.Size([4, 128, 64]), torch.Size([1, 4, 64]))
    """

    cell_class = FastRNNCell
