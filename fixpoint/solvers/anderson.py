"""Anderson mixing, type II."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fixpoint._validation import at_least, non_negative, positive
from fixpoint.solvers.base import IterativeSolver


class AndersonState(NamedTuple):
    """Last fz = phi(z) and g = phi(z) - z, (B, D), up to m differences of each, and dG^T dG."""

    fz: Tensor
    g: Tensor
    df: tuple[Tensor, ...] = ()
    dg: tuple[Tensor, ...] = ()
    gram: Tensor | None = None  # (B, m, m)


class Anderson(IterativeSolver):
    """Anderson mixing: z <- z + beta g - (dZ + beta dG) gamma, g = phi(z) - z.

    The weights gamma minimise ||g - dG gamma|| over the last `memory` differences of g, each
    sample by itself. They solve the normal equations with columns scaled to length one, plus
    `ridge`: the result does not depend on the scale of z. A sample whose small system fails, or
    whose weights are larger than `bound`, makes a plain step.

    The default choice: few evaluations where phi is a slow contraction, no derivatives. It
    stores 2 * memory states.

    Args:
        memory: differences kept, m; no more than D are used.
        beta: mixing, 1 = undamped.
        ridge: added to the unit diagonal of the scaled Gram matrix, at least the dtype's eps.
        bound: largest sum of |gamma|.
        options: see `IterativeSolver`.

    Source: Anderson (1965), Iterative procedures for nonlinear integral equations; Walker and
        Ni (2011), Anderson acceleration for fixed-point iterations, Eq. 2.2.

    Example:
        >>> import torch
        >>> from fixpoint import Anderson, solve
        >>> solution = solve(torch.cos, torch.zeros(1, 1), Anderson())
        >>> round(solution.z.item(), 4), solution.converged.tolist()
        (0.7391, [True])
    """

    def __init__(
        self,
        *,
        memory: int = 5,
        beta: float = 1.0,
        ridge: float = 1e-10,
        bound: float = 1e4,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.memory = at_least(1, memory=memory)
        self.beta = positive(beta=beta)
        self.ridge = non_negative(ridge=ridge)
        self.bound = positive(bound=bound)

    def update(
        self, k: int, z: Tensor, fz: Tensor, state: AndersonState | None
    ) -> tuple[Tensor, AndersonState]:
        g = fz - z
        if state is None:
            return self._damp(fz, g), AndersonState(fz, g)
        place = (k - 1) % min(self.memory, max(z.shape[1], 1))  # that of the oldest
        df, dg = (
            _replace_at(state.df, place, fz - state.fz),
            _replace_at(state.dg, place, g - state.g),
        )
        gram = _put_products(state.gram, place, _products(dg[place], dg))
        gamma = self._weights(gram, _products(g, dg)).to(z.dtype)
        new = _subtract_weighted(fz, gamma, df)
        if self.beta != 1:
            new = self._damp(new, _subtract_weighted(g, gamma, dg))
        return new, AndersonState(fz, g, df, dg, gram)

    def _damp(self, new: Tensor, g: Tensor) -> Tensor:
        """z + beta g - (dZ + beta dG) gamma, with dZ = dF - dG, from its value at beta = 1."""
        return new if self.beta == 1 else new - (1 - self.beta) * g

    def _weights(self, gram: Tensor, right: Tensor) -> Tensor:
        """gamma, (B, m), from dG^T dG, (B, m, m), and dG^T g, (B, m); 0 where not usable."""
        gamma, usable = self._solve(gram, right)
        if gamma.requires_grad:
            # Solved again without what is not usable, whose zero gradient would meet inf.
            unit = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
            gram = torch.where(usable.unsqueeze(2), gram, unit)
            gamma, _ = self._solve(gram, torch.where(usable, right, 0.0))
        return torch.where(usable, gamma, 0.0)

    def _solve(self, gram: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and whether they are usable, (B, 1)."""
        # A zero column, of a sample that has stopped, gets weight zero: its right side is zero.
        square = gram.diagonal(dim1=1, dim2=2).detach()
        length = square.clamp_min(torch.finfo(square.dtype).tiny).sqrt()
        scaled = gram / (length.unsqueeze(1) * length.unsqueeze(2))
        scaled.diagonal(dim1=1, dim2=2).add_(max(self.ridge, torch.finfo(square.dtype).eps))
        factor, info = torch.linalg.cholesky_ex(scaled)
        gamma = torch.cholesky_solve((right / length).unsqueeze(2), factor).squeeze(2) / length
        usable = info.logical_not() & (gamma.detach().abs().sum(1) <= self.bound)
        return gamma, usable.unsqueeze(1)

    def extra_repr(self) -> str:
        return f"memory={self.memory}, beta={self.beta:g}, {super().extra_repr()}"


def _products(a: Tensor, others: tuple[Tensor, ...]) -> Tensor:
    """Inner products of each sample of a with those of each other, (B, m), in >= float32.

    One by one: to put the history into one tensor for a single product takes longer, as a fresh
    buffer of that size costs page faults.
    """
    dtype = torch.promote_types(a.dtype, torch.float32)
    if a.dtype != dtype:
        a, others = a.to(dtype), tuple(b.to(dtype) for b in others)
    return torch.stack([torch.linalg.vecdot(a, b) for b in others], 1)


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


def _subtract_weighted(a: Tensor, gamma: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
    """a minus the sum of the parts, (B, D) each, weighted by the columns of gamma, (B, m)."""
    for weight, part in zip(gamma.split(1, dim=1), parts, strict=True):
        a = torch.addcmul(a, weight, part, value=-1)
    return a
