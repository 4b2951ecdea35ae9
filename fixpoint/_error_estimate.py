"""The error of a state by a few Krylov directions: (I - J) e = phi(z) - z."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def krylov_error(
    phi: Callable[[Tensor], Tensor], z: Tensor, products: int
) -> tuple[Tensor, Tensor]:
    """Return |z* - z| to first order and the largest modulus of an eigenvalue of J, (B,) each.

    Both from the Krylov space of J and phi(z) - z: GMRES for the error, Ritz values for the rate.
    J v is a difference quotient. The error is inf where the whole space is found and phi does not
    contract on it.

    Args:
        phi: map of (B, D) states.
        z: (B, D).
        products: J times a vector, each one evaluation of phi.

    Source: Saad and Schultz (1986), GMRES: a generalized minimal residual algorithm.
    """
    fz = phi(z)
    size = torch.linalg.vector_norm(z, dim=1, keepdim=True)
    noise = torch.finfo(z.dtype).eps ** 0.5
    h = noise * torch.where(size > 0, size, 1.0)
    residual = torch.linalg.vector_norm(fz - z, dim=1)
    start = torch.where(residual[:, None] > 0, fz - z, 1.0)  # for the rate of an exact solution
    V = [start / torch.linalg.vector_norm(start, dim=1, keepdim=True)]
    m = min(max(products, 1), z.shape[1])
    H = z.new_zeros(len(z), m + 1, m)
    for j in range(m):
        w = (phi(z + h * V[j]) - fz) / h
        length = torch.linalg.vector_norm(w, dim=1)
        for _ in range(2):
            for i, v in enumerate(V):
                part = (v * w).sum(1)
                w = w - part[:, None] * v
                H[:, i, j] += part
        rest = torch.linalg.vector_norm(w, dim=1)
        # What remains of the noise of the quotient is not a direction.
        rest = torch.where(rest > 10 * noise * length.clamp_min(1.0), rest, 0.0)
        H[:, j + 1, j] = rest
        V.append(torch.where(rest[:, None] > 0, w / rest[:, None], 0.0))
    square = H[:, :m]
    used = torch.cat((torch.ones_like(residual)[:, None], H.diagonal(-1, 1, 2)[:, : m - 1]), 1) > 0
    used = used.cumprod(1)
    square = square * used[:, None, :] * used[:, :, None]
    rate = torch.linalg.eigvals(square).abs().amax(1)
    A = torch.eye(m + 1, m, dtype=z.dtype, device=z.device) - H * used[:, None, :]
    target = torch.zeros_like(A[:, :, :1])
    target[:, 0, 0] = residual
    error = torch.linalg.vector_norm(torch.linalg.pinv(A) @ target, dim=(1, 2))
    complete = (H.diagonal(-1, 1, 2)[:, -1] == 0) | (used[:, -1] == 0)
    return torch.where(complete & (rate >= 1), torch.inf, error), rate
