"""`fixpoint train`: one recipe, from wherever it stopped to its record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed
from filelock import FileLock, Timeout
from lightning_fabric import Fabric
from rich.console import Console

from fixpoint.training.commands.progress import RunProgress
from fixpoint.training.engine.fit import Epoch
from fixpoint.training.engine.model_factory import resolve
from fixpoint.training.engine.run_data import prepare
from fixpoint.training.experiment import build_model, make_fabric, run_experiment, tuned
from fixpoint.training.recipe.schema import Recipe
from fixpoint.training.recipe.toml import RECIPE, write_recipe
from fixpoint.training.results.logs import Logs
from fixpoint.training.results.store import Record, Records, open_records
from fixpoint.training.results.table import comparison_table, findings


def train_and_show(
    console: Console, recipe: Recipe, *, out: Path, fresh: bool = False, tensorboard: bool = False
) -> Record:
    """Train a recipe unless it is finished, show how it goes and what came of it.

    Args:
        console: where to print.
        out: folder of `runs.jsonl` and of a folder with the checkpoints of each recipe.
        fresh: forget what is there of this recipe.
        tensorboard: also write event files for TensorBoard.

    Raises:
        ValueError: a value is wrong, or options do not go together; nothing is written then.
        OSError: a data file is missing, or a file cannot be written.
    """
    recipe = replace(recipe, model=resolve(recipe.model))
    build_model(recipe, prepare(recipe).data)
    fabric = make_fabric(recipe.machine)
    if recipe.machine.devices > 1:
        fabric.launch()
    console.quiet = console.quiet or not fabric.is_global_zero
    try:
        return _train(console, recipe, fabric, out=out, fresh=fresh, tensorboard=tensorboard)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _train(
    console: Console, recipe: Recipe, fabric: Fabric, *, out: Path, fresh: bool, tensorboard: bool
) -> Record:
    records: Records | None = None
    folder = out / recipe.key
    if fabric.is_global_zero:
        records = open_records(out)
        if fresh:
            records.forget(recipe.key)
            Logs.clear(folder)
    done = fabric.broadcast(records.by_key.get(recipe.key) if records else None)
    if done is not None:
        console.print(f"This recipe is finished: {out / 'runs.jsonl'} has it; --fresh starts anew.")
        _show(console, done)
        return done
    console.print(f"{recipe.label} on {recipe.data.dataset}: {folder}", highlight=False)
    with RunProgress(console) as progress:
        task = progress.add(recipe)
        record = train_recipe(
            recipe,
            out,
            lambda epoch: progress.advance(task, epoch),
            fabric=fabric,
            tensorboard=tensorboard,
        )
        progress.stop(task)
    if records:
        records.append(record)
    fabric.barrier()
    _show(console, record)
    console.print(f"Results: {out / 'runs.jsonl'}   Weights: {folder}", soft_wrap=True)
    return record


def train_recipe(
    recipe: Recipe,
    out: Path | None,
    report: Callable[[Epoch], None],
    *,
    fabric: Fabric | None = None,
    tensorboard: bool = False,
) -> Record:
    """The record of a recipe, its period of halvings chosen first where it has choices.

    Args:
        recipe: what to run; unfinished checkpoints of it in `out` are gone on from.
        out: its checkpoints lie in `out/KEY`; None keeps nothing.
        report: called after each epoch, those of the choice included.
    """
    fabric = fabric or make_fabric(recipe.machine)
    folder = out / recipe.key if out else None

    def run(recipe: Recipe, folder: Path | None) -> Record:
        logs = Logs(folder, tensorboard=tensorboard) if folder and fabric.is_global_zero else None

        def note(epoch: Epoch) -> None:
            if logs:
                logs.add(epoch)
            report(epoch)

        return run_experiment(recipe, prepare(recipe).data, note, folder=folder, fabric=fabric)

    def trial(choice: Recipe) -> Record:
        # Each trial is a recipe of its own, finished or not on its own.
        records = None
        if folder and fabric.is_global_zero:
            records = Records(folder / "tuning")
        done = fabric.broadcast(records.by_key.get(choice.key) if records else None)
        if done is None:
            done = run(choice, folder / "tuning" / choice.key if folder else None)
            if records:
                records.append(done)
        return done

    with ExitStack() as stack:
        if folder and fabric.is_global_zero:
            Logs.write_text(folder / RECIPE, write_recipe(recipe))
            stack.enter_context(_alone_in(folder))
        final, trials = tuned(recipe, trial)
        record = run(final, folder)
    return {**record, "key": recipe.key, "recipe": recipe.differing, "tuning": trials}


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes from training the same run; the system drops the lock of a dead one."""
    lock = FileLock(folder / ".lock", timeout=0)
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


def _show(console: Console, record: dict[str, Any]) -> None:
    console.print(comparison_table([record]))
    if record["contraction"]:
        console.print(findings(record), highlight=False, soft_wrap=True)
