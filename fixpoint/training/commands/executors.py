"""The executor of a grid: processes of this machine, jobs of a batch system, a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path

from fixpoint.training.commands.batch_jobs import batch_jobs
from fixpoint.training.commands.local_processes import LocalProcesses
from fixpoint.training.recipe.schema import Recipe


@contextmanager
def make_executor(
    runs: list[Recipe], jobs: int, cluster: str | None, out: Path
) -> Iterator[Executor]:
    """Make the executor of a grid; on leaving, what still runs is ended.

    Args:
        jobs: processes on this machine, where no cluster is given.
        cluster: address of a Dask scheduler, or "slurm" or "local" with parameters of submitit, as
            "slurm:timeout_min=240,slurm_partition=cpu".
        out: folder of the checkpoints.

    Raises:
        ImportError: the package of this kind of cluster is not installed.
        OSError: no scheduler answers.
        ValueError: the address or a parameter is wrong, or the workers cannot run fixpoint.
    """
    if cluster is None:
        with LocalProcesses(jobs) as processes:
            yield processes
    elif cluster.partition(":")[0] in ("slurm", "local"):
        with batch_jobs(cluster, out) as batch:
            yield batch
    else:
        from fixpoint.training.commands.dask_cluster import dask_workers

        with dask_workers(cluster, runs) as workers:
            yield workers
