"""Progress of runs: bars on a terminal, elsewhere a line for each finished epoch."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from math import isfinite
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column

from fixpoint._messages import printable
from fixpoint.models.ops.common.dispatch import MAX_SIZE
from fixpoint.training.commands.console import say
from fixpoint.training.engine.fit import Epoch, PastEpoch
from fixpoint.training.recipe.names import SOLVERS, short_name
from fixpoint.training.recipe.schema import Recipe
from fixpoint.training.results.aggregate import mean_and_sd

COMPILED = ("ernn", "fastrnn", "fastgrnn", "ugrnn", "spectralrnn", "rnn", "gru", "lstm")
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
        self.names = short_names(runs)
        self.left = TimeLeft(self.total)
        fits = console.is_terminal and console.width >= NARROW
        self.bars = _bars(console) if fits else None
        self.tasks = {run: self._bar(self.bars, run) for run in runs if self.bars}

    def __enter__(self) -> RunProgress:
        if any(_emulates_bfloat16(run) for run in self.total):
            say(
                self.console,
                "This CPU has no bfloat16 instructions, so its products take several times as long "
                "as float32: --precision 32-true is faster.",
            )
        if any(map(_lacks_numba, self.total)):
            say(
                self.console,
                "numba is not installed, without which training on the CPU takes about twice as "
                "long: pip install 'torch-fixpoint[fast]'",
            )
        if self.bars:
            self.bars.start()
        elif any(_first_note(run) for run in self.total):
            say(self.console, "Compiling the recurrence once, which may take some 10 s.")
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bars:
            self.bars.stop()

    def begin(self, run: Recipe, where: str) -> None:
        """Show that the run starts there, or starts again; its epochs so far are counted again."""
        again, self.done[run] = self.done[run], 0
        self.left.begin(run)
        if self.bars:
            self.bars.update(self.tasks[run], completed=0, note=_first_note(run) or where)
        elif again:
            say(self.console, f"{self.names[run]}: its worker was lost; taken over by {where}")

    def advance(self, run: Recipe, epoch: Epoch) -> None:
        """Show that one more epoch is done."""
        self.done[run] += 1
        left = self.left.after(run, epoch)
        if self.bars:
            self.bars.start_task(self.tasks[run])
            self.bars.update(self.tasks[run], advance=1, note=_result(epoch), left=left)
            return
        of = f"epoch {self.done[run]} of {self.total[run]}"
        note = "done before" if isinstance(epoch, PastEpoch) else left
        say(self.console, f"{self.names[run]}: {of}, {_result(epoch)}{note and f'; {note}'}")

    def stop(self, run: Recipe, note: str | None = None) -> None:
        """Show that the run has ended; `note` says how if not well."""
        self.total[run] = self.done[run]
        self.left.stop(run)
        if self.bars:
            if note is not None:
                self.bars.update(self.tasks[run], note=note)
            self.bars.stop_task(self.tasks[run])

    def fail(self, run: Recipe, reason: str) -> None:
        """Show that the run has failed."""
        say(self.console, f"{run_name(run)} failed: {reason}")
        self.stop(run, "failed")

    def _bar(self, bars: Progress, run: Recipe) -> TaskID:
        name, note = printable(self.names[run]), _first_note(run)
        return bars.add_task(name, total=self.total[run], start=False, note=note, left="")


class TimeLeft:
    """Time left, from the epochs of this process without the first of each run.

    That one may compile.

    Args:
        total: epochs of each run.
    """

    def __init__(self, total: Mapping[Recipe, int]) -> None:
        self.total = dict(total)
        self.seen = dict.fromkeys(total, 0)
        self.last: dict[Recipe, float] = {}
        self.gaps: dict[Recipe, list[float]] = {run: [] for run in total}

    def begin(self, run: Recipe) -> None:
        """Count the epochs of this run again from 0: its next process reports them all."""
        self.seen[run] = 0
        self.last.pop(run, None)

    def after(self, run: Recipe, epoch: Epoch) -> str:
        """Return the time left after one more epoch, "" where it is not known."""
        now = time.monotonic()
        self.seen[run] += 1
        if isinstance(epoch, PastEpoch):
            self.last.pop(run, None)
            return ""
        if run in self.last:
            self.gaps[run].append(now - self.last[run])
        self.last[run] = now
        known = [gap for gaps in self.gaps.values() for gap in gaps]
        if not known or not any(self.seen[r] < n for r, n in self.total.items()):
            return ""
        running = sum(0 < self.seen[r] < n for r, n in self.total.items())
        seconds = sum(
            (n - self.seen[r]) * fmean(self.gaps[r] or known) for r, n in self.total.items()
        )
        return f"about {_duration(seconds / max(running, 1))} left"

    def stop(self, run: Recipe) -> None:
        """Count no epoch of this run among those to come."""
        self.total[run] = self.seen[run]


class JsonProgress:
    """Progress as JSON, an object a line, for other programs.

    Args:
        console: where to print; standard output if it is standard error, which has all else then.
        runs: all that will be run.
    """

    def __init__(self, console: Console, runs: list[Recipe]) -> None:
        self.console, self.runs = console, runs

    def __enter__(self) -> JsonProgress:
        for run in self.runs:
            self._say("planned", run, name=run_name(run), epochs=_epochs(run))
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def begin(self, run: Recipe, where: str) -> None:
        """Show that the run starts there, or starts again."""
        self._say("started", run, where=where)

    def advance(self, run: Recipe, epoch: Epoch) -> None:
        """Show that one more epoch is done."""
        values = {k: v if v is None or isfinite(v) else None for k, v in epoch._asdict().items()}
        self._say("epoch", run, **values)

    def stop(self, run: Recipe, note: str | None = None) -> None:
        """Show that the run has ended."""
        self._say("finished", run)

    def fail(self, run: Recipe, reason: str) -> None:
        """Show that the run has failed."""
        self._say("failed", run, reason=reason)

    def _say(self, event: str, run: Recipe, **values: Any) -> None:
        line = json.dumps({"event": event, "key": run.key, **values}, allow_nan=False)
        file = sys.stdout if self.console.stderr else self.console.file
        file.write(line + "\n")
        file.flush()


def make_progress(console: Console, runs: list[Recipe]) -> RunProgress | JsonProgress:
    """Choose JSON lines where they are asked for, else bars or lines."""
    return (JsonProgress if json_progress() else RunProgress)(console, runs)


def json_progress() -> bool:
    """Tell whether the environment variable FIXPOINT_PROGRESS asks for JSON lines.

    Raises:
        ValueError: it is neither json nor empty.
    """
    wanted = os.environ.get("FIXPOINT_PROGRESS", "")
    if wanted not in ("", "json"):
        raise ValueError(f"FIXPOINT_PROGRESS must be json or not set; got {wanted!r}")
    return wanted == "json"


def short_names(runs: list[Recipe]) -> dict[Recipe, str]:
    """Return a name for each run of what sets it apart from the others: data, model, backward,
    seed.
    """
    parts = {run: _name_parts(run) for run in runs}
    if len(runs) < 2:
        return {run: run_name(run) for run in runs}
    alike = [len({p[i] for p in parts.values()}) < 2 for i in range(4)]
    # Maps follow from solvers where each solver has one.
    pairs = {(run.model.solver, run.model.max_iter, run.model.map) for run in runs}
    without = len(pairs) == len({pair[:2] for pair in pairs})
    names = {}
    for run, (data, model, backward, seed) in parts.items():
        shown = _short_model(run) if without and run.model.solver else model
        rest = [shown, backward, seed]
        kept = [text for text, same in zip(rest, alike[1:], strict=True) if text and not same]
        name = " ".join(kept) or shown
        names[run] = name if alike[0] else f"{data}: {name}"
    return names


def _short_model(run: Recipe) -> str:
    """Return the solver of an ERNN, with K."""
    solver = str(run.model.solver)
    name = SOLVERS.get(solver, short_name(solver))
    return f"K={run.model.max_iter}" if solver == "inexact-newton" else name


def _name_parts(recipe: Recipe) -> tuple[str, str, str, str]:
    model, seed = recipe.model, recipe.training.seed
    return recipe.data.dataset, recipe.label, model.backward or "", f"seed {seed}"


def run_name(recipe: Recipe) -> str:
    """Return the short name of a run among others."""
    parts = [recipe.label, recipe.model.backward, f"seed {recipe.training.seed}"]
    return f"{recipe.data.dataset}: {', '.join(part for part in parts if part)}"


def _bars(console: Console) -> Progress:
    """Make bars; on a narrow terminal names are wrapped and bars left out, so that no number is
    cut.
    """
    wide = console.width >= WIDE
    return Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=wide)),
        *((BarColumn(),) if wide else ()),
        MofNCompleteColumn(),
        TextColumn("epochs"),
        *((TimeElapsedColumn(),) if wide else ()),
        TextColumn("{task.fields[left]}", markup=False),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
    )


def _epochs(recipe: Recipe) -> int:
    training = recipe.training
    return training.epochs * (1 + len(training.halve_choices))


def _first_note(recipe: Recipe) -> str:
    return "compiling once" if _is_compiled(recipe) and find_spec("numba") else ""


def _lacks_numba(recipe: Recipe) -> bool:
    return _is_compiled(recipe) and not find_spec("numba")


def _is_compiled(recipe: Recipe) -> bool:
    """Tell whether numba compiles the recurrence, where it is installed."""
    model, machine = recipe.model, recipe.machine
    fits = model.hidden <= MAX_SIZE and machine.precision in ("32-true", "64-true")
    return model.model in COMPILED and machine.device == "cpu" and fits


def _emulates_bfloat16(recipe: Recipe) -> bool:
    machine = recipe.machine
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    if machine.device != "cpu" or not machine.precision.startswith("bf16"):
        return False
    known = capabilities.get("architecture") == "x86_64"
    return known and not (capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def _result(epoch: Epoch) -> str:
    if not isfinite(epoch.train_loss):
        return "diverged"
    loss = mean_and_sd([epoch.train_loss], 3)
    if epoch.accuracy is None:
        return f"loss {loss}, perplexity {epoch.perplexity:.1f}"
    return f"loss {loss}, test {epoch.accuracy:.1f} %"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
