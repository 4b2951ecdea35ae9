"""FastRNN: an RNN with a learned leak."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fixpoint.models.rnn.base_cell import Leaky, LeakyCell, LeakyOptions
from fixpoint.models.rnn.base_layer import Recurrent
from fixpoint.models.rnn.low_rank import Weight

if TYPE_CHECKING:
    from typing_extensions import Unpack


class FastRNNCell(LeakyCell):
    """h' = sigmoid(beta) h + sigmoid(alpha) sigma(W x + V h + b): a leaky RNN.

    Args:
        input_size, hidden_size, nonlinearity, implementation, recompute, time: see `LeakyCell`.
        bias: have b, 0 at the start; 1 in the authors' code.
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

    b: Tensor | None
    alpha: Tensor
    beta: Tensor

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
        self.W = Weight(hidden_size, input_size, rank, **self._where)
        self.V = Weight(hidden_size, hidden_size, rank, **self._where)
        self.new_bias("b", hidden_size, start=nn.init.zeros_, bias=bias)
        self.new_parameter("alpha", start=partial(nn.init.constant_, val=-3.0))
        self.new_parameter("beta", start=partial(nn.init.constant_, val=3.0))

    def recurrence(self, T: int, start: int = 0) -> Leaky:
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
