"""Runs in worker processes: one thread each, measured apart, a crash costs one run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fixpoint.training.commands.single_run import train_recipe
from fixpoint.training.engine.fit import Epoch
from fixpoint.training.recipe.schema import Recipe


class Started(NamedTuple):
    """A run has started, or starts again, on a worker of a cluster."""

    where: str


Outcome = Started | Epoch | dict[str, Any] | str
"""What comes of a run: epochs, at last its record, or the text of its error."""


class _Worker(NamedTuple):
    """A process, and the pipe that takes its runs to it and what comes of them back."""

    process: Any
    pipe: Connection

    def take(self, run: Recipe) -> None:
        with suppress(ConnectionError):  # if it is dead, the next `receive` says so
            self.pipe.send(run)

    def receive(self) -> Outcome:
        try:
            event: Outcome = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return f"its process ended with exit status {self.process.exitcode}"
        return event


def run_all(
    runs: list[Recipe], jobs: int, out: Path | None = None
) -> Iterator[tuple[Recipe, Outcome]]:
    """Execute the runs, at most `jobs` at a time, and yield what happens as it happens.

    A process takes one run after another, so that modules are loaded once; after a run that failed
    a new process takes its place. Checkpoints are kept in `out`; see `train_recipe`.

    On leaving early, by an exception or `close`, the running processes are ended and awaited.
    """
    waiting, workers = _last_first(runs, jobs), dict[Connection, _Worker]()
    idle: list[_Worker] = []
    running: dict[Connection, Recipe] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                worker = idle.pop() if idle else _start(out, workers)
                running[worker.pipe] = waiting.pop()
                worker.take(running[worker.pipe])
            ready = wait(list(running))
            for pipe in [p for p in running if p in ready]:
                event = workers[pipe].receive()
                yield running[pipe], event
                if isinstance(event, Epoch):
                    continue
                del running[pipe]
                if isinstance(event, str):
                    _end([workers.pop(pipe)])
                else:
                    idle.append(workers[pipe])
    finally:
        _end(list(workers.values()))


def _last_first(runs: list[Recipe], jobs: int) -> list[Recipe]:
    """The runs in reverse; of several at a time the longest begin, so that none runs alone at last.

    Anderson's and Broyden's updates are unrolled in Python, which takes some ten times as long.
    """

    def is_short(run: Recipe) -> bool:
        return run.model.backward != "unrolled" or run.model.solver not in ("anderson", "broyden")

    return (sorted(runs, key=is_short) if jobs > 1 else runs)[::-1]


def _start(out: Path | None, workers: dict[Connection, _Worker]) -> _Worker:
    """A new process, among the `workers` before a signal can interrupt."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with _undisturbed():
        process = context.Process(target=_work, args=(out, there), daemon=True)
        process.start()
        there.close()
        workers[here] = _Worker(process, here)
    return workers[here]


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.process.terminate()
    for worker in workers:
        worker.process.join()  # its lock is free then
        worker.pipe.close()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Defer SIGINT and SIGTERM while a worker starts, so that it can always be terminated.

    SIGINT is blocked meanwhile, which the worker inherits: Ctrl-C reaches its parent as well, which
    terminates it. Another thread may still receive it, so that its handler is deferred too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    mask = getattr(signal, "pthread_sigmask", None)  # not on Windows
    if mask:
        resource_tracker.ensure_running()  # unblocks SIGINT when it starts, so before
        mask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        if mask:
            mask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[0])


def _work(out: Path | None, pipe: Connection) -> None:
    """Train one run after another, until the parent has ended."""
    torch.set_num_threads(1)
    with suppress(EOFError, ConnectionError):
        while True:
            pipe.send(_outcome(pipe.recv(), out, pipe.send))


def _outcome(run: Recipe, out: Path | None, report: Callable[[Epoch], None]) -> Outcome:
    """The record of a run, or the text of its error."""
    try:
        return train_recipe(run, out, report)
    except ConnectionError:
        os._exit(1)  # the parent has ended
    except (OSError, MemoryError) as error:
        return reason(error)
    except Exception as error:
        traceback.print_exc()
        return reason(error)


def reason(error: Exception) -> str:
    """The text of an error; of those that say what to do without its type."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"
