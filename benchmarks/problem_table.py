"""Solvers on test problems, compared with SciPy and torchdeq: writes docs/solver_table.md.

python benchmarks/problem_table.py
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torchdeq

import fixpoint
from fixpoint import Result, SciPySolver, make_solver, solve

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from support.problems import PROBLEMS, Problem  # noqa: E402

OPTIONS = {"max_iter": 200, "rtol": 1e-10, "atol": 1e-10}
OURS = {
    name: make_solver(name, **OPTIONS)
    for name in ("picard", "barzilai-borwein", "anderson", "broyden", "newton", "newton-krylov")
}
MIN_FALL = 1e-3
"""A residual counts as fallen at this fraction of 1 and the size and residual of the start."""
WORDS = {
    Result.MAX_ITER: "slow",
    Result.STALLED: "stalled",
    Result.NONFINITE: "non-finite",
}


def our_cell(solver: fixpoint.IterativeSolver, problem: Problem) -> tuple[str, int]:
    solution = solve(problem.phi, problem.z0, solver)
    solved = int(solution.converged.sum())
    count = str(solution.evaluations)
    if solution.products:
        count += f" + {solution.products}"
    if solved == len(problem.z0):
        return count, solved
    worst = Result(int(solution.result.max()))
    return f"*{solved}/{len(problem.z0)} {WORDS[worst]}*", solved


def scipy_cell(problem: Problem) -> tuple[str, int]:
    solution = solve(problem.phi, problem.z0, SciPySolver("hybr", **OPTIONS))
    return _judge(solution.z, problem, solution.evaluations)


def torchdeq_cell(name: str) -> Callable[[Problem], tuple[str, int]]:
    def cell(problem: Problem) -> tuple[str, int]:
        try:
            z, _, info = torchdeq.solver.get_solver(name)(
                problem.phi, problem.z0, max_iter=200, tol=1e-10, stop_mode="rel"
            )
        except Exception as error:
            return f"*{type(error).__name__}*", 0
        return _judge(z, problem, int(info["nstep"].max()))

    return cell


def _judge(z: torch.Tensor, problem: Problem, evaluations: int) -> tuple[str, int]:
    """The same test for all: rms(phi(z) - z) <= 1e-10 (1 + rms(phi(z))), and it has fallen.

    Relative to a state that has run away every residual is small.
    """
    z0, f0, fz = problem.z0, problem.phi(problem.z0), problem.phi(z)
    g, size, start, g0 = (x.square().mean(1).sqrt() for x in (fz - z, fz, z0, f0 - z0))
    solved = int(((g <= 1e-10 * (1 + size)) & (g <= MIN_FALL * (1 + start + g0))).sum())
    return (str(evaluations) if solved == len(z) else f"*{solved}/{len(z)}*"), solved


def main() -> None:
    warnings.simplefilter("ignore")
    columns: dict[str, Callable[[Problem], tuple[str, int]]] = {
        name: lambda problem, solver=solver: our_cell(solver, problem)
        for name, solver in OURS.items()
    }
    columns["SciPy hybr"] = scipy_cell
    for name in ("fixed_point_iter", "anderson", "broyden"):
        columns[f"torchdeq {name}"] = torchdeq_cell(name)
    solvable = [p for p in PROBLEMS if p.kind != "none"]
    starts = sum(len(p.z0) for p in solvable)
    totals = dict.fromkeys(columns, 0)
    claimed = dict.fromkeys(columns, 0)
    rows = []
    for problem in PROBLEMS:
        cells = []
        for name, column in columns.items():
            text, solved = column(problem)
            (claimed if problem.kind == "none" else totals)[name] += solved
            cells.append(text)
        rows.append(f"| {problem.name} | {problem.kind} | " + " | ".join(cells) + " |")
    lines = [
        "# Solvers on test problems",
        "",
        "Made by `python benchmarks/problem_table.py` from the problems of",
        "`tests/support/problems.py`,",
        "in float64 to rms(phi(z) - z) <= 1e-10 (1 + rms(phi(z))), at most 200 updates. A number",
        "is the evaluations of phi (+ Jacobian-vector products) for the whole batch of starts,",
        "where all were solved; else how many were, and how the worst ended. SciPy is given one",
        "start at a time, and its evaluations are added up.",
        f"fixpoint {fixpoint.__version__}, torch {torch.__version__}, torchdeq 0.1.0.",
        "",
        "| problem | kind | " + " | ".join(columns) + " |",
        "|---|---|" + "---|" * len(columns),
        *rows,
        f"| **starts solved, of {starts}** | | " + " | ".join(map(str, totals.values())) + " |",
        "| **claimed where there is none, of "
        f"{sum(len(p.z0) for p in PROBLEMS if p.kind == 'none')}** | | "
        + " | ".join(map(str, claimed.values()))
        + " |",
        "",
        "The two rows of `nan_row` that hold no NaN do have a solution and count as claimed.",
    ]
    (ROOT / "docs" / "solver_table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines[-5:]))


if __name__ == "__main__":
    main()
