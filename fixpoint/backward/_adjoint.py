"""The adjoint u = J^T u + g of a solve, itself differentiable by the same rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fixpoint.captured import captured_tensors, stop_gradient_at
from fixpoint.derivatives import Derivatives, MatrixMap, batch_vjp_of_units
from fixpoint.solution import Solution
from fixpoint.solvers import Solver


class AdjointProblem(NamedTuple):
    """What the backward pass of one solve needs.

    phi; z, (B, D), a detached z*; fz = phi(z) with its graph; which samples are lost, (B, 1); the
    solver of the adjoint; a start for it as a function of g, or None; what takes its `Solution`.
    """

    phi: MatrixMap
    fz: Tensor
    z: Tensor
    lost: Tensor
    solver: Solver
    start: Callable[[Tensor], Tensor] | None
    finish: Callable[[Solution], None]


class Equilibrium(torch.autograd.Function):
    """z* as a function of fz = phi(z), or of the tensors that phi closes over.

    A first derivative passes u on to fz, whose graph carries it further. That graph holds z
    constant; so for a derivative that will be differentiated again, phi is evaluated at the z*
    that depends on `outer`, and the gradient goes to `outer` itself.
    """

    @staticmethod
    def forward(ctx: Any, problem: AdjointProblem, fz: Tensor, *outer: Tensor) -> Tensor:
        z = problem.z.detach().clone()
        ctx.problem = problem  # its graph leads to `outer`, not to the output: no reference cycle
        ctx.save_for_backward(z, *outer)
        ctx.set_materialize_grads(False)
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * len(ctx.needs_input_grad)
        problem: AdjointProblem = ctx.problem
        g = torch.where(problem.lost, 0.0, g)
        if not torch.is_grad_enabled():
            u = _adjoint(problem, problem.fz, problem.z, g)
            return None, u, *(None for _ in ctx.needs_input_grad[2:])
        z, *outer = ctx.saved_tensors
        fz = problem.phi(z)
        u = _adjoint(problem, fz, z, g)
        with stop_gradient_at([z, *outer]):
            return None, None, *_vjp(fz, outer, u)


def _adjoint(problem: AdjointProblem, fz: Tensor, z: Tensor, g: Tensor) -> Tensor:
    """u = J^T u + g of each sample, (B, D), differentiable under grad mode."""
    # With max |g| = 1 neither tiny nor huge cotangents leave the range of the dtype.
    size = g.detach().abs().amax(1, keepdim=True) if g.shape[1] else g.detach()
    unit = g / torch.where(size > 0, size, 1.0)

    def adjoint_map(u: Tensor) -> Tensor:
        (jtu,) = _vjp(fz, [z], u)
        return unit if jtu is None else jtu + unit

    with torch.no_grad():
        u0 = unit.detach() if problem.start is None else problem.start(unit.detach())
        derivatives = _AdjointDerivatives(adjoint_map, fz, z)
        adjoint = problem.solver.run(adjoint_map, u0, derivatives=derivatives)
    problem.finish(adjoint)
    u = adjoint.z.detach()
    if torch.is_grad_enabled():
        # The adjoint is a fixed point too: its gradient follows from the same rule.
        u = u.requires_grad_()
        psi, outer = captured_tensors(adjoint_map, u)
        if outer:
            again = problem._replace(phi=adjoint_map, fz=psi, z=u, start=None)
            u = Equilibrium.apply(again, psi, *outer)
    return u * size


class _AdjointDerivatives(Derivatives):
    """The Jacobian of u -> J^T u + g is J^T, whatever u is."""

    def __init__(self, phi: MatrixMap, fz: Tensor, z: Tensor) -> None:
        super().__init__(phi)
        self.fz, self.z = fz, z

    def jacobian(self, z: Tensor) -> Tensor:
        self.products += z.shape[1]
        return batch_vjp_of_units(self.fz, self.z).mT

    def jvp(self, z: Tensor, v: Tensor) -> Tensor:
        self.products += 1
        (jtv,) = _vjp(self.fz, [self.z], v)
        return torch.zeros_like(v) if jtv is None else jtv


def _vjp(fz: Tensor, inputs: list[Tensor], u: Tensor) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(
        fz,
        inputs,
        u,
        retain_graph=True,
        create_graph=torch.is_grad_enabled(),
        allow_unused=True,
    )
