"""Anderson mixing, type II."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from fixpoint._torch import carries_tangents, is_exporting, tree_map
from fixpoint._validation import at_least, non_negative, positive
from fixpoint.solvers._anderson_host import (
    GROWTH,
    RECOVERY,
    Options,
    Outcome,
    Scalars,
    Step,
    accept_step,
    as_tensor,
    mix_in_graph,
    mix_on_device,
    mix_on_host,
    mix_unseen,
)
from fixpoint.solvers._numbers import TENSORS, computes_on_host
from fixpoint.solvers._weights import orthogonalize, subtract_weighted, with_gradient
from fixpoint.solvers.base import IterativeOptions, IterativeSolver, at_least_float32

T = TypeVar("T")
__all__ = ["GROWTH", "RECOVERY", "Anderson", "AndersonState"]


class AndersonState(NamedTuple):
    """Start of the next step: fz = phi(z) and g = phi(z) - z, (B, D).

    df, dg: differences of both from the state that each step started from, the newest first,
        (B, D) each.
    scalars: see `Outcome`, (B, 4) or wider, float64.
    """

    fz: Tensor
    g: Tensor
    df: tuple[Tensor, ...]
    dg: tuple[Tensor, ...]
    scalars: Tensor


class Anderson(IterativeSolver):
    """Anderson mixing: z <- z + beta g - (dZ + beta dG) gamma, g = phi(z) - z.

    The weights gamma minimize ||g - dG gamma|| over the last `memory` differences of g, each
    sample by itself: by normal equations with columns scaled to length one where these are
    accurate, else by Gram-Schmidt, where a difference that adds only rounding to the newer ones is
    left out. The result does not depend on the scale of z, nor a bit of it on batch-mates: sums
    are along rows, in an order that depends on D alone (where D is below 32768, or torch has one
    thread).

    A state of fixed shape (`init_fixed`) holds `memory` differences at all times, and a traced
    update has operations that grow with their square, in a graph of torch.compile on the CPU with
    their cube: up to some 8.

    A step after which ||g|| is more than 1.5 times as large is not continued: the next one starts
    where it started, with what the step showed of g', and with the mixing of that sample reduced
    to the inverse of the slope met, from which it recovers by a factor 1.1 a step. After a second
    such step in a row the history restarts.

    The default choice: few evaluations where phi is a slow contraction, no derivatives. It
    stores 2 * memory states.

    Args:
        memory: differences kept, m; no more than D are used.
        beta: mixing, 1 = undamped.
        ridge: added to the unit diagonal of the scaled Gram matrix.
        options: see `IterativeSolver`.

    Source: Anderson (1965), Iterative procedures for nonlinear integral equations; Walker and
        Ni (2011), Anderson acceleration for fixed-point iterations, Eq. 2.2 and section 4.

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
        ridge: float = 0.0,
        **options: Unpack[IterativeOptions],
    ) -> None:
        super().__init__(**options)
        self.memory = at_least(1, memory=memory)
        self.beta = positive(beta=beta)
        self.ridge = non_negative(ridge=ridge)

    restarts = True

    def init_fixed(self, z: Tensor, fz: Tensor, t: int | None = None) -> AndersonState:
        m = self._most_differences(z)
        zeros = tuple(torch.zeros_like(fz) for _ in range(2 * m))
        state = _begin(fz, fz - z)
        if computes_on_host(state.g) or _is_in_graph_of_host(state.g):
            gram = state.scalars.new_zeros(len(z), m * (m + 1) // 2)
            state = state._replace(scalars=torch.cat((state.scalars, gram), 1))
        return state._replace(df=zeros[:m], dg=zeros[m:])

    def update_fixed(
        self, k: Tensor, z: Tensor, fz: Tensor, state: AndersonState
    ) -> tuple[Tensor, AndersonState]:
        return self._advance(fz, fz - z, state, may_read=False)

    def update(
        self, k: int, z: Tensor, fz: Tensor, state: AndersonState | None
    ) -> tuple[Tensor, AndersonState]:
        g = fz - z
        if state is not None:
            return self._advance(fz, g, state, may_read=self.may_sync)
        new = fz if self.beta == 1 else subtract_weighted(fz, [1 - self.beta], [g])
        return new, _begin(fz, g)

    def restart(self, state: AndersonState, rows: Tensor, z: Tensor, fz: Tensor) -> AndersonState:
        rows, new = rows.unsqueeze(1), _begin(fz, fz - z)
        scalars = torch.where(rows, new.scalars, state.scalars[:, :4])
        if self._has_gram(z, state.scalars) or state.scalars.shape[1] > 4:
            scalars = torch.cat((scalars, state.scalars[:, 4:]), 1)
        return state._replace(
            fz=torch.where(rows, fz, state.fz), g=torch.where(rows, new.g, state.g), scalars=scalars
        )

    def _most_differences(self, z: Tensor) -> int:
        return min(self.memory, max(z.shape[1], 1))

    def _has_gram(self, z: Tensor, scalars: Tensor) -> bool:
        """Tell whether the Gram matrix of all differences is behind the numbers of `Scalars`.

        Asked of a graph, it makes their number a constant.
        """
        m = self._most_differences(z)
        return scalars.shape[1] == len(Scalars._fields) + m * (m + 1) // 2

    def _advance(
        self, fz: Tensor, g: Tensor, state: AndersonState, *, may_read: bool
    ) -> tuple[Tensor, AndersonState]:
        m = self._most_differences(fz)
        df, dg = (fz - state.fz, *state.df)[:m], (g - state.g, *state.dg)[:m]
        end, start = Step(fz, g, df, dg), Step(*state[:4])
        differentiates = (torch.is_grad_enabled() and dg[0].requires_grad) or carries_tangents()
        given = (end, start, state.scalars)
        outcome = self._mix(*(_constant(given) if differentiates else given), may_read=may_read)
        accepted, weights, rest, scalars = outcome
        if accepted is not None:
            fz, g = torch.where(accepted, fz, state.fz), torch.where(accepted, g, state.g)
        if differentiates:
            weights = self._with_gradient(weights, Step(fz, g, df, dg), scalars)
            if rest is not None:
                scalars = self._mixing_with_gradient(outcome, end, state.scalars)
                rest = (1 - self.beta * scalars[:, 1:2]).to(g.dtype)
        new = subtract_weighted(fz, weights, df)
        if rest is not None:
            new = subtract_weighted(new, [rest], [subtract_weighted(g, weights, dg)])
        return new, AndersonState(fz, g, df, dg, scalars)

    def _mix(self, end: Step, start: Step, scalars: Tensor, *, may_read: bool) -> Outcome:
        options = Options(self._most_differences(end.fz), self.beta, self.ridge)
        if _is_in_graph_of_host(end.g) and self._has_gram(end.g, scalars):
            return mix_in_graph(end, start, scalars, options)
        if not computes_on_host(end.g):
            return mix_on_device(end, start, scalars, options)
        return (mix_on_host if may_read else mix_unseen)(end, start, scalars, options)

    def _with_gradient(
        self, weights: Sequence[Tensor | float] | Tensor, step: Step, scalars: Tensor
    ) -> Tensor:
        """Return the weights as functions of the differences, (m, B, 1)."""
        g, dg = at_least_float32(step.g), [at_least_float32(x) for x in step.dg]
        constant = [x.detach() for x in dg]
        fz = at_least_float32(step.fz.detach())
        noise = torch.finfo(step.fz.dtype).eps * torch.linalg.vector_norm(fz, dim=1)
        _, factors = orthogonalize(constant, g.detach(), noise, self.ridge, scalars[:, 3])
        gamma = as_tensor(weights, constant[0])
        return with_gradient(gamma, factors, dg, g, self.ridge).to(step.g.dtype).unsqueeze(2)

    def _mixing_with_gradient(self, outcome: Outcome, end: Step, last: Tensor) -> Tensor:
        """Return the scalars with the mixing as a function of the differences of rejected steps,
        from which it recovers after accepted ones.
        """
        dg = at_least_float32(end.dg[0])
        step, one = at_least_float32(end.df[0]) - dg, torch.ones_like(dg[:, 0])
        accepted = one > 0 if outcome.accepted is None else outcome.accepted.squeeze(1)
        # The inner `where` keeps the quotient of an accepted step, or none, out of the gradient.
        squares = [x.square().sum(1) for x in (step, dg)]
        slope = tuple(torch.where(accepted | (x == 0), one, x).to(last.dtype) for x in squares)
        numbers = Scalars(*last[:, :4].unbind(1))
        mixing = accept_step(
            TENSORS, accepted, numbers.merit, (slope[0], slope[1]), numbers, self.memory
        ).mixing
        change = (mixing - mixing.detach()).unsqueeze(1)
        return torch.cat(
            (outcome.scalars[:, :1], outcome.scalars[:, 1:2] + change, outcome.scalars[:, 2:]), 1
        )

    def extra_repr(self) -> str:
        return f"memory={self.memory}, beta={self.beta:g}, {super().extra_repr()}"


def _is_in_graph_of_host(x: Tensor) -> bool:
    """Tell whether a compiler traces x on the CPU, where a branch in a graph waits for nothing.

    ONNX has no branch in the body of a loop.
    """
    return torch.compiler.is_compiling() and not is_exporting() and x.device.type == "cpu"


def _begin(fz: Tensor, g: Tensor) -> AndersonState:
    """Return the state without differences."""
    wide = at_least_float32(g.detach())
    dtype = torch.float32 if g.device.type == "mps" else torch.float64
    merit = torch.linalg.vecdot(wide, wide).to(dtype)
    one, zero = torch.ones_like(merit), torch.zeros_like(merit)
    return AndersonState(fz, g, (), (), torch.stack((merit, one, zero, zero), 1))


def _constant(tree: T) -> T:
    """Return the tree of tensors without their graphs."""
    return tree_map(Tensor.detach, tree)
