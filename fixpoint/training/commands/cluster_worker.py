"""What the workers of a cluster do: check their data, and train one run at a time."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from distributed import Worker, WorkerPlugin, get_worker

from fixpoint.data.content import content_digest
from fixpoint.training.commands.single_run import LOCK, train_recipe
from fixpoint.training.engine.fit import Epoch
from fixpoint.training.engine.model_factory import resolved
from fixpoint.training.recipe.schema import Recipe
from fixpoint.training.results.store import Record

RUN = "fixpoint run"
"""Resource of a worker, once: that it has one run at a time."""

Files = dict[str, bytes]
"""Contents by path."""

PATIENCE = 60.0
"""Seconds to wait for a run that its former worker has not left yet."""


class OfferData(WorkerPlugin):
    """Gives a worker, now or once it joins, a resource for each data set that it has.

    Args:
        digests: `content_digest` of each data set at the client.

    Attributes:
        refused: why a data set is not offered, by its name.
    """

    def __init__(self, digests: Mapping[str, str]) -> None:
        self.digests = dict(digests)
        self.refused: dict[str, str] = {}

    async def setup(self, worker: Worker) -> None:
        offered: dict[str, float] = {RUN: 1}
        for name, digest in self.digests.items():
            try:
                found = await asyncio.to_thread(content_digest, name)
            except (ValueError, OSError) as error:
                self.refused[name] = str(error)
                continue
            if found == digest:
                offered[data_resource(name, digest)] = 1
            else:
                self.refused[name] = f"its {name} differs from that of this machine"
        await worker.set_resources(**offered)


def data_resource(name: str, digest: str) -> str:
    return f"fixpoint data {name} {digest}"


def refusals(plugin: str, dask_worker: Worker) -> tuple[str, dict[str, str]]:
    """Name of the machine, and which data sets it does not offer."""
    offer = dask_worker.plugins[plugin]
    assert isinstance(offer, OfferData)
    return socket.gethostname(), offer.refused


def train_on_worker(recipe: Recipe, key: str, marker: str, topic: str) -> tuple[Record, Files]:
    """Train a run on the worker that calls this; its epochs are events of `topic`.

    Args:
        key: that of the recipe at the client.
        marker: file in the folder of the checkpoints; where this machine has it, that is shared.

    Returns:
        The record; and the files of the run, if the folder is not shared.

    Raises:
        ValueError: the recipe means something else here.
        OSError: another process trains this run, or a file cannot be written.
    """
    worker = get_worker()
    task = worker.get_current_task()
    if replace(recipe).key != key:  # made again, of the files of this machine
        raise ValueError(
            f"data or plugins of this run are other files on {socket.gethostname()}: copy them "
            "there, or keep them in a folder that all machines share"
        )

    def report(epoch: Epoch) -> None:
        state = worker.state.tasks.get(task)
        if state is None or state.state != "executing":
            raise RuntimeError("the run was canceled")
        worker.log_event(topic, (key, epoch._asdict()))

    torch.set_num_threads(worker.state.nthreads)
    worker.log_event(topic, (key, f"{socket.gethostname()}, {worker.address}"))
    return train_where_shared(recipe, Path(marker), report)


def train_where_shared(
    recipe: Recipe, marker: Path, report: Callable[[Epoch], None]
) -> tuple[Record, Files]:
    """Train with checkpoints beside the marker if it is there, else in a folder that is temporary.

    Returns:
        The record, and the files in the temporary folder.
    """
    with ExitStack() as stack:
        shared = marker.exists()
        out = marker.parent if shared else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        record = _patiently(lambda: train_recipe(recipe, out, report))
        folder = out / resolved(recipe).key
        paths = [] if shared else [p for p in folder.rglob("*") if p.is_file() and p.name != LOCK]
        return record, {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def _patiently(train: Callable[[], Record]) -> Record:
    """Train once another process has left the run: a worker that was lost may still be ending."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return train()
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
