"""The fused path of an ERNN whose equilibria are solved to a tolerance."""

from __future__ import annotations

import torch
from torch import Tensor

from fixpoint._torch import (
    has_values,
    is_exporting,
    is_ordinary,
    outside_graph,
)
from fixpoint.backward import Backward, Implicit
from fixpoint.fixed_point import FixedPoint
from fixpoint.models._parameters import first_parameter
from fixpoint.models.maps import EquilibriumMap, ManifoldMap, SelfFeedback
from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.models.ops.common.dispatch import without_autocast
from fixpoint.models.ops.common.plan import CallPlan
from fixpoint.models.ops.equilibrium.arguments import MAX_SIZE_ON_CUDA, Inputs, Method
from fixpoint.models.ops.equilibrium.autograd import run_equilibrium_scan, unsupported
from fixpoint.models.ops.equilibrium.results import as_solution
from fixpoint.models.ops.equilibrium.settings import unsupported_method
from fixpoint.models.rnn.scan import Trajectory, mask_trajectory


def why_not_fused(phi: EquilibriumMap, fixed_point: FixedPoint) -> str | None:
    """Return why no input takes the fused equilibrium scan, or None where some do."""
    if is_manifold(phi):
        exact = fixed_point.solver.has_tolerance and isinstance(fixed_point.backward, Implicit)
        return None if exact else "ManifoldMap is solved for all time steps at once with Implicit()"
    device = first_parameter(phi).device
    backward = _backward_here(fixed_point, device)
    if reason := unsupported_method(fixed_point.solver, backward, device):
        return reason
    n = phi.hidden_size
    if device.type == "cuda" and n > MAX_SIZE_ON_CUDA:
        return f"it takes at most {MAX_SIZE_ON_CUDA} units on a CUDA device, and the state has {n}"
    if not phi.defines("as_self_feedback"):
        return f"{type(phi).__name__} is not known to be sigma(U h + V h_prev + W x + b)"
    return None


def method_of(phi: EquilibriumMap, fixed_point: FixedPoint, device: torch.device) -> Method:
    """Return how the fused scan solves and differentiates; `why_not_fused` gives no reason."""
    backward = _backward_here(fixed_point, device)
    return Method(phi.nonlinearity, fixed_point.solver, backward)  # type: ignore[arg-type]


def fused_trajectory(
    plan: CallPlan,
    phi: EquilibriumMap,
    fixed_point: FixedPoint,
    x: Tensor,
    h0: Tensor,
    start: int,
    good: Tensor | None = None,
) -> tuple[str | None, Trajectory | None]:
    """Return either the reason against the fused path for these tensors, or the same as `scan`.

    x and h0 are finite; good: which states are, of `mask_nonfinite`. torch.compile leaves it out of
    its graph as a whole, not each time step's solve.
    """
    method = plan.method._replace(start=start, activation=phi.nonlinearity)
    given = phi, fixed_point, method, x, h0, good
    run = _manifold_trajectory if plan.path == "manifold" else _self_feedback_trajectory
    leaves = fixed_point.solver.has_tolerance or not fixed_point.compiles
    if leaves and torch.compiler.is_compiling() and not is_exporting():
        return outside_graph(run, *given)
    return run(*given)


def _self_feedback_trajectory(
    phi: EquilibriumMap,
    fixed_point: FixedPoint,
    method: Method,
    x: Tensor,
    h0: Tensor,
    good: Tensor | None,
) -> tuple[str | None, Trajectory | None]:
    weights: SelfFeedback = phi(read=lambda own: own.as_self_feedback())
    inputs = Inputs(x, weights.W, weights.b, weights.U, weights.V, h0)
    with without_autocast(x.device.type):
        if not is_ordinary(inputs):
            if not has_values(x):
                return "when a solve ends depends on values, and x has none", None
            if reason := unsupported(activation=method.activation, **inputs._asdict()):
                return reason, None
        output, end = run_equilibrium_scan(inputs, method)
        solution = as_solution(output, end)
        fixed_point.non_convergence.check(solution)
    return None, mask_trajectory(output, good, *end[:3], solution.evaluations)


def _backward_here(fixed_point: FixedPoint, device: torch.device) -> Backward:
    """Return Implicit() in place of a backward that is not fused where no gradient can be asked
    for.
    """
    solver, backward = fixed_point.solver, fixed_point.backward
    if torch.is_grad_enabled() or unsupported_method(solver, backward, device) is None:
        return backward
    return Implicit()


def is_manifold(phi: EquilibriumMap) -> bool:
    """Tell whether phi is that of `ManifoldMap`: a subclass may have another."""
    return getattr(type(phi), "bind", None) is ManifoldMap.bind


def _manifold_trajectory(
    phi: EquilibriumMap,
    fixed_point: FixedPoint,
    method: Method,
    x: Tensor,
    h0: Tensor,
    good: Tensor | None,
) -> tuple[None, Trajectory]:
    return None, phi(read=lambda own: _read_manifold_trajectory(own, fixed_point, x, h0, good))


def _read_manifold_trajectory(
    phi: ManifoldMap, fixed_point: FixedPoint, x: Tensor, h0: Tensor, good: Tensor | None
) -> Trajectory:
    """Return s_t = h_t + h_{t-1} of all time steps as one batch of equilibria, h_t as their sum."""
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
