"""scipy.optimize.root as a solver: an independent reference to check results against."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Unpack

from fixpoint._messages import missing_extra, unknown_name
from fixpoint.derivatives import Derivatives, MatrixMap
from fixpoint.solution import Result, Solution, Stall, Trace
from fixpoint.solvers.base import Record, Solver, SolverOptions, checked_record
from fixpoint.solvers.finite_differences import derivatives_of
from fixpoint.solvers.loop import rules
from fixpoint.solvers.loop.gauge import Gauge
from fixpoint.solvers.loop.rules import has_stalled
from fixpoint.solvers.loop.whole import RowNorms, as_one, derivatives_as_one, join

METHODS = (
    "hybr",
    "lm",
    "broyden1",
    "broyden2",
    "anderson",
    "linearmixing",
    "diagbroyden",
    "excitingmixing",
    "krylov",
    "df-sane",
)
"""The methods of scipy.optimize.root."""


class SciPySolver(Solver):
    """scipy.optimize.root on phi(z) - z = 0, one sample at a time, in float64 on the CPU.

    An independent reference to check results against, and a second try where a solver fails. Where
    rows of phi depend on each other, the batch is then solved as one sample. It is slow, since each
    evaluation of the whole batch moves one sample only; choose `Newton` for work. phi itself runs
    in the dtype of z0.

    SciPy's own tolerances are switched off. A sample ends at the first evaluation within
    rtol and atol; after `max_iter` evaluations beyond that of its start, whatever the method;
    or when SciPy gives up or raises, which makes it STALLED. Its `iterations` are those
    evaluations, and `Trace` holds one entry for each. "hybr" and "lm" are given the Jacobian,
    which is not counted against `max_iter`; "krylov" and the line searches are.

    Args:
        method: "hybr" (Powell's hybrid of Newton and gradient steps), "lm" (Levenberg-Marquardt),
            "broyden1", "broyden2", "anderson", "linearmixing", "diagbroyden", "excitingmixing",
            "krylov" or "df-sane".
        keep_best, record: see `IterativeSolver`.
        options: see `Solver`; rtol = atol = 0 is refused.

    Raises:
        ValueError: the method is unknown, or there is no tolerance.

    Source: Virtanen et al. (2020), SciPy 1.0; "hybr" and "lm": More, Garbow, Hillstrom (1980),
        User guide for MINPACK-1.

    Example:
        >>> import torch
        >>> from fixpoint import SciPySolver, solve
        >>> solution = solve(torch.cos, torch.zeros(1, 1), SciPySolver())
        >>> round(solution.z.item(), 4), solution.converged.tolist()
        (0.7391, [True])
    """

    unrollable = False

    def __init__(
        self,
        method: str = "hybr",
        *,
        keep_best: bool = True,
        record: Record | None = None,
        **options: Unpack[SolverOptions],
    ) -> None:
        super().__init__(**options)
        self.keep_best = keep_best
        self.record = checked_record(record)
        if method not in METHODS:
            raise ValueError(unknown_name("method of scipy.optimize.root", method, METHODS))
        if not self.has_tolerance:
            raise ValueError(
                "SciPySolver stops at a tolerance; rtol = atol = 0 was given: set rtol or atol"
            )
        self.method = method

    @torch.no_grad()
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
        z = z.detach().clone()
        fz = phi(z)
        gauge = Gauge(z, fz, self.tolerance, getattr(phi, "columns", ()))
        solution = self._solve_rows(phi, z, fz, gauge, derivatives)
        moved = solution.iterations > 0
        if len(z) < 2 or not bool(solution.converged.any() and moved.any()):
            return solution
        # Each sample was solved beside the others as they were then.
        fz = phi(solution.z)
        r, _ = gauge.measure(solution.z, fz)
        solution = replace(solution, evaluations=solution.evaluations + 1)
        if not bool((solution.converged & ~(r <= rules.MAX_EXCESS)).any()):
            return solution
        return self._solve_as_one(phi, solution, fz, gauge, derivatives)

    def _solve_as_one(
        self,
        phi: MatrixMap,
        first: Solution,
        fz: Tensor,
        gauge: Gauge,
        derivatives: Derivatives | None,
    ) -> Solution:
        """Return the solution, from that of each row, where rows of phi depend on each other."""
        z, shape = first.z.reshape(1, -1), first.z.shape
        whole = as_one(phi, shape)
        if derivatives is not None:
            derivatives = derivatives_as_one(whole, derivatives, shape)
        norms = RowNorms(gauge.norms, shape)
        one = Gauge(z, fz.reshape(1, -1), self.tolerance, norms=norms)
        rest = self._solve_rows(whole, z.clone(), fz.reshape(1, -1), one, derivatives)
        rest = replace(rest, evaluations=rest.evaluations - 1)  # that of fz has been counted
        return join(first, rest, shape)

    def _solve_rows(
        self,
        phi: MatrixMap,
        z: Tensor,
        fz: Tensor,
        gauge: Gauge,
        derivatives: Derivatives | None,
    ) -> Solution:
        """Return the solution of each row from z, which is written to, with phi(z) = fz."""
        r, finite = gauge.measure(z, fz)
        searches = [
            _SampleSolve(self, gauge, phi, z, row, fz, start)
            for row, start in enumerate(torch.where(finite, r, torch.inf).tolist())
        ]
        if derivatives is None:
            takes_it = self.method in ("hybr", "lm") and any(search.open for search in searches)
            derivatives = derivatives_of(phi, z) if takes_it else Derivatives(phi)
        for row, search in enumerate(searches):
            search.run(derivatives)
            z[row] = search.answer()[0]
        ends = [search.end() for search in searches]
        return Solution(
            z=z,
            residual=r.new_tensor([search.answer()[1] for search in searches]),
            iterations=z.new_tensor([s.updates for s in searches], dtype=torch.int64),
            evaluations=1 + sum(s.updates for s in searches) + derivatives.evaluations,
            result=z.new_tensor([result for result, _ in ends], dtype=torch.int8),
            trace=self._trace(searches, r) if self.record else None,
            products=derivatives.products,
            stall=z.new_tensor([stall for _, stall in ends], dtype=torch.int8),
        )

    def _trace(self, searches: list[_SampleSolve], r: Tensor) -> Trace:
        length = 1 + max((s.updates for s in searches), default=0)
        padded = [s.course + s.course[-1:] * (length - len(s.course)) for s in searches]
        residual = r.new_tensor([[value for _, value in course] for course in padded])
        residual = residual.reshape(len(searches), length).T
        if self.record != "iterates" or not padded:
            return Trace(residual)
        iterates = [torch.stack([z for z, _ in course]) for course in padded]
        return Trace(residual, torch.stack(iterates, 1))

    def extra_repr(self) -> str:
        return f"method={self.method!r}, {super().extra_repr()}"


class _Ended(Exception):
    """End of SciPy's search from inside: the tolerance is met or the budget is spent."""


class _SampleSolve:
    """The search of one sample: what SciPy calls, its budget, and what it has found.

    Attributes:
        course: each state evaluated, (D,), with its scaled residual, inf where not finite.
        updates: evaluations beyond that of the start.
    """

    def __init__(
        self,
        solver: SciPySolver,
        gauge: Gauge,
        phi: MatrixMap,
        z: Tensor,
        row: int,
        fz: Tensor,
        r: float,
    ) -> None:
        self.gauge = gauge
        self.solver, self.phi, self.z, self.row = solver, phi, z, row
        self.course = [(z[row].clone(), r)]
        self.x = _numbers(z[row])
        self.g = _numbers(fz[row] - z[row])
        self.phi_raised = False

    @property
    def updates(self) -> int:
        return len(self.course) - 1

    @property
    def open(self) -> bool:
        """True if the start is finite and not yet a solution."""
        return 1 < self.course[0][1] < math.inf and self.solver.max_iter > 0

    def run(self, derivatives: Derivatives) -> None:
        """Let SciPy search from the start."""
        try:
            from scipy.optimize import root
        except ModuleNotFoundError:
            raise missing_extra("SciPySolver", "scipy", "bench") from None

        if not self.open:
            return
        identity = np.eye(len(self.x))

        def jacobian(x: np.ndarray) -> np.ndarray:
            return _numbers(derivatives.jacobian(self._batch(x))[self.row]) - identity

        method = self.solver.method
        with warnings.catch_warnings():
            # SciPy's own; what phi warns of comes through.
            warnings.filterwarnings("ignore", module=r"(scipy|numpy)\.|fixpoint\.solvers\.scipy$")
            try:
                root(
                    self._residual,
                    self.x,
                    method=method,
                    jac=jacobian if method in ("hybr", "lm") else None,
                    options=_without_tolerance(method, self.solver.max_iter, self.z.dtype),
                )
            except _Ended:
                pass
            except Exception:
                # Most methods give a sample up by raising; an error of phi is the user's.
                if self.phi_raised:
                    raise

    def answer(self) -> tuple[Tensor, float]:
        """Return the state found, (D,), and its residual."""
        if self.course[-1][1] <= 1:
            return self.course[-1]
        if self.solver.keep_best:
            return min(self.course, key=lambda entry: entry[1])
        finite = [entry for entry in self.course if entry[1] < math.inf]
        return finite[-1] if finite else self.course[0]

    def end(self) -> tuple[Result, Stall]:
        """Return how the search ended, and why without progress."""
        residuals = [r for _, r in self.course]
        if residuals[-1] <= 1:
            return Result.CONVERGED, Stall.NONE
        if residuals[-1] == math.inf:
            return Result.NONFINITE, Stall.NONE
        if self.updates < self.solver.max_iter:
            return Result.STALLED, Stall.GAVE_UP
        if has_stalled(residuals.index(min(residuals)), self.updates):
            return Result.STALLED, Stall.NO_PROGRESS
        return Result.MAX_ITER, Stall.NONE

    def _residual(self, x: np.ndarray) -> np.ndarray:
        """Return phi(z) - z of this sample, (D,)."""
        # SciPy asks for the start again, and some methods for their last state.
        if np.array_equal(x, self.x):
            return self.g
        if self.updates == self.solver.max_iter:
            raise _Ended
        batch = self._batch(x)
        try:
            fz = self.phi(batch)[self.row : self.row + 1]
        except Exception:
            self.phi_raised = True
            raise
        z = batch[self.row : self.row + 1]
        r, finite = self.gauge.measure(z, fz, self.row)
        self.course.append((z[0], r.item() if finite.item() else math.inf))
        if self.course[-1][1] <= 1:
            raise _Ended
        self.x, self.g = x.copy(), _numbers(fz[0] - z[0])
        return self.g

    def _batch(self, x: np.ndarray) -> Tensor:
        """Return the states of all samples with this one at x, (B, D)."""
        batch = self.z.clone()
        batch[self.row] = torch.from_numpy(x).to(batch)
        return batch


def _numbers(x: Tensor) -> np.ndarray:
    return x.detach().double().cpu().numpy()


def _without_tolerance(method: str, max_iter: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return options with which SciPy continues for as long as it can, at least `max_iter`
    evaluations.
    """
    budget = max_iter + 2
    if method == "hybr":
        return {"xtol": 0.0, "maxfev": budget}
    if method == "lm":
        return {"xtol": 0.0, "ftol": 0.0, "gtol": 0.0, "maxiter": budget}
    if method == "df-sane":
        return {"ftol": 0.0, "fatol": 0.0, "maxfev": budget}
    options: dict[str, Any] = {"fatol": 0.0, "maxiter": budget}
    if method == "krylov":
        # Its differences have to be seen by phi, which runs in this dtype.
        options["jac_options"] = {"rdiff": torch.finfo(dtype).eps ** 0.5}
    return options
