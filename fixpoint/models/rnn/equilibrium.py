"""The fused path of an ERNN whose equilibria are solved to a tolerance."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from fixpoint.fixed_point import FixedPoint
from fixpoint.models.maps import EquilibriumMap
from fixpoint.models.ops.equilibrium.arguments import Inputs, Method
from fixpoint.models.ops.equilibrium.autograd import (
    as_solution,
    equilibrium_scan,
    unsupported,
    unsupported_method,
)
from fixpoint.models.rnn.scan import Trajectory, mask_nonfinite, mask_trajectory


def why_not_fused(phi: EquilibriumMap, fixed_point: FixedPoint) -> str | None:
    """Why no input takes the fused equilibrium scan, or None where some do."""
    if reason := unsupported_method(fixed_point.solver, fixed_point.backward):
        return reason
    if not phi.defines("as_self_feedback"):
        return f"{type(phi).__name__} is not known to be sigma(U h + V h_prev + W x + b)"
    return None


def fused_trajectory(
    phi: EquilibriumMap, fixed_point: FixedPoint, x: Tensor, h0: Tensor
) -> tuple[str | None, Trajectory | None]:
    """Either the reason against the fused path, or the same as `scan`."""
    weights, device = phi.as_self_feedback(), x.device.type
    if weights is None:
        return why_not_fused(phi, fixed_point), None
    autocast = torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False) if autocast else nullcontext():
        U, V, W, b = weights
        x, h0, good = mask_nonfinite(x, h0)
        inputs = Inputs(x, W, b, U, V, h0)
        if reason := unsupported(activation=phi.nonlinearity, **inputs._asdict()):
            return reason, None
        method = Method(phi.nonlinearity, fixed_point.solver, fixed_point.backward)  # type: ignore[arg-type]
        output, report = equilibrium_scan(inputs, method)
    solution = as_solution(output, report)
    fixed_point.non_convergence.check(solution)
    return None, mask_trajectory(output, good, *report, solution.evaluations)
