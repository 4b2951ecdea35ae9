"""`fixpoint reproduce solvers`: which solver, backward, tolerance and cell on HAR-2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fixpoint.paper.solver_measures import LOST, measure
from fixpoint.training.commands.comparison import run_missing
from fixpoint.training.commands.console import say
from fixpoint.training.commands.save_figure import save_figure
from fixpoint.training.engine.checkpoint import replace_file
from fixpoint.training.engine.model_factory import resolve
from fixpoint.training.recipe.names import SOLVERS
from fixpoint.training.recipe.schema import Recipe
from fixpoint.training.results.aggregate import Column, groups
from fixpoint.training.results.store import Record, Records, open_records

COMMON: dict[str, Any] = {
    **{"dataset": "har2", "normalize": "asinh", "rotate": 30.0},
    **{"epochs": 4, "schedule": "cosine", "clip": 1.0},
}
STEPS: dict[str, Any] = {"solver": "inexact-newton", "cell": "jordan", "rank": 8, "eta": 0.03}
EQUILIBRIUM: dict[str, Any] = {
    **{"solver": "anderson", "backward": "implicit", "cell": "self-feedback", "rtol": 1e-3},
    **{"nonlinearity": "relu", "init": "identity", "bound": 0.5, "lr": 0.003},
}
MEASURED: dict[str, Any] = {
    "solver": "anderson",
    "rtol": 1e-3,
    "backward": "implicit",
    "bound": 0.5,
}
"""The run on whose weights all other solvers, tolerances and backwards are measured."""

TOLERANCES = (1e-2, 1e-3, 1e-5)

Design = Sequence[tuple[dict[str, Any], tuple[int, ...]]]
"""Settings of each row, and its seeds."""


def _design() -> Design:
    once = {**EQUILIBRIUM, "epochs": 1}
    picard = {**once, "solver": "picard"}
    first, five = (0,), (0, 1, 2, 3, 4)
    return (
        *(({**STEPS, "max_iter": K}, five) for K in (1, 2, 5)),
        (EQUILIBRIUM, five),
        *(({**once, "rtol": rtol}, first) for rtol in (1e-2, 1e-5)),
        *(({**picard, "rtol": rtol}, first) for rtol in TOLERANCES),
        *(({**once, "solver": solver}, first) for solver in ("broyden", "newton")),
        *(({**picard, "backward": backward}, first) for backward in ("unrolled", "phantom")),
        *(({**once, "bound": bound}, first) for bound in (0.9, 0.99, 0.0)),
    )


DESIGN: Design = _design()
"""Solver, tolerance, backward and cell, changed one at a time; one epoch but for the main rows,
whose first epoch has the same learning rate."""


def study_runs(
    design: Design = DESIGN, *, seeds: Sequence[int] | None = None, **changes: Any
) -> list[Recipe]:
    """The runs of a design, those of its first rows and seeds first.

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
    runs = [
        Recipe().changed(**{**COMMON, **settings, **changes, "seed": own[i]})
        for i in range(most)
        for settings, own in rows
        if i < len(own)
    ]
    return [replace(run, model=resolve(run.model)) for run in runs]


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
    runs = study_runs(design, seeds=seeds, **(changes or {}))
    records = open_records(out)
    run_missing(console, runs, records, out=out, jobs=jobs)
    measure_missing(console, records, [run.key for run in runs], out)
    done = [records.by_key[run.key] for run in runs if run.key in records.by_key]
    if done:
        _show(console, done, out, formats)
    if len(done) < len(runs):
        raise ValueError(f"{len(runs) - len(done)} of {len(runs)} runs failed, see above")
    return done


def measure_missing(console: Console, records: Records, keys: Iterable[str], out: Path) -> None:
    """Add `measure` to the records of these runs that are without."""
    for key in keys:
        record = records.by_key.get(key)
        if record is not None and "measures" not in record:
            with console.status(f"measuring {record['label']}"):
                lost = record["accuracy_last"] is None
                measures = LOST if lost else measure(out / key, grid=has_grid(record["run"]))
            records.forget(key)
            records.append({**record, "measures": measures})


def has_grid(run: dict[str, Any]) -> bool:
    return run["seed"] == 0 and all(run[name] == value for name, value in MEASURED.items())


def _show(console: Console, records: list[Record], out: Path, formats: Sequence[str]) -> None:
    from fixpoint.analysis import plots

    text = "\n\n".join([markdown_table(records), grid_table(records)])
    replace_file(out / "solvers.md", (text + "\n").encode())
    console.print(text, markup=False, soft_wrap=True)
    for name, draw in plots.STUDY_FIGURES.items():
        files = save_figure(draw(records), out / name, formats, (draw.__doc__ or "").split("\n")[0])
        say(console, f"Figure: {', '.join(map(str, files))}")


COLUMNS = (
    Column("epoch 1 %", "accuracy_first", 2),
    Column("last %", "accuracy_last", 2),
    Column("best %", "accuracy_best", 2),
    Column("s / epoch", "measures/seconds_per_epoch", 1),
    Column("peak MiB", "measures/peak_memory_mib", 0),
    Column("iterations", "mean_iterations", 1),
    Column("converged %", "fraction_converged", 2, 100),
)


GRID_COLUMNS = (
    Column("s / epoch", "seconds_per_epoch", 1),
    Column("peak MiB", "peak_memory_mib", 0),
    Column("iterations", "mean_iterations", 1),
    Column("converged %", "fraction_converged", 2, 100),
)


def markdown_table(records: list[Record]) -> str:
    """A row for each setting; mean and standard deviation where it has several seeds."""
    heads = ["cell", "solver", "rtol", "backward", "epochs", "seeds"]
    heads += [*(column.head for column in COLUMNS), "gradient error"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    first = [{**r, "accuracy_first": r["epochs"][0]["accuracy"]} for r in records]
    for group in groups(first):
        run = group[0]["run"]
        cells = [_cell(run), _solver(run), _tolerance(run), run["backward"], str(run["epochs"])]
        cells += [str(len(group)), *(column.text(group) for column in COLUMNS), _error(group)]
        if any(record["accuracy_last"] is None for record in group):
            cells[6] = "diverged"
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def grid_table(records: list[Record]) -> str:
    """A row for each solver, tolerance and backward, all on the weights of one model."""
    heads = ["solver", "rtol", "backward", *(column.head for column in GRID_COLUMNS)]
    lines = ["| " + " | ".join([*heads, "gradient error"]) + " |", "|" + "---|" * (len(heads) + 1)]
    for row in (row for record in records for row in record["measures"]["grid"]):
        if row["rtol"] in TOLERANCES:
            cells = [SOLVERS[row["solver"]], _tolerance(row), row["backward"]]
            cells += [*(column.text([row]) for column in GRID_COLUMNS), _error([{"measures": row}])]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(run: dict[str, Any]) -> str:
    if run["cell"] == "jordan":
        return "Jordan"
    return f"bound {run['bound']:g}" if run["bound"] else "free"


def _solver(run: dict[str, Any]) -> str:
    return f"K = {run['max_iter']}" if run["solver"] == STEPS["solver"] else SOLVERS[run["solver"]]


def _tolerance(run: dict[str, Any]) -> str:
    return "-" if run["rtol"] is None else f"{run['rtol']:.0e}".replace("e-0", "e-")


def _error(group: list[Record]) -> str:
    errors = Column("", "measures/gradient_error", 0).values(group)
    return f"{sum(errors) / len(errors):.2g}" if errors else "-"
