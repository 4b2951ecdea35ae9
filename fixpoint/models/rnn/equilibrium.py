"""The fused path of an ERNN whose equilibria are solved to a tolerance."""

from __future__ import annotations

import torch
from torch import Tensor

from fixpoint._torch import is_exporting, outside_graph
from fixpoint.backward import Backward, Implicit
from fixpoint.fixed_point import FixedPoint
from fixpoint.models.maps import EquilibriumMap, ManifoldMap
from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.models.ops.common.dispatch import without_autocast
from fixpoint.models.ops.equilibrium.arguments import MAX_SIZE_ON_CUDA, Inputs, Method
from fixpoint.models.ops.equilibrium.autograd import equilibrium_scan, unsupported
from fixpoint.models.ops.equilibrium.results import as_solution
from fixpoint.models.ops.equilibrium.settings import too_many_units, unsupported_method
from fixpoint.models.rnn.scan import Trajectory, mask_nonfinite, mask_trajectory


def why_not_fused(phi: EquilibriumMap, fixed_point: FixedPoint) -> str | None:
    """Why no input takes the fused equilibrium scan, or None where some do."""
    if _is_manifold(phi):
        exact = fixed_point.solver.has_tolerance and isinstance(fixed_point.backward, Implicit)
        return None if exact else "ManifoldMap is solved for all time steps at once with Implicit()"
    device = next(phi.parameters()).device
    backward = _backward_here(fixed_point, device)
    if reason := unsupported_method(fixed_point.solver, backward, device):
        return reason
    n = phi.hidden_size
    if device.type == "cuda" and n > MAX_SIZE_ON_CUDA:
        return f"it takes at most {MAX_SIZE_ON_CUDA} units on a CUDA device, and the state has {n}"
    if not phi.defines("as_self_feedback"):
        return f"{type(phi).__name__} is not known to be sigma(U h + V h_prev + W x + b)"
    return None


def fused_trajectory(
    phi: EquilibriumMap, fixed_point: FixedPoint, x: Tensor, h0: Tensor
) -> tuple[str | None, Trajectory | None]:
    """Either the reason against the fused path, or the same as `scan`.

    torch.compile leaves it out of its graph as a whole, not each time step's solve.
    """
    if torch.compiler.is_compiling() and not is_exporting() and _is_whole(phi, fixed_point):
        return outside_graph(_fused_trajectory, phi, fixed_point, x, h0)
    return _fused_trajectory(phi, fixed_point, x, h0)


def _is_whole(phi: EquilibriumMap, fixed_point: FixedPoint) -> bool:
    """Whether a graph leaves out all time steps at once."""
    if not fixed_point.compiles:
        return True
    return fixed_point.solver.has_tolerance and why_not_fused(phi, fixed_point) is None


def _fused_trajectory(
    phi: EquilibriumMap, fixed_point: FixedPoint, x: Tensor, h0: Tensor
) -> tuple[str | None, Trajectory | None]:
    if isinstance(phi, ManifoldMap) and _is_manifold(phi):
        reason = why_not_fused(phi, fixed_point)
        return reason, None if reason else _manifold_trajectory(phi, fixed_point, x, h0)
    weights, device = phi.as_self_feedback(), x.device.type
    if weights is None:
        return why_not_fused(phi, fixed_point), None
    with without_autocast(device):
        U, V, W, b = weights
        x, h0, good = mask_nonfinite(x, h0)
        inputs = Inputs(x, W, b, U, V, h0)
        if reason := unsupported(activation=phi.nonlinearity, **inputs._asdict()):
            return reason, None
        backward = _backward_here(fixed_point, x.device)
        method = Method(phi.nonlinearity, fixed_point.solver, backward)  # type: ignore[arg-type]
        if reason := too_many_units(method, inputs):
            return reason, None
        output, end = equilibrium_scan(inputs, method)
    linearizations = int(fixed_point.solver.needs_derivatives)
    solution = as_solution(output, end, linearizations=linearizations)
    fixed_point.non_convergence.check(solution)
    return None, mask_trajectory(output, good, *end[:3], solution.evaluations)


def _backward_here(fixed_point: FixedPoint, device: torch.device) -> Backward:
    """Implicit() in place of a backward that is not fused where no gradient can be asked for."""
    solver, backward = fixed_point.solver, fixed_point.backward
    if torch.is_grad_enabled() or unsupported_method(solver, backward, device) is None:
        return backward
    return Implicit()


def _is_manifold(phi: EquilibriumMap) -> bool:
    """Whether phi is that of `ManifoldMap`: a subclass may have another."""
    return getattr(type(phi), "bind", None) is ManifoldMap.bind


def _manifold_trajectory(
    phi: ManifoldMap, fixed_point: FixedPoint, x: Tensor, h0: Tensor
) -> Trajectory:
    """s_t = h_t + h_{t-1} of all time steps as one batch of equilibria, h_t as their sum."""
    x, h0, good = mask_nonfinite(x, h0)
    u, sigma = phi.input_projection(x), ACTIVATIONS[phi.nonlinearity]
    rows, U = u.flatten(0, 1), phi.U
    solution = fixed_point(
        lambda s: sigma(torch.addmm(rows, s, U.mT)) / phi.gamma, torch.zeros_like(rows)
    )
    sign = 1 - 2 * (torch.arange(1, len(x) + 1, device=x.device) % 2).to(u)[:, None, None]
    h = sign * ((sign * solution.z.view_as(u)).cumsum(0) + h0)
    shape = x.shape[:2]
    return mask_trajectory(
        h,
        good,
        solution.iterations.view(shape),
        None if solution.residual is None else solution.residual.view(shape),
        solution.result.view(shape),
        solution.evaluations,
    )
