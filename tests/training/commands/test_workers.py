"""Runs in processes of their own: one that fails costs no other."""

import multiprocessing
import multiprocessing.util
import os
import signal

import pytest

from fixpoint.training import Epoch, Recipe
from fixpoint.training.commands import workers
from fixpoint.training.commands.workers import run_all


def run(**changes):
    return Recipe().changed(**{"hidden": 4, "epochs": 2} | changes)


@pytest.mark.slow
def test_a_run_that_fails_costs_no_other(capfd):
    bad, good = run(dataset="nope"), run()
    events = list(run_all([bad, good], jobs=1))
    assert [owner for owner, _ in events] == [bad, good, good, good]
    assert events[0][1].startswith("ValueError: unknown data set 'nope'")
    assert [event.number for _, event in events[1:3] if isinstance(event, Epoch)] == [1, 2]
    assert events[3][1]["key"] == good.key
    capfd.readouterr()


@pytest.mark.slow
def test_a_process_takes_one_run_after_another(monkeypatch):
    started = []
    monkeypatch.setattr(
        workers, "_start", lambda *given, start=workers._start: started.append(1) or start(*given)
    )
    runs = [run(epochs=1, seed=seed) for seed in (0, 1)]
    records = [event for _, event in run_all(runs, jobs=1) if isinstance(event, dict)]
    alone = [event for _, event in run_all(runs[1:], jobs=1) if isinstance(event, dict)]
    assert [record["key"] for record in records] == [one.key for one in runs]
    assert records[1]["loss"] == alone[0]["loss"]  # bit for bit, whatever ran before
    assert len(started) == 2  # one for each call of run_all


@pytest.mark.slow
def test_a_process_that_is_killed_costs_one_run():
    first, second = run(epochs=50), run(epochs=1, seed=1)
    outcomes = {}
    for owner, event in run_all([first, second], jobs=1):
        if owner == first and isinstance(event, Epoch):
            for child in multiprocessing.active_children():
                child.kill()
        outcomes[owner] = event
    assert outcomes[first] == "its process ended with exit status -9"
    assert outcomes[second]["key"] == second.key


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
