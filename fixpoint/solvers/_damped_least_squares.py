"""I - J of a batch, and least squares with damping."""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes that the matrix of each sample is a multiple of, with rows of zeros below it."""


def residual_matrix(J: Tensor, dtype: torch.dtype) -> Tensor:
    """Return I - J in this dtype, (B, D, D); I, whose Newton step is plain, where J is not finite.

    A sample's numbers lie together, so that reductions take them in the same order in any batch.
    """
    J = J.contiguous()
    finite = J.detach().isfinite().flatten(1).all(1)[:, None, None]
    unit = torch.eye(J.shape[1], dtype=dtype, device=J.device)
    return unit - torch.where(finite, J, 0.0).to(dtype)


def solve_damped(A: Tensor, g: Tensor, damping: Tensor) -> Tensor:
    """Return s that minimizes |A s - g|^2 + damping^2 |s|^2, (B, D), by QR.

    Each sample by the same operations in any batch: a batched product of matrices would take
    another kernel for a batch of one, and a kernel of LAPACK may do for another alignment.

    Args:
        A: (B, D, D).
        g: (B, D).
        damping: (B, 1); 0 counts as 1.
    """
    D = A.shape[1]
    unit = torch.eye(D, dtype=A.dtype, device=A.device)
    damping = torch.where(damping > 0, damping, 1.0).unsqueeze(2)
    padding = A.new_zeros(len(A), -2 * D % (ALIGNMENT // A.itemsize), D)
    Q, R = torch.linalg.qr(torch.cat((A, damping * unit, padding), 1))
    right = (Q[:, :D] * g.unsqueeze(2)).sum(1)
    return torch.linalg.solve_triangular(R, right.unsqueeze(2), upper=True).squeeze(2)
