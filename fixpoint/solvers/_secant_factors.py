"""The inverse Jacobian of Broyden's method as a product of factors I + u s^T."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fixpoint.solvers._numbers import TENSORS, Arithmetic, Number
from fixpoint.solvers._weights import inner_products

LEAST_PIVOT = 0.1
"""Least |s . q| / |s|^2 of an update, which keeps the approximate Jacobian regular."""
MOST_PENDING = 16
"""Factors that are applied one by one on a CPU, before they are joined: a pair of a batch fits into
its cache. A GPU would start three kernels for each."""


class Factors(NamedTuple):
    """P = (I + u_m s_m^T) ... (I + u_1 s_1^T): the first factors as I + U^T T S, with T lower
    triangular, and the last ones as pairs.

    U, S: (B, M, D); T: (B, M, M). Rows from the number of factors on are 0. pending: u, s, (B, D)
    each.
    """

    U: Tensor
    S: Tensor
    T: Tensor
    pending: tuple[tuple[Tensor, Tensor], ...] = ()

    @classmethod
    def none(cls, like: Tensor, rows: int = 0) -> Factors:
        """Return no factors, of states like (B, D), with rows for this many."""
        U = like.new_zeros(like.shape[0], rows, like.shape[1])
        return cls(U, torch.zeros_like(U), like.new_zeros(like.shape[0], rows, rows))

    def apply(self, p: Tensor) -> Tensor:
        """Return P p, (B, D)."""
        if self.U.shape[1] > 0:
            c = (self.T * (self.S * p.unsqueeze(1)).sum(2).unsqueeze(1)).sum(2)
            p = p + (self.U * c.unsqueeze(2)).sum(1)
        for u, s in self.pending:
            p = torch.addcmul(p, u, torch.linalg.vecdot(s, p).unsqueeze(1))
        return p

    def apply_transpose(self, p: Tensor) -> Tensor:
        """Return P^T p, (B, D)."""
        for u, s in reversed(self.pending):
            p = torch.addcmul(p, s, torch.linalg.vecdot(u, p).unsqueeze(1))
        if self.U.shape[1] > 0:
            c = (self.T * (self.U * p.unsqueeze(1)).sum(2).unsqueeze(2)).sum(1)
            p = p + (self.S * c.unsqueeze(2)).sum(1)
        return p

    def append(self, u: Tensor, s: Tensor) -> Factors:
        """Add the factor I + u s^T on the left."""
        more = self._replace(pending=(*self.pending, (u, s)))
        waits = u.device.type == "cpu" and not torch.compiler.is_compiling()
        return more if waits and len(more.pending) <= MOST_PENDING else more.joined()

    def put(self, place: Tensor, u: Tensor, s: Tensor) -> Factors:
        """Put the factor I + u s^T on the left, in a row that is 0; place: (B,)."""
        here = torch.arange(self.U.shape[1], device=u.device) == place.unsqueeze(1)
        row = torch.where(here, 1.0, _coefficients(self.U, self.T, s))
        rows = here.unsqueeze(2)
        return Factors(
            torch.where(rows, u.unsqueeze(1), self.U),
            torch.where(rows, s.unsqueeze(1), self.S),
            torch.where(rows, row.unsqueeze(1), self.T),
        )

    def joined(self) -> Factors:
        """Return the same product without pending factors."""
        if not self.pending:
            return self
        U, S = (
            torch.cat((rows, torch.stack(new, 1)), 1)
            for rows, new in zip(self[:2], zip(*self.pending, strict=True), strict=True)
        )
        T = self.T
        for _, s in self.pending:
            row = _coefficients(U[:, : T.shape[1]], T, s)
            last = torch.cat((row, s.new_ones(len(s), 1)), 1).unsqueeze(1)
            T = torch.cat((torch.cat((T, torch.zeros_like(row).unsqueeze(2)), 2), last), 1)
        return Factors(U, S, T)

    def last_half(self) -> Factors:
        """Return the factors that the last half of the secant pairs gives from -I."""
        whole = self.joined()
        M, h = whole.U.shape[1], whole.U.shape[1] // 2
        if h == 0:
            return Factors.none(whole.S[:, 0])
        u, s = whole.U[:, M - h :], whole.S[:, M - h :]
        ratio = (s * s).sum(2, keepdim=True) / (1 + (s * u).sum(2, keepdim=True))
        q = s - ratio * u  # from u = (s - q) / (s . q)
        y = whole._apply_inverses(q)  # up to the sign
        kept = Factors.none(s[:, 0])
        for j in range(h):
            step, change = s[:, j], kept.apply(y[:, j])
            numbers = inner_products(step, (step, change)).to(torch.float64).unbind()
            (weight,) = pair_weight(TENSORS, numbers, ())
            kept = kept.append(weight.unsqueeze(1).to(step.dtype) * (step - change), step)
        return kept

    def _apply_inverses(self, q: Tensor) -> Tensor:
        """Apply for each of the last h factors those before it, inverted, to q_j, (B, h, D).

        The inverse of I + U^T T S is I - U^T R^-1 S, R the upper triangle of I + S U^T.
        """
        U, S = self.U, self.S
        M, h = U.shape[1], q.shape[1]
        K = torch.stack([(S * U[:, i : i + 1]).sum(2) for i in range(M)], 2)
        right = torch.stack([(S * q[:, j : j + 1]).sum(2) for j in range(h)], 2)
        index = torch.arange(M, device=q.device)
        right = right * (index.unsqueeze(1) < index[M - h :]).to(q.dtype)
        c = right.new_zeros(len(q), 0, h)
        for i in range(M - 1, -1, -1):
            rest = right[:, i] - (K[:, i, i + 1 :].unsqueeze(2) * c).sum(1)
            c = torch.cat(((rest / (1 + K[:, i, i : i + 1])).unsqueeze(1), c), 1)
            q = q - c[:, 0].unsqueeze(2) * U[:, i : i + 1]
        return q


def _coefficients(U: Tensor, T: Tensor, s: Tensor) -> Tensor:
    """Return s^T U^T T, (B, M)."""
    return ((U * s.unsqueeze(1)).sum(2).unsqueeze(2) * T).sum(1)


def pair_weight(
    kind: Arithmetic, numbers: Sequence[Number], constants: Sequence[Any]
) -> Sequence[Number]:
    """Return weight of u = weight (s - q), 1 / (s . q) with q damped towards s for a small pivot.

    numbers: s . s and s . q.
    """
    square, inner = numbers
    moved = square > 0  # s . s may vanish by underflow where s . q does not
    if kind is not TENSORS and kind.all(moved & (inner > LEAST_PIVOT * square)):
        return [1 / inner]
    zero = kind.zeros_like(square)
    regular = kind.where(inner < 0, -inner, inner) > LEAST_PIVOT * square  # False for s = 0
    square = kind.where(moved, square, 1.0)
    # The inner `where` keeps inf, and 0 * inf in the gradient, away from regular samples.
    pivot = kind.where(regular, 2.0, inner / square)
    goal = kind.where(pivot < 0, zero - LEAST_PIVOT, zero + LEAST_PIVOT)
    theta = (1 - goal) / (1 - pivot)
    # s - q_theta = theta (s - q) and s . q_theta = |s|^2 (1 - theta + theta pivot).
    below = square * (1 - theta + theta * pivot)
    damped = theta / (below + (below == 0))
    weight = kind.where(regular, 1 / kind.where(regular, inner, 1.0), damped)
    return [kind.where(moved, weight, 0.0)]
