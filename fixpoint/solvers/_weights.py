"""Least-squares weights of Anderson mixing: a fast solve where it is accurate, else one by QR."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class History(NamedTuple):
    """Up to m differences of phi(z) and of g, (B, D) each, and dG^T dG, (B, m, m)."""

    df: tuple[Tensor, ...] = ()
    dg: tuple[Tensor, ...] = ()
    gram: Tensor | None = None

    def replace(self, place: int, df: Tensor, dg: Tensor) -> History:
        """The history with new differences at that place, or at the end."""
        all_df, all_dg = _replace_at(self.df, place, df), _replace_at(self.dg, place, dg)
        return History(all_df, all_dg, _put_products(self.gram, place, products(dg, all_dg)))

    def keep_rows(self, kept: Tensor) -> History:
        """The history with the differences of other samples set to zero; kept is (B, 1) bool."""
        assert self.gram is not None
        df, dg = (tuple(torch.where(kept, x, 0.0) for x in parts) for parts in (self.df, self.dg))
        return History(df, dg, torch.where(kept.unsqueeze(2), self.gram, 0.0))


def solve(
    history: History, g: Tensor, noise: Tensor, ridge: float, newest: int, *, may_sync: bool
) -> Tensor:
    """gamma, (B, m), that minimizes |g - dG gamma|.

    Args:
        history: m differences, the newest at that place, the older ones before it.
        g: (B, D).
        noise: length below which a difference is rounding, (B, 1).
        ridge: added to the unit diagonal of the scaled Gram matrix.
        may_sync: whether the host may read which samples need the QR solve.
    """
    gamma, sound = solve_gram(history, g, noise, ridge)
    sound = sound.unsqueeze(1)
    if g.shape[1] == 0 or (may_sync and bool(sound.all())):
        return gamma
    if gamma.requires_grad:
        # Solved again without the samples left out, whose zero gradient would meet inf.
        assert history.gram is not None
        unit = torch.eye(gamma.shape[1], dtype=gamma.dtype, device=gamma.device)
        some = history._replace(gram=torch.where(sound.unsqueeze(2), history.gram, unit))
        gamma, _ = solve_gram(some, torch.where(sound, g, 0.0), noise, ridge)
    order = [*range(newest, -1, -1), *range(len(history.dg) - 1, newest, -1)]
    columns = tuple(history.dg[j].to(gamma.dtype) for j in order)
    places = [order.index(j) for j in range(len(order))]
    careful = _solve_qr(g.to(gamma.dtype), columns, noise, ridge)[:, places]
    gamma = torch.where(sound, gamma, careful)
    return torch.where(gamma.detach().isfinite().all(1, keepdim=True), gamma, 0.0)


def solve_gram(history: History, g: Tensor, noise: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """gamma of the normal equations, (B, m), and whether nearly all its digits hold, (B,).

    The squared pivots of the scaled matrix are the squared sines between each difference and
    those before it, and the normal equations lose as many digits as these are small.
    """
    gram, right = history.gram, products(g, history.dg)
    assert gram is not None
    # A zero difference, of a sample that has stopped, gets weight zero.
    square = gram.diagonal(dim1=1, dim2=2).detach()
    positive = square > 0
    length = torch.where(positive, square, torch.inf).sqrt()
    scaled = gram / (length.unsqueeze(1) * length.unsqueeze(2))
    diagonal = scaled.diagonal(dim1=1, dim2=2).add_(positive.logical_not())
    if ridge > 0:
        diagonal.add_(ridge)
    factor, info = torch.linalg.cholesky_ex(scaled)
    gamma = torch.cholesky_solve((right / length).unsqueeze(2), factor).squeeze(2) / length
    pivot = factor.detach().diagonal(dim1=1, dim2=2)
    least = torch.finfo(gram.dtype).eps ** (1 / 16)
    sound = ((pivot > least) & (pivot * length > noise)).all(1)
    return gamma, sound & info.logical_not()


def _solve_qr(g: Tensor, columns: tuple[Tensor, ...], noise: Tensor, ridge: float) -> Tensor:
    """gamma, (B, m), from a QR factorization of the scaled columns, the newest first.

    A column whose part orthogonal to the newer ones is not longer than `noise` gets weight zero.
    """
    with torch.no_grad():
        A = torch.stack(columns, 2)
        length = torch.linalg.vector_norm(A, dim=1)
        length = torch.where(length > 0, length, 1.0)
        A = A / length.unsqueeze(1)
        if ridge > 0:
            damping = ridge**0.5 * torch.eye(A.shape[2], dtype=A.dtype, device=A.device)
            A = torch.cat((A, damping.expand(len(A), -1, -1)), 1)
        Q, R = torch.linalg.qr(A)
        dead = R.diagonal(dim1=1, dim2=2).abs() * length <= noise
        R = torch.where(dead.unsqueeze(2), 0.0, R) + torch.diag_embed(dead.to(R.dtype))
        right = torch.where(dead, 0.0, products(g, Q[:, : g.shape[1]].unbind(2)))
        gamma = torch.linalg.solve_triangular(R, right.unsqueeze(2), upper=True).squeeze(2) / length
    if not (torch.is_grad_enabled() and (g.requires_grad or columns[0].requires_grad)):
        return gamma
    # The derivative of the normal equations at their solution, where that of R is not needed.
    # Along a column that depends on the newer ones but for little more than rounding, rounding of
    # the defect would be amplified by 1 / eps: its weight is constant.
    defect = products(subtract_weighted(g, gamma, columns), columns) / length
    with torch.no_grad():
        frozen = dead | (R.diagonal(dim1=1, dim2=2).abs() <= torch.finfo(R.dtype).eps ** 0.5)
        R = torch.where(frozen.unsqueeze(2), 0.0, R) + torch.diag_embed(frozen.to(R.dtype))
    frozen = frozen.unsqueeze(2)
    change = torch.where(frozen, 0.0, defect.unsqueeze(2))
    change = torch.linalg.solve_triangular(R.mT, change, upper=False)
    change = torch.where(frozen, 0.0, change)  # of the unit rows of R
    change = torch.linalg.solve_triangular(R, change, upper=True).squeeze(2) / length
    return gamma + (change - change.detach())


def products(a: Tensor, others: tuple[Tensor, ...]) -> Tensor:
    """Inner products of each sample of a with those of each other, (B, m), in >= float32.

    One by one: to put the history into one tensor for a single product takes longer, as a fresh
    buffer of that size costs page faults.
    """
    dtype = torch.promote_types(a.dtype, torch.float32)
    if a.dtype != dtype:
        a, others = a.to(dtype), tuple(b.to(dtype) for b in others)
    return torch.stack([torch.linalg.vecdot(a, b) for b in others], 1)


def subtract_weighted(a: Tensor, gamma: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
    """a minus the sum of the parts, (B, D) each, weighted by the columns of gamma, (B, m)."""
    for weight, part in zip(gamma.split(1, dim=1), parts, strict=True):
        a = torch.addcmul(a, weight, part, value=-1)
    return a


def _replace_at(parts: tuple[Tensor, ...], place: int, new: Tensor) -> tuple[Tensor, ...]:
    """The parts with the new one at its place, or at the end."""
    return (*parts[:place], new, *parts[place + 1 :])


def _put_products(gram: Tensor | None, place: int, row: Tensor) -> Tensor:
    """The Gram matrix, (B, m, m), with the products of the difference at that place, (B, m)."""
    if gram is None:
        return row.unsqueeze(1)
    if gram.shape[1] < row.shape[1]:
        column = row.unsqueeze(2)
        return torch.cat((torch.cat((gram, column[:, :-1].mT), 1), column), 2)
    gram = gram.clone()
    gram[:, place] = row
    gram[:, :, place] = row
    return gram
