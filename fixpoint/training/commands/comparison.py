"""`fixpoint compare`: run a grid, print its tables, draw the convergence condition."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fixpoint._messages import SomeFailed
from fixpoint.training.commands.console import say
from fixpoint.training.commands.executors import make_executor
from fixpoint.training.commands.failures import FAILED, read_failed, write_failed
from fixpoint.training.commands.progress import make_progress, run_name
from fixpoint.training.commands.save_figure import save_figure
from fixpoint.training.commands.workers import Started, run_all
from fixpoint.training.engine.checkpoint import replace_file
from fixpoint.training.engine.fit import Epoch
from fixpoint.training.engine.model_factory import resolved
from fixpoint.training.engine.run_data import preparer
from fixpoint.training.experiment import build_model, make_fabric
from fixpoint.training.recipe.names import run_label
from fixpoint.training.recipe.schema import Recipe
from fixpoint.training.results.aggregate import by_dataset, groups
from fixpoint.training.results.html_report import render
from fixpoint.training.results.store import Record, Records, open_records, read_file
from fixpoint.training.results.summary import summary
from fixpoint.training.results.table import comparison_table
from fixpoint.training.results.verdict import shared_findings

NORMALIZED = {
    "column": "normalized by time step and channel",
    "channel": "normalized by channel",
    "asinh": "normalized by asinh",
    "none": "not normalized",
}
"""Words for `data.normalize` of a recipe."""


def run_comparison(
    console: Console,
    runs: list[Recipe],
    *,
    out: Path,
    jobs: int,
    cluster: str | None = None,
    formats: Sequence[str] = ("png",),
    dry: bool = False,
    only_failed: bool = False,
) -> list[Record]:
    """Run what is not finished yet and show everything.

    Pairs of map, solver and backward that make no sense are left out and named, unless nothing
    else was asked for.

    Args:
        console: where to print.
        runs: see `make_grid`.
        out: folder of `runs.jsonl`, `report.html`, `contraction.png` and the checkpoints.
        jobs: runs at a time.
        cluster: where else the runs are trained; see `make_executor`.
        formats: of the figure, of png, pdf and svg.
        dry: print the runs with their keys, and run nothing.
        only_failed: run those alone that failed before.

    Raises:
        ValueError: an option is wrong, or no run is left; nothing has been run then.
        OSError: a data file is missing, or `out` cannot be written.
    """
    if not runs:
        raise ValueError("no run to make: give at least one of --solvers and of --seeds")
    if cluster is None:
        make_fabric(runs[0].machine)
    if runs[0].machine.devices > 1:
        raise ValueError(
            "fixpoint compare takes one device a run: use --jobs for several at a time"
        )
    runs = buildable(console, runs)
    if only_failed:
        runs = [run for run in runs if run.key in read_failed(out)]
        if not runs:
            raise ValueError(f"no run of this command is in {out / FAILED}")
    if dry:
        list_runs(console, runs, out)
        return []
    records = open_records(out)
    done = run_missing(console, runs, records, out=out, jobs=jobs, cluster=cluster)
    show(console, done, out, formats)
    if len(done) < len(runs):
        raise SomeFailed(f"{len(runs) - len(done)} of {len(runs)} runs failed, see above")
    return done


def run_missing(
    console: Console,
    runs: list[Recipe],
    records: Records,
    *,
    out: Path,
    jobs: int,
    cluster: str | None = None,
) -> list[Record]:
    """Return the records of those runs that were finished, after running what is not in `records`.

    Failed runs are listed in `failed.json` in `out`.
    """
    todo = [resolved(run) for run in runs if run.key not in records.by_key]
    if len(todo) < len(runs):
        say(console, f"{len(runs) - len(todo)} of {len(runs)} runs are already in {records.path}")
    failed: dict[str, str] = {}
    if todo:
        with (
            make_executor(todo, jobs, cluster, out) as executor,
            make_progress(console, todo) as progress,
        ):
            for run, event in run_all(_longest_first(todo, jobs), executor, out):
                if isinstance(event, Started):
                    progress.begin(run, event.where)
                elif isinstance(event, Epoch):
                    progress.advance(run, event)
                elif isinstance(event, dict):
                    records.append(event)
                    progress.stop(run)
                else:
                    failed[run.key] = event
                    progress.fail(run, event)
        write_failed(out, failed, {run.key for run in todo})
    return [records.by_key[run.key] for run in runs if run.key in records.by_key]


def _longest_first(runs: list[Recipe], jobs: int) -> list[Recipe]:
    """Order runs, where several run at a time, so that no long one runs alone at last.

    Anderson's and Broyden's updates are unrolled in Python, which takes some ten times as long.
    """

    def is_short(run: Recipe) -> bool:
        return run.model.backward != "unrolled" or run.model.solver not in ("anderson", "broyden")

    return sorted(runs, key=is_short) if jobs > 1 else runs


def list_runs(console: Console, runs: list[Recipe], out: Path) -> None:
    """Print a line for each run: its key, whether it is finished, its name."""
    path = out / "runs.jsonl"
    done = {record["key"] for record in read_file(path)} if path.is_file() else set()
    for run in runs:
        state = "finished" if run.key in done else "to run"
        say(console, f"{run.key}  {state:8}  {run_name(run)}")


def show(console: Console, records: list[Record], out: Path, formats: Sequence[str]) -> None:
    """Print a table for each data set and what the numbers mean, and draw the condition."""
    for group in by_dataset(records).values():
        console.print(comparison_table(group))
    for group in by_dataset(records).values():
        for text in (*shared_findings(groups(group)), *summary(group)):
            say(console, text)
    if records:
        solved = [r for r in records if r["contraction"]]
        files = _draw(solved, out, formats) if solved else []
        figure = f"   Figure: {', '.join(map(str, files))}" if files else ""
        page = out / "report.html"
        replace_file(page, render(records).encode())
        say(console, f"Results: {out / 'runs.jsonl'}{figure}   Report: {page}")


def buildable(console: Console, runs: list[Recipe]) -> list[Recipe]:
    """Return the runs whose model can be built; the others are named, each reason once."""
    prepared, shown = preparer(), set()
    good: list[Recipe] = []
    refused: list[ValueError] = []
    for run in runs:
        data, dropped, _ = prepared(run)
        if run.data not in shown:
            shown.add(run.data)
            say(console, f"{data!r}, {NORMALIZED[run.data.normalize]}")
            if dropped:
                say(console, f"{dropped} training windows hold NaN or inf and are left out")
        try:
            build_model(run, data)
            good.append(run)
        except ValueError as error:
            if str(error) not in map(str, refused):
                refused.append(error)
    if not good:
        raise refused[0]
    for reason in refused:
        say(console, f"Left out: {reason}")
    return good


def _draw(records: list[Record], out: Path, formats: Sequence[str]) -> list[Path]:
    """Draw a panel for each solver with all its seeds: of several backwards the first."""
    from fixpoint.analysis import plots

    shown: dict[str, list[Record]] = {}
    for seeds in groups(records):
        shown.setdefault(run_label(seeds[0]["run"]), seeds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        figure = plots.contraction_figure(list(shown.values()))
        return save_figure(figure, out / "contraction", formats, plots.CONTRACTION_CAPTION)
