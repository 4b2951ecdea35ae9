"""Newton's method, with a direct or a Krylov linear solve."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Unpack

from fixpoint._torch import has_values
from fixpoint._validation import at_least
from fixpoint.derivatives import Derivatives
from fixpoint.solvers._damped_least_squares import residual_matrix, solve_damped
from fixpoint.solvers._rowwise import dot
from fixpoint.solvers.base import IterativeOptions, IterativeSolver
from fixpoint.solvers.gmres import Block, LinearResult, LinearSolution, gmres, keep_rows
from fixpoint.solvers.line_search import LineSearchState, accept_or_backtrack
from fixpoint.solvers.watchdog import Watchdog

Preconditioner = Callable[[Tensor, Tensor], Tensor]
BASIS_BYTES = 2**22
"""What the spaces of one sample may take by default."""
MAX_PLAIN_GROWTH = 2.0
"""How much |g| may grow by a plain step in place of one that leaves the domain of phi."""
MIN_MEMORY = 30
"""Products of a cycle by default, however large a state is."""


class NewtonState(NamedTuple):
    """The step being tried, and the forcing term and `LinearResult` of its linear solve, (B,).

    plain: whether the step is a plain one in place of one that left the domain of phi, (B, 1),
        newton: the Newton direction, (B, D), and barred: samples whose plain step was not
        accepted and that make no other, (B, 1); None while no sample makes such a step.
    watchdog: of the line search.
    linear_result is None with "direct", and blocks, the spaces of the last GMRES solve, empty.
    jacobian: J, (B, D, D), where it is kept.
    doubts: samples whose direction is a guess, as I - J is singular, (B,); None where none is.
    """

    trial: LineSearchState
    forcing: Tensor
    linear_result: Tensor | None = None
    blocks: tuple[Block, ...] = ()
    plain: Tensor | None = None
    newton: Tensor | None = None
    barred: Tensor | None = None
    watchdog: Watchdog = Watchdog()
    jacobian: Tensor | None = None
    doubts: Tensor | None = None

    def transposed_factors(self) -> tuple[Tensor, Tensor]:
        """Return LU factors of I - J^T of each sample, (B, D, D), and their pivots."""
        assert self.jacobian is not None
        matrix = residual_matrix(self.jacobian, self.trial.g.dtype).mT
        factors, pivots, _ = torch.linalg.lu_factor_ex(matrix)
        return factors, pivots


class Newton(IterativeSolver):
    """z <- z + lambda s with (I - J) s = phi(z) - z, J = d phi / d z.

    A step that does not lower |phi(z) - z| is taken back and shortened, each sample by itself.
    Where that makes little progress, a sample makes up to 20 undamped steps, once (see
    `fixpoint.solvers.watchdog`). If all its steps are refused it is STALLED, at a minimum of
    |phi(z) - z| that is not a solution or at a singular I - J. In place of a step that leaves the
    domain of phi the plain one is made, until that leaves it too or doubles |phi(z) - z|.

    Quadratic near a solution, whether or not phi is a contraction. An update costs D
    vector-Jacobian products and a D x D factorization with "direct" (D up to a few hundred), or
    Jacobian-vector products with "gmres" (any D). Where I - J is singular to rounding, "direct"
    takes a damped step of least squares (with check_every=1). "gmres" restarts after `memory`
    products. It starts from the spaces of the step before, on which I - J has changed little, or
    from none if these do not serve: 4 * memory states.

    Args:
        linear: "direct" or "gmres".
        memory: most products of one cycle of GMRES, and directions kept. None: D, within 4 MiB a
            sample, or 30.
        preconditioner: of "gmres": (z, v) -> an estimate of (I - J)^-1 v, (B, D) each.
        options: see `IterativeSolver`.

    Source: Eisenstat and Walker (1996), Choosing the forcing terms in an inexact Newton method,
        choice 2 with gamma = 0.9, alpha = 2, at most 0.1; Dennis and Schnabel (1983), Numerical
        methods for unconstrained optimization and nonlinear equations, algorithm A6.3.1.

    Example:
        >>> import torch
        >>> from fixpoint import Newton, solve
        >>> solution = solve(torch.cos, torch.zeros(1, 1), Newton())
        >>> round(solution.z.item(), 4), solution.iterations.item()
        (0.7391, 4)
    """

    needs_derivatives = True
    backtracks = True
    guesses = True
    keeps_jacobian = False
    """Whether its state has the last J of "direct", for the adjoint."""

    def __init__(
        self,
        *,
        linear: Literal["direct", "gmres"] = "direct",
        memory: int | None = None,
        preconditioner: Preconditioner | None = None,
        **options: Unpack[IterativeOptions],
    ) -> None:
        super().__init__(**options)
        if linear not in ("direct", "gmres"):
            raise ValueError(f'linear must be "direct" or "gmres"; got {linear!r}')
        self.linear = linear
        self.unrollable = linear == "direct"
        self.memory = memory if memory is None else at_least(1, memory=memory)
        if preconditioner is not None and linear == "direct":
            raise ValueError(
                'a preconditioner needs linear="gmres"; a direct solve has no use of it'
            )
        self.preconditioner = preconditioner

    def update(  # type: ignore[override]
        self,
        k: int,
        z: Tensor,
        fz: Tensor,
        state: NewtonState | None,
        *,
        derivatives: Derivatives,
        certain: bool = False,
    ) -> tuple[Tensor, NewtonState]:
        # What is on another device is chosen there: the host would wait for each outcome it read.
        reads = self.may_sync and z.is_cpu
        trial, max_merit = (None, None) if state is None else (state.trial, _max_merit(state))
        after = accept_or_backtrack(trial, z, fz, may_sync=reads, max_merit=max_merit)
        watchdog = Watchdog() if state is None else state.watchdog
        after, watchdog = watchdog.follow(after, may_sync=reads)
        # J is known where phi was evaluated. Samples put back elsewhere have a direction.
        at = after.z if torch.is_grad_enabled() else z
        accepted, all_accepted, z, g, merit, step_size = after
        forcing = _forcing(state, accepted, merit)
        linear_result: Tensor | None = None
        blocks: tuple[Block, ...] = ()
        jacobian: Tensor | None = None
        doubts: Tensor | None = None
        if self.linear == "direct":
            jacobian = derivatives.jacobian(at)
            guesses = self.may_sync and not (reads or certain or self.noise or g.requires_grad)
            may_read = self.may_sync and not guesses and has_values(g)
            direction, regular = _direct(jacobian, g, may_sync=may_read)
            doubts = ~regular[:, 0] if guesses else None
        else:
            moved = accepted if watchdog.returns is None else accepted & ~watchdog.returns
            rtol = torch.where(moved[:, 0], forcing, torch.inf)
            solution = self._krylov(derivatives, at, g, rtol, () if state is None else state.blocks)
            direction, linear_result, blocks = solution.x, solution.result, solution.blocks
        plain: Tensor | None = None
        newton: Tensor | None = None
        barred = None if state is None else state.barred
        if state is not None and not all_accepted:
            refused, step_size, plain, newton, barred = _refused(state, fz, step_size, accepted)
            direction = torch.where(accepted, direction, refused)
            if linear_result is not None and state.linear_result is not None:
                linear_result = torch.where(accepted[:, 0], linear_result, state.linear_result)
        direction, watchdog = watchdog.direct(direction)
        new = (z + step_size * direction).to(z.dtype)
        new_trial = LineSearchState(z, g, merit, direction, step_size)
        return new, NewtonState(
            new_trial,
            forcing,
            linear_result,
            blocks,
            plain,
            newton,
            barred,
            watchdog,
            jacobian if self.keeps_jacobian else None,
            doubts,
        )

    def doubts(self, state: NewtonState) -> Tensor | None:
        return state.doubts

    def _krylov(
        self,
        derivatives: Derivatives,
        z: Tensor,
        g: Tensor,
        rtol: Tensor,
        blocks: tuple[Block, ...],
    ) -> LinearSolution:
        within = max(BASIS_BYTES // max(4 * z.shape[1] * g.itemsize, 1), MIN_MEMORY)
        given = self.preconditioner

        def precondition(v: Tensor) -> Tensor:
            assert given is not None
            return given(z, v.to(z.dtype)).to(v.dtype)

        solve = functools.partial(
            gmres,
            lambda v: v - derivatives.jvp(z, v.to(z.dtype)).to(v.dtype),
            g,
            memory=self.memory or within,
            preconditioner=precondition if given else None,
        )
        solution = solve(rtol=rtol, blocks=blocks)
        unmet = solution.result != LinearResult.CONVERGED.value
        if blocks and not solution.met and bool(unmet.any()):
            second = solve(rtol=torch.where(unmet, rtol, torch.inf))
            better = unmet & (second.residual < solution.residual)
            solution = LinearSolution(
                torch.where(better[:, None], second.x, solution.x),
                torch.where(better, second.residual, solution.residual),
                torch.where(better, second.result, solution.result),
                keep_rows(~better, solution.blocks) + keep_rows(better, second.blocks),
            )
        # False where x is not finite, and where it lies along a null vector.
        usable = dot(solution.x, solution.x) <= (100 * torch.finfo(g.dtype).eps) ** -2 * dot(g, g)
        return solution._replace(x=torch.where(usable, solution.x, g))

    def extra_repr(self) -> str:
        memory = "" if self.memory is None else f", memory={self.memory}"
        return f"linear={self.linear!r}{memory}, {super().extra_repr()}"


def _max_merit(state: NewtonState) -> Tensor | None:
    """Return the largest |g|^2 at which the step being tried is accepted, (B, 1); None: as by
    Armijo.
    """
    if state.plain is None and state.watchdog.excursion is None:
        return None
    most = state.watchdog.max_merit(state.trial.armijo())
    if state.plain is None:
        return most
    return torch.where(state.plain, MAX_PLAIN_GROWTH**2 * state.trial.merit, most)


def _refused(
    state: NewtonState, fz: Tensor, step_size: Tensor, accepted: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what samples try after a step that ended where phi is fz and was not accepted.

    Returns:
        The direction, (B, D), the step size, whether the step is plain, (B, 1) each, the Newton
        direction, (B, D), and the samples that make no further plain step, (B, 1).
    """
    trial = state.trial
    newton, barred = trial.direction, torch.zeros_like(accepted)
    if state.plain is not None and state.newton is not None:
        newton = torch.where(state.plain, state.newton, newton)
        barred = state.plain & ~accepted
    if state.barred is not None:
        barred = barred | state.barred
    outside = ~fz.detach().isfinite().all(1, keepdim=True)
    other = (trial.g != newton).detach().any(1, keepdim=True)
    plain = outside & other & (trial.step_size == 1) & ~barred & ~accepted
    step_size = torch.where(plain, 1.0, step_size)
    return torch.where(plain, trial.g, newton), step_size, plain, newton, barred


def _direct(J: Tensor, g: Tensor, *, may_sync: bool) -> tuple[Tensor, Tensor]:
    """Return the solution of (I - J) s = g, (B, D); damped least squares where I - J is singular.

    Where the host may not read whether a sample needs these, it is g. Also returned: where I - J is
    regular, (B, 1).
    """
    D = J.shape[1]
    A = residual_matrix(J, g.dtype)
    # A second right side shows a null vector of A to which g happens to be orthogonal.
    probe = torch.arange(1, D + 1, dtype=g.dtype, device=J.device).cos().expand_as(g)
    right = torch.stack((g, probe), 2)
    s, info = _solve_each(A, right)
    s, probed = s[:, :, 0], s[:, :, 1]
    eps = torch.finfo(g.dtype).eps
    with torch.no_grad():
        # A solution of size |g| / (eps |A|) or above lies along a null vector of A + O(eps).
        size = torch.linalg.matrix_norm(A, keepdim=True)
        bound = (100 * eps * size.squeeze(2)) ** -2
        regular = (dot(s, s) <= bound * dot(g, g)) & (
            dot(probed, probed) <= bound * dot(probe, probe)
        )
        regular &= (info == 0)[:, None]
    if may_sync and bool(regular.all()):
        return s, regular
    if s.requires_grad:
        # Solved again without the samples left out, whose zero gradient would meet inf; with as
        # many right sides, so that the others have the same bits.
        unit = torch.eye(D, dtype=g.dtype, device=J.device)
        safe = torch.where(regular.unsqueeze(2), A, unit)
        s = _solve_each(safe, right)[0][:, :, 0]
    rest = solve_damped(A, g, eps**0.5 * size[:, 0]) if may_sync else g
    return torch.where(regular, s, rest), regular


def _solve_each(A: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the solutions of A s = right, (B, D, m), and LAPACK's info, (B,).

    Some processors' LAPACK rounds a matrix of more than 16 rows by its place in memory: matrices
    that do not all begin on a boundary of 64 bytes are extended by rows of the unit matrix, so that
    no bit depends on the place in the batch.
    """
    D = A.shape[1]
    more = -D % 4
    if D <= 16 or not more or A.device.type != "cpu":
        return torch.linalg.solve_ex(A, right)
    corner = torch.arange(D + more) >= D
    A = F.pad(A, (0, more, 0, more)) + corner.to(A.dtype).diag()
    s, info = torch.linalg.solve_ex(A, F.pad(right, (0, 0, 0, more)))
    return s[:, :D], info


def _forcing(state: NewtonState | None, accepted: Tensor, merit: Tensor) -> Tensor:
    """Return the relative tolerance of the linear solve, (B,): tighter the faster |g| falls."""
    if state is None:
        return torch.full_like(merit[:, 0], 0.01)
    with torch.no_grad():
        fall = (merit / state.trial.merit.clamp_min(torch.finfo(merit.dtype).tiny))[:, 0]
        chosen = 0.9 * fall
        return torch.where(accepted[:, 0], chosen.clamp(1e-8, 0.1), state.forcing)
