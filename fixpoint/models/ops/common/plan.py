"""Plan of a call: fused or not, by which kernels, and why."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch

from fixpoint.models.ops.common import dispatch

FUSED = os.environ.get("FIXPOINT_FUSED", "1") != "0"
"""False turns every fused path off; read when the package is imported."""


class CallPlan(NamedTuple):
    """Plan of a layer's computation on one device, decided once for each.

    path: "leaky", "gated", "gru", "lstm", "equilibrium", "manifold", or "reference".
    kernels: of a fused path, "numba", "torch" or "triton".
    reason: why no fused path, None where there is one.
    method: how equilibria are solved, a `Method` of their operation.
    """

    path: str
    kernels: str = ""
    reason: str | None = None
    method: Any = None

    @property
    def fused(self) -> bool:
        return self.reason is None

    def __str__(self) -> str:
        return f"fused by {self.kernels}" if self.fused else f"not fused: {self.reason}"


def make_plan(path: str, reason: str | None, units: int, device: torch.device) -> CallPlan:
    """Return the plan for a number of units, with the reason against the fused path, if any."""
    if reason is None and not FUSED:
        reason = "FIXPOINT_FUSED=0 turns fused paths off"
    if reason is not None:
        return CallPlan("reference", reason=reason)
    return CallPlan(path, dispatch.kernels_for(units, device))
