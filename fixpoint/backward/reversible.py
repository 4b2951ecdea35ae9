"""Backpropagation through a fixed number of updates in constant memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import comb
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fixpoint._modes import unrecorded
from fixpoint._torch import inside_forward_mode
from fixpoint._validation import at_least
from fixpoint.backward._adjoint import pullback
from fixpoint.backward._evaluation import NO_GRAPH, solve_without_gradient
from fixpoint.backward.base import Backward
from fixpoint.derivatives import MatrixMap
from fixpoint.solution import Solution
from fixpoint.solvers import InexactNewton, Picard, Solver
from fixpoint.solvers.base import IterativeSolver
from fixpoint.tracing import (
    PureMap,
    closure_convert,
    is_differentiable,
    stop_gradient_at,
    substitute,
)


class Reversible(Backward):
    """The gradient of `Unrolled()` in memory that does not grow with the number of updates.

    The backward pass walks the updates from the last to the first and computes each state again
    from the nearest of `slots` stored ones, which it places so that each is made as few times as
    possible: with 8 slots at most 3 times for 46 to 165 updates. The states are the same to the
    last bit. The algebraic inverse z_k = (z_{k+1} - beta phi(z_k)) / (1 - beta) of a damped update
    would need no slots, but multiplies rounding by 1 / (1 - beta) an update: by 1e30 over 100
    updates with beta = 1/2.

    Choose it where `Unrolled` does not fit into memory, for `Picard` and `InexactNewton` with
    rtol = atol = 0; where an equilibrium is reached `Implicit` is cheaper. A backward pass that is
    to be differentiated again, torch.func and forward mode need the memory of `Unrolled`. The
    backward pass raises where phi does not repeat itself, as with new dropout masks.

    Args:
        slots: states kept, besides that of the update at work.

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
        if solver.noise:
            raise ValueError("Reversible repeats updates, and noise does not: use Unrolled()")

    def compiles(self, solver: Solver) -> bool:
        return False

    def solve(self, solver: Solver, phi: MatrixMap, z0: Tensor, t: int | None) -> Solution:
        updates = cast(IterativeSolver, solver)
        if inside_forward_mode():
            return updates.run(phi, z0, t)
        solution = solve_without_gradient(lambda phi: updates.run(phi, z0, t), phi)
        if not torch.is_grad_enabled() or updates.max_iter == 0:
            return solution
        with unrecorded():
            z = z0.detach().requires_grad_()
            closure = closure_convert(phi, z)
            # The solver has tensors of its own: learned steps.
            learned = closure_convert(
                lambda z: updates.update(0, z, torch.zeros_like(z), updates.init(z, t))[0], z
            ).captured
        steps = [
            _Steps(updates, t, function, learned, len(closure.opaque))
            for function in (closure.function, closure.again)
        ]
        reversal = _Reversal(steps, updates.max_iter, self.slots, solution.z)
        inputs = [*closure.captured, *learned, *closure.opaque]
        return replace(solution, z=_ReversedUpdates.apply(reversal, solution.z, z0, *inputs))

    def extra_repr(self) -> str:
        return f"slots={self.slots}"


class _Steps(NamedTuple):
    """Update number k as a function of the state and of the captured tensors.

    function: phi, of z and of its captured tensors, which come first.
    learned: tensors of the solver, which come next.
    opaque: how many tensors, the last ones, phi reaches by itself.
    """

    solver: IterativeSolver
    t: int | None
    function: PureMap
    learned: list[Tensor]
    opaque: int

    def step(self, k: int, z: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Return the state k + 1 from state k, (B, D)."""
        count = len(inputs) - self.opaque - len(self.learned)
        learned = list(inputs[count : count + len(self.learned)])
        fz = self.function(z, *inputs[:count])
        if not learned:
            return self._update(k, z, fz)
        return substitute(lambda z: self._update(k, z, fz), z, self.learned, learned, fz)

    def _update(self, k: int, z: Tensor, fz: Tensor) -> Tensor:
        return self.solver.update(k, z, fz, self.solver.init(z, self.t))[0]


class _Reversal:
    """The backward pass through updates, and the gradients of the captured tensors.

    Where the recorded operations do not give the states of the forward pass, since phi branches,
    phi itself is evaluated.
    """

    def __init__(self, ways: list[_Steps], count: int, slots: int, last: Tensor) -> None:
        self.ways, self.count, self.slots, self.last = ways, count, slots, last.detach()

    def gradients(self, z0: Tensor, inputs: list[Tensor], g: Tensor) -> Sequence[Tensor | None]:
        """Return the gradients of z0 and of the captured tensors."""
        for steps in self.ways:
            try:
                if torch.is_grad_enabled():
                    return self._unrolled(steps, z0, inputs, g)
                return _Walk(self, steps, inputs).back(z0, g)
            except _OtherStates:
                continue
        raise RuntimeError(
            "phi gave other values when Reversible repeated its updates: a random phi, such as "
            "dropout, must repeat itself (fixpoint.models.frozen), or use Unrolled()"
        )

    def _unrolled(
        self, steps: _Steps, z0: Tensor, inputs: list[Tensor], g: Tensor
    ) -> Sequence[Tensor | None]:
        """Return the same as a function of all of them, to be differentiated again."""

        def last(z: Tensor, *inputs: Tensor) -> Tensor:
            for k in range(self.count):
                z = steps.step(k, z, inputs)
            self.check(z)
            return z

        return pullback(last, [z0, *inputs], g, opaque=steps.opaque)

    def check(self, last: Tensor) -> None:
        """Refuse a gradient along other states than those of the forward pass."""
        tolerance = torch.finfo(last.dtype).eps ** 0.5
        size = self.last.abs().nan_to_num(posinf=0.0).amax() if last.numel() else 0.0
        bound = float(tolerance * size)
        if not torch.allclose(last.detach(), self.last, 0.0, bound, equal_nan=True):
            raise _OtherStates


class _OtherStates(Exception):
    """Error of repeated updates that lead elsewhere."""


class _Walk:
    """The updates from the last to the first, and the sums of the gradients."""

    def __init__(self, reversal: _Reversal, steps: _Steps, inputs: list[Tensor]) -> None:
        self.reversal, self.steps = reversal, steps
        own = inputs[: len(inputs) - steps.opaque]
        self.opaque = inputs[len(own) :]
        twins = [x.detach() for x in own]
        self.twins = [x.requires_grad_() if is_differentiable(x) else x for x in twins]
        self.total: list[Tensor | None] = [None] * len(inputs)

    def back(self, z0: Tensor, g: Tensor) -> list[Tensor | None]:
        """Return the gradients of z0 and of the captured tensors."""
        reversal = self.reversal
        return [self._reverse(0, reversal.count, z0.detach(), reversal.slots, g), *self.total]

    def _reverse(self, first: int, last: int, z: Tensor, slots: int, g: Tensor) -> Tensor:
        """Carry the gradient of state `last` back to state `first`, which is z."""
        while last - first > 1:
            middle = last - 1 if slots == 0 else first + _split(last - first, slots)
            at = z
            for k in range(first, middle):
                at = self._forward(k, at)
            g = self._reverse(middle, last, at, max(slots - 1, 0), g)
            last = middle
        return self._back(first, z, g)

    def _forward(self, k: int, z: Tensor) -> Tensor:
        """Return one update, without gradient, save for a phi that differentiates itself."""
        inputs = [*self.twins, *self.opaque]
        try:
            with torch.no_grad():
                return self.steps.step(k, z, inputs)
        except RuntimeError as error:
            if NO_GRAPH not in str(error):
                raise
        with torch.enable_grad():
            return self.steps.step(k, z.detach().requires_grad_(), inputs).detach()

    def _back(self, k: int, z: Tensor, g: Tensor) -> Tensor:
        """Carry a gradient back through one update."""
        inputs = [z.detach().requires_grad_(), *self.twins, *self.opaque]
        with torch.enable_grad():
            out = self.steps.step(k, inputs[0], inputs[1:])
        if k == self.reversal.count - 1:
            self.reversal.check(out)
        places = [i for i, x in enumerate(inputs) if x.requires_grad]
        if not out.requires_grad:
            return torch.zeros_like(g)
        with stop_gradient_at(self.opaque, out):
            found = torch.autograd.grad(
                out,
                [inputs[i] for i in places],
                g,
                allow_unused=True,
                retain_graph=bool(self.opaque),  # the graph of these is not this one's to free
            )
        for place, part in zip(places[1:], found[1:], strict=True):
            before = self.total[place - 1]
            if part is not None:
                self.total[place - 1] = part if before is None else before + part
        return torch.zeros_like(g) if found[0] is None else found[0]


class _ReversedUpdates(torch.autograd.Function):
    """The last state as a function of the first and of the captured tensors."""

    @staticmethod
    def forward(ctx: Any, reversal: _Reversal, z: Tensor, z0: Tensor, *inputs: Tensor) -> Tensor:
        ctx.reversal = reversal
        ctx.save_for_backward(z0, *inputs)  # a change in place is refused
        return z.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        z0, *inputs = ctx.saved_tensors
        return None, None, *ctx.reversal.gradients(z0, inputs, g)


def _split(count: int, slots: int) -> int:
    """Find where to store a state in `count` updates, so that each is repeated as seldom as
    possible.
    """
    repeats = 1
    while comb(slots + repeats, slots) < count:
        repeats += 1
    return max(1, count - comb(slots - 1 + repeats, slots - 1))
