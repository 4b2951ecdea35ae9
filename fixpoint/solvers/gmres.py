"""GMRES for a batch of linear systems, each sample with its own status."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor


class LinearResult(IntEnum):
    """How the linear solve of one sample ended."""

    CONVERGED = 0
    MAX_ITER = 1
    STAGNATED = 2  # the residual stayed within 1 % of its start over the whole memory
    BREAKDOWN = 3  # the Krylov space is exhausted, and the system singular on it
    NONFINITE = 4


class LinearSolution(NamedTuple):
    """x, (B, D), its relative residual |b - A x| / |b|, products made, and `LinearResult`."""

    x: Tensor
    residual: Tensor  # (B,)
    products: int
    result: Tensor  # (B,) int8


def gmres(
    matvec: Callable[[Tensor], Tensor], b: Tensor, *, rtol: Tensor, memory: int
) -> LinearSolution:
    """Solve A x = b for each sample from x = 0, over one Krylov space of at most `memory`.

    The basis is orthogonalised twice by classical Gram-Schmidt. It stops early once every sample
    is below its tolerance (one synchronisation a product).

    Args:
        matvec: A v of each sample, (B, D) -> (B, D).
        b: right-hand sides, (B, D).
        rtol: relative tolerance of each sample, (B,).
        memory: most products.

    Source: Saad and Schultz (1986), GMRES: a generalized minimal residual algorithm.
    """
    B, D = b.shape
    memory = min(memory, max(D, 1))
    size = b.norm(dim=1)
    scale = torch.where(size > 0, size, 1.0)
    basis = [b / scale[:, None]]
    H = b.new_zeros(B, memory + 1, memory)
    y, residual = b.new_zeros(B, memory), torch.ones_like(size)
    spent = torch.zeros_like(size, dtype=torch.bool)
    done = size == 0
    tiny = 10 * torch.finfo(b.dtype).eps
    for j in range(memory):
        w = matvec(basis[j])
        V = torch.stack(basis, 1)
        length = w.norm(dim=1)
        for _ in range(2):
            h = torch.einsum("bjd,bd->bj", V, w)
            w = w - torch.einsum("bjd,bj->bd", V, h)
            H[:, : j + 1, j] += h
        rest = w.norm(dim=1)
        spent = spent | (~done & (rest <= tiny * length))
        H[:, j + 1, j] = torch.where(spent, 0.0, rest)
        inverse = torch.where(spent | (rest == 0), 0.0, 1 / rest)
        basis.append(inverse[:, None] * w)
        fitted, error = _least_squares(H[:, : j + 2, : j + 1])
        # A sample that is done keeps its answer, whatever its batch-mates still need.
        y[:, : j + 1] = torch.where(done[:, None], y[:, : j + 1], fitted)
        residual = torch.where(done, residual, error)
        done = done | spent | ~error.isfinite() | (error <= rtol)
        if bool(done.all()):
            break
    x = torch.einsum("bjd,bj->bd", torch.stack(basis[:-1], 1), y[:, : j + 1]) * scale[:, None]
    residual = torch.where(size == 0, 0.0, residual)
    result = torch.full_like(size, LinearResult.MAX_ITER)
    result = torch.where(residual > 0.99, LinearResult.STAGNATED, result)
    result = torch.where(spent, LinearResult.BREAKDOWN, result)
    result = torch.where(residual <= rtol, LinearResult.CONVERGED, result)
    result = torch.where(x.isfinite().all(1) & residual.isfinite(), result, LinearResult.NONFINITE)
    return LinearSolution(x, residual, j + 1, result.to(torch.int8))


def _least_squares(H: Tensor) -> tuple[Tensor, Tensor]:
    """min |e_1 - H y| of each sample, H (B, j + 2, j + 1): y and the minimum, (B,)."""
    Q, R = torch.linalg.qr(H, mode="complete")
    right = Q[:, 0, :]  # Q^T e_1
    diagonal = R.diagonal(dim1=1, dim2=2)
    largest = diagonal.abs().amax(1, keepdim=True)
    eps = torch.finfo(H.dtype).eps
    # A zero pivot is a direction along which A does nothing: leave it out.
    dead = diagonal.abs() <= eps * largest
    square = R[:, :-1] + torch.diag_embed(torch.where(dead, 1.0, 0.0).to(R.dtype))
    target = torch.where(dead, 0.0, right[:, :-1])
    y = torch.linalg.solve_triangular(square, target.unsqueeze(2), upper=True).squeeze(2)
    y = torch.where(dead, 0.0, y)
    error = -torch.einsum("bij,bj->bi", H, y)
    error[:, 0] += 1
    return y, error.norm(dim=1)
