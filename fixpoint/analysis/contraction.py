"""The convergence condition ||I + eta f'(z)||_2 < 1 of the inexact Newton method, exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fixpoint._validation import at_least
from fixpoint.analysis.arnoldi import hessenberg, largest, unit
from fixpoint.derivatives import Derivatives, batch_jacobian

MatrixMap = Callable[[Tensor], Tensor]


class FeasibleEta(NamedTuple):
    """The open interval of eta that satisfy the condition, for each sample.

    lower, upper: its ends, (B,); NaN where no eta does, or z, phi(z) or J is not finite.
    feasible: whether any eta does, (B,).
    """

    lower: Tensor
    upper: Tensor
    feasible: Tensor


def contraction(
    phi: MatrixMap,
    z: Tensor,
    eta: float | Tensor,
    *,
    dense: int = 512,
    memory: int = 64,
    generator: torch.Generator | None = None,
) -> Tensor:
    """||I + eta f'(z)||_2 of each sample, (B,), f(z) = phi(z) - z.

    Below 1 along the iterates, z <- z + eta f(z) converges locally at a linear rate.

    With D <= `dense` by singular values, exact to rounding, at the cost of one D x D decomposition
    a sample. Above that by Lanczos' method on A^T A, A = I + eta f', in `memory` products A v (jvp;
    phi must support forward-mode differentiation) and A^T v (vjp) from a random start. That value
    is never above the norm; whatever A is, the expected relative error of its square is at most
    0.103 (ln(D (memory - 1)^4) / (memory - 1))^2, for D = 1000 1.5e-2 at memory = 64 and 4.4e-3
    at 128. Where the largest singular value stands out it is exact to rounding.

    Args:
        phi: map of (B, D) states, rows independent.
        z: (B, D).
        eta: a number or one a sample, (B,).
        dense: largest D whose singular values are computed.
        memory: vectors of the Lanczos basis, each (B, D).
        generator: of the random start.

    Returns:
        NaN for a sample where z, phi(z) or J is not finite.

    Source: Zhang, Kag, Sullivan, Saligrama (2019), Equilibrated Recurrent Neural Network,
        Theorem 1; Kuczynski and Wozniakowski (1992), Estimating the largest eigenvalue by the
        power and Lanczos algorithms with a random start, Theorem 3.2.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import contraction
        >>> contraction(lambda z: 0.5 * z, torch.zeros(1, 2, dtype=torch.float64), eta=1.0)
        tensor([0.5000], dtype=torch.float64)
    """
    at_least(0, dense=dense)
    at_least(2, memory=memory)
    if z.shape[1] > dense:
        return _lanczos_norm(phi, z, eta, min(memory, z.shape[1]), generator)
    F, good = _residual_jacobian(phi, z)
    steps = torch.as_tensor(eta, dtype=F.dtype, device=F.device).reshape(-1, 1, 1)
    one = torch.eye(F.shape[1], dtype=F.dtype, device=F.device)
    norm = torch.linalg.matrix_norm(one + steps * F, 2)
    return torch.where(good, norm, torch.nan).to(z.dtype)


def _lanczos_norm(
    phi: MatrixMap,
    z: Tensor,
    eta: float | Tensor,
    memory: int,
    generator: torch.Generator | None,
) -> Tensor:
    """||A||_2 of each sample, A = (1 - eta) I + eta J, from below."""
    with torch.enable_grad():
        start = z.detach().requires_grad_()
        fz = phi(start)
    wide = torch.promote_types(z.dtype, torch.float32)
    steps = torch.as_tensor(eta, dtype=wide, device=z.device).reshape(-1, 1)
    derivatives = Derivatives(phi)

    def gram(v: Tensor) -> Tensor:
        with torch.no_grad():
            Jv = derivatives.jvp(z.detach(), v.to(z.dtype)).to(wide)
        Av = torch.lerp(v, Jv, steps)
        if not fz.requires_grad:
            return (1 - steps) * Av
        (Jt,) = torch.autograd.grad(fz, start, Av.to(z.dtype), retain_graph=True, allow_unused=True)
        return torch.lerp(Av, torch.zeros_like(Av) if Jt is None else Jt.to(wide), steps)

    v = torch.randn(z.shape, dtype=wide, device=z.device, generator=generator)
    norm = largest(hessenberg(gram, unit(v), memory)).sqrt()
    good = z.isfinite().all(1) & fz.detach().isfinite().all(1)
    return torch.where(good, norm, torch.nan).to(z.dtype)


def feasible_eta(phi: MatrixMap, z: Tensor) -> FeasibleEta:
    """All eta with ||I + eta f'(z)||_2 < 1, for each sample.

    With F = f'(z) and S = -(F + F^T), ||I + eta F|| < 1 means eta^2 F^T F < eta S as quadratic
    forms. Some eta > 0 does so iff S is positive definite, and then exactly those in (0, m), m
    the smallest generalised eigenvalue of S v = m F^T F v. If -S is positive definite the same
    holds with eta < 0. Otherwise none does, though a norm other than the 2-norm may allow one.

    Args:
        phi: map of (B, D) states, rows independent.
        z: (B, D).

    Example:
        >>> import torch
        >>> from fixpoint.analysis import feasible_eta
        >>> feasible_eta(lambda z: 0.5 * z, torch.zeros(1, 2)).upper
        tensor([4.])
    """
    F, good = _residual_jacobian(phi, z)
    S = -(F + F.mT)
    spectrum = torch.linalg.eigvalsh(S)
    # An eigenvalue within the rounding of J and of S counts as 0, as where F is singular.
    eps = max(torch.finfo(z.dtype).eps, torch.finfo(S.dtype).eps)
    size = 2 + spectrum.abs().amax(1)
    rounding = 4 * z.shape[1] ** 0.5 * eps * size
    # 1 where S > 0, -1 where S < 0, 0 where it is not definite.
    sign = (spectrum[:, 0] > rounding).to(S.dtype)
    sign = sign - (spectrum[:, -1] < -rounding).to(S.dtype)
    feasible = (sign != 0) & good
    sign = torch.where(feasible, sign, 0.0)
    definite = sign[:, None, None] * S
    one = torch.eye(F.shape[1], dtype=F.dtype, device=F.device)
    L, _ = torch.linalg.cholesky_ex(torch.where(feasible[:, None, None], definite, one))
    # |S| = L L^T, so 1 / m is the largest eigenvalue of (F L^-T)^T (F L^-T).
    X = torch.linalg.solve_triangular(L, F.mT, upper=False)
    m = 1 / torch.linalg.matrix_norm(X, 2) ** 2
    zero, nan = torch.zeros_like(m), torch.full_like(m, torch.nan)
    lower = torch.where(sign > 0, zero, torch.where(sign < 0, -m, nan)).to(z.dtype)
    upper = torch.where(sign > 0, m, torch.where(sign < 0, zero, nan)).to(z.dtype)
    return FeasibleEta(lower, upper, feasible)


def infeasible_reason(phi: MatrixMap, z: Tensor) -> tuple[str, ...]:
    """Why no eta satisfies ||I + eta f'(z)||_2 < 1, a sentence a sample, "" where some eta does.

    Source: see `feasible_eta`; a norm other than the 2-norm may allow a small eta iff all
        eigenvalues of f' have real parts of one sign, for then rho(I + eta f') < 1.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import infeasible_reason
        >>> phi = lambda z: z * torch.tensor([0.5, 2.0])
        >>> print(infeasible_reason(phi, torch.zeros(1, 2))[0][:49])
        the eigenvalues of (f' + f'^T) / 2 span -0.5 .. 1
    """
    F, good = _residual_jacobian(phi, z)
    feasible = feasible_eta(phi, z).feasible
    ends = torch.linalg.eigvalsh((F + F.mT) / 2)[:, [0, -1]]
    real = torch.linalg.eigvals(F).real
    sides = torch.where((real < 0).all(1), 1, torch.where((real > 0).all(1), -1, 0))
    rows = zip(good.tolist(), feasible.tolist(), ends.tolist(), sides.tolist(), strict=True)
    return tuple(_reason(*row) for row in rows)


def _reason(good: bool, feasible: bool, ends: list[float], side: int) -> str:
    if feasible:
        return ""
    if not good:
        return "z, phi(z) or the Jacobian is not finite"
    low, high = (f"{end:.3g}" for end in ends)
    span = f"the eigenvalues of (f' + f'^T) / 2 span {low} .. {high}"
    if side:
        sign = "positive" if side > 0 else "negative"
        return f"{span}; in another norm a small {sign} eta does: those of f' lie on one side of 0"
    return f"{span}; no other norm helps: those of f' do not lie on one side of 0"


def _residual_jacobian(phi: MatrixMap, z: Tensor) -> tuple[Tensor, Tensor]:
    """f'(z) = J - I in float64, (B, D, D), and whether z, phi(z) and J are finite, (B,).

    Where they are not, -I stands in, so that the other samples get their answer.
    """
    J = batch_jacobian(phi, z).detach().double()
    fz = phi(z).detach()
    good = z.isfinite().all(1) & fz.isfinite().all(1) & J.isfinite().all(2).all(1)
    one = torch.eye(J.shape[1], dtype=J.dtype, device=J.device)
    return torch.where(good[:, None, None], J, 0.0) - one, good
