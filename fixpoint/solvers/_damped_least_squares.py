"""I - J of a batch, and least squares with damping."""

from __future__ import annotations

import torch
from torch import Tensor


def residual_matrix(J: Tensor, dtype: torch.dtype) -> Tensor:
    """I - J in this dtype, (B, D, D); I, whose Newton step is plain, where J is not finite."""
    finite = J.detach().isfinite().flatten(1).all(1)[:, None, None]
    unit = torch.eye(J.shape[1], dtype=dtype, device=J.device)
    return unit - torch.where(finite, J, 0.0).to(dtype)


def solve_damped(A: Tensor, g: Tensor, damping: Tensor) -> Tensor:
    """s that minimizes |A s - g|^2 + damping^2 |s|^2, (B, D), by QR.

    Args:
        A: (B, D, D).
        g: (B, D).
        damping: (B, 1); 0 counts as 1.
    """
    unit = torch.eye(A.shape[1], dtype=A.dtype, device=A.device)
    damping = torch.where(damping > 0, damping, 1.0).unsqueeze(2)
    Q, R = torch.linalg.qr(torch.cat((A, damping * unit), 1))
    right = Q[:, : A.shape[1]].mT @ g.unsqueeze(2)
    return torch.linalg.solve_triangular(R, right, upper=True).squeeze(2)
