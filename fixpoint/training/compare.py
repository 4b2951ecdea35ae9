"""`fixpoint compare`: run a grid, print its table, draw the convergence condition."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fixpoint.training.fit import Epoch
from fixpoint.training.grid import make_grid
from fixpoint.training.records import Record, Records
from fixpoint.training.run import Run, build
from fixpoint.training.table import comparison_table, findings
from fixpoint.training.workers import prepared, run_all


def compare(console: Console, *, out: Path, jobs: int, **options: Any) -> list[Record]:
    """Run what is not finished yet and show everything.

    Args:
        console: where to print.
        out: folder of `runs.jsonl` and `contraction.png`.
        jobs: runs at a time.
        options: see `make_grid`.

    Raises:
        ValueError: an option is wrong or a pair refused; nothing has been run then.
        OSError: a data file is missing, or `out` cannot be written.
    """
    runs = make_grid(**options)
    if not runs:
        raise ValueError("no run to make: give at least one of --solvers and of --seeds")
    _check_device(runs[0].device)
    data, dropped = prepared(runs[0])
    for run in runs:
        build(run, data)
    if not runs[0].batch_size >= 1:
        raise ValueError(f"--batch-size must be at least 1; got {runs[0].batch_size}")
    records = _open(out)
    console.print(f"{data!r}, normalised per {runs[0].normalise}", highlight=False)
    if dropped:
        console.print(f"{dropped} training windows hold NaN or inf and are left out")
    todo = [run for run in runs if run.key not in records.by_key]
    if len(todo) < len(runs):
        console.print(f"{len(runs) - len(todo)} of {len(runs)} runs are already in {records.path}")
    failed = _run_missing(console, todo, jobs, records)
    done = [records.by_key[run.key] for run in runs if run.key in records.by_key]
    if done:
        console.print(comparison_table(done))
        for record in done:
            if record["run"]["seed"] == runs[0].seed:
                console.print(findings(record), highlight=False, soft_wrap=True)
        figure = _draw(done, out)
        console.print(f"Results: {records.path}   Figure: {figure}", soft_wrap=True)
    if failed:
        raise ValueError(f"{len(failed)} of {len(runs)} runs failed: " + "; ".join(failed))
    return done


def _open(out: Path) -> Records:
    try:
        return Records(out)
    except OSError as error:
        raise OSError(
            f"--out must be a folder that can be written; {out} cannot ({error.strerror}): give "
            "another one"
        ) from None


def _check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda; got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA device and a CUDA build of torch: use cpu")


def _run_missing(console: Console, todo: list[Run], jobs: int, records: Records) -> list[str]:
    """Run, record each run as it ends, and return what went wrong."""
    failed = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        tasks = {
            run: progress.add_task(_name(run), total=run.epochs, start=False, note="")
            for run in todo
        }
        for run, event in run_all(todo, jobs):
            task = tasks[run]
            if isinstance(event, Epoch):
                progress.start_task(task)
                note = f"loss {event.train_loss:.3f}  test {event.accuracy:.1f} %"
                progress.update(task, completed=event.number, note=note)
            elif isinstance(event, dict):
                records.append(event)
                progress.stop_task(task)
            else:
                failed.append(f"{_name(run)}: {event}")
                progress.update(task, note="failed")
                progress.stop_task(task)
    return failed


def _name(run: Run) -> str:
    return f"{run.label}, {run.backward}, seed {run.seed}"


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
