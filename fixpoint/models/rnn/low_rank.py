"""A weight matrix, full or of low rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fixpoint._validation import at_least


class Weight(nn.Module):
    """A matrix, (rows, columns), full or the product of two factors of rank r.

    It is full where rank is None or no less than a side, which would save nothing. Entries are
    drawn from N(0, 0.1^2), in each factor. Called, it gives the matrix.

    Attributes:
        full: (rows, columns), or left: (rows, r) and right: (r, columns).
    """

    def __init__(self, rows: int, columns: int, rank: int | None) -> None:
        super().__init__()
        if rank is not None and at_least(1, rank=rank) >= min(rows, columns):
            rank = None
        self.rank = rank
        if rank is None:
            self.full = nn.Parameter(0.1 * torch.randn(rows, columns))
        else:
            self.left = nn.Parameter(0.1 * torch.randn(rows, rank))
            self.right = nn.Parameter(0.1 * torch.randn(rank, columns))

    def forward(self) -> Tensor:
        return self.full if self.rank is None else self.left @ self.right

    def extra_repr(self) -> str:
        shape = self.full.shape if self.rank is None else (len(self.left), self.right.shape[1])
        return f"{shape[0]}, {shape[1]}" + ("" if self.rank is None else f", rank={self.rank}")
