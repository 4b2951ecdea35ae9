"""Solvers and backwards of the equilibrium scan, and their settings for its kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from fixpoint.backward import Implicit, Unrolled
from fixpoint.models.ops.common import dispatch as op
from fixpoint.models.ops.equilibrium.arguments import MAX_MEMORY_ON_CUDA, IterationSettings
from fixpoint.solvers import Anderson, Broyden, InexactNewton, Picard, Solver
from fixpoint.solvers.base import ALONE

METHODS = {
    Picard: "plain",
    InexactNewton: "plain",
    Anderson: "anderson",
    Broyden: "broyden",
}


def unsupported_method(solver: Solver, backward: object, device: torch.device) -> str | None:
    """Return why the scan cannot take this solver and backward on this device, or None where it
    can.
    """
    if device.type != "cuda" and not op.has_numba():
        return "it needs numba, which is not installed"
    if device.type == "cuda" and (reason := _why_not_on_cuda(solver, backward)):
        return reason
    if isinstance(backward, Unrolled):
        return _why_not_unrolled(solver, backward)
    if not isinstance(backward, Implicit):
        return f"it differentiates by Implicit() or Unrolled(), not {type(backward).__name__}"
    if backward.failed != "zero":
        return f'samples that fail have no gradient there, and it has failed="{backward.failed}"'
    if backward.reuse_factors:
        return "it starts each adjoint solve at its right side, without reuse_factors"
    for what, used in (("solver", solver), ("adjoint solver", backward.solver)):
        if used is not None and (reason := _unsupported_solver(used)):
            return f"its {what} {reason}"
    if isinstance(solver, InexactNewton) and solver.timesteps and backward.solver is None:
        return "its adjoint needs a solver without timesteps: give one to Implicit(solver)"
    return None


def _why_not_on_cuda(solver: Solver, backward: object) -> str | None:
    if not isinstance(backward, Implicit):
        return f"it differentiates by Implicit() on a CUDA device, not {type(backward).__name__}"
    for what, used in (("solver", solver), ("adjoint solver", backward.solver)):
        if used is not None and type(used) not in (Picard, InexactNewton, Anderson):
            allowed = "Picard, Anderson or InexactNewton"
            return f"its {what} must be {allowed} on a CUDA device, not {type(used).__name__}"
        if isinstance(used, Anderson) and used.memory > MAX_MEMORY_ON_CUDA:
            return f"its {what} must have memory of at most {MAX_MEMORY_ON_CUDA} on a CUDA device"
    return None


def _unsupported_solver(solver: Solver) -> str | None:
    name = type(solver).__name__
    if type(solver) not in METHODS:
        known = ", ".join(kind.__name__ for kind in METHODS)
        return f"must be one of {known}, not {name}"
    if not solver.has_tolerance:
        return f"must stop at a tolerance, and {name} has rtol = atol = 0"
    if isinstance(solver, Anderson) and solver.ridge > 0:
        return "must have ridge=0"
    return _unsupported_option(solver)


def _why_not_unrolled(solver: Solver, backward: Unrolled) -> str | None:
    if type(solver) not in (Picard, InexactNewton):
        return f"it unrolls the updates of Picard and InexactNewton, not {type(solver).__name__}"
    if backward.last is not None:
        return f"it unrolls all updates, not the last {backward.last}"
    reason = _unsupported_option(solver)
    return f"its solver {reason}" if reason else None


def _unsupported_option(solver: Solver) -> str | None:
    plain = {"norm": None, "record": None, "keep_best": True, "check_every": 1} | ALONE
    for option, default in plain.items():
        if getattr(solver, option) != default:
            return f"must have {option}={default!r}"
    return None


def steps_of(solver: Solver, start: int, T: int, device: torch.device | None = None) -> Tensor:
    """Return the weight of phi(z) in each update, or beta of Anderson mixing, (T or 1, max_iter).

    Of T time steps from the index `start` on.
    """
    if isinstance(solver, InexactNewton):
        return torch.atleast_2d(solver.steps_until(start + T, start))
    beta = solver.beta if isinstance(solver, Picard | Anderson) else 1.0
    return torch.full((1, solver.max_iter), beta, dtype=torch.float64, device=device)


def iteration_of(solver: Solver, start: int, T: int, like: Tensor) -> IterationSettings:
    """Return how a kernel solves T time steps from `start` on, of states like one, (B, n)."""
    method, memory, growth, n = METHODS[type(solver)], 0, 0.0, like.shape[1]
    if isinstance(solver, Anderson):
        memory = min(solver.memory, n)
    if isinstance(solver, Broyden):
        memory, growth = solver.most_factors(n, like.dtype), solver.growth
    steps = steps_of(solver, start, T, like.device).detach().to(like.device)
    undamped = isinstance(solver, Picard) and solver.beta == 1
    return IterationSettings(steps, memory, solver.rtol, solver.atol, method, growth, undamped)
