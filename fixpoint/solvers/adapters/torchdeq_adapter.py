"""Interoperability with torchdeq, both ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from fixpoint._messages import missing_extra, unknown_name
from fixpoint._tree import Packing, Tree
from fixpoint._validation import at_least, non_negative, positive
from fixpoint.derivatives import Derivatives, MatrixMap
from fixpoint.solution import Result, Solution, Stall
from fixpoint.solvers.base import Solver, SolverOptions
from fixpoint.solvers.finite_differences import derivatives_of
from fixpoint.solvers.loop.gauge import Gauge
from fixpoint.solvers.loop.rules import classify, has_stalled
from fixpoint.solvers.registry import SOLVERS, make_solver

THEIR_NAMES = {
    "fixed_point_iter": {"beta": "tau"},
    "simple_fixed_point_iter": {"beta": "tau"},
    "anderson": {"beta": "tau", "memory": "m", "ridge": "lam"},
    "broyden": {"memory": "LBFGS_thres", "line_search": "ls"},
}
"""What torchdeq calls the options of `TorchDEQSolver`, for each solver that has them."""

OUR_NAMES = {
    "picard": {"tau": "beta"},
    "anderson": {"tau": "beta", "m": "memory"},
    "broyden": {"LBFGS_thres": "memory"},
}
"""What we call the options that users of torchdeq give its solvers."""

GUARD = 1e-9
"""torchdeq's addition to the norm that its relative residual is divided by."""


class TorchDEQSolver(Solver):
    """A solver of torchdeq, measured and reported as ours are.

    Choose it to compare: torchdeq stops when the worst sample has met its tolerance, and moves
    all samples until then. With rtol > 0 its criterion is ||phi(z) - z|| < rtol ||phi(z)||
    (stop_mode "rel"; atol does not stop it), else ||phi(z) - z|| < atol sqrt(D) ("abs");
    "simple_fixed_point_iter" never stops before `max_iter`. The residual of what it returns is
    then measured by one evaluation of phi, and decides with rtol and atol: a sample that
    torchdeq left before `max_iter` and that does not meet them is STALLED, for torchdeq may have
    tested the state before the one it returns. A sample where phi is not finite is kept from
    torchdeq from then on and returned where its residual was smallest.

    An iteration is a call of phi by torchdeq, the same number for all samples; "broyden" makes
    one more at its start, and "anderson" returns z0 if `max_iter` < 3.

    Args:
        name: "fixed_point_iter", "simple_fixed_point_iter", "anderson" or "broyden", or a solver
            registered in torchdeq.
        beta: mixing, 1 = undamped, torchdeq's tau. None leaves this and the next three at
            torchdeq's defaults.
        memory: states kept by "anderson" (m, at least 2), rank of "broyden" (LBFGS_thres).
        ridge: added to the Gram matrix by "anderson" (lam), in units of z squared.
        line_search: whether "broyden" searches along its steps (ls), one length for all samples.
        options: see `Solver`. A `norm` is used where the result is measured, not where torchdeq
            stops. rtol = atol = 0 runs all `max_iter` steps and returns the last state.

    Raises:
        ValueError: torchdeq has no solver of that name, or a value is out of range.
        TypeError: that solver does not have the option.

    Source: Geng and Kolter (2023), TorchDEQ: a library for deep equilibrium models.

    Example:
        >>> import torch
        >>> from fixpoint import TorchDEQSolver, solve
        >>> solution = solve(torch.cos, torch.zeros(1, 1), TorchDEQSolver("anderson"))
        >>> round(solution.z.item(), 4), solution.converged.tolist()
        (0.7391, [True])
    """

    unrollable = False

    def __init__(
        self,
        name: str,
        *,
        beta: float | None = None,
        memory: int | None = None,
        ridge: float | None = None,
        line_search: bool | None = None,
        **options: Unpack[SolverOptions],
    ) -> None:
        super().__init__(**options)
        self.name = _known_name(name)
        self.beta = None if beta is None else positive(beta=beta)
        least = 2 if name == "anderson" else 1
        self.memory = None if memory is None else at_least(least, memory=memory)
        self.ridge = None if ridge is None else non_negative(ridge=ridge)
        self.line_search = line_search
        self._their_options()

    def run(
        self,
        phi: MatrixMap,
        z: Tensor,
        t: int | None = None,
        *,
        track_from: int = 0,
        derivatives: Derivatives | None = None,
    ) -> Solution:
        """Solve from z, (B, D), without gradient; see `Solver.run`."""
        with torch.no_grad():
            z = z.detach()
            masked = _MaskedMap(self, phi, z)
            if not self.has_tolerance:
                return self._fixed_steps(masked, z)
            masked(z)
            step, calls = torch.zeros_like(masked.r), 0
            if self.max_iter > 0 and masked.unsolved:
                z, step = self._their_run(masked, z)
                calls = masked.calls - 1
                masked(z)
            if calls < self.max_iter:
                stall = torch.full_like(step, Stall.GAVE_UP.value)
            else:
                stall = has_stalled(step, self.max_iter) * Stall.NO_PROGRESS.value
            result, stall = classify(torch, masked.r, nonfinite=masked.lost, stall=stall)
            return Solution(
                z=masked.answer(z),
                residual=torch.where(masked.lost, masked.best_r, masked.r),
                iterations=torch.full_like(result, min(calls, self.max_iter), dtype=torch.int64),
                evaluations=masked.calls,
                result=result,
                stall=stall,
            )

    def _fixed_steps(self, masked: _MaskedMap, z: Tensor) -> Solution:
        z, _ = self._their_run(masked, z)
        result = torch.where(masked.lost, Result.NONFINITE, Result.FIXED_STEPS)
        iterations = torch.full_like(result, self.max_iter)
        return Solution(masked.answer(z), None, iterations, masked.calls, result.to(torch.int8))

    def _their_run(self, masked: _MaskedMap, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return torchdeq's state, (B, D), and the step at which it found it, (B,)."""
        try:
            from torchdeq.solver import get_solver
        except ModuleNotFoundError:
            raise missing_extra("TorchDEQSolver", "torchdeq", "bench") from None

        last = torch.full_like(masked.r, self.max_iter)
        if self.max_iter == 0 or z.numel() == 0:
            return z, last
        if self.rtol > 0:
            stop = {"tol": self.rtol, "stop_mode": "rel"}
        else:
            stop = {"tol": self.atol * z.shape[1] ** 0.5, "stop_mode": "abs"}
        if not self.has_tolerance:
            stop["return_final"] = True
        solver, options = get_solver(self.name), self._their_options()
        try:
            z, _, info = solver(masked, z, max_iter=self.max_iter, **stop, **options)
        except torch.linalg.LinAlgError:
            # One singular sample ends its batched solve for all.
            return masked.best, torch.zeros_like(last)
        return z, info["nstep"] if info["nstep"].shape == last.shape else last

    def _their_options(self) -> dict[str, Any]:
        given = {
            "beta": self.beta,
            "memory": self.memory,
            "ridge": self.ridge,
            "line_search": self.line_search,
        }
        names = THEIR_NAMES.get(self.name, {})
        for option, value in given.items():
            if value is not None and option not in names:
                raise TypeError(unknown_name(f"option of torchdeq's {self.name}", option, names))
        return {names[key]: value for key, value in given.items() if value is not None}

    def extra_repr(self) -> str:
        options = "".join(f", {key}={value}" for key, value in self._their_options().items())
        return f"{self.name!r}{options}, {super().extra_repr()}"


class _MaskedMap:
    """phi as torchdeq may call it: a sample where phi is not finite looks solved from then on.

    torchdeq tests the worst sample and solves small systems for the batch: a NaN would keep all
    others from stopping, or make it raise.

    Attributes:
        lost: samples where phi was not finite, (B,) bool.
        r: scaled residual at the last call, (B,).
        best, best_r: state of each sample with the smallest residual, (B, D), and that, (B,).
        calls: of phi.
    """

    def __init__(self, solver: TorchDEQSolver, phi: MatrixMap, z: Tensor) -> None:
        self.columns = getattr(phi, "columns", ())
        self.tolerance = solver.tolerance
        self.gauge: Gauge | None = None
        self.phi = phi
        self.r = torch.full_like(_norm(z), torch.inf)
        self.lost = torch.zeros_like(self.r, dtype=torch.bool)
        self.best, self.best_r = z, self.r
        self.calls = 0

    @property
    def unsolved(self) -> bool:
        """True if a sample that is not lost did not meet the tolerance at the last call."""
        return bool(((self.r > 1) & ~self.lost).any())

    def answer(self, z: Tensor) -> Tensor:
        """Return z, (B, D), with lost samples put back to where they were best."""
        return torch.where(self.lost[:, None], self.best, z)

    def __call__(self, z: Tensor, tau: float = 1.0) -> Tensor:
        self.calls += 1
        fz = self.phi(z)
        if self.gauge is None:
            self.gauge = Gauge(z, fz, self.tolerance, self.columns)
        self.r, finite = self.gauge.measure(z, fz)
        self.lost = self.lost | ~finite
        better = self.r < self.best_r
        self.best = torch.where(better[:, None], z, self.best)
        self.best_r = torch.where(better, self.r, self.best_r)
        if tau != 1:
            fz = torch.lerp(z, fz, tau)
        return torch.where(self.lost[:, None], z, fz)


def register_torchdeq(prefix: str = "fixpoint-") -> list[str]:
    """Register our solvers in torchdeq as `prefix` + name, and return these names.

    `torchdeq.get_deq(f_solver="fixpoint-anderson", b_solver="fixpoint-broyden")` then uses them.
    Every solver of `SOLVERS` is registered but "inexact-newton", whose steps are learned and which
    has no tolerance.

    A sample stops once it has met the tolerance itself: ||phi(z) - z|| <= tol with stop_mode
    "abs", tol (||phi(z)|| + 1e-9) with "rel". Sampled states (`indexing`) are, as in torchdeq, the
    best of each sample up to that step; there is one for each index, also after an early stop.
    `return_final=True` runs all steps. Where a solver has them, torchdeq's names of options (tau,
    m, LBFGS_thres) are taken as well as ours; any other option is an error. A ridge `lam` is not
    taken: ours is relative.

    Raises:
        TypeError, ValueError: at a solve, an option or the stop_mode is unknown.

    Source: Geng and Kolter (2023), TorchDEQ: a library for deep equilibrium models.

    Example:
        >>> import torch
        >>> from fixpoint import register_torchdeq
        >>> "fixpoint-anderson" in register_torchdeq()
        True
        >>> import torchdeq
        >>> deq = torchdeq.get_deq(f_solver="fixpoint-anderson", ift=True)
        >>> (z,), info = deq(torch.cos, torch.zeros(1, 1))
        >>> round(z.item(), 2)
        0.74
    """
    try:
        from torchdeq.solver import register_solver
    except ModuleNotFoundError:
        raise missing_extra("register_torchdeq", "torchdeq", "bench") from None

    names = [name for name in SOLVERS if name != "inexact-newton"]
    for name in names:
        register_solver(prefix + name, partial(_as_theirs, name))
    return [prefix + name for name in names]


def _as_theirs(
    name: str,
    func: Callable[[Tree], Tree],
    x0: Tree,
    max_iter: int = 50,
    tol: float = 1e-3,
    stop_mode: str = "abs",
    indexing: Sequence[int] | None = None,
    return_final: bool = False,
    **options: Any,
) -> tuple[Tree, list[Tree], dict[str, Tensor]]:
    """Return our solver of that name with torchdeq's signature and results."""
    packing = Packing(x0, batched=not isinstance(x0, Tensor) or x0.dim() > 0)
    z0, max_iter, indexing = packing.pack(x0), int(max_iter), indexing or ()
    solver = make_solver(
        name,
        **_renamed(name, options, max_iter),
        max_iter=max_iter,
        **_stopping(z0.dtype, tol, stop_mode, return_final),
        record="iterates" if any(index < max_iter for index in indexing) else "residual",
    )
    course = _RecordingMap(packing.wrap(func))
    with torch.no_grad():
        derivatives = course.derivatives_at(z0) if solver.needs_derivatives else None
        solution = solver.run(course, z0, derivatives=derivatives)
    states = [packing.unpack(z) for z in _sampled(solution, indexing)]
    return packing.unpack(solution.z), states, course.info(max_iter, stop_mode, return_final)


def _renamed(name: str, options: dict[str, Any], max_iter: int) -> dict[str, Any]:
    """Return the options by our names."""
    ours = OUR_NAMES.get(name, {})
    renamed: dict[str, Any] = {}
    for key, value in options.items():
        if key == "LBFGS_thres" and value is None:
            value = max(max_iter, 1)  # torchdeq's meaning of None
        if ours.get(key, key) in renamed:
            raise TypeError(f"{ours.get(key, key)} was given twice, by our name and torchdeq's")
        renamed[ours.get(key, key)] = value
    return renamed


def _stopping(dtype: torch.dtype, tol: float, stop_mode: str, return_final: bool) -> dict[str, Any]:
    """Return our options with torchdeq's meaning of its own."""
    if stop_mode not in ("abs", "rel"):
        raise ValueError(unknown_name("stop_mode", stop_mode, ("abs", "rel")))
    # 0 means to us that nothing is measured, to torchdeq that the best of all steps is returned.
    least = torch.finfo(torch.promote_types(dtype, torch.float32)).tiny ** 0.5
    tol = 0.0 if return_final else max(non_negative(tol=tol), least)
    return {
        "rtol": tol if stop_mode == "rel" else 0.0,
        "atol": tol if stop_mode == "abs" else tol * GUARD,
        "norm": _norm,
        "keep_best": not return_final,
    }


def _sampled(solution: Solution, indexing: Sequence[int]) -> list[Tensor]:
    """Return the best state of each sample up to each of these steps, (B, D)."""
    trace = solution.trace
    if trace is None or trace.iterates is None:
        return [solution.z for _ in indexing]
    steps = len(trace.residual) - 1
    rows = torch.arange(trace.residual.shape[1], device=trace.residual.device)
    return [
        trace.iterates[trace.residual[: index + 1].argmin(0), rows] if index < steps else solution.z
        for index in indexing
    ]


class _RecordingMap:
    """phi that notes torchdeq's two residuals of each state it is called with, (B,)."""

    def __init__(self, phi: MatrixMap) -> None:
        self.phi = phi
        self.residuals: dict[str, list[Tensor]] = {"abs": [], "rel": []}

    def __call__(self, z: Tensor) -> Tensor:
        return self.note(z, self.phi(z))

    def derivatives_at(self, z: Tensor) -> Derivatives:
        """Return derivatives of phi whose evaluations are noted; those of differences are not."""
        derivatives = derivatives_of(self.phi, z)
        evaluate = derivatives.evaluate
        vars(derivatives)["evaluate"] = lambda z: self.note(z, evaluate(z))
        return derivatives

    def note(self, z: Tensor, fz: Tensor) -> Tensor:
        residual = _norm(fz - z)
        self.residuals["abs"].append(residual)
        self.residuals["rel"].append(residual / (_norm(fz) + GUARD))
        return fz

    def info(self, max_iter: int, stop_mode: str, return_final: bool) -> dict[str, Tensor]:
        """Return torchdeq's record of a solve; traces start at x0, padded with the lowest."""
        from torchdeq.solver.stat import SolverStat

        entries: dict[str, Tensor] = {}
        for mode, residuals in self.residuals.items():
            trace = torch.stack(residuals, 1)
            ordered = trace.nan_to_num(nan=torch.inf, posinf=torch.inf)
            step = ordered.argmin(1, keepdim=True)
            if return_final:
                step = torch.full_like(step, trace.shape[1] - 1)
            lowest = ordered.gather(1, step)
            missing = max_iter + 1 - trace.shape[1]
            entries[f"{mode}_trace"] = torch.cat([trace, lowest.expand(-1, missing)], 1)
            entries[f"{mode}_lowest"] = lowest.squeeze(1)
            if mode == stop_mode:
                entries["nstep"] = step.squeeze(1).to(trace.dtype)
        return SolverStat(**entries)


def _norm(x: Tensor) -> Tensor:
    """Return Euclidean norm of each sample, (B,)."""
    return torch.linalg.vector_norm(x, dim=1, dtype=torch.promote_types(x.dtype, torch.float32))


def _known_name(name: str) -> str:
    from torchdeq.solver import _solvers

    if name not in _solvers:
        raise ValueError(unknown_name("solver of torchdeq", name, _solvers))
    return name
