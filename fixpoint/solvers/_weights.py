"""Least-squares weights of Anderson mixing: from the Gram matrix where it is accurate, else from
the differences themselves.

Differences are ordered from the newest to the oldest. All sums are along rows and everything else
is elementwise, so that the weights of a sample do not depend on its batch-mates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fixpoint.solvers._numbers import Arithmetic, Number

SMALL = 2**13
"""Numbers of a batch up to which one product with many is faster than one with each."""


class Factors(NamedTuple):
    """R of dG = Q R, column by column: the unit upper triangle, the inverse squares of the
    diagonal, 0 where a difference is left out, and the scale of each difference.

    rows: R without its diagonal, and Q^T g last, (m - j, B) for j = 0..m-1. inverse: (B,) each.
    scale: (m, B).
    """

    rows: list[Tensor]
    inverse: list[Tensor]
    scale: Tensor


def eliminate(
    kind: Arithmetic,
    gram: Sequence[Sequence[Number]],
    right: Sequence[Number],
    noise: Number,
    ridge: float,
    least: float,
) -> tuple[list[Number], Number]:
    """Return the weights by the normal equations, and whether nearly all their digits hold.

    Gaussian elimination of the matrix scaled to a unit diagonal. Its pivots are the squared sines
    between each difference and the newer ones, and the weights lose as many digits as the sines
    are small.

    Args:
        kind: of the numbers.
        gram: row i has the products of difference i with itself and the older ones.
        right: products of the differences with g.
        noise: length below which a difference is rounding.
        ridge: added to the unit diagonal.
        least: sine for which the matrix serves.
    """
    m = len(right)
    scale: list[Number] = []
    inverse: list[Number] = []
    y: list[Number] = []
    U: list[list[Number]] = [[] for _ in range(m)]  # U[b][c - b - 1] for c > b
    R: list[list[Number]] = [[] for _ in range(m)]  # the same over the pivot
    sound: Number = True
    for c in range(m):
        square = gram[c][0]
        zero = square == 0
        scale.append((square > 0) / kind.sqrt(square + zero))  # a zero difference gets weight zero
        pivot = 1.0 + ridge + 0 * square
        y_c = right[c] * scale[c]
        for b in range(c):
            entry = gram[b][c - b] * scale[c] * scale[b]
            for j in range(b):
                entry = entry - R[j][b - j - 1] * U[j][c - j - 1]
            U[b].append(entry)
            R[b].append(entry * inverse[b])
            pivot = pivot - R[b][-1] * entry
            y_c = y_c - R[b][-1] * y[b]
        large = (pivot > least * least) & (pivot * square > noise * noise)
        sound = sound & (zero | large)
        inverse.append(1 / (pivot + (pivot == 0)))
        y.append(y_c)
    for c in range(m - 1, -1, -1):
        y[c] = y[c] * inverse[c]
        for b in range(m - 1, c, -1):
            y[c] = y[c] - R[c][b - c - 1] * y[b]
    return [weight * s for weight, s in zip(y, scale, strict=True)], sound


def eliminate_arrays(
    gram: Sequence[Sequence[np.ndarray]],
    right: Sequence[np.ndarray],
    noise: np.ndarray,
    ridge: float,
    least: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Return `eliminate` of arrays, (B,), by operations on whole rows, (m, B): the same bits of
    weights whose digits hold.
    """
    m = len(right)
    A = np.zeros((m, m + 1, *noise.shape))  # the upper triangle, and the right side behind it
    for b, row in enumerate(gram):
        A[b, b:m] = row
    A[:, m] = right
    diagonal = A.reshape(m * (m + 1), -1)[:: m + 2]
    square = diagonal.copy()
    zero = square == 0
    scale = (square > 0) / np.sqrt(square + zero)
    A[:, :m] *= scale
    A *= scale[:, None]
    np.add(1.0 + ridge, 0 * square, out=diagonal)
    R = np.empty_like(A)
    for b in range(m):
        rest = A[b, b + 1 :]
        over = np.multiply(rest, 1 / diagonal[b], out=R[b, b + 1 :])
        if b + 1 < m:
            A[b + 1 :, b + 1 :] -= over[:-1, None] * rest
    large = (diagonal > least * least) & (diagonal * square > noise * noise)
    y = R[:, m]
    for c in range(m - 1, 0, -1):
        y[:c] -= R[:c, c] * y[c]
    return y * scale, (zero | large).all(0)


def orthogonalize(
    dG: Sequence[Tensor], g: Tensor, noise: Tensor, ridge: float, count: Tensor
) -> tuple[Tensor, Factors]:
    """Return the weights, (m, B), by Gram-Schmidt on the scaled differences and g, and the factors.

    A difference whose part orthogonal to the newer ones is not longer than `noise` gets weight
    zero; so do all of a sample where one is not finite. Modified Gram-Schmidt solves least squares
    as stably as Householder's QR where the right side takes part (Bjorck 1967).

    Args:
        dG: differences, (B, D) each, in at least float32.
        g: (B, D).
        noise: length below which a difference is rounding, (B,).
        ridge: added to the squared lengths of the scaled differences.
        count: how many differences of each sample are used, (B,).
    """
    m = len(dG)
    tiny = torch.finfo(g.dtype).tiny
    A = torch.stack((*dG, g))
    square = (A * A).sum(2)[:m]
    used = torch.arange(m, device=g.device).unsqueeze(1) < count
    scale = (used & (square > 0)) / square.clamp_min(tiny).sqrt()  # (m, B)
    A = A * torch.cat((scale, torch.ones_like(scale[:1]))).unsqueeze(2)
    if ridge > 0:
        damping = ridge**0.5 * torch.eye(m + 1, m, dtype=g.dtype, device=g.device)
        A = torch.cat((A, damping.unsqueeze(1).expand(-1, g.shape[0], -1)), 2)
    threshold = (noise * scale).square().clamp_min(tiny)
    rows, inverse = [], []
    for j in range(m):
        q = A[0]
        products = (A * q).sum(2)
        alive = (products[0] > threshold[j]) & (scale[j] > 0)
        inverse.append(alive / products[0].clamp_min(tiny))
        rows.append(products[1:] * inverse[j])
        A = torch.addcmul(A[1:], rows[j].unsqueeze(2), q, value=-1)
    gamma = rows[m - 1] if m > 0 else g.new_zeros(0, g.shape[0])
    for j in range(m - 2, -1, -1):
        known = (rows[j][:-1] * gamma).T.contiguous().sum(1)
        gamma = torch.cat(((rows[j][-1] - known).unsqueeze(0), gamma))
    gamma = gamma * scale
    finite = (gamma.abs() < torch.inf).all(0)
    return torch.where(finite, gamma, torch.zeros_like(gamma)), Factors(rows, inverse, scale)


def with_gradient(
    gamma: Tensor, factors: Factors, dG: Sequence[Tensor], g: Tensor, ridge: float
) -> Tensor:
    """Return gamma, (m, B), with the first and second derivatives of the normal equations'
    solution.

    gamma and the factors are constants, dG and g have a graph. A step gamma + M (dG^T g - dG^T dG
    gamma), M the inverse of dG^T dG, changes no value and adds an order of derivatives.
    Along a difference that depends on the newer ones but for little more than rounding, rounding
    of the defect would be amplified by 1 / eps: its weight is constant.
    """
    M, damping, result = _inverse(factors), torch.zeros_like(gamma), gamma
    if ridge > 0:
        squares = torch.stack([torch.linalg.vecdot(x, x) for x in dG])
        damping = ridge * torch.where(factors.scale > 0, squares, 0.0)
    for _ in range(2):
        defect = inner_products(subtract_weighted(g, result.unsqueeze(2), dG), dG)
        result = result + (M * (defect - damping * result)).sum(1)
    return gamma + (result - result.detach())


def _inverse(factors: Factors) -> Tensor:
    """Return (R^T R)^-1 of the differences that are not nearly dependent, (m, m, B)."""
    rows, inverse, scale = factors
    m, eps = len(rows), torch.finfo(scale.dtype).eps
    free = [(x > 0) & (x < 1 / eps) for x in inverse]  # of unit columns: x = 1 / sine^2
    unit = torch.eye(m, dtype=scale.dtype, device=scale.device).unsqueeze(2)
    w: list[Tensor] = []  # R^-T, row by row
    for i in range(m):
        column = unit[i].expand(-1, scale.shape[1])
        for j in range(i):
            column = column - torch.where(free[j], rows[j][i - j - 1], 0.0) * w[j]
        w.append(column)
    u: list[Tensor] = [unit[0]] * m
    for j in range(m - 1, -1, -1):
        column = torch.where(free[j], inverse[j], 0.0) * w[j]
        for i in range(j + 1, m):
            column = column - torch.where(free[j], rows[j][i - j - 1], 0.0) * u[i]
        u[j] = column
    return torch.stack(u) * scale * scale.unsqueeze(1)


def inner_products(a: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return inner products of each sample of a with those of each other, (m, B)."""
    if len(others) == 1:
        return torch.linalg.vecdot(a, others[0]).unsqueeze(0)
    traced = torch.compiler.is_compiling()  # a graph must not depend on the size of its batch
    if not traced and a.numel() <= SMALL:
        return torch.linalg.vecdot(torch.stack(list(others)), a)
    return torch.stack([torch.linalg.vecdot(a, b) for b in others])


def subtract_weighted(
    a: Tensor, weights: Sequence[Tensor | float] | Tensor, parts: Sequence[Tensor]
) -> Tensor:
    """Return a minus the sum of the parts, (B, D) each, with a weight each, (B, 1) or a float."""
    for weight, part in zip(weights, parts, strict=True):
        if isinstance(weight, float):
            a = torch.sub(a, part, alpha=weight)
        else:
            a = torch.addcmul(a, weight, part, value=-1)
    return a
