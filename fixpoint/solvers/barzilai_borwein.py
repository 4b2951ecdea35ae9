"""The spectral step length of Barzilai and Borwein."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from fixpoint._validation import positive
from fixpoint.solvers._rowwise import at_least_float32, dot
from fixpoint.solvers.base import IterativeOptions, IterativeSolver


class BarzilaiBorweinState(NamedTuple):
    """Last state, its residual g, (B, D), and the step taken from it, (B, 1)."""

    z: Tensor
    g: Tensor
    eta: Tensor


class BarzilaiBorwein(IterativeSolver):
    """z <- z + eta_k g, g = phi(z) - z, with eta_k from the last two iterates of each sample.

    With s and y the changes of z and g, I + eta g' is smallest along s for
    "long": eta = -(s . s) / (s . y), and "short": eta = -(s . y) / (y . y). "alternate" takes
    them by turns. A step that is not finite, or outside [1 / bound, bound] in size, is replaced
    by the nearest that is; a negative one remains negative.

    The step length that the ERNN paper names as its inspiration. Good where J is symmetric; for
    other J `Anderson` is the safer choice. It stores 2 states.

    Args:
        step: "long", "short" or "alternate".
        bound: largest |eta|, and the inverse of the smallest.
        options: see `IterativeSolver`.

    Source: Barzilai and Borwein (1988), Two-point step size gradient methods, Eqs. 5 and 6; for
        equations: La Cruz and Raydan (2003), Nonmonotone spectral methods for large-scale
        nonlinear systems.

    Example:
        >>> import torch
        >>> from fixpoint import BarzilaiBorwein, solve
        >>> round(solve(torch.cos, torch.zeros(1, 1), BarzilaiBorwein()).z.item(), 4)
        0.7391
    """

    def __init__(
        self,
        *,
        step: Literal["long", "short", "alternate"] = "alternate",
        bound: float = 1e3,
        **options: Unpack[IterativeOptions],
    ) -> None:
        super().__init__(**options)
        if step not in ("long", "short", "alternate"):
            raise ValueError(f'step must be "long", "short" or "alternate"; got {step!r}')
        self.step = step
        self.bound = positive(bound=bound)

    restarts = True

    def update(
        self, k: int, z: Tensor, fz: Tensor, state: BarzilaiBorweinState | None
    ) -> tuple[Tensor, BarzilaiBorweinState]:
        g = fz - z
        if state is None:
            eta = torch.ones_like(z[:, :1])
        else:
            s, y = at_least_float32(z - state.z), at_least_float32(g - state.g)
            sy = dot(s, y)
            long = self.step == "long" or (self.step == "alternate" and k % 2 == 1)
            above, below = (dot(s, s), sy) if long else (sy, dot(y, y))
            # The inner `where` keeps 0 / 0 out of the gradient; a sample at rest remains at rest.
            defined = (below != 0) & (above.abs() + below.abs() < torch.inf)
            eta = -above / torch.where(defined, below, 1.0)
            size = eta.abs().clamp(1 / self.bound, self.bound)
            eta = torch.where(defined, torch.copysign(size, eta), 1.0)
        return (z + eta * g).to(z.dtype), BarzilaiBorweinState(z, g, eta)

    def restart(
        self, state: BarzilaiBorweinState, rows: Tensor, z: Tensor, fz: Tensor
    ) -> BarzilaiBorweinState:
        rows = rows.unsqueeze(1)
        return BarzilaiBorweinState(
            torch.where(rows, z, state.z), torch.where(rows, fz - z, state.g), state.eta
        )

    def extra_repr(self) -> str:
        return f"step={self.step!r}, {super().extra_repr()}"
