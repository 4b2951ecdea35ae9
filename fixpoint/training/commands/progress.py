"""Progress of runs: bars on a terminal, elsewhere a line for each finished epoch."""

from __future__ import annotations

import time
from importlib.util import find_spec
from math import isfinite

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from fixpoint._messages import printable
from fixpoint.training.commands.console import say
from fixpoint.training.engine.fit import Epoch
from fixpoint.training.recipe.schema import Recipe
from fixpoint.training.results.aggregate import mean_and_sd

COMPILED = ("ernn", "fastrnn", "fastgrnn", "ugrnn", "spectralrnn")
"""Models whose recurrence numba compiles in the first batch, unless its cache has it."""

WIDE = 150
"""Columns of a terminal that hold the name of a run, its bar and its result."""

NARROW = 70
"""Columns that hold the result and a name that can be read."""


class RunProgress:
    """Epochs done, loss, score, and time left, of several runs at once.

    Args:
        console: bars if it is a terminal that has room for them, else lines, which a log file can
            hold.
        runs: all that will be run, for the estimate of the time left.
    """

    def __init__(self, console: Console, runs: list[Recipe]) -> None:
        self.console = console
        self.total = {run: _epochs(run) for run in runs}
        self.done = dict.fromkeys(runs, 0)
        self.start = time.monotonic()
        fits = console.is_terminal and console.width >= NARROW
        self.bars = _bars(console) if fits else None
        self.tasks = {run: self._bar(self.bars, run) for run in runs if self.bars}

    def __enter__(self) -> RunProgress:
        if self.bars:
            self.bars.start()
        elif any(_first_note(run) for run in self.total):
            say(self.console, "Compiling the recurrence once, which may take some 10 s.")
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bars:
            self.bars.stop()

    def begin(self, run: Recipe, where: str) -> None:
        """The run starts there, or starts again; its epochs so far will be counted again."""
        again, self.done[run] = self.done[run], 0
        if self.bars:
            self.bars.update(self.tasks[run], completed=0, note=where)
        elif again:
            say(self.console, f"{run_name(run)}: its worker was lost; taken over by {where}")

    def advance(self, run: Recipe, epoch: Epoch) -> None:
        """One more epoch is done."""
        self.done[run] += 1
        if self.bars:
            self.bars.start_task(self.tasks[run])
            self.bars.update(self.tasks[run], advance=1, note=_result(epoch))
            return
        of = f"epoch {self.done[run]} of {self.total[run]}"
        say(self.console, f"{run_name(run)}: {of}, {_result(epoch)}{self._left()}")

    def stop(self, run: Recipe, note: str | None = None) -> None:
        """The run has ended; `note` says how if not well."""
        self.total[run] = self.done[run]
        if self.bars:
            if note is not None:
                self.bars.update(self.tasks[run], note=note)
            self.bars.stop_task(self.tasks[run])

    def _bar(self, bars: Progress, run: Recipe) -> TaskID:
        name, note = printable(run_name(run)), _first_note(run)
        return bars.add_task(name, total=self.total[run], start=False, note=note)

    def _left(self) -> str:
        """The time left, from the mean time of the epochs so far."""
        done, total = sum(self.done.values()), sum(self.total.values())
        seconds = (time.monotonic() - self.start) * (total - done) / done
        return f"; about {_duration(seconds)} left" if total > done else ""


def run_name(recipe: Recipe) -> str:
    """Short name of a run among others."""
    parts = [recipe.label, recipe.model.backward, f"seed {recipe.training.seed}"]
    return f"{recipe.data.dataset}: {', '.join(part for part in parts if part)}"


def _bars(console: Console) -> Progress:
    """Names are wrapped where a terminal is narrow, and bars left out: no number is cut."""
    wide = console.width >= WIDE
    return Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=wide)),
        *((BarColumn(),) if wide else ()),
        MofNCompleteColumn(),
        TextColumn("epochs"),
        *((TimeElapsedColumn(),) if wide else ()),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
    )


def _epochs(recipe: Recipe) -> int:
    training = recipe.training
    return training.epochs * (1 + len(training.halve_choices))


def _first_note(recipe: Recipe) -> str:
    compiled = recipe.model.model in COMPILED and recipe.machine.device == "cpu"
    return "compiling once" if compiled and find_spec("numba") else ""


def _result(epoch: Epoch) -> str:
    if not isfinite(epoch.train_loss):
        return "diverged"
    loss = mean_and_sd([epoch.train_loss], 3)
    if epoch.accuracy is None:
        return f"loss {loss}, perplexity {epoch.perplexity:.1f}"
    return f"loss {loss}, test {epoch.accuracy:.1f} %"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
