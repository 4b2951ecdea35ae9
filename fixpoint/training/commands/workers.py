"""Runs in processes of their own: one thread each, measured apart, a crash costs one run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from fixpoint.training.commands.single_run import train_recipe
from fixpoint.training.engine.fit import Epoch
from fixpoint.training.recipe.schema import Recipe

Outcome = Epoch | dict[str, Any] | str
"""What comes of a run: epochs, at last its record, or the text of its error."""


def run_all(
    runs: list[Recipe], jobs: int, out: Path | None = None
) -> Iterator[tuple[Recipe, Outcome]]:
    """Execute the runs, at most `jobs` at a time, and yield what happens as it happens.

    Checkpoints are kept in `out`; see `train_recipe`.

    On leaving early, by an exception or `close`, the running processes are ended and awaited.
    """
    context = multiprocessing.get_context("spawn")
    waiting = list(reversed(runs))
    running: dict[Connection, tuple[Recipe, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop()
                here, there = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(run, out, there), daemon=True)
                with _undisturbed():
                    process.start()
                    there.close()
                    running[here] = (run, process)
            ready = wait(list(running))
            for connection in [c for c in running if c in ready]:
                run, process = running[connection]
                try:
                    event: Outcome = connection.recv()
                except EOFError:
                    process.join()
                    event = f"its process ended with exit status {process.exitcode}"
                yield run, event
                if not isinstance(event, Epoch):
                    process.join()
                    del running[connection]
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join()  # its lock is free then


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


def _work(run: Recipe, out: Path | None, events: Connection) -> None:
    # A closed pipe means that the parent is gone: sending then ends this process too.
    torch.set_num_threads(1)
    try:
        events.send(train_recipe(run, out, events.send))
    except BrokenPipeError:
        os._exit(1)
    except OSError as error:  # says what to do
        events.send(error.strerror or str(error))
    except MemoryError as error:
        events.send(str(error))
    except Exception as error:
        traceback.print_exc()
        events.send(f"{type(error).__name__}: {error}")
