"""Equilibria through time as a loop over the generic fixed-point layer, which defines them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear
from typing_extensions import Unpack

from fixpoint.backward import Implicit
from fixpoint.fixed_point import FixedPoint
from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.models.ops.equilibrium.arguments import Inputs, Method
from fixpoint.solvers.base import IterativeOptions, IterativeSolver


class GivenSteps(IterativeSolver):
    """`InexactNewton` with the steps (T or 1, K) of a tensor."""

    state_has_rows = False

    def __init__(self, values: Tensor, **options: Unpack[IterativeOptions]) -> None:
        super().__init__(**options)
        self.values = values

    def init(self, z: Tensor, t: int | None) -> Tensor:
        return self.values[min(t or 0, len(self.values) - 1)].to(z.dtype)

    def update(self, k: int, z: Tensor, fz: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return torch.lerp(z, fz, state[k]), state


def equilibrium_reference(inputs: Inputs, method: Method, *, steps: Tensor | None = None) -> Tensor:
    """Return h_1 .. h_T, (T, B, n), with `steps` in place of those of the solver where given."""
    x, W, bias, U, V, h = inputs
    activation = ACTIVATIONS[method.activation]
    solver, backward = method.solver.absolute(), method.backward
    if steps is not None:
        solver = GivenSteps(steps, max_iter=steps.shape[1], rtol=solver.rtol, atol=solver.atol)
    if isinstance(backward, Implicit):
        backward = Implicit(backward.solver, on_failure="ignore")
    solve = FixedPoint(solver, backward, on_failure="ignore")
    states = []
    for t, u in enumerate(linear(x, W, bias)):
        q = torch.addmm(u, h, V.mT)

        def phi(z: Tensor, q: Tensor = q) -> Tensor:
            return activation(q + z if U is None else torch.addmm(q, z, U.mT))

        h = solve(phi, h, t=method.start + t).z
        states.append(h)
    return torch.stack(states)
