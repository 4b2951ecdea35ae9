"""Progress of runs on the terminal."""

from __future__ import annotations

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

from fixpoint.training.engine.fit import Epoch
from fixpoint.training.recipe.schema import Recipe


class RunProgress:
    """A bar a run: epochs done, time used and left, loss and score."""

    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("epochs"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )

    def __enter__(self) -> RunProgress:
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()

    def add(self, recipe: Recipe) -> TaskID:
        """A bar that starts to count with the first epoch."""
        t = recipe.training
        total = t.epochs * (1 + len(t.halve_choices))
        return self.progress.add_task(run_name(recipe), total=total, start=False, note="")

    def advance(self, task: TaskID, epoch: Epoch) -> None:
        """One more epoch is done."""
        score = (
            f"perplexity {epoch.perplexity:.1f}"
            if epoch.accuracy is None
            else f"test {epoch.accuracy:.1f} %"
        )
        self.progress.start_task(task)
        self.progress.update(task, advance=1, note=f"loss {epoch.train_loss:.3f}  {score}")

    def stop(self, task: TaskID, note: str | None = None) -> None:
        """The run has ended; `note` says how if not well."""
        if note is not None:
            self.progress.update(task, note=note)
        self.progress.stop_task(task)


def run_name(recipe: Recipe) -> str:
    """Short name of a run among others."""
    parts = [recipe.label, recipe.model.backward, f"seed {recipe.training.seed}"]
    return f"{recipe.data.dataset}: {', '.join(part for part in parts if part)}"
