"""`fixpoint train`: one recipe, from wherever it stopped to its record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import nan
from pathlib import Path

import torch.distributed
from filelock import FileLock, Timeout
from lightning_fabric import Fabric
from rich.console import Console

from fixpoint.training.commands.console import say
from fixpoint.training.commands.progress import make_progress
from fixpoint.training.engine.fit import Epoch, PastEpoch
from fixpoint.training.engine.model_factory import resolved
from fixpoint.training.engine.run_data import prepare, save_origin
from fixpoint.training.experiment import build_model, make_fabric, run_experiment, tuned
from fixpoint.training.recipe.schema import Recipe
from fixpoint.training.recipe.toml import RECIPE, write_recipe
from fixpoint.training.results.confusion import confusion_table, draw_confusion
from fixpoint.training.results.logs import Logs, check_loggers
from fixpoint.training.results.store import Record, Records, open_records
from fixpoint.training.results.table import comparison_table
from fixpoint.training.results.verdict import findings

LOCK = ".lock"


def train_and_show(
    console: Console,
    recipe: Recipe,
    *,
    out: Path,
    fresh: bool = False,
    loggers: Sequence[str] = (),
) -> Record:
    """Train a recipe unless it is finished, and show progress and result.

    Args:
        console: where to print.
        out: folder of `runs.jsonl` and of a folder with the checkpoints of each recipe.
        fresh: discard what is there of this recipe.
        loggers: names in `fixpoint.training.LOGGERS`.

    Raises:
        ValueError: a value is wrong, or options do not go together; nothing is written then.
        OSError: a data file is missing, a file cannot be written, or another process trains this
            recipe.
    """
    recipe = resolved(recipe)
    check_loggers(loggers)
    build_model(recipe, prepare(recipe).data)
    fabric = make_fabric(recipe.machine)
    if recipe.machine.devices > 1:
        fabric.launch()
    console.quiet = console.quiet or not fabric.is_global_zero
    try:
        with ExitStack() as stack:
            records: Records | None = None
            if fabric.is_global_zero:
                records = open_records(out)
                stack.enter_context(_alone_in(out / recipe.key))
                if fresh:
                    records.forget(recipe.key)
                    Logs.clear(out / recipe.key, keep=LOCK)
            return _train(console, recipe, fabric, records, out=out, loggers=loggers)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _train(
    console: Console,
    recipe: Recipe,
    fabric: Fabric,
    records: Records | None,
    *,
    out: Path,
    loggers: Sequence[str],
) -> Record:
    folder = out / recipe.key
    done = fabric.broadcast(records.by_key.get(recipe.key) if records else None)
    if done is not None:
        say(console, f"This recipe is finished, see {out / 'runs.jsonl'}; --fresh trains again.")
        _show(console, done)
        return done
    say(console, f"{recipe.label} on {recipe.data.dataset}: {folder}")
    with make_progress(console, [recipe]) as progress:
        record = _train_recipe(
            recipe,
            folder,
            lambda epoch: progress.advance(recipe, epoch),
            fabric=fabric,
            loggers=loggers,
        )
        progress.stop(recipe)
    if records:
        records.append(record)
    fabric.barrier()
    _show(console, record)
    picture = draw_confusion(record, folder / "confusion.png") if records else None
    drawn = f"   Confusion: {picture}" if picture else ""
    say(console, f"Results: {out / 'runs.jsonl'}   Weights: {folder}{drawn}")
    return record


def train_recipe(
    recipe: Recipe,
    out: Path | None,
    report: Callable[[Epoch], None] = lambda epoch: None,
    *,
    patience: float = 0.0,
) -> Record:
    """Return the record of a recipe, its period of halvings chosen first where it has choices.

    Args:
        recipe: what to run; unfinished checkpoints of it in `out` are continued.
        out: its checkpoints are in `out/KEY`; None keeps nothing.
        report: called after each epoch, those of the choice included.
        patience: seconds to wait for another process that trains this recipe.

    Raises:
        OSError: another process trains this recipe, or a file cannot be written.
    """
    recipe, fabric = resolved(recipe), make_fabric(recipe.machine)
    if out is None:
        return _train_recipe(recipe, None, report, fabric=fabric)
    with _alone_in(out / recipe.key, patience):
        return _train_recipe(recipe, out / recipe.key, report, fabric=fabric)


def _train_recipe(
    recipe: Recipe,
    folder: Path | None,
    report: Callable[[Epoch], None],
    *,
    fabric: Fabric,
    loggers: Sequence[str] = (),
) -> Record:
    def run(recipe: Recipe, folder: Path | None) -> Record:
        logs = Logs(folder, loggers) if folder and fabric.is_global_zero else None

        def note(epoch: Epoch) -> None:
            if logs:
                logs.add(epoch)
            report(epoch)

        ready = prepare(recipe)
        if folder and fabric.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            ready.form.save(folder)
        record = run_experiment(recipe, ready.data, note, folder=folder, fabric=fabric)
        if logs:
            logs.finish()
        return record

    def trial(choice: Recipe) -> Record:
        # Each trial is a recipe of its own, finished or not on its own.
        records = None
        if folder and fabric.is_global_zero:
            records = Records(folder / "tuning")
        done = fabric.broadcast(records.by_key.get(choice.key) if records else None)
        if done is not None:
            for epoch in (PastEpoch(**values) for values in done["epochs"]):
                lost = epoch.train_loss is None  # as JSON has NaN
                report(epoch._replace(train_loss=nan) if lost else epoch)
        else:
            done = run(choice, folder / "tuning" / choice.key if folder else None)
            if records:
                records.append(done)
        return done

    if folder and fabric.is_global_zero:
        Logs.write_text(folder / RECIPE, write_recipe(recipe))
        save_origin(recipe, folder)
    final, trials = tuned(recipe, trial)
    record = run(final, folder)
    return {**record, "key": recipe.key, "recipe": recipe.differing, "tuning": trials}


@contextmanager
def _alone_in(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Keep other processes from training the same run; the system drops the lock of a dead one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            error.errno,
            f"the folder {folder} cannot be made ({error.strerror}): give another --out",
        ) from None
    lock = FileLock(folder / LOCK, timeout=patience)
    try:
        lock.acquire()
    except Timeout:
        raise BlockingIOError(
            f"another process trains this run in {folder}: wait for it, or choose another --out"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _show(console: Console, record: Record) -> None:
    console.print(comparison_table([record]))
    if table := confusion_table(record):
        console.print(table)
    if text := findings(record):
        say(console, text)
