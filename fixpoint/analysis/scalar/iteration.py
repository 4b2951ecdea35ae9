"""Equilibrium of a user's scalar map, and the steps of plain and Newton iteration to it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fixpoint._validation import at_least, non_negative, positive
from fixpoint.analysis.scalar.tanh import tanh_equilibrium
from fixpoint.backward import Implicit
from fixpoint.fixed_point import FixedPoint
from fixpoint.solvers import Newton

ScalarMap = Callable[[Tensor, Tensor], Tensor]
"""phi(h, alpha), elementwise."""

_BLOCK = 256


def scalar_equilibrium(
    phi: ScalarMap, alpha: Tensor, *, lower: float = -1.0, upper: float = 1.0
) -> Tensor:
    """Compute h = phi(h, alpha) for each number of alpha, of any shape, with lower <= h <= upper.

    Newton's method kept inside a shrinking bracket, by bisection where it is slow: it cannot
    fail where phi is continuous and maps [lower, upper] into itself. Then h is exact up to the
    rounding of phi over |1 - phi'|. Where several equilibria exist one of them is returned. Its
    derivatives, of any order, follow from the implicit function theorem.

    Args:
        phi: acts on each number alone; differentiable in h.
        alpha: floating-point tensor.
        lower, upper: bracket of h; for a bounded activation its range.

    Returns:
        NaN where phi(h, alpha) - h does not change sign between lower and upper.

    Raises:
        ValueError: lower is not below upper.

    Source: Zhang, Kag, Sullivan, Saligrama (2019), Equilibrated Recurrent Neural Network, Eq. h
        for one unit; Press et al. (2007), Numerical recipes, section 9.4 (safeguarded Newton).

    Example:
        >>> import torch
        >>> from fixpoint.analysis import scalar_equilibrium
        >>> alpha = torch.tensor([0.5, 1.0])
        >>> scalar_equilibrium(lambda h, alpha: torch.cos(alpha * h), alpha, lower=0, upper=1)
        tensor([0.9004, 0.7391])
    """
    if not lower < upper:
        raise ValueError(f"lower must be below upper; got {lower} and {upper}")
    flat = alpha.reshape(-1)
    with torch.no_grad():
        start, bracketed = _bracketed_newton(lambda h: phi(h, flat) - h, flat, lower, upper)
    column = flat.unsqueeze(1)
    # One unit a row: Newton solves the adjoint exactly in one step.
    layer = FixedPoint(
        Newton(max_iter=0, rtol=1.0),
        Implicit(Newton(rtol=1e-12, atol=0.0), failed="keep", on_failure="ignore"),
        on_failure="ignore",
    )
    h = layer(lambda h: phi(h, column), start.unsqueeze(1)).z.squeeze(1)
    return torch.where(bracketed, h, torch.nan).reshape(alpha.shape)


def _bracketed_newton(
    f: Callable[[Tensor], Tensor], like: Tensor, lower: float, upper: float
) -> tuple[Tensor, Tensor]:
    """Return a zero of f in [lower, upper] for each number, and whether f changes sign there."""
    low, high = torch.full_like(like, lower), torch.full_like(like, upper)
    f_low, f_high = f(low), f(high)
    bracketed = (f_low * f_high <= 0) & f_low.isfinite() & f_high.isfinite()
    rising = f_high > f_low
    h = torch.where(f_low == 0, low, torch.where(f_high == 0, high, (low + high) / 2))
    last = high - low
    for _ in range(2200):  # bisection alone ends after 2100 halvings of float64
        value, slope = _with_slope(f, h)
        right = (value > 0) == rising  # the zero lies to the left of h
        low, high = torch.where(right, low, h), torch.where(right, h, high)
        step = value / slope
        newton = h - step
        middle = low + (high - low) / 2
        good = (newton >= low) & (newton <= high) & (2 * step.abs() <= last)
        following = torch.where(value == 0, h, torch.where(good, newton, middle))
        last = (following - h).abs()
        done = (last == 0) | (following == low) & ~good | (following == high) & ~good
        h = following
        if bool((done | ~bracketed).all()):
            break
    return h, bracketed


def _with_slope(f: Callable[[Tensor], Tensor], h: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        h = h.detach().requires_grad_()
        value = f(h)
        (slope,) = torch.autograd.grad(value.sum(), h)
    return value.detach(), slope


def tanh_plain_steps(
    alpha: Tensor, *, eta: float = 1.0, atol: float = 1e-6, max_iter: int = 100_000
) -> Tensor:
    """Return updates h <- h + eta (tanh(h + alpha) - h) from h = 0 until |h - Phi(alpha)| <= atol.

    eta = 1 is plain iteration. Locally the error falls by |1 - eta h^2| an update, h = Phi: the
    count grows like alpha^(-2/3) near 0, and an eta of 2 / h^2 or more never gets there.

    Returns:
        int64, shaped like alpha; -1 where max_iter updates were not enough.

    Source: Zhang et al. (2019), Eqs. val_h and z.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import tanh_plain_steps
        >>> tanh_plain_steps(torch.tensor([0.01, 0.5, 5.0], dtype=torch.float64))
        tensor([145,  10,   2])
    """
    positive(eta=eta)
    non_negative(atol=atol)
    alpha = alpha.detach()
    target = tanh_equilibrium(alpha)
    h = torch.zeros_like(alpha)
    steps = torch.where((h - target).abs() <= atol, 0, -1)
    for start in range(0, at_least(0, max_iter=max_iter), _BLOCK):
        path = []
        for _ in range(min(_BLOCK, max_iter - start)):
            h = torch.lerp(h, torch.tanh(h + alpha), eta)
            path.append(h)
        near = (torch.stack(path) - target).abs() <= atol
        first = start + 1 + near.byte().argmax(0)
        steps = torch.where((steps < 0) & near.any(0), first, steps)
        if bool((steps >= 0).all()):
            break
    return steps


def tanh_newton_steps(alpha: Tensor, *, rtol: float = 5e-15, max_iter: int = 50) -> Tensor:
    """Return Newton steps on f(h) = tanh(h + alpha) - h until one is at most rtol |h|.

    In float64, from h = (3 |alpha|)^(1/3), the first term of Phi near 0, or 1 if that is larger.
    The last, negligible step counts. Near alpha = 0 f is so flat that its rounding, divided by
    f' = -h^2, takes a step more than exact arithmetic would, and h keeps an error of 6e-13 at
    alpha = 1e-6: `tanh_equilibrium` inverts the map instead.

    Returns:
        int64, shaped like alpha; -1 where max_iter steps were not enough.

    Source: Zhang et al. (2019), Eq. val_h; Newton's method of its section 3.2.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import tanh_newton_steps
        >>> tanh_newton_steps(torch.tensor([0.01, 0.5, 5.0], dtype=torch.float64))
        tensor([5, 5, 2])
    """
    non_negative(rtol=rtol)
    at_least(0, max_iter=max_iter)
    steps = [_newton_count(abs(a), rtol, max_iter) for a in alpha.double().flatten().tolist()]
    return torch.tensor(steps, dtype=torch.int64).reshape(alpha.shape)


def _newton_count(a: float, rtol: float, max_iter: int) -> int:
    # tanh of the C library: vectorised ones round otherwise, which the count near 0 shows.
    if a == 0:
        return 0
    h = min((3 * a) ** (1 / 3), 1.0)
    for k in range(max_iter):
        value = math.tanh(h + a)
        step = (value - h) / value**2
        h += step
        if abs(step) <= rtol * h:
            return k + 1
    return -1
