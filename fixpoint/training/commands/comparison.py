"""`fixpoint compare`: run a grid, print its tables, draw the convergence condition."""

from __future__ import annotations

import warnings
from pathlib import Path

from rich.console import Console

from fixpoint.training.commands.progress import RunProgress, run_name
from fixpoint.training.commands.workers import run_all
from fixpoint.training.engine.checkpoint import replace_file
from fixpoint.training.engine.fit import Epoch
from fixpoint.training.engine.run_data import preparer
from fixpoint.training.experiment import build_model, make_fabric
from fixpoint.training.recipe.schema import Recipe
from fixpoint.training.results.html_report import render
from fixpoint.training.results.store import Record, Records, open_records
from fixpoint.training.results.table import comparison_table, findings


def run_comparison(console: Console, runs: list[Recipe], *, out: Path, jobs: int) -> list[Record]:
    """Run what is not finished yet and show everything.

    Pairs of cell, solver and backward that make no sense are left out and named, unless nothing
    else was asked for.

    Args:
        console: where to print.
        runs: see `make_grid`.
        out: folder of `runs.jsonl`, `report.html`, `contraction.png` and the checkpoints.
        jobs: runs at a time.

    Raises:
        ValueError: an option is wrong, or no run is left; nothing has been run then.
        OSError: a data file is missing, or `out` cannot be written.
    """
    if not runs:
        raise ValueError("no run to make: give at least one of --solvers and of --seeds")
    make_fabric(runs[0].machine)
    if runs[0].machine.devices > 1:
        raise ValueError(
            "fixpoint compare takes one device a run: use --jobs for several at a time"
        )
    runs = _buildable(console, runs)
    records = open_records(out)
    done = run_missing(console, runs, records, out=out, jobs=jobs)
    show(console, done, out)
    if len(done) < len(runs):
        raise ValueError(f"{len(runs) - len(done)} of {len(runs)} runs failed, see above")
    return done


def run_missing(
    console: Console, runs: list[Recipe], records: Records, *, out: Path, jobs: int
) -> list[Record]:
    """The records of those runs that ended well, after running what is not in `records`."""
    todo = [run for run in runs if run.key not in records.by_key]
    if len(todo) < len(runs):
        console.print(
            f"{len(runs) - len(todo)} of {len(runs)} runs are already in {records.path}",
            soft_wrap=True,
        )
    with RunProgress(console) as progress:
        tasks = {run: progress.add(run) for run in todo}
        for run, event in run_all(todo, jobs, out):
            if isinstance(event, Epoch):
                progress.advance(tasks[run], event)
            elif isinstance(event, dict):
                records.append(event)
                progress.stop(tasks[run])
            else:
                console.print(f"{run_name(run)} failed: {event}", highlight=False, soft_wrap=True)
                progress.stop(tasks[run], "failed")
    return [records.by_key[run.key] for run in runs if run.key in records.by_key]


def show(console: Console, records: list[Record], out: Path) -> None:
    """A table for each data set, what the numbers mean, and the figure of the condition."""
    for dataset in dict.fromkeys(r["run"]["dataset"] for r in records):
        console.print(comparison_table([r for r in records if r["run"]["dataset"] == dataset]))
    solved = [r for r in records if r["contraction"]]
    for record in solved:
        if record["run"]["seed"] == records[0]["run"]["seed"]:
            console.print(findings(record), highlight=False, soft_wrap=True)
    if records:
        figure = f"   Figure: {_draw(solved, out)}" if solved else ""
        page = out / "report.html"
        replace_file(page, render(records).encode())
        console.print(f"Results: {out / 'runs.jsonl'}{figure}   Report: {page}", soft_wrap=True)


def _buildable(console: Console, runs: list[Recipe]) -> list[Recipe]:
    """The runs whose model can be built; the others are named, each reason once."""
    prepared, shown = preparer(), set()
    good: list[Recipe] = []
    refused: list[ValueError] = []
    for run in runs:
        data, dropped = prepared(run)
        if run.data not in shown:
            shown.add(run.data)
            console.print(f"{data!r}, normalized per {run.data.normalize}", highlight=False)
            if dropped:
                console.print(f"{dropped} training windows hold NaN or inf and are left out")
        try:
            build_model(run, data)
            good.append(run)
        except ValueError as error:
            if str(error) not in map(str, refused):
                refused.append(error)
    if not good:
        raise refused[0]
    for reason in refused:
        console.print(f"Left out: {reason}", highlight=False, soft_wrap=True)
    return good


def _draw(records: list[Record], out: Path) -> Path:
    """One panel for each solver: of several backwards and seeds the first."""
    from fixpoint.analysis import plots

    shown: dict[tuple[str, str], Record] = {}
    for record in records:
        shown.setdefault((record["label"], record["run"]["cell"]), record)
    path = out / "contraction.png"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        plots.save(plots.contraction_figure(list(shown.values())), path)
    return path
