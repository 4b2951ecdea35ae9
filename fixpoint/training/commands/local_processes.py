"""Processes of this machine, of one thread and one run at a time each."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import parent_process, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

import torch


class LocalProcesses(ThreadPoolExecutor):
    """Threads with a `ProcessPoolExecutor` of one process each, so that a crash costs one task.

    A process takes one task after another, so that modules are loaded once; after a task that
    failed a new process takes its place. On `shutdown` the running processes are ended and awaited.

    Args:
        jobs: processes at a time.
    """

    def __init__(self, jobs: int) -> None:
        super().__init__(jobs, initializer=_block_interrupts)
        self.idle: list[_Process] = []
        self.all: list[_Process] = []
        self.lock, self.closed = threading.Lock(), False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(self._run, fn, *args, **kwargs)

    def _run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            if self.closed:
                raise CancelledError
            process, future = self._start(fn, *args, **kwargs)
        try:
            result = future.result()
        except BrokenProcessPool:
            status = process.end()
            raise ChildProcessError(f"its process ended with exit status {status}") from None
        except Exception:
            process.end()
            raise
        self.idle.append(process)
        return result

    def _start(self, *task: Any, **kwargs: Any) -> tuple[_Process, Future[Any]]:
        """Give a task to a process that waits for one, or to a new one."""
        while self.idle:
            process = self.idle.pop()
            try:
                return process, process.pool.submit(*task, **kwargs)
            except BrokenProcessPool:  # it was killed as it waited
                process.end()
        self.all.append(_Process())
        return self.all[-1], self.all[-1].pool.submit(*task, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self.lock:
            self.closed = True
        for process in self.all:
            process.end()
        super().shutdown(wait, cancel_futures=cancel_futures)


class _Process(SpawnContext):
    """A pool of one process, and that process."""

    def __init__(self) -> None:
        self.made: list[SpawnProcess] = []
        self.ending = threading.Lock()
        self.pool = ProcessPoolExecutor(1, self, _begin)

    def Process(self, *args: Any, **kwargs: Any) -> SpawnProcess:  # type: ignore[override]
        self.made.append(SpawnProcess(*args, **kwargs))
        return self.made[-1]

    def end(self) -> int | None:
        """End the process if it runs, wait for it, and return its exit status."""
        for process in self.made:
            process.terminate()
        with self.ending:  # the thread of its task and that of `shutdown`: closing is for one
            self.pool.shutdown()
        return self.made[0].exitcode if self.made else None


def _block_interrupts() -> None:
    """Block SIGINT in this thread, and so in the processes that it starts.

    Ctrl-C reaches the main thread as well, which ends them.
    """
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        resource_tracker.ensure_running()  # unblocks SIGINT when it starts, so before
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _begin() -> None:
    """Take one thread, and end with the process that started this one, however that ends."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    torch.set_num_threads(1)
    threading.Thread(target=watch, daemon=True).start()
