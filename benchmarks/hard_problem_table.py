"""The hard and the stiff problems, compared with torchdeq and SciPy: writes docs/hard_problems.md.

python benchmarks/hard_problem_table.py
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import scipy.optimize
import torch
import torchdeq
from recorder import ACCEPTED, BUDGET, GOAL, Recorder, largest_residual, relative_residual

import fixpoint
from fixpoint import make_solver, solve

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from support.hard_problems import HARD, STIFF  # noqa: E402
from support.problems import Problem  # noqa: E402

OURS = ("anderson", "broyden", "newton", "newton-krylov", "levenberg-marquardt", "auto")
OPTIMISTIX = json.loads((ROOT / "docs" / "optimistix.json").read_text())
SCIPY = ("anderson", "broyden1", "krylov")


def ours(problem: Problem, name: str) -> str:
    solver = make_solver(name, max_iter=BUDGET - 1, rtol=GOAL, atol=0.0)
    solution = solve(problem.phi, problem.z0, solver)
    largest = largest_residual(problem.phi, problem.z0)
    r = relative_residual(solution.z, problem.phi(solution.z), largest)
    return count(solution.evaluations, solution.products) if r <= ACCEPTED else "-"


def count(evaluations: int, products: int) -> str:
    return f"{evaluations} + {products}" if products else str(evaluations)


def theirs(problem: Problem, run: Callable[[Recorder], object]) -> str:
    recorder = Recorder(problem.phi, problem.z0)
    with contextlib.suppress(Exception):
        run(recorder)
    return str(recorder.at) if recorder.solved else "-"


def torchdeq_cell(problem: Problem, name: str) -> str:
    find = torchdeq.solver.get_solver(name)
    options = {"max_iter": BUDGET, "tol": 1e-10, "stop_mode": "rel"}
    return theirs(problem, lambda phi: find(phi, problem.z0, **options))


def scipy_cell(problem: Problem, name: str) -> str:
    def run(phi: Recorder) -> None:
        def g(z):  # type: ignore[no-untyped-def]
            row = torch.from_numpy(z)[None]
            return (phi(row) - row)[0].numpy()

        scipy.optimize.root(g, problem.z0[0].numpy(), method=name, tol=1e-13)

    return theirs(problem, run)


def optimistix_cell(problem: Problem, name: str) -> str:
    found = OPTIMISTIX["problems"][problem.name][name]
    return "-" if found is None else count(*found)


def main() -> None:
    warnings.simplefilter("ignore")
    columns: dict[str, Callable[[Problem], str]] = {}
    for name in OURS:
        columns[name] = lambda p, name=name: ours(p, name)
    for name in ("anderson", "broyden"):
        columns[f"torchdeq {name}"] = lambda p, name=name: torchdeq_cell(p, name)
    for name in SCIPY:
        columns[f"SciPy {name}"] = lambda p, name=name: scipy_cell(p, name)
    for name in next(iter(OPTIMISTIX["problems"].values())):
        columns[f"optimistix {name}"] = lambda p, name=name: optimistix_cell(p, name)
    solved, rows = dict.fromkeys(columns, 0), []
    for problem in HARD + STIFF:
        cells = [column(problem) for column in columns.values()]
        for name, cell in zip(columns, cells, strict=True):
            solved[name] += cell != "-"
        rows.append(f"| {problem.name} | {problem.source} | " + " | ".join(cells) + " |")
    lines = [
        "# Hard and stiff problems",
        "",
        "Made by `python benchmarks/hard_problem_table.py` from `tests/support/hard_problems.py`,",
        "in float64: evaluations of phi (+ Jacobian-vector products) to a relative residual of",
        f"1e-10, at most {BUDGET} evaluations or updates; a dash where 1e-9 was not reached",
        "by a residual below half of that of the start, so not by a runaway. A Jacobian is D",
        "products. optimistix, by `benchmarks/optimistix_cells.py`, counts up to the solution; its",
        "`BestSoFar` wrappers change no count.",
        f"fixpoint {fixpoint.__version__}, torch {torch.__version__}, torchdeq 0.1.0, SciPy "
        f"{scipy.__version__}, optimistix {OPTIMISTIX['versions']['optimistix']} "
        f"(jax {OPTIMISTIX['versions']['jax']}).",
        "",
        "| problem | map | " + " | ".join(columns) + " |",
        "|---|---|" + "---|" * len(columns),
        *rows,
        f"| **solved, of {len(rows)}** | | " + " | ".join(map(str, solved.values())) + " |",
    ]
    (ROOT / "docs" / "hard_problems.md").write_text("\n".join(lines) + "\n")
    print(lines[-1])


if __name__ == "__main__":
    main()
