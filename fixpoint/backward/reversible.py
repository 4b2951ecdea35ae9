"""Backpropagation through a fixed number of updates in constant memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import comb
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fixpoint._validation import at_least
from fixpoint.backward.base import Backward
from fixpoint.derivatives import MatrixMap
from fixpoint.solution import Solution
from fixpoint.solvers import InexactNewton, Picard, Solver
from fixpoint.solvers.base import IterativeSolver
from fixpoint.tracing import closure_convert, unrecorded

Step = Callable[[int, Tensor], Tensor]
"""Update number k of a state, (B, D)."""


class Reversible(Backward):
    """The gradient of `Unrolled()` in memory that does not grow with the number of updates.

    The backward pass walks the updates from the last to the first and computes each state again
    from the nearest of `slots` stored ones, which it places so that each is made as few times as
    possible: with 8 slots at most 3 times for 46 to 165 updates. The states are the same to the
    last bit. The algebraic inverse z_k = (z_{k+1} - beta phi(z_k)) / (1 - beta) of a damped update
    would need no slots, but multiplies rounding by 1 / (1 - beta) an update: by 1e30 over 100
    updates with beta = 1/2.

    Choose it where `Unrolled` does not fit into memory, for `Picard` and `InexactNewton` with
    rtol = atol = 0; where an equilibrium is reached `Implicit` is cheaper. First derivatives only;
    the backward pass raises where phi does not repeat itself, as with new dropout masks.

    Args:
        slots: states kept, beside that of the update at work.

    Source: Griewank and Walther (2000), Algorithm 799: revolve, an implementation of checkpointing
        for the reverse or adjoint mode of computational differentiation.

    Example:
        >>> import torch
        >>> from fixpoint import FixedPoint, Picard
        >>> from fixpoint.backward import Reversible
        >>> a = torch.tensor([[0.5]], requires_grad=True)
        >>> layer = FixedPoint(Picard(max_iter=100, rtol=0.0, atol=0.0), Reversible())
        >>> layer(lambda z: a * z + 1, torch.zeros(1, 1)).z.backward()
        >>> a.grad  # z* = 1 / (1 - a)
        tensor([[4.]])
    """

    def __init__(self, slots: int = 8) -> None:
        super().__init__()
        self.slots = at_least(1, slots=slots)

    def check(self, solver: Solver) -> None:
        if solver.has_tolerance or not isinstance(solver, (Picard, InexactNewton)):
            raise ValueError(
                "Reversible repeats a fixed number of updates without a history; got "
                f"{solver}: use Picard or InexactNewton with rtol = atol = 0, or Implicit()"
            )

    def compiles(self, solver: Solver) -> bool:
        return False

    def solve(self, solver: Solver, phi: MatrixMap, z0: Tensor, t: int | None) -> Solution:
        updates = cast(IterativeSolver, solver)

        def step(k: int, z: Tensor) -> Tensor:
            return updates.update(k, z, phi(z), updates.init(z, t))[0]

        with unrecorded(), torch.no_grad():
            solution = updates.run(phi, z0, t)
        if not torch.is_grad_enabled() or updates.max_iter == 0:
            return solution
        with unrecorded():
            closure = closure_convert(lambda z: step(0, z), z0.detach().requires_grad_())
        captured = [*closure.captured, *closure.leaves]
        reversal = _Reversal(step, updates.max_iter, self.slots, captured, solution.z)
        z = _ReversedUpdates.apply(reversal, solution.z, z0, *captured)
        return replace(solution, z=z)

    def extra_repr(self) -> str:
        return f"slots={self.slots}"


class _Reversal:
    """The backward pass through updates, and the gradients of the captured tensors."""

    def __init__(
        self, step: Step, count: int, slots: int, captured: list[Tensor], last: Tensor
    ) -> None:
        self.step, self.count, self.slots, self.last = step, count, slots, last.detach()
        kind = last.device.type
        enabled = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if enabled else None
        self.autocast = torch.autocast(kind, dtype=dtype, enabled=enabled)
        self.places = {id(x): i for i, x in enumerate(captured)}
        self.captured = captured

    def gradients(self, z0: Tensor, g: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """Those of z0 and of the captured tensors."""
        total: list[Tensor | None] = [None] * len(self.captured)
        with self.autocast:
            return self._reverse(0, self.count, z0, self.slots, g, total), total

    def _reverse(
        self, first: int, last: int, z: Tensor, slots: int, g: Tensor, total: list[Tensor | None]
    ) -> Tensor:
        """From the gradient of state `last` to that of state `first`, which is z."""
        while last - first > 1:
            middle = last - 1 if slots == 0 else first + _split(last - first, slots)
            at = z
            with torch.no_grad():
                for k in range(first, middle):
                    at = self.step(k, at)
            g = self._reverse(middle, last, at, max(slots - 1, 0), g, total)
            last = middle
        return self._back(first, z, g, total)

    def _back(self, k: int, z: Tensor, g: Tensor, total: list[Tensor | None]) -> Tensor:
        """Through one update."""
        z = z.detach().requires_grad_()
        with torch.enable_grad():
            closure = closure_convert(lambda z: self.step(k, z), z)
        if k == self.count - 1:
            self._check_repeated(closure.fz.detach())
        inputs = [z, *closure.twins, *closure.leaves]
        if not closure.fz.requires_grad:
            return torch.zeros_like(g)
        dz, *found = torch.autograd.grad(closure.fz, inputs, g, allow_unused=True)
        for x, part in zip([*closure.captured, *closure.leaves], found, strict=True):
            place = self.places.get(id(x))
            if place is None:
                raise RuntimeError(
                    f"phi closes over other tensors at update {k} than at the first one, which "
                    "Reversible cannot differentiate: use Unrolled()"
                )
            before = total[place]
            total[place] = part if before is None or part is None else before + part
        return torch.zeros_like(g) if dz is None else dz

    def _check_repeated(self, last: Tensor) -> None:
        """Refuse a gradient along other states than those of the forward pass."""
        tolerance = torch.finfo(last.dtype).eps ** 0.5
        size = self.last.abs().nan_to_num(posinf=0.0).amax() if last.numel() else 0.0
        if not torch.allclose(last, self.last, 0.0, float(tolerance * size), equal_nan=True):
            raise RuntimeError(
                "phi gave other values when Reversible repeated its updates: a random phi, such as "
                "dropout, must repeat itself (fixpoint.models.frozen), or use Unrolled()"
            )


class _ReversedUpdates(torch.autograd.Function):
    """The last state as a function of the first and of the captured tensors."""

    @staticmethod
    def forward(ctx: Any, reversal: _Reversal, z: Tensor, z0: Tensor, *captured: Tensor) -> Tensor:
        ctx.reversal = reversal
        ctx.save_for_backward(z0, *captured)  # a change in place is refused
        return z.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        z0 = ctx.saved_tensors[0]
        dz, total = ctx.reversal.gradients(z0.detach(), g)
        return None, None, dz, *total


def _split(count: int, slots: int) -> int:
    """Where to store a state in `count` updates, so that each is repeated as seldom as possible."""
    repeats = 1
    while comb(slots + repeats, slots) < count:
        repeats += 1
    return max(1, count - comb(slots - 1 + repeats, slots - 1))
