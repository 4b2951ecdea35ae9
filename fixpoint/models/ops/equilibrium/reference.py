"""Equilibria through time as a loop over the generic fixed-point layer, which defines them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from fixpoint.backward import Implicit
from fixpoint.fixed_point import FixedPoint
from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.models.ops.equilibrium.arguments import Inputs, Method


def equilibrium_reference(inputs: Inputs, method: Method) -> Tensor:
    """h_1 .. h_T, (T, B, n)."""
    x, W, bias, U, V, h = inputs
    activation = ACTIVATIONS[method.activation]
    solve = FixedPoint(method.solver, Implicit(method.backward.solver, on_failure="ignore"))
    states = []
    for t, u in enumerate(linear(x, W, bias)):
        q = torch.addmm(u, h, V.mT)

        def phi(z: Tensor, q: Tensor = q) -> Tensor:
            return activation(q + z if U is None else torch.addmm(q, z, U.mT))

        h = solve(phi, h, t=t).z
        states.append(h)
    return torch.stack(states)
