"""Anderson mixing, type II."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fixpoint.solvers.base import IterativeSolver
from fixpoint.solvers.checks import at_least, non_negative, positive


class AndersonState(NamedTuple):
    """Last fz = phi(z) and g = phi(z) - z, (B, D), and up to m differences of each."""

    fz: Tensor
    g: Tensor
    df: tuple[Tensor, ...]
    dg: tuple[Tensor, ...]


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
            new = fz
            df: tuple[Tensor, ...] = ()
            dg: tuple[Tensor, ...] = ()
        else:
            first = max(0, len(state.dg) + 1 - min(self.memory, z.shape[1]))
            df, dg = (*state.df[first:], fz - state.fz), (*state.dg[first:], g - state.g)
            dG = torch.stack(dg, 1)
            gamma = self._weights(dG, g).to(z.dtype).unsqueeze(1)  # (B, 1, m)
            new = fz - torch.bmm(gamma, torch.stack(df, 1)).squeeze(1)
        if self.beta != 1:
            # z + beta g - (dZ + beta dG) gamma, with dZ = dF - dG.
            mixed = g if state is None else g - torch.bmm(gamma, dG).squeeze(1)
            new = new - (1 - self.beta) * mixed
        return new, AndersonState(fz, g, df, dg)

    def _weights(self, dg: Tensor, g: Tensor) -> Tensor:
        """gamma, (B, m), from the differences dg, (B, m, D), and the residual g, (B, D)."""
        dtype = torch.promote_types(g.dtype, torch.float32)
        dg, g = dg.to(dtype), g.to(dtype)
        gram = torch.bmm(dg, dg.mT)
        square = gram.detach().diagonal(dim1=1, dim2=2)
        # A zero column, of a sample that has stopped, gets weight zero.
        length = torch.where(square > 0, square, 1).sqrt()
        ridge = max(self.ridge, torch.finfo(dtype).eps)
        scaled = gram / (length.unsqueeze(1) * length.unsqueeze(2))
        scaled = scaled + torch.diag_embed(torch.where(square > 0, ridge, 1.0).to(dtype))
        # The row vector times dg^T: as dg times a column bmm is several times slower on a CPU.
        right = torch.bmm(g.unsqueeze(1), dg.mT).mT / length.unsqueeze(2)
        factor, info = torch.linalg.cholesky_ex(scaled)
        gamma = torch.cholesky_solve(right, factor).squeeze(2) / length
        usable = (info == 0) & (gamma.detach().abs().sum(1) <= self.bound)
        return torch.where(usable[:, None], gamma, 0.0)

    def extra_repr(self) -> str:
        return f"memory={self.memory}, beta={self.beta:g}, {super().extra_repr()}"
