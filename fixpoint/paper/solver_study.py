"""`fixpoint reproduce solvers`: which solver, backward, tolerance and map on HAR-2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fixpoint._messages import SomeFailed
from fixpoint.paper.solver_measures import LOST, measure
from fixpoint.training.commands.comparison import buildable, run_missing
from fixpoint.training.commands.console import say
from fixpoint.training.commands.save_figure import caption, save_figure
from fixpoint.training.engine.checkpoint import replace_file
from fixpoint.training.engine.model_factory import resolve
from fixpoint.training.recipe.names import SOLVERS
from fixpoint.training.recipe.schema import Recipe
from fixpoint.training.results.aggregate import Column, groups
from fixpoint.training.results.store import Record, Records, open_records

COMMON: dict[str, Any] = {
    **{"dataset": "har2", "normalize": "asinh", "rotate": 30.0},
    **{"epochs": 40, "schedule": "cosine", "clip": 1.0},
}
STEPS: dict[str, Any] = {"solver": "inexact-newton", "map": "jordan", "rank": 8, "eta": 0.03}
EQUILIBRIUM: dict[str, Any] = {
    **{"solver": "picard", "backward": "implicit", "map": "self-feedback", "rtol": 1e-3},
    **{"nonlinearity": "relu", "init": "identity", "bound": 0.5, "lr": 0.003},
}

TOLERANCES = (1e-2, 1e-3, 1e-5)
BACKWARDS = ("implicit", "unrolled", "phantom")
BOUNDS = (0.5, 0.9, 0.99, 0.0)
"""Of ||U||_2 in the equilibrium maps; 0 is none."""

Design = Sequence[tuple[dict[str, Any], tuple[int, ...]]]
"""Settings of each row, and its seeds."""


def _design() -> Design:
    once = {**EQUILIBRIUM, "epochs": 1}
    first, five = (0,), (0, 1, 2, 3, 4)
    return (
        *(({**STEPS, "max_iter": K}, five) for K in (1, 2, 5)),
        (EQUILIBRIUM, five),
        *(
            ({**once, "bound": bound, "solver": solver, "rtol": rtol, "backward": backward}, first)
            for bound in BOUNDS
            for solver in ("picard", "anderson", "broyden")
            for rtol in TOLERANCES
            for backward in BACKWARDS
        ),
        *(({**once, "solver": "newton", "rtol": rtol}, first) for rtol in TOLERANCES),
    )


DESIGN: Design = _design()
"""The main rows, trained to the end, and a sweep of one epoch over solver, tolerance, backward and
map. The learning rate of that epoch is that of the first one of the main rows."""


def study_runs(
    design: Design = DESIGN, *, seeds: Sequence[int] | None = None, **changes: Any
) -> list[Recipe]:
    """Return the runs of a design, those of its first rows and seeds first.

    Args:
        seeds: of every row, in place of its own.
        changes: keys of all recipes to change, as epochs for a first look.

    Example:
        >>> from fixpoint.paper.solver_study import study_runs
        >>> [run.model.max_iter for run in study_runs()[:3]]
        [1, 2, 5]
    """
    rows = [(settings, tuple(seeds) if seeds is not None else own) for settings, own in design]
    most = max(len(own) for _, own in rows)
    recipes = (
        Recipe().changed(**{**COMMON, **settings, **changes, "seed": own[i]})
        for i in range(most)
        for settings, own in rows
        if i < len(own)
    )
    runs = [replace(recipe, model=resolve(recipe.model)) for recipe in recipes]
    return list({run.key: run for run in runs}.values())  # `changes` can make two runs alike


def reproduce_solvers(
    console: Console,
    *,
    out: Path,
    jobs: int,
    seeds: Sequence[int] | None = None,
    changes: dict[str, Any] | None = None,
    formats: Sequence[str] = ("png",),
    design: Design = DESIGN,
) -> list[Record]:
    """Train the models of the study, measure what is not in a record of training, and show all.

    Finished runs in `out` are not run again. The table is written to `solvers.md` and the figures
    beside it.

    Raises:
        ValueError: some runs failed, or a value is wrong.
        OSError: the data are not there, or `out` cannot be written.
    """
    runs = buildable(console, study_runs(design, seeds=seeds, **(changes or {})))
    records = open_records(out)
    run_missing(console, runs, records, out=out, jobs=jobs)
    measure_missing(console, records, runs, out)
    done = [records.by_key[run.key] for run in runs if run.key in records.by_key]
    if done:
        _show(console, done, out, formats)
    if len(done) < len(runs):
        raise SomeFailed(f"{len(runs) - len(done)} of {len(runs)} runs failed, see above")
    return done


def measure_missing(console: Console, records: Records, runs: Sequence[Recipe], out: Path) -> None:
    """Add `measure` to the records of these runs that are without."""
    grid = grid_run(runs)
    for run in runs:
        record = records.by_key.get(run.key)
        if record is not None and "measures" not in record:
            with console.status(f"measuring {record['label']}"):
                lost = record["accuracy_last"] is None
                measures = LOST if lost else measure(out / run.key, grid=run.key == grid)
            records.forget(run.key)
            records.append({**record, "measures": measures})


def grid_run(runs: Sequence[Recipe]) -> str | None:
    """Return the key of the run on whose weights all solvers, tolerances and backwards are
    measured.

    It is the first of the longest that solve for an equilibrium.
    """
    solved = [run for run in runs if run.model.solver != STEPS["solver"]]
    return max(solved, key=lambda run: run.training.epochs).key if solved else None


def _show(console: Console, records: list[Record], out: Path, formats: Sequence[str]) -> None:
    from fixpoint.analysis import plots

    text = "\n\n".join(tables(records))
    replace_file(out / "solvers.md", (text + "\n").encode())
    console.print(text, markup=False, soft_wrap=True)
    for name, draw in plots.STUDY_FIGURES.items():
        files = save_figure(draw(records), out / name, formats, caption(draw))
        say(console, f"Figure: {', '.join(map(str, files))}")


def tables(records: list[Record]) -> list[str]:
    """Write the tables of the page: the longest runs, the sweep of shorter ones, and the grid."""
    longest = max(record["run"]["epochs"] for record in records)
    long = [record for record in records if record["run"]["epochs"] == longest]
    short = [record for record in records if record["run"]["epochs"] < longest]
    return [markdown_table(long), *([sweep_table(short)] if short else []), grid_table(records)]


LAST = Column("last %", "accuracy_last", 2)
SECONDS = Column("s / epoch", "measures/seconds_per_epoch", 1)
ITERATIONS = Column("iterations", "mean_iterations", 1)
ERROR = Column("gradient error", "measures/gradient_error", None)
COLUMNS = (
    Column("epoch 1 %", "accuracy_first", 2),
    LAST,
    Column("best %", "accuracy_best", 2),
    SECONDS,
    Column("peak MiB", "measures/peak_memory_mib", 0),
    ITERATIONS,
    Column("converged %", "fraction_converged", 2, 100),
    ERROR,
)
SWEEP_COLUMNS = (LAST, SECONDS, ERROR)
GRID_COLUMNS = (
    Column("s / epoch", "seconds_per_epoch", 1),
    Column("peak MiB", "peak_memory_mib", 0),
    ITERATIONS,
    Column("converged %", "fraction_converged", 2, 100),
    Column("gradient error", "gradient_error", None),
)


def markdown_table(records: list[Record]) -> str:
    """Return a row for each setting; mean and standard deviation where it has several seeds."""
    heads = ["map", "solver", "rtol", "backward", "seeds", *(column.head for column in COLUMNS)]
    rows = []
    for group in groups([{**r, "accuracy_first": r["epochs"][0]["accuracy"]} for r in records]):
        run = group[0]["run"]
        cells = [_map(run), _solver(run), _tolerance(run), run["backward"], str(len(group))]
        rows.append([*cells, *(_text(column, group) for column in COLUMNS)])
    return _markdown(heads, rows)


def sweep_table(records: list[Record]) -> str:
    """Return a row for each map, solver and tolerance, with a few columns for each backward."""
    by_row: dict[tuple[str, ...], dict[str, list[Record]]] = {}
    for record in records:
        run = record["run"]
        row = by_row.setdefault((_map(run), _solver(run), _tolerance(run)), {})
        row.setdefault(run["backward"], []).append(record)
    heads = ["map", "solver", "rtol", "iterations"]
    heads += [f"{name}: {column.head}" for name in BACKWARDS for column in SWEEP_COLUMNS]
    rows = [
        [*row, _text(ITERATIONS, next(iter(found.values())))]
        + [_text(column, found.get(name, [])) for name in BACKWARDS for column in SWEEP_COLUMNS]
        for row, found in by_row.items()
    ]
    return _markdown(heads, rows)


def grid_table(records: list[Record]) -> str:
    """Return a row for each solver, tolerance and backward, all on the weights of one model."""
    rows = [
        [SOLVERS[row["solver"]], _tolerance(row), row["backward"]]
        + [column.text([row]) for column in GRID_COLUMNS]
        for record in records
        for row in record["measures"]["grid"]
        if row["rtol"] in TOLERANCES
    ]
    return _markdown(["solver", "rtol", "backward", *(c.head for c in GRID_COLUMNS)], rows)


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (heads, ["---"] * len(heads), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _text(column: Column, group: list[Record]) -> str:
    lost = any(record["accuracy_last"] is None for record in group)
    return "diverged" if lost and column is LAST else column.text(group)


def _map(run: dict[str, Any]) -> str:
    if run["map"] == "jordan":
        return "Jordan"
    return f"bound {run['bound']:g}" if run["bound"] else "free"


def _solver(run: dict[str, Any]) -> str:
    return f"K = {run['max_iter']}" if run["solver"] == STEPS["solver"] else SOLVERS[run["solver"]]


def _tolerance(run: dict[str, Any]) -> str:
    return "-" if run["rtol"] is None else f"{run['rtol']:.0e}".replace("e-0", "e-")
