"""Runs on a real scheduler and two real workers, one of them killed while it trains."""

import os
import re
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from fixpoint.cli.app import app
from fixpoint.training import Recipe
from fixpoint.training.commands.executors import make_executor
from fixpoint.training.commands.single_run import train_recipe
from fixpoint.training.commands.workers import Started, run_all
from fixpoint.training.engine.fit import Epoch

distributed = pytest.importorskip("distributed")

RUNS = [
    Recipe().changed(model="rnn", hidden=3, epochs=6),
    Recipe().changed(model="rnn", hidden=3, epochs=6, seed=1),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Address of a scheduler, and its two workers by the number of their process."""
    folder = tmp_path_factory.mktemp("cluster")
    environment = os.environ | {"FIXPOINT_DATA": str(folder), "OMP_NUM_THREADS": "1"}

    def start(name, *command):
        command = [sys.executable, "-m", "dask", *command]
        with (folder / f"{name}.log").open("w") as log:
            return subprocess.Popen(command, stderr=log, stdout=log, cwd=folder, env=environment)

    def found(name, pattern):
        while not (match := re.search(pattern, (folder / f"{name}.log").read_text())):
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)
        return match[1]

    local = ("--host", "127.0.0.1", "--no-dashboard")
    processes = [start("scheduler", "scheduler", "--port", "0", *local)]
    try:
        address = found("scheduler", r"Scheduler at: +(tcp://\S+)")
        one = ("worker", address, "--no-nanny", "--nthreads", "1", *local)
        processes += [start(name, *one) for name in ("a", "b")]
        for name in ("a", "b"):
            found(name, r"Start worker at: +(tcp://\S+)")
        yield address, {process.pid: process for process in processes[1:]}
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def run_on_cluster(runs, address, out):
    with make_executor(runs, 1, address, out) as executor:
        yield from run_all(runs, executor, out)


@pytest.mark.slow
def test_another_worker_continues_the_run_of_one_that_was_killed(cluster, tmp_path):
    address, workers = cluster
    where, epochs, records, killed = {}, {run: [] for run in RUNS}, {}, None
    (tmp_path / "out").mkdir()
    for run, event in run_on_cluster(RUNS, address, tmp_path / "out"):
        if isinstance(event, Started):
            where[run] = int(event.where.split()[-1])
            if run == killed:
                before, epochs[run] = epochs[run], []
        elif isinstance(event, Epoch):
            epochs[run].append(event)
            if killed is None and event.number == 2:
                killed = run
                workers.pop(where[run]).kill()
        else:
            records[run] = event
    assert killed is not None
    assert set(where.values()) == set(workers)
    assert before == epochs[killed][: len(before)]  # their times too: none of them was run again
    for run in RUNS:
        assert [epoch.number for epoch in epochs[run]] == list(range(1, 7))
        assert records[run]["key"] == run.key
    whole = train_recipe(killed, tmp_path / "here")
    same = ("accuracy_last", "loss", "threads", "recipe")
    assert {name: records[killed][name] for name in same} == {name: whole[name] for name in same}

    # The command: what is finished is skipped.
    options = ["compare", "--cluster", address, "--out", str(tmp_path / "out"), "--models", "rnn"]
    options += ["--hidden", "3", "--epochs", "1"]
    first = CliRunner().invoke(app, options)
    assert first.exit_code == 0, first.output
    assert "har2-sample: RNN, seed 0: epoch 1 of 1" in first.output
    again = CliRunner().invoke(app, options)
    assert "1 of 1 runs are already in" in again.output
    assert not list((tmp_path / "out").glob(".events-*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cluster", "tcp://127.0.0.1:1"], "no scheduler answers at tcp://127.0.0.1:1"),
        (["--cluster", "nowhere:-1"], "for SLURM; got 'nowhere:-1'"),
        (["--cluster", "tcp://127.0.0.1:1", "--jobs", "2"], "--jobs is for this machine"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, monkeypatch, options, message):
    monkeypatch.setattr("fixpoint.training.commands.dask_cluster.TIMEOUT", 0.2)
    result = CliRunner().invoke(app, ["compare", "--out", str(tmp_path), *options])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.slow
def test_data_that_no_worker_has_are_named(cluster, tmp_path, monkeypatch):
    """The workers' FIXPOINT_DATA is empty."""
    monkeypatch.setattr("fixpoint.training.commands.dask_cluster.content_digest", lambda name: "0")
    with pytest.raises(
        ValueError, match=r"no worker has the data har2 \(.*: .*fixpoint data fetch"
    ):
        list(run_on_cluster([Recipe().changed(dataset="har2")], cluster[0], tmp_path))
    with pytest.raises(ValueError, match="its har2-sample differs from that of this machine"):
        list(run_on_cluster(RUNS, cluster[0], tmp_path))
