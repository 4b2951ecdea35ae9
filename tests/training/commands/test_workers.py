"""Runs in processes of their own: one that fails costs no other."""

import multiprocessing
import multiprocessing.util
import os
import signal

import pytest
import torch

from fixpoint.training import Epoch, Recipe
from fixpoint.training.commands import workers
from fixpoint.training.commands.single_run import train_recipe
from fixpoint.training.commands.workers import run_all
from fixpoint.training.engine.model_factory import resolved


def run(**changes):
    return Recipe().changed(**{"hidden": 4, "epochs": 2} | changes)


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_run_that_fails_or_is_killed_costs_no_other(monkeypatch, capfd):
    """A process takes one run after another; after each of these two a new one takes its place."""
    started = []
    monkeypatch.setattr(
        workers, "_start", lambda *given, start=workers._start: started.append(1) or start(*given)
    )
    bad, killed, good = run(dataset="nope"), run(epochs=50), [run(seed=seed) for seed in (1, 2)]
    events = {one: [] for one in (bad, killed, *good)}
    for owner, event in run_all(list(events), jobs=1):
        if owner == killed and isinstance(event, Epoch):
            for child in multiprocessing.active_children():
                child.kill()
        events[owner].append(event)
    assert len(events[bad]) == 1
    assert events[bad][0].startswith("ValueError: unknown data set 'nope'")
    assert events[killed][-1] == "its process ended with exit status -9"
    for one in good:
        *epochs, record = events[one]
        assert [epoch.number for epoch in epochs] == [1, 2]
        assert record["key"] == resolved(one).key
    assert len(started) == 3
    # bit for bit, whatever ran before
    assert events[good[1]][-1]["loss"] == train_recipe(good[1], None, lambda epoch: None)["loss"]
    capfd.readouterr()


def test_of_several_at_a_time_the_longest_begin():
    short = [run(seed=seed) for seed in (0, 1)]
    long = [run(solver=name, backward="unrolled") for name in ("anderson", "broyden")]
    runs = [short[0], long[0], short[1], long[1]]
    assert workers._last_first(runs, jobs=2)[::-1] == [*long, *short]
    assert workers._last_first(runs, jobs=1)[::-1] == runs


def test_no_runs():
    assert list(run_all([], jobs=2)) == []


@pytest.mark.usefixtures("interruptible")
@pytest.mark.skipif(os.name != "posix", reason="starts processes as POSIX systems do")
def test_stopping_while_a_run_starts_leaves_no_process_behind(monkeypatch, capfd):
    spawn, started = multiprocessing.util.spawnv_passfds, []

    def interrupted(path, args, fds):
        pid = spawn(path, args, fds)
        if "--multiprocessing-fork" in args:
            started.append(pid)
            os.kill(os.getpid(), signal.SIGINT)
        return pid

    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(run_all([Recipe().changed(hidden=2, epochs=1)], 1))
    (pid,) = started
    with pytest.raises(ProcessLookupError):  # ended and awaited
        os.kill(pid, 0)
    assert capfd.readouterr().err == ""
