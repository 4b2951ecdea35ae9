"""Runs on the workers of a dask.distributed cluster, one at a time on each."""

from __future__ import annotations

import logging
import queue
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fixpoint._messages import missing_extra
from fixpoint.data.content import content_digest
from fixpoint.training.commands.workers import Outcome, Started, reason
from fixpoint.training.engine.checkpoint import write_bytes
from fixpoint.training.engine.fit import Epoch
from fixpoint.training.recipe.schema import Recipe

if TYPE_CHECKING:
    from distributed import Client

TIMEOUT = 10.0
"""Seconds to wait for an answer of the scheduler."""


def run_on_cluster(runs: list[Recipe], address: str, out: Path) -> Iterator[tuple[Recipe, Outcome]]:
    """Execute the runs on the workers of a cluster, and yield what happens as it happens.

    A worker has one run at a time, with as many threads as the worker has. Runs go to workers whose
    data are those of this machine. Where a worker sees the folder `out`, checkpoints are kept
    there, so that another one continues the run of a worker that was lost; elsewhere another one
    starts it again, and its files come with its record. On leaving early, by an exception or
    `close`, the workers stop after the running epoch.

    Args:
        address: of the scheduler, as tcp://HOST:8786.
        out: folder of the checkpoints, see `train_recipe`.

    Raises:
        ImportError: dask.distributed is not installed here.
        OSError: no scheduler answers, or `out` cannot be written.
        ValueError: the workers cannot import fixpoint, or no worker has the data.
    """
    topic = f"fixpoint-{uuid.uuid4().hex}"
    by_key = {run.key: run for run in runs}
    events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    marker = out.absolute() / f".{topic}"  # by which a worker sees whether it shares that folder
    marker.touch()
    try:
        with _connected(address) as client, _offered(client, topic, runs) as needs:
            from fixpoint.training.commands.cluster_worker import RUN, train_on_worker

            client.subscribe_topic(topic, lambda event: events.put(event[1]))
            futures = []
            for key, run in by_key.items():
                future = client.submit(
                    train_on_worker,
                    run,
                    key,
                    str(marker),
                    topic,
                    key=f"{topic}-{key}",
                    resources={RUN: 1, needs[run.data.dataset]: 1},
                    pure=False,
                )
                # Called after the events of the run: all come by one connection, in order.
                future.add_done_callback(lambda future, key=key: events.put((key, future)))
                futures.append(future)
            try:
                while by_key:
                    key, event = events.get()
                    if key in by_key:
                        run, what = by_key[key], _outcome(event, out / key)
                        if isinstance(what, dict | str):
                            del by_key[key]
                        yield run, what
            finally:
                with suppress(Exception):  # the scheduler may be gone
                    client.cancel(futures)
    finally:
        marker.unlink(missing_ok=True)


@contextmanager
def _connected(address: str) -> Iterator[Client]:
    try:
        import distributed
    except ImportError:
        raise missing_extra("--cluster", "dask.distributed", "cluster") from None
    if not re.fullmatch(r"([a-z]+://)?[^/:\s]+(:\d+)?(/.*)?", address) or ":" not in address:
        raise ValueError(
            f"--cluster takes the address that `dask scheduler` prints, as tcp://HOST:8786; got "
            f"{address!r}"
        )
    try:
        with _without_log("distributed"):
            client = distributed.Client(address, timeout=TIMEOUT, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise OSError(
            f"no scheduler answers at {address} ({error}): give the address that `dask scheduler` "
            "prints, as tcp://HOST:8786"
        ) from None
    with client:
        yield client


@contextmanager
def _without_log(name: str) -> Iterator[None]:
    """Keep a package from printing tracebacks of an error that is raised anyway."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _offered(client: Client, topic: str, runs: list[Recipe]) -> Iterator[dict[str, str]]:
    """The resource of the workers that stands for each data set."""
    from fixpoint.training.commands.cluster_worker import OfferData, data_resource, refusals

    digests = {name: content_digest(name) for name in {run.data.dataset for run in runs}}
    try:
        client.register_plugin(OfferData(digests), name=topic)
    except ImportError as error:
        raise ValueError(
            f"the workers cannot run fixpoint ({error}): install torch-fixpoint[bench,cluster] in "
            "their environment, in this version"
        ) from None
    try:
        answers = client.run(refusals, topic).values()
        for name in digests:
            reasons = [f"{host}: {refused[name]}" for host, refused in answers if name in refused]
            if reasons and len(reasons) == len(answers):
                raise ValueError(
                    f"no worker has the data {name} ({reasons[0]}): put its file into "
                    "FIXPOINT_DATA on each machine, and start the workers again"
                )
        yield {name: data_resource(name, digest) for name, digest in digests.items()}
    finally:
        with suppress(Exception):
            client.unregister_worker_plugin(topic)


def _outcome(event: Any, folder: Path) -> Outcome:
    """What an event of a run says; the files that come with a record are put into its folder."""
    if isinstance(event, str):
        return Started(event)
    if isinstance(event, dict):
        return Epoch(**event)
    try:
        record, files = event.result()
    except Exception as error:
        return _failure(error)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
    return record


def _failure(error: Exception) -> str:
    from distributed import CancelledError, KilledWorker

    if isinstance(error, KilledWorker):
        return f"{error.allowed_failures + 1} workers were lost during this run"
    if isinstance(error, CancelledError):
        return "the scheduler was lost"
    return reason(error)
