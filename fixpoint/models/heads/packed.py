"""Operations on each time step of sequences, packed or not."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Sequences = Tensor | PackedSequence


def on_data(f: Callable[[Tensor], Tensor], x: Sequences) -> Sequences:
    """Return f of all time steps, packed again where x is."""
    return x._replace(data=f(x.data)) if isinstance(x, PackedSequence) else f(x)
