"""The phantom gradient: a few damped updates made from the solution."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from fixpoint._messages import unknown_name
from fixpoint._validation import at_least, positive
from fixpoint.backward.base import Backward, refuse_learned_eta, solve_then_track
from fixpoint.derivatives import MatrixMap
from fixpoint.failure import FailedRows, checked_failed
from fixpoint.solution import Solution
from fixpoint.solvers import Picard, Solver

PhantomValue = Literal["equilibrium", "last"]


class Phantom(Backward):
    """Gradient through a few damped updates z <- z + beta (phi(z) - z) made from z*, a cheap one.

    It is the Neumann series of (I - J)^-1 cut after `steps` terms; steps = 1 is Jacobian-free
    backpropagation. Biased, unless J is small; choose it where a descent direction is enough.
    The value of z remains z*, whose residual is known; with value="last" it is the state that is
    differentiated, as the gradient belongs to it where z* is not reached (`grad` of torchdeq).

    Args:
        steps: number of updates.
        beta: mixing, 1 = undamped.
        failed: the gradient of samples whose solve does not converge: "zero", "keep" or "phantom"
            that of their updates, or "raise". Samples that are NONFINITE have none.
        clip: most |J^T v| of a sample, in units of |v|, in reverse mode: v is the gradient that an
            update hands on. None does not limit it. steps=2 with a clip is the clipped one-step
            adjoint v + J^T v.
        value: "equilibrium" or "last": z of the solution is z*, or the state after the updates.
            The residual and the result are those of z* in both cases.

    Raises:
        ValueError: another `value`, or `steps`, `beta` or `clip` is out of range.

    Source: Geng et al. (2021), On training implicit models; Fung et al. (2022), JFB:
        Jacobian-free backpropagation for implicit networks.

    Example:
        >>> import torch
        >>> from fixpoint import Anderson, FixedPoint, Phantom
        >>> a = torch.tensor([[0.5]], requires_grad=True)
        >>> layer = FixedPoint(Anderson(), Phantom(steps=2))
        >>> layer(lambda z: a * z + 1, torch.zeros(1, 1)).z.backward()
        >>> a.grad  # z* (1 + a)
        tensor([[3.]])
    """

    def __init__(
        self,
        steps: int = 1,
        *,
        beta: float = 1.0,
        failed: FailedRows = "zero",
        clip: float | None = None,
        value: PhantomValue = "equilibrium",
    ) -> None:
        super().__init__()
        if value not in get_args(PhantomValue):
            raise ValueError(unknown_name("value", value, get_args(PhantomValue)))
        self.value = value
        self.clip = None if clip is None else positive(clip=clip)
        self.failed = checked_failed(failed)
        self.updates = Picard(max_iter=at_least(1, steps=steps), beta=beta, rtol=0.0, atol=0.0)

    def check(self, solver: Solver) -> None:
        refuse_learned_eta(solver, "Phantom")

    def compiles(self, solver: Solver) -> bool:
        return super().compiles(solver) and self.clip is None

    def solve(self, solver: Solver, phi: MatrixMap, z0: Tensor, t: int | None) -> Solution:
        count, last = self.updates.max_iter, self.value == "last"
        if self.clip is not None:
            phi = _Clipped(phi, self.clip)
        return solve_then_track(solver, self.updates, count, phi, z0, t, last=last)


class _Clipped:
    """phi, whose J^T v of each sample is at most `clip` times as long as v."""

    def __init__(self, phi: MatrixMap, clip: float) -> None:
        self.phi, self.clip, self.columns = phi, clip, getattr(phi, "columns", ())

    def __call__(self, z: Tensor) -> Tensor:
        if not z.requires_grad:
            return self.phi(z)
        sizes: list[Tensor] = []

        def limit(product: Tensor) -> Tensor:
            size = torch.linalg.vector_norm(product, dim=1, keepdim=True)
            most = self.clip * sizes[-1]
            above = size > most
            return product * torch.where(above, most / torch.where(above, size, 1.0), 1.0)

        argument = z.view_as(z)
        argument.register_hook(limit)
        fz = self.phi(argument)
        if fz.requires_grad:
            fz = fz.view_as(fz)
            fz.register_hook(
                lambda v: sizes.append(torch.linalg.vector_norm(v, dim=1, keepdim=True))
            )
        return fz
