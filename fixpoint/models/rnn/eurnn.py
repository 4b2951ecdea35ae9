"""EURNN: an RNN with an orthogonal transition made of plane rotations."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fixpoint._validation import at_least
from fixpoint.models._parameters import Resettable, Start
from fixpoint.models.rnn.base_cell import RecurrentCell
from fixpoint.models.rnn.base_layer import Recurrent

GUARD = 0.01
"""Added to |z| where modReLU divides by it."""


def mod_relu(z: Tensor, b: Tensor | None) -> Tensor:
    """Return relu(|z| + b) z / (|z| + 0.01)."""
    size = z.abs()
    return torch.relu(size if b is None else size + b) * z / (size + GUARD)


class EURNNCell(RecurrentCell):
    """h' = modReLU(W x + F h), F = F_1 ... F_L orthogonal, each F_l a layer of plane rotations.

    "tunable": layers turn the pairs (0, 1)(2, 3).. and (1, 2)(3, 4).. by turns. "fft": layer l
    turns pairs 2^l apart, for l = 0 .. log2(n) - 1, which reaches every unit from every other.

    Args:
        input_size, hidden_size, time, device, dtype: see `RecurrentCell`; "fft" needs a power of 2.
        style: "tunable" or "fft".
        capacity: L of the tunable style.
        bias: have b, in modReLU.

    Attributes:
        angles: one a pair, from U(-pi, pi), in radians. W: (n, d), from U(-0.01, 0.01). b: (n,).

    Source: Jing et al. (2017), Tunable efficient unitary neural networks (EUNN) and their
        application to RNNs, here with real numbers.

    Example:
        >>> import torch
        >>> from fixpoint.models import EURNNCell
        >>> EURNNCell(3, 6)(torch.randn(2, 3)).shape
        torch.Size([2, 6])
    """

    W: Tensor
    b: Tensor | None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        style: Literal["tunable", "fft"] = "tunable",
        capacity: int = 2,
        bias: bool = True,
        time: str = "sequential",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, implementation="reference", time=time, **where)
        self.style, self.capacity = style, at_least(1, capacity=capacity)
        counts = [len(first) for first, _ in _pairs(hidden_size, style, capacity)]
        self.angles = Angles(counts, **self._where)
        self.new_parameter("W", hidden_size, input_size, start=_uniform(0.01))
        self.new_bias("b", hidden_size, start=nn.init.zeros_, bias=bias)

    def transition(self) -> Tensor:
        """Return F, (n, n)."""
        where = self.W.device
        M = torch.eye(self.hidden_size, dtype=self.W.dtype, device=where)
        pairs = _pairs(self.hidden_size, self.style, self.capacity, where)
        for angle, (first, second) in zip(self.angles(), pairs, strict=True):
            # Columns first, second of M times the rotation: M F_l.
            c, s = angle.cos(), angle.sin()
            a, b = M[:, first], M[:, second]
            M = M.index_copy(1, first, a * c + b * s)
            M = M.index_copy(1, second, b * c - a * s)
        return M

    def states(self, x: Tensor, h0: Tensor, *, last_only: bool) -> Tensor:
        rotate = self.transition().t()
        h, states = h0, []
        for u in F.linear(x, self.W).unbind(0):
            h = mod_relu(torch.addmm(u, h, rotate), self.b)
            states.append(h)
        return h if last_only else torch.stack(states)


class Angles(Resettable):
    """The angles of each layer of rotations, named 0, 1, ...; called, it gives them all."""

    def __init__(self, counts: list[int], **where: Any) -> None:
        super().__init__(**where)
        for i, count in enumerate(counts):
            self.new_parameter(str(i), count, start=_uniform(math.pi))

    def forward(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._starts]

    def __getitem__(self, layer: int) -> Tensor:
        angle: Tensor = getattr(self, str(layer))
        return angle


def _uniform(size: float) -> Start:
    return partial(nn.init.uniform_, a=-size, b=size)


def _pairs(
    n: int, style: str, capacity: int, device: torch.device | str = "cpu"
) -> list[tuple[Tensor, Tensor]]:
    """Return the two units of each pair, layer by layer."""
    units = torch.arange(n, device=device)
    if style == "tunable":
        layers = []
        for layer in range(capacity):
            first = units[layer % 2 : n - 1 : 2]
            layers.append((first, first + 1))
        return layers
    if style == "fft":
        if n & (n - 1) or n < 2:
            raise ValueError(f'style="fft" needs a hidden_size that is a power of 2; got {n}')
        strides = [2**layer for layer in range(n.bit_length() - 1)]
        return [(units[units & k == 0], units[units & k == 0] + k) for k in strides]
    raise ValueError(f'style must be "tunable" or "fft"; got {style!r}')


class EURNN(Recurrent):
    """Layers of `EURNNCell`, called like `torch.nn.RNN`.

    Arguments: see `Recurrent`, and `EURNNCell` for those of the cell.

    Example:
        >>> import torch
        >>> from fixpoint.models import EURNN
        >>> output, h_n = EURNN(9, 64, batch_first=True)(torch.randn(4, 128, 9))
        >>> output.shape, h_n.shape
        (torch.Size([4, 128, 64]), torch.Size([1, 4, 64]))
    """

    cell_class = EURNNCell
