"""SpectralRNN: an RNN whose transition matrix has all singular values near 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fixpoint._torch import inside_dispatch_mode, inside_forward_mode, is_exporting
from fixpoint._validation import at_least, non_negative
from fixpoint.models._parameters import Memo, small_normal_
from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.models.rnn.base_cell import Leaky, LeakyCell, LeakyOptions
from fixpoint.models.rnn.base_layer import Recurrent
from fixpoint.solvers.base import at_least_float32

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SpectralRNNCell(LeakyCell):
    """h' = sigma(W x + M h + b), M = P diag(s) Q^T, P and Q products of n_r reflections each.

    s = 1 + 2 r (sigmoid(p) - 1/2), so every singular value of M lies in [1 - r, 1 + r].

    Args:
        input_size, hidden_size, nonlinearity, implementation, recompute, time: see `LeakyCell`.
        reflections: n_r, Householder reflections on either side; n / 4 (at least 1) if not given.
        radius: r.
        bias: have b.

    Attributes:
        P, Q: vectors of the reflections, (n, n_r); the i-th uses its entries from row i on, the
            one in row i being 1. p: (n,), 0 at the start.

    Source: Zhang, Lei, Dhillon (2018), Stabilizing gradients for deep neural networks via
        efficient SVD parameterization.

    Example:
        >>> import torch
        >>> from fixpoint.models import SpectralRNNCell
        >>> SpectralRNNCell(3, 5)(torch.randn(2, 3)).shape
        torch.Size([2, 5])
    """

    W: Tensor
    P: Tensor
    Q: Tensor
    p: Tensor
    b: Tensor | None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        reflections: int | None = None,
        radius: float = 0.01,
        bias: bool = True,
        **options: Unpack[LeakyOptions],
    ) -> None:
        super().__init__(input_size, hidden_size, **options)
        count = max(1, hidden_size // 4) if reflections is None else reflections
        if at_least(1, reflections=count) > hidden_size:
            raise ValueError(f"reflections must be at most hidden_size={hidden_size}; got {count}")
        self.radius, self._memo = non_negative(radius=radius), Memo()
        self.new_parameter("W", hidden_size, input_size, start=small_normal_)
        self.new_parameter("P", hidden_size, count, start=nn.init.normal_)
        self.new_parameter("Q", hidden_size, count, start=nn.init.normal_)
        self.new_parameter("p", hidden_size, start=nn.init.zeros_)
        self.new_bias("b", hidden_size, start=nn.init.zeros_, bias=bias)

    def transition(self) -> Tensor:
        """Return M, (n, n)."""
        s = 1 + 2 * self.radius * (torch.sigmoid(self.p) - 0.5)
        return _orthogonal(self.P) * s @ _orthogonal(self.Q).mT

    def single_step(self, x: Tensor, h: Tensor, t: int | None) -> Tensor:
        plain = x.is_cpu and not torch.is_grad_enabled() and not inside_dispatch_mode()
        if not plain or torch.compiler.is_compiling() or inside_forward_mode() or is_exporting():
            return super().single_step(x, h, t)
        M = self._memo.get((self.p, self.P, self.Q), self.transition)
        act = ACTIVATIONS[self.nonlinearity]
        return act(torch.addmm(linear(x, self.W, self.b), h, M.mT))

    def recurrence(self, T: int, start: int = 0) -> Leaky:
        zero, one = self.W.new_zeros(()), self.W.new_ones(())
        return Leaky(self.transition(), self.W, self.b, zero, one)


def _orthogonal(vectors: Tensor) -> Tensor:
    """Return the product of the reflections I - tau v v^T, (n, n), for vectors (n, n_r)."""
    n, count = vectors.shape
    below = vectors.tril(-1)
    tau = 2 / (1 + below.square().sum(0))
    if is_exporting():
        return _in_plain_operations(below, tau)
    # A reflection with tau = 0 is the identity: pad to get all n columns.
    rest = n - count
    # LAPACK has no types of 16 bits.
    below, tau = at_least_float32(below), at_least_float32(tau)
    product = torch.linalg.householder_product(
        torch.cat([below, below.new_zeros(n, rest)], 1), torch.cat([tau, tau.new_zeros(rest)])
    )
    return product.to(vectors.dtype)


def _in_plain_operations(below: Tensor, tau: Tensor) -> Tensor:
    """Return the same one reflection after the other: ONNX has no householder_product."""
    n, count = below.shape
    one = torch.eye(n, dtype=below.dtype, device=below.device)
    product, vectors = one, below + one[:, :count]
    for i in range(count):
        v = vectors[:, i : i + 1]
        product = product - tau[i] * (product @ v) @ v.mT
    return product


class SpectralRNN(Recurrent):
    """Layers of `SpectralRNNCell`, called like `torch.nn.RNN`.

    Arguments: see `Recurrent`, and `SpectralRNNCell` for those of the cell.

    Example:
        >>> import torch
        >>> from fixpoint.models import SpectralRNN
        >>> output, h_n = SpectralRNN(9, 64, batch_first=True)(torch.randn(4, 128, 9))
        >>> output.shape, h_n.shape
        (torch.Size([4, 128, 64]), torch.Size([1, 4, 64]))
    """

    cell_class = SpectralRNNCell
