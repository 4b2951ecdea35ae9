"""The scalar equilibrium h = tanh(h + alpha) = Phi(alpha) and its derivatives, to rounding."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fixpoint._torch import tangents_of_outer_levels

EXPANDING_BAND = math.atanh(math.sqrt(0.5)) - math.sqrt(0.5)
"""0.174267...: |Phi'(alpha)| > 1 iff |alpha| is below it, for Phi' = (1 - h^2) / h^2 is 1 at
h = 1 / sqrt(2)."""

_SERIES_BELOW = 1e-10
_SATURATED = 40.0


def tanh_equilibrium(alpha: Tensor) -> Tensor:
    """Compute Phi(alpha), the one solution h of h = tanh(h + alpha), of any shape.

    Phi is odd and increasing. Relative error below 1e-15 in float64 for every alpha, the smallest
    and largest included: with u = h + alpha the inverse u - tanh(u) = alpha is solved, which is
    well conditioned where tanh(h + alpha) - h is flat. Phi(+-inf) = +-1, Phi(nan) = nan. Lower
    precisions are computed in float64 and rounded once. Derivatives of any order exist by
    autograd; those at 0 are infinite.

    Raises:
        TypeError: alpha is not a floating-point tensor.

    Source: Zhang, Kag, Sullivan, Saligrama (2019), Equilibrated Recurrent Neural Network,
        Eq. val_h, one unit of it with alpha = V h_{t-1} + W x_t + b.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import tanh_equilibrium
        >>> alpha = torch.tensor([0.0, 1e-6, 0.5], dtype=torch.float64)
        >>> tanh_equilibrium(alpha)
        tensor([0.0000, 0.0144, 0.8812], dtype=torch.float64)
    """
    _check(alpha)
    return _Phi.apply(alpha.double()).to(alpha.dtype)


def tanh_equilibrium_derivative(alpha: Tensor) -> Tensor:
    """Compute Phi'(alpha) = (1 - h^2) / h^2 = 1 / sinh^2(h + alpha), of any shape.

    Relative error below 1e-14 in float64 for every alpha; inf at 0, 0 at +-inf. It exceeds 1
    within `EXPANDING_BAND`, where gradients through time can grow. Differentiable to any order.

    Raises:
        TypeError: alpha is not a floating-point tensor.

    Source: implicit function theorem on Zhang et al. (2019), Eq. val_h; the paper's figure of
        Phi and its derivative.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import EXPANDING_BAND, tanh_equilibrium_derivative
        >>> alpha = torch.tensor([0.0, EXPANDING_BAND, 5.0], dtype=torch.float64)
        >>> tanh_equilibrium_derivative(alpha)
        tensor([       inf, 1.0000e+00, 2.4578e-05], dtype=torch.float64)
    """
    _check(alpha)
    return _PhiPrime.apply(alpha.double()).to(alpha.dtype)


def _check(alpha: Tensor) -> None:
    if not isinstance(alpha, Tensor) or not alpha.dtype.is_floating_point:
        given = alpha.dtype if isinstance(alpha, Tensor) else type(alpha).__name__
        raise TypeError(
            f"alpha must be a floating-point tensor; got {given}: pass torch.tensor(..., "
            "dtype=torch.float64)"
        )


class _Phi(torch.autograd.Function):
    @staticmethod
    def forward(alpha: Tensor) -> Tensor:
        return torch.tanh(_drive(alpha.abs())).copysign(alpha)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return _times(g, _PhiPrime.apply(*ctx.saved_tensors))

    @staticmethod
    def jvp(ctx: Any, v: Tensor) -> Tensor:
        with tangents_of_outer_levels(ctx) as (alpha,):
            return _times(v, _PhiPrime.apply(alpha))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], alpha: Tensor) -> tuple[Tensor, int]:
        return _Phi.apply(alpha), in_dims[0]


class _PhiPrime(torch.autograd.Function):
    @staticmethod
    def forward(alpha: Tensor) -> Tensor:
        a = alpha.abs()
        u = _drive(a)
        # exp(-2 u), u = h + a, as a product: u itself is rounded, and exp makes its absolute
        # error a relative one.
        E = torch.exp(-2 * a) * torch.exp(-2 * torch.tanh(u))
        return torch.where(u < 1, torch.sinh(u) ** -2, 4 * E / (1 - E) ** 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return _times(g, _second(*ctx.saved_tensors))

    @staticmethod
    def jvp(ctx: Any, v: Tensor) -> Tensor:
        with tangents_of_outer_levels(ctx) as (alpha,):
            return _times(v, _second(alpha))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], alpha: Tensor) -> tuple[Tensor, int]:
        return _PhiPrime.apply(alpha), in_dims[0]


def _second(alpha: Tensor) -> Tensor:
    """Compute Phi'' = -2 Phi' / Phi^3, from Phi' = Phi^-2 - 1."""
    return -2 * _PhiPrime.apply(alpha) / _Phi.apply(alpha) ** 3


def _times(g: Tensor, slope: Tensor) -> Tensor:
    """Multiply g by the slope; 0 where it is infinite and g = 0, a sample outside the loss."""
    return g * torch.where(slope.isinf() & (g == 0), 0.0, slope)


def _drive(a: Tensor) -> Tensor:
    """Compute u >= 0 with u - tanh(u) = a, for a >= 0 in float64."""
    a = a.clamp(max=_SATURATED)  # tanh is 1 from 19 on
    s = _cube_root(3 * a)
    q = s * s
    series = s * (1 + q * (2 / 15 + q * 3 / 175))
    u = torch.where(a < 1, series, a + torch.tanh(a + 1))
    u = torch.where(a < _SERIES_BELOW, 1.0, u)
    for _ in range(5):
        u = u - (_excess(u) - a) / torch.tanh(u) ** 2
    return torch.where(a < _SERIES_BELOW, series, u)


def _cube_root(x: Tensor) -> Tensor:
    s = torch.where(x > 0, x ** (1 / 3), 1.0)
    # 1/3 is rounded, which the power of a tiny number magnifies: one Newton step.
    return torch.where(x == 0, x, s - (s - x / s**2) / 3)


def _excess(u: Tensor) -> Tensor:
    """Return u - tanh(u) for u > 0 without cancellation.

    tanh(u) = u / (1 + c) with the continued fraction c = u^2 / (3 + u^2 / (5 + ...)), Lambert
    (1761), whose terms are all positive: u - tanh(u) = u c / (1 + c).
    """
    q = u * u
    c = torch.zeros_like(u)
    for odd in range(25, 1, -2):
        c = q / (odd + c)
    return torch.where(u < 2, u * c / (1 + c), u - torch.tanh(u))
