"""One recurrent layer whose states are equilibria, for a graph that can hold a loop."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from fixpoint import FixedPoint
from fixpoint.export.recurrence import Observer, Recurrence
from fixpoint.models import EquilibriumMap
from fixpoint.models.rnn.scan import solve_steps


@dataclass(frozen=True, kw_only=True, eq=False)
class Equilibrium(Recurrence):
    """h_t = phi(h_t, h_{t-1}, x_t), solved from h_{t-1} to the tolerance of its run.

    Args:
        map: phi, whose weights are in it.
        fixed_point: the solver.
    """

    map: EquilibriumMap
    fixed_point: FixedPoint

    @classmethod
    def of(cls, map: EquilibriumMap, fixed_point: FixedPoint) -> Equilibrium:
        """Make the network of a trained layer."""
        return cls(
            kind="equilibrium",
            recurrent=(),
            input=(),
            bias=torch.zeros(1, map.hidden_size),
            nonlinearity=map.nonlinearity,
            map=_with_plain_weights(map),
            fixed_point=fixed_point,
        )

    def step(
        self, x: Tensor, state: Tensor, t: int | Tensor, watch: Observer = lambda name, value: value
    ) -> Tensor:
        """Return the state, (B, n), after x_t, (B, d), and the state before."""
        return next(solve_steps(self.map, self.fixed_point, x.unsqueeze(0), state, start=None)).z

    def to(self, dtype: torch.dtype) -> Equilibrium:
        """Return the same in another precision, apart from any graph."""
        map = copy.deepcopy(self.map).to(dtype).requires_grad_(False)
        return replace(self, bias=self.bias.to(dtype), map=map)


def _with_plain_weights(map: EquilibriumMap) -> EquilibriumMap:
    """Copy a map with its bounded weights as they are now, without what bounds them."""
    other: EquilibriumMap = copy.deepcopy(map)
    if not parametrize.is_parametrized(map):
        return other
    names = list(map.parametrizations)  # type: ignore[arg-type]
    other.__class__ = parametrize.type_before_parametrizations(map)
    del other.parametrizations
    for name in names:
        other.register_buffer(name, getattr(map, name).detach().clone())
    return other
