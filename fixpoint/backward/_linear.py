"""Linear fixed-point problem x = A x + b with A = J^T or J, and the information for its solver."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from fixpoint.derivatives import Derivatives, MatrixMap
from fixpoint.solution import Solution
from fixpoint.solvers import Newton, Solver


class Operator(Protocol):
    """A linear map of (B, D) matrices; see `fixpoint.derivatives.Linearization`."""

    def jvp(self, v: Tensor) -> Tensor:
        """Return a v, (B, D)."""

    def vjp(self, u: Tensor) -> Tensor:
        """Return a^T u, (B, D)."""

    def jacobian(self) -> Tensor:
        """Return a of each sample, (B, D, D)."""


class Transposed:
    """A^T of an operator A."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator

    def jvp(self, v: Tensor) -> Tensor:
        return self.operator.vjp(v)

    def vjp(self, u: Tensor) -> Tensor:
        return self.operator.jvp(u)

    def jacobian(self) -> Tensor:
        return self.operator.jacobian().mT


class Scaled:
    """S^-1 A S with a positive number for each sample in S, (B, 1).

    Exact where A couples samples; where it does not, it is A.
    """

    def __init__(self, operator: Operator, scale: Tensor) -> None:
        self.operator, self.scale = operator, scale

    def jvp(self, v: Tensor) -> Tensor:
        return self.operator.jvp(v * self.scale) / self.scale

    def vjp(self, u: Tensor) -> Tensor:
        return self.operator.vjp(u / self.scale) * self.scale

    def jacobian(self) -> Tensor:
        return self.operator.jacobian()


class AsOne:
    """An operator on (B, D) as one on (1, B D)."""

    def __init__(self, operator: Operator, shape: torch.Size) -> None:
        self.operator, self.shape = operator, shape

    def jvp(self, v: Tensor) -> Tensor:
        return self.operator.jvp(v.view(self.shape)).view(1, -1)

    def vjp(self, u: Tensor) -> Tensor:
        return self.operator.vjp(u.view(self.shape)).view(1, -1)

    def jacobian(self) -> Tensor:
        raise NotImplementedError("Newton-Krylov needs products alone")


class LinearDerivatives(Derivatives):
    """The Jacobian of x -> A x + b, which is A, whatever x is.

    An adjoint solver finds here which problem it is given.

    Attributes:
        operator: A.
        transposed: whether A is J^T of the map that was solved, as in reverse mode, or J.
        at: z where J is taken, (B, D); None where rows are those of several instances.
    """

    def __init__(
        self, phi: MatrixMap, operator: Operator, *, at: Tensor | None, transposed: bool
    ) -> None:
        super().__init__(phi)
        self.operator, self.at, self.transposed = operator, at, transposed

    def evaluate(self, z: Tensor) -> Tensor:
        return self.phi(z)

    def jacobian(self, z: Tensor) -> Tensor:
        self.products += z.shape[1]
        return self.operator.jacobian()

    def jvp(self, z: Tensor, v: Tensor) -> Tensor:
        self.products += 1
        return self.operator.jvp(v)


def row_scale(b: Tensor) -> Tensor:
    """Return max |b| of each row, (B, 1), and for a row of zeros that of the largest row.

    Divided by it neither tiny nor huge right sides leave the range of the dtype.
    """
    if not b.numel():
        return b.new_ones(len(b), 1)
    size = b.detach().abs().amax(1, keepdim=True).nan_to_num(nan=0.0, posinf=0.0)
    size = torch.where(size > 0, size, size.amax())
    return torch.where(size > 0, size, 1.0)


def couples_rows(operator: Operator, like: Tensor) -> bool:
    """Tell whether a row of A x depends on other rows of x, by two products for each binary digit
    of their numbers: those of two rows differ in one.
    """
    number = torch.arange(len(like), device=like.device)[:, None]
    probe = 1.5 + torch.arange(like.numel(), device=like.device).cos().view_as(like).to(like)
    for digit in range(max(len(like) - 1, 0).bit_length()):
        ones = (number >> digit) % 2 == 1
        for others in (ones, ~ones):
            image = operator.jvp(torch.where(others, probe, 0.0))
            if bool(torch.where(others, 0.0, image).any()):
                return True
    return False


def solve_as_one(solver: Solver, operator: Operator, b: Tensor, rows: Solution) -> Solution:
    """Return the solution of x = A x + b with all rows as one state, where that converges.

    Args:
        rows: the attempt by rows, which is returned elsewhere.
    """

    one, flat = AsOne(operator, b.shape), b.view(1, -1)

    def affine(x: Tensor) -> Tensor:
        return one.jvp(x) + flat

    krylov = Newton(
        linear="gmres", rtol=solver.rtol or solver.atol, atol=0.0, max_iter=solver.max_iter
    )
    derivatives = LinearDerivatives(affine, one, at=None, transposed=False)
    whole = krylov.run(affine, flat, derivatives=derivatives)
    if not bool(whole.converged):
        return rows
    return replace(
        rows,
        z=whole.z.view_as(b),
        residual=whole.residual.expand(len(b)) if whole.residual is not None else None,
        iterations=rows.iterations + whole.iterations,
        evaluations=rows.evaluations + whole.evaluations,
        products=rows.products + whole.products,
        result=torch.zeros_like(rows.result),
        stall=None if rows.stall is None else torch.zeros_like(rows.stall),
    )
