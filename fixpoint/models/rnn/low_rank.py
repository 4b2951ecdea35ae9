"""A weight matrix, full or of low rank."""

from __future__ import annotations

import torch
from torch import Tensor

from fixpoint._validation import at_least
from fixpoint.models._parameters import Resettable, small_normal_


class Weight(Resettable):
    """A matrix, (rows, columns), full or the product of two factors of rank r.

    It is full where rank is None or no less than a side, which would save nothing. Entries are
    drawn from N(0, 0.1^2), in each factor. Called, it gives the matrix.

    Attributes:
        full: (rows, columns), or left: (rows, r) and right: (r, columns).
    """

    full: Tensor
    left: Tensor
    right: Tensor

    def __init__(
        self,
        rows: int,
        columns: int,
        rank: int | None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(device=device, dtype=dtype)
        if rank is not None and at_least(1, rank=rank) >= min(rows, columns):
            rank = None
        self.rank = rank
        if rank is None:
            self.new_parameter("full", rows, columns, start=small_normal_)
        else:
            self.new_parameter("left", rows, rank, start=small_normal_)
            self.new_parameter("right", rank, columns, start=small_normal_)

    def forward(self) -> Tensor:
        return self.full if self.rank is None else self.left @ self.right

    def extra_repr(self) -> str:
        shape = self.full.shape if self.rank is None else (len(self.left), self.right.shape[1])
        return f"{shape[0]}, {shape[1]}" + ("" if self.rank is None else f", rank={self.rank}")
