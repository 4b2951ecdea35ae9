"""Arnoldi's method for a batch of matrices that are given by their products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
"""A v of each sample, (B, D) -> (B, D)."""


def hessenberg(product: Product, v: Tensor, memory: int) -> Tensor:
    """Compute H = V^T A V of each sample, (B, m, m), V an orthonormal basis of v, A v, A^2 v, ...

    A sample whose Krylov space is exhausted continues with zero vectors, which add zeros to the
    eigenvalues of its H.
    """
    H = v.new_zeros(len(v), memory, memory)
    basis = [v]
    tiny = 10 * torch.finfo(v.dtype).eps
    for j in range(memory):
        w = product(basis[j])
        length = w.norm(dim=1)
        V = torch.stack(basis, 1)  # (B, j + 1, D)
        for _ in range(2):
            h = torch.einsum("bjd,bd->bj", V, w)
            w = w - torch.einsum("bjd,bj->bd", V, h)
            H[:, : j + 1, j] += h
        if j + 1 < memory:
            rest = w.norm(dim=1)
            spent = rest <= tiny * length
            H[:, j + 1, j] = torch.where(spent, 0.0, rest)
            basis.append(torch.where(spent[:, None], 0.0, unit(w)))
    return H


def unit(v: Tensor) -> Tensor:
    """Divide each row by its norm; zero rows are unchanged."""
    size = v.norm(dim=1, keepdim=True)
    return v / torch.where(size == 0, 1.0, size)


def largest(matrices: Tensor) -> Tensor:
    """Return the largest |eigenvalue| of each matrix (B, n, n), float64; NaN where not finite."""
    good = matrices.isfinite().all(2).all(1)
    # LAPACK refuses a matrix that is not finite: it prints, or raises for the whole batch.
    values = torch.linalg.eigvals(torch.where(good[:, None, None], matrices, 0.0).double())
    return torch.where(good, values.abs().amax(1), torch.nan)
