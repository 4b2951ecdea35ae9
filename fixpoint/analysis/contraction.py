"""The convergence condition ||I + eta f'(z)||_2 < 1 of the inexact Newton method, exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fixpoint.derivatives import batch_jacobian

MatrixMap = Callable[[Tensor], Tensor]


class FeasibleEta(NamedTuple):
    """The open interval of eta that satisfy the condition, for each sample.

    lower, upper: its ends, (B,); NaN where no eta does, or z, phi(z) or J is not finite.
    feasible: whether any eta does, (B,).
    """

    lower: Tensor
    upper: Tensor
    feasible: Tensor


def contraction(phi: MatrixMap, z: Tensor, eta: float | Tensor) -> Tensor:
    """||I + eta f'(z)||_2 of each sample, (B,), f(z) = phi(z) - z, by singular values.

    Below 1 along the iterates, z <- z + eta f(z) converges locally at a linear rate. Cost is one
    D x D singular value decomposition a sample.

    Args:
        phi: map of (B, D) states, rows independent.
        z: (B, D).
        eta: a number or one a sample, (B,).

    Returns:
        NaN for a sample where z, phi(z) or J is not finite.

    Source: Zhang, Kag, Sullivan, Saligrama (2019), Equilibrated Recurrent Neural Network,
        Theorem 1.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import contraction
        >>> contraction(lambda z: 0.5 * z, torch.zeros(1, 2, dtype=torch.float64), eta=1.0)
        tensor([0.5000], dtype=torch.float64)
    """
    F, good = _residual_jacobian(phi, z)
    steps = torch.as_tensor(eta, dtype=F.dtype, device=F.device).reshape(-1, 1, 1)
    one = torch.eye(F.shape[1], dtype=F.dtype, device=F.device)
    norm = torch.linalg.matrix_norm(one + steps * F, 2)
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
    # 1 where S > 0, -1 where S < 0, 0 where it is indefinite.
    sign = (spectrum[:, 0] > 0).to(S.dtype) - (spectrum[:, -1] < 0).to(S.dtype)
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


def _residual_jacobian(phi: MatrixMap, z: Tensor) -> tuple[Tensor, Tensor]:
    """f'(z) = J - I in float64, (B, D, D), and whether z, phi(z) and J are finite, (B,).

    Where they are not, -I stands in, so that the other samples get their answer.
    """
    J = batch_jacobian(phi, z).detach().double()
    fz = phi(z).detach()
    good = z.isfinite().all(1) & fz.isfinite().all(1) & J.isfinite().all(2).all(1)
    one = torch.eye(J.shape[1], dtype=J.dtype, device=J.device)
    return torch.where(good[:, None, None], J, 0.0) - one, good
