"""Runs on the workers of a dask.distributed cluster, one at a time on each."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from fixpoint._messages import missing_extra
from fixpoint.data.content import content_digest
from fixpoint.training.commands.workers import append
from fixpoint.training.recipe.schema import Recipe

try:
    from distributed import Client, Worker, WorkerPlugin, get_worker
except ImportError:
    raise missing_extra("--cluster", "dask.distributed", "cluster") from None

TIMEOUT = 10.0
"""Seconds to wait for an answer of the scheduler."""

PATIENCE = 60.0
"""Seconds to wait for a run that a worker that was lost has not left yet."""

RUN = "fixpoint run"
"""Resource of a worker, once: that it has one run at a time."""


class DaskWorkers(Executor):
    """The executor of a Dask client, for runs: each goes to a worker that has its data.

    Args:
        needs: the resource of the workers that stands for each data set.
    """

    def __init__(self, client: Client, topic: str, needs: Mapping[str, str]) -> None:
        self.topic = topic
        self.executors = {
            name: client.get_executor(pure=False, resources={RUN: 1, need: 1})
            for name, need in needs.items()
        }

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        executor = self.executors[args[0].data.dataset]
        future: Future[Any] = executor.submit(_on_worker, fn, self.topic, *args, **kwargs)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for executor in self.executors.values():
            executor.shutdown(wait=False)


def _on_worker(fn: Callable[..., Any], topic: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call the task with the threads of its worker; what it says are events of the `topic`."""
    worker = get_worker()
    task = worker.get_current_task()

    def send(path: Path, line: str) -> None:
        state = worker.state.tasks.get(task)
        if state is None or state.state != "executing":
            raise ChildProcessError("the run was canceled")
        worker.log_event(topic, (str(path), line))

    torch.set_num_threads(worker.state.nthreads)
    return fn(*args, **kwargs, send=send, patience=PATIENCE)


@contextmanager
def dask_workers(address: str, runs: list[Recipe]) -> Iterator[DaskWorkers]:
    """Connect to a cluster, and check the data of its workers.

    A worker has one run at a time, with as many threads as the worker has.

    Args:
        address: of the scheduler, as tcp://HOST:8786.

    Raises:
        OSError: no scheduler answers.
        ValueError: the workers cannot import fixpoint, or no worker has the data.
    """
    topic = f"fixpoint-{uuid.uuid4().hex}"

    def relay(event: tuple[float, tuple[str, str]]) -> None:
        path, line = event[1]
        with suppress(FileNotFoundError):  # the grid has ended
            append(Path(path), line)

    with _connected(address) as client, _offered(client, topic, runs) as needs:
        client.subscribe_topic(topic, relay)
        with DaskWorkers(client, topic, needs) as workers:
            yield workers


@contextmanager
def _connected(address: str) -> Iterator[Client]:
    if not re.fullmatch(r"([a-z]+://)?[^/:\s]+(:\d+)?(/.*)?", address) or ":" not in address:
        raise ValueError(
            "--cluster takes the address that `dask scheduler` prints, as tcp://HOST:8786, or "
            f"slurm:KEY=VALUE,... for SLURM; got {address!r}"
        )
    logging.disable()  # of an error that is raised anyway
    try:
        client = Client(address, timeout=TIMEOUT, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise OSError(
            f"no scheduler answers at {address} ({error}): give the address that `dask scheduler` "
            "prints, as tcp://HOST:8786"
        ) from None
    finally:
        logging.disable(logging.NOTSET)
    with client:
        yield client


@contextmanager
def _offered(client: Client, topic: str, runs: list[Recipe]) -> Iterator[dict[str, str]]:
    """Let workers offer a resource for each data set that they have, and yield its name."""
    offer = OfferData({name: content_digest(name) for name in {run.data.dataset for run in runs}})
    try:
        client.register_plugin(offer, name=topic)
    except Exception as error:  # Dask gives the error of a worker as its text
        raise ValueError(
            f"the workers cannot run fixpoint ({error}): install torch-fixpoint[bench,cluster] in "
            "their environment, in this version"
        ) from None
    try:
        answers = client.run(refusals, topic).values()
        for name in offer.digests:
            reasons = [f"{host}: {refused[name]}" for host, refused in answers if name in refused]
            if reasons and len(reasons) == len(answers):
                raise ValueError(
                    f"no worker has the data {name} ({reasons[0]}): put its file into "
                    "FIXPOINT_DATA on each machine, and start the workers again"
                )
        yield offer.resources
    finally:
        with suppress(Exception):
            client.unregister_worker_plugin(topic)


class OfferData(WorkerPlugin):
    """Plugin that gives a worker, now or once it joins, a resource for each data set that it has.

    Args:
        digests: `content_digest` of each data set at the client.

    Attributes:
        resources: the name of the resource of each data set.
        refused: why a data set is not offered, by its name.
    """

    def __init__(self, digests: Mapping[str, str]) -> None:
        self.digests = dict(digests)
        self.resources = {name: f"fixpoint data {name} {digests[name]}" for name in digests}
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
                offered[self.resources[name]] = 1
            else:
                self.refused[name] = f"its {name} differs from that of this machine"
        await worker.set_resources(**offered)


def refusals(plugin: str, dask_worker: Worker) -> tuple[str, dict[str, str]]:
    """Return the name of the machine, and which data sets it does not offer."""
    offer = dask_worker.plugins[plugin]
    assert isinstance(offer, OfferData)
    return socket.gethostname(), offer.refused
