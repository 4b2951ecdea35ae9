"""Cost of accuracy: residual against evaluations and time, and gradients against both."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fixpoint.backward import Implicit, Unrolled
from fixpoint.derivatives import MatrixMap
from fixpoint.fixed_point import FixedPoint, solve
from fixpoint.solvers import Newton, Picard, Solver


class ResidualCurve(NamedTuple):
    """One solver on one map, after k = 0, 1, .. n updates, or fewer where it reached the floor.

    work: evaluations of phi and Jacobian-vector products made so far, each for the whole batch,
        (n + 1,).
    residual: smallest rms(phi(z) - z) / rms(phi(z)) so far, (n + 1, B).
    """

    work: Tensor
    residual: Tensor


def residual_curves(
    phi: MatrixMap,
    z0: Tensor,
    solvers: Mapping[str, Solver],
    *,
    max_iter: int = 50,
    floor: float | None = None,
) -> dict[str, ResidualCurve]:
    """Return residual against work of each solver on one map.

    Each point is a solve of its own, so the work is counted and not assumed; a Jacobian of
    D columns is D products.

    Args:
        phi: map of (B, D) states.
        z0: start, (B, D).
        solvers: by the name they get in a figure.
        max_iter: n, most updates of each.
        floor: residual at which a curve ends, 10 roundings of z0's dtype if not given.

    Example:
        >>> import torch
        >>> from fixpoint import Anderson, Picard
        >>> from fixpoint.analysis import residual_curves
        >>> solvers = {"picard": Picard(), "anderson": Anderson()}
        >>> curves = residual_curves(torch.cos, torch.zeros(1, 1), solvers, max_iter=5)
        >>> bool(curves["anderson"].residual[-1] < curves["picard"].residual[-1])
        True
    """
    curves = {}
    floor = 10 * torch.finfo(z0.dtype).eps if floor is None else floor
    for name, solver in solvers.items():
        work, residual = [], []
        for k in range(max_iter + 1):
            fixed = solver.with_options(max_iter=k, rtol=0.0, atol=0.0, record="residual")
            solution = solve(phi, z0, fixed)
            assert solution.residual is not None  # `record` asks for it
            work.append(solution.evaluations + solution.products)
            residual.append(solution.residual)
            if bool((solution.residual <= floor).all()):
                break
        curves[name] = ResidualCurve(torch.tensor(work), torch.stack(residual).cummin(0)[0])
    return curves


class WorkPoint(NamedTuple):
    """One solver at one tolerance.

    rtol: relative tolerance asked for; atol is 0.
    fraction_converged: of the samples, those that reached it.
    residual: largest rms(phi(z) - z) / rms(phi(z)) of the samples that did, NaN where none did.
    error: largest rms(z - root) / rms(root) of those, NaN without a root.
    work: evaluations and Jacobian-vector products for the whole batch.
    seconds: shortest of the repeats.
    """

    rtol: float
    fraction_converged: float
    residual: float
    error: float
    work: float
    seconds: float


def work_precision(
    phi: MatrixMap,
    z0: Tensor,
    solvers: Mapping[str, Solver],
    *,
    root: Tensor | None = None,
    rtols: Sequence[float] = (1e-2, 1e-4, 1e-6, 1e-8, 1e-10),
    max_iter: int = 200,
    repeats: int = 3,
) -> dict[str, list[WorkPoint]]:
    """Measure the cost-accuracy frontier of each solver: the accuracy reached, and its work.

    Args:
        phi: map of (B, D) states.
        z0: start, (B, D).
        solvers: by the name they get in a figure.
        root: the solution of each start, (B, D), where it is known.
        rtols: tolerances.
        max_iter: most updates.
        repeats: timed solves a point, the shortest counts.

    Source: Hairer and Wanner (1996), Solving ordinary differential equations II, section IV.10:
        work-precision diagrams.

    Example:
        >>> import torch
        >>> from fixpoint import Anderson
        >>> from fixpoint.analysis import work_precision
        >>> z0 = torch.zeros(1, 1, dtype=torch.float64)
        >>> points = work_precision(torch.cos, z0, {"anderson": Anderson()}, rtols=[1e-2, 1e-8])
        >>> [point.work for point in points["anderson"]]
        [4, 7]
    """
    return {
        name: [_point(phi, z0, solver, root, rtol, max_iter, repeats) for rtol in rtols]
        for name, solver in solvers.items()
    }


def _point(
    phi: MatrixMap,
    z0: Tensor,
    solver: Solver,
    root: Tensor | None,
    rtol: float,
    max_iter: int,
    repeats: int,
) -> WorkPoint:
    solver = solver.with_options(max_iter=max_iter, rtol=rtol, atol=0.0, record=None)
    seconds = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        solution = solve(phi, z0, solver)
        seconds = min(seconds, time.perf_counter() - start)
    with torch.no_grad():
        residual = _relative(phi(solution.z) - solution.z, phi(solution.z))[solution.converged]
    error = torch.empty(0)
    if root is not None:
        error = _relative(solution.z - root, root)[solution.converged]
    return WorkPoint(
        rtol,
        solution.converged.double().mean().item(),
        residual.max().item() if len(residual) else float("nan"),
        error.max().item() if len(error) else float("nan"),
        solution.evaluations + solution.products,
        seconds,
    )


class GradientError(NamedTuple):
    """Relative error of gradients against the gradient of the exact equilibrium.

    unrolled: backpropagation through K plain updates, one value a K.
    implicit: the implicit function theorem at a tolerance, one value a tolerance.
    unrolled_work, implicit_work: evaluations of phi of the forward solve; backward makes as many
        vector-Jacobian products for unrolled, its own number for implicit.
    """

    unrolled: Tensor
    implicit: Tensor
    unrolled_work: Tensor
    implicit_work: Tensor


def gradient_error(
    phi: MatrixMap,
    z0: Tensor,
    parameters: Sequence[Tensor],
    *,
    loss: Callable[[Tensor], Tensor] = lambda z: z.square().sum(),
    steps: Sequence[int] = (1, 2, 4, 8, 16, 32),
    rtols: Sequence[float] = (1e-1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8),
    beta: float = 1.0,
) -> GradientError:
    """Measure the error of unrolled and implicit gradients of loss(z*) over K and the tolerance.

    The reference is implicit, from Newton to the rounding floor of z0's dtype; take float64.
    Unrolling K updates errs by about K rho^K, rho the spectral radius of J; stopping at a
    tolerance by about that tolerance over 1 - rho.

    Args:
        phi: map of (B, D) states, closing over `parameters`.
        z0: start, (B, D).
        parameters: tensors that require grad.
        loss: scalar of z, (B, D).
        steps: K of the unrolled solves.
        rtols: tolerances of the implicit solves, forward (by plain iteration) and adjoint.
        beta: damping of both.

    Raises:
        ConvergenceError: the reference does not converge.

    Source: Bai, Kolter, Koltun (2019), Deep equilibrium models, Theorem 1, against
        backpropagation through Eq. z of Zhang et al. (2019).

    Example:
        >>> import torch
        >>> from fixpoint.analysis import gradient_error
        >>> a = torch.tensor([[0.5]], dtype=torch.float64, requires_grad=True)
        >>> z0 = torch.zeros(1, 1, dtype=torch.float64)
        >>> error = gradient_error(lambda z: a * z + 1, z0, [a], steps=[2, 20], rtols=[1e-8])
        >>> [f"{e:.0e}" for e in (*error.unrolled.tolist(), *error.implicit.tolist())]
        ['8e-01', '2e-05', '4e-08']
    """
    eps = torch.finfo(z0.dtype).eps
    newton = Newton(rtol=8 * eps, atol=8 * eps, max_iter=100)
    exact, _ = _gradient(FixedPoint(newton, Implicit(newton)), phi, z0, parameters, loss)
    unrolled, implicit, unrolled_work, implicit_work = [], [], [], []
    for K in steps:
        layer = FixedPoint(Picard(beta=beta, max_iter=K, rtol=0, atol=0), Unrolled())
        g, work = _gradient(layer, phi, z0, parameters, loss)
        unrolled.append((g - exact).norm() / exact.norm())
        unrolled_work.append(work)
    for rtol in rtols:
        plain = Picard(beta=beta, max_iter=100_000, rtol=rtol, atol=0)
        g, work = _gradient(FixedPoint(plain, Implicit(plain)), phi, z0, parameters, loss)
        implicit.append((g - exact).norm() / exact.norm())
        implicit_work.append(work)
    return GradientError(
        torch.stack(unrolled),
        torch.stack(implicit),
        torch.tensor(unrolled_work),
        torch.tensor(implicit_work),
    )


def _gradient(
    layer: FixedPoint,
    phi: MatrixMap,
    z0: Tensor,
    parameters: Sequence[Tensor],
    loss: Callable[[Tensor], Tensor],
) -> tuple[Tensor, int]:
    with torch.enable_grad():
        solution = layer(phi, z0).check()
        gradients = torch.autograd.grad(loss(solution.z), parameters)
    return torch.cat([g.flatten() for g in gradients]), solution.evaluations


def _relative(z: Tensor, scale: Tensor) -> Tensor:
    """Compute rms(z) / rms(scale) of each sample, (B,)."""
    tiny = torch.finfo(z.dtype).tiny
    return z.norm(dim=1) / scale.norm(dim=1).clamp_min(tiny)
