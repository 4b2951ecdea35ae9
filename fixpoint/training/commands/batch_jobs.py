"""Runs as jobs of a batch system, by submitit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fixpoint._messages import missing_extra

MOST = 10_000
"""Jobs at a time; a thread waits for each."""


class BatchJobs(ThreadPoolExecutor):
    """Jobs of submitit as futures of `concurrent.futures`; on `shutdown` they are canceled.

    Args:
        executor: of submitit.
    """

    def __init__(self, executor: Any) -> None:
        super().__init__(MOST)
        self.executor = executor
        self.jobs: list[Any] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.jobs.append(self.executor.submit(_call, fn, *args, **kwargs))
        return super().submit(_result, self.jobs[-1])

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for job in self.jobs:
            if not job.done():
                job.cancel()
        super().shutdown(wait, cancel_futures=cancel_futures)


def _call(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return the result, or the error, which submitit would turn into the text of its traceback."""
    torch.set_num_threads(int(os.environ.get("SLURM_CPUS_PER_TASK", 1)))
    try:
        return fn(*args, **kwargs)
    except Exception as error:
        return error


def _result(job: Any) -> Any:
    """Wait for a job, and return its result or raise its error."""
    try:
        result = job.result()
    except Exception:  # of kinds that differ from one version of submitit to another
        raise ChildProcessError(f"its job {job.job_id} was lost: see {job.paths.stderr}") from None
    if isinstance(result, Exception):
        raise result
    return result


@contextmanager
def batch_jobs(cluster: str, out: Path) -> Iterator[BatchJobs]:
    """Make the executor of a batch system.

    Args:
        cluster: "slurm", or "local" for processes that are jobs of no batch system, with
            parameters of submitit's `AutoExecutor`, as "slurm:timeout_min=240,cpus_per_task=2".
        out: the folder of the checkpoints, which jobs must see; submitit keeps its files in it.

    Raises:
        ImportError: submitit is not installed.
        ValueError: a parameter is unknown or wrong, or there is no batch system.
    """
    try:
        import submitit
    except ImportError:
        raise missing_extra(f"--cluster {cluster}", "submitit", "cluster") from None
    name, _, settings = cluster.partition(":")
    pairs = [part.partition("=")[::2] for part in settings.split(",") if part]
    try:
        executor = submitit.AutoExecutor(out / ".jobs", cluster=name)
        executor.update_parameters(**{key: int(v) if v.isdigit() else v for key, v in pairs})
    except (NameError, AssertionError, RuntimeError) as error:
        text = f"--cluster {cluster}: {' '.join(str(error).split())}"
        raise ValueError(f"{text}; write {name}:KEY=VALUE,... by submitit's names") from None
    with BatchJobs(executor) as jobs:
        yield jobs
