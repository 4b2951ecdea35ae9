"""Runs as tasks of an executor of `concurrent.futures`: processes here, or jobs elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fixpoint.training.commands.single_run import LOCK, train_recipe
from fixpoint.training.engine.checkpoint import write_bytes
from fixpoint.training.engine.fit import Epoch, PastEpoch
from fixpoint.training.recipe.schema import Recipe
from fixpoint.training.results.store import Record

POLL = 0.1
"""Seconds between two looks at what the runs say."""

Files = dict[str, bytes]
"""Contents by path."""


class Started(NamedTuple):
    """A run has started, or starts again after its worker was lost."""

    where: str


Outcome = Started | Epoch | dict[str, Any] | str
"""An event of a run: its start, its epochs, at last its record or the text of its error."""


def run_all(runs: list[Recipe], executor: Executor, out: Path) -> Iterator[tuple[Recipe, Outcome]]:
    """Execute each run as a task of the executor, and yield what happens as it happens.

    Where a worker sees the folder `out`, checkpoints are kept there, so that another one continues
    the run of a worker that was lost; elsewhere the files of a run come with its record. On leaving
    early, by an exception or `close`, waiting runs are canceled and others stop after the running
    epoch, unless the executor ends them before.

    Args:
        executor: any, as a `ProcessPoolExecutor` or the `get_executor()` of a Dask client.
        out: folder of the checkpoints, see `train_recipe`.
    """
    by_key = {run.key: run for run in runs}
    out.mkdir(parents=True, exist_ok=True)
    events = Path(tempfile.mkdtemp(prefix=".events-", dir=out.absolute()))
    read: dict[str, int] = {}
    futures: dict[Future[Any], str] = {}
    try:
        for key, run in by_key.items():
            futures[executor.submit(train_run, run, key, events)] = key
        pending = set(futures)
        while pending:
            done, pending = wait(pending, POLL, FIRST_COMPLETED)
            # After `wait`: all that a finished run said is there.
            for key, event in _unread(events, read):
                yield by_key[key], event
            for future in done:
                yield by_key[futures[future]], _outcome(future, out / futures[future])
    finally:
        for future in futures:
            future.cancel()
        shutil.rmtree(events, ignore_errors=True)


def _unread(folder: Path, read: dict[str, int]) -> Iterator[tuple[str, Started | Epoch]]:
    """Yield the events that were written since, and note how many bytes of each file are read."""
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            file.seek(read.get(path.name, 0))
            for line in file:
                if line.endswith(b"\n"):  # else it is being written
                    read[path.name] = read.get(path.name, 0) + len(line)
                    event = json.loads(line)
                    yield path.name, _event(event)


def _event(values: dict[str, Any]) -> Started | Epoch:
    if "number" not in values:
        return Started(**values)
    return (PastEpoch if values.pop("past") else Epoch)(**values)


def _line(epoch: Epoch) -> str:
    return json.dumps({"past": isinstance(epoch, PastEpoch), **epoch._asdict()})


def _outcome(future: Future[tuple[Record, Files]], folder: Path) -> Outcome:
    """Return the record of a run, whose files are put into its folder, or the text of its error."""
    try:
        record, files = future.result()
    except Exception as error:
        return _reason(error)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
    return record


def _reason(error: Exception) -> str:
    """Return the text of an error; of those that say not what to do print the traceback too."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, MemoryError):
        return str(error)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


def train_run(
    recipe: Recipe,
    key: str,
    events: Path,
    send: Callable[[Path, str], None] | None = None,
    patience: float = 0.0,
) -> tuple[Record, Files]:
    """Train a run on the worker that calls this.

    Args:
        key: that of the recipe where the run was submitted.
        events: folder for what the run says, in that of the checkpoints; where this machine does
            not see it, checkpoints are kept in a temporary folder.
        send: takes a file of events and a line for it; None appends the line.
        patience: seconds to wait for a run that its former worker has not left yet.

    Returns:
        The record; and the files of the run, if the folder is not shared.

    Raises:
        ValueError: the recipe means something else here.
        OSError: another process trains this run, or a file cannot be written.
    """
    host, say = socket.gethostname(), partial(send or append, events / key)
    if replace(recipe).key != key:  # computed again from the files of this machine
        raise ValueError(
            f"data or plugins of this run are other files on {host}: copy them there, or keep them "
            "in a folder that all machines share"
        )
    with ExitStack() as stack:
        shared = events.exists()
        out = events.parent if shared else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        say(json.dumps({"where": f"{host}, process {os.getpid()}"}))
        record = train_recipe(recipe, out, lambda epoch: say(_line(epoch)), patience=patience)
        folder = out / recipe.key
        paths = [] if shared else [p for p in folder.rglob("*") if p.is_file() and p.name != LOCK]
        return record, {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def append(path: Path, line: str) -> None:
    """Append a line to a file of a folder that is there.

    Raises:
        FileNotFoundError: the folder is not there, which stops the runs of a grid that has ended.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"the run was canceled, or its machine does not see {path.parents[1]}"
        ) from None
