"""Work against accuracy over all test problems: draws three figures and prints a table.

python benchmarks/work_precision.py [--out docs]    # writes work_precision_solved.png, ...
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from pathlib import Path
from statistics import geometric_mean

import torch
from processor import processor

import fixpoint
from fixpoint import make_solver
from fixpoint.analysis import WorkPoint, plots, work_precision

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from support.problems import PROBLEMS, Problem  # noqa: E402

NAMES = ("picard", "barzilai-borwein", "anderson", "broyden", "newton", "newton-krylov")
RTOLS = (1e-2, 1e-4, 1e-6, 1e-8, 1e-10)
AT = RTOLS.index(1e-8)


def measure(problems: list[Problem], repeats: int) -> dict[str, list[list[WorkPoint]]]:
    """The points of each solver, problem by problem."""
    solvers = {name: make_solver(name) for name in NAMES}
    rows: dict[str, list[list[WorkPoint]]] = {name: [] for name in NAMES}
    for problem in problems:
        points = work_precision(
            problem.phi, problem.z0, solvers, root=problem.root, rtols=RTOLS, repeats=repeats
        )
        for name in NAMES:
            rows[name].append(points[name])
    return rows


def average(points: tuple[WorkPoint, ...]) -> WorkPoint:
    """Geometric means over the problems, at one tolerance."""
    work, seconds = (geometric_mean([getattr(p, k) for p in points]) for k in ("work", "seconds"))
    return WorkPoint(points[0].rtol, 1.0, points[0].rtol, math.nan, work, seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--limit", type=int, help="the first of the problems only")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    problems = [p for p in PROBLEMS if p.kind != "none"][: options.limit]
    rows = measure(problems, repeats=1)
    works = {
        n: [p[AT].work if p[AT].fraction_converged == 1 else math.inf for p in rows[n]]
        for n in NAMES
    }
    common = [
        problem
        for i, problem in enumerate(problems)
        if all(p.fraction_converged == 1 for n in NAMES for p in rows[n][i])
    ]
    means = {
        name: [average(points) for points in zip(*row, strict=True)]
        for name, row in measure(common, repeats=5).items()
    }
    drawn = {
        "solved": plots.plot_data_profile(works),
        "work": plots.plot_work_precision(means),
        "seconds": plots.plot_work_precision(means, by="seconds"),
    }
    for name, axes in drawn.items():
        if name != "solved":
            axes.set_ylabel("relative tolerance")
        plots.save(plots.figure_of(axes), options.out / f"work_precision_{name}.png")
    print(
        f"fixpoint {fixpoint.__version__}, torch {torch.__version__}, one thread, "
        f"{processor()}; all starts of a problem in one batch"
    )
    print(f"solver             solved to 1e-8, of {len(problems)}   work, ms to 1e-8")
    for name in NAMES:
        count, point = sum(map(math.isfinite, works[name])), means[name][AT]
        print(f"{name:18} {count:16d} {point.work:14.1f} {1e3 * point.seconds:7.2f}")
    print(f"work and time: geometric means over the {len(common)} problems that all solve")


if __name__ == "__main__":
    main()
