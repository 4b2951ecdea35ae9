"""Runs in processes of their own: one that fails costs no other."""

import multiprocessing
import multiprocessing.util
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fixpoint.training import Epoch, Recipe
from fixpoint.training.commands.comparison import _longest_first
from fixpoint.training.commands.local_processes import LocalProcesses, _Process
from fixpoint.training.commands.single_run import train_recipe
from fixpoint.training.commands.workers import Started, run_all, train_run
from fixpoint.training.engine.fit import PastEpoch


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
def test_a_run_that_fails_or_is_killed_costs_no_other(tmp_path, capfd):
    """A process takes one run after another; after each of these two a new one takes its place."""
    bad, killed, good = run(dataset="nope"), run(epochs=50), [run(seed=seed) for seed in (1, 2)]
    events = {one: [] for one in (bad, killed, *good)}
    with LocalProcesses(1) as executor:
        for owner, event in run_all(list(events), executor, tmp_path):
            if owner == killed and isinstance(event, Epoch):
                for child in multiprocessing.active_children():
                    child.kill()
            events[owner].append(event)
    assert events[bad][-1].startswith("ValueError: unknown data set 'nope'")
    assert events[killed][-1] == "its process ended with exit status -9"
    for one in good:
        _, *epochs, record = events[one]
        assert [epoch.number for epoch in epochs] == [1, 2]
        assert record["key"] == one.key
    places = [events[one][0] for one in events]
    assert all(isinstance(place, Started) for place in places)
    assert len(set(places)) == 3
    # bit for bit, whatever ran before
    assert events[good[1]][-1]["loss"] == train_recipe(good[1], None, lambda epoch: None)["loss"]
    capfd.readouterr()


def test_of_several_at_a_time_the_longest_begin():
    short = [run(seed=seed) for seed in (0, 1)]
    long = [run(solver=name, backward="unrolled") for name in ("anderson", "broyden")]
    runs = [short[0], long[0], short[1], long[1]]
    assert _longest_first(runs, jobs=2) == [*long, *short]
    assert _longest_first(runs, jobs=1) == runs


def test_no_runs(tmp_path):
    with LocalProcesses(2) as executor:
        assert list(run_all([], executor, tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("interruptible")
@pytest.mark.skipif(os.name != "posix", reason="starts processes as POSIX systems do")
def test_stopping_while_a_run_starts_leaves_no_process_behind(monkeypatch, capfd, tmp_path):
    spawn, started = multiprocessing.util.spawnv_passfds, []

    def interrupted(path, args, fds):
        pid = spawn(path, args, fds)
        if "--multiprocessing-fork" in args:
            started.append(pid)
            os.kill(os.getpid(), signal.SIGINT)
        return pid

    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", interrupted)
    with pytest.raises(KeyboardInterrupt), LocalProcesses(1) as executor:
        list(run_all([Recipe().changed(hidden=2, epochs=1)], executor, tmp_path))
    (pid,) = started
    with pytest.raises(ProcessLookupError):  # ended and awaited
        os.kill(pid, 0)
    assert capfd.readouterr().err == ""


def test_a_process_that_is_killed_as_it_waits_costs_no_task():
    with LocalProcesses(1) as executor:
        first = executor.submit(os.getpid).result()
        os.kill(first, signal.SIGTERM)
        manager = executor.idle[0].pool._executor_manager_thread
        manager.join()  # by then it has noticed
        assert executor.submit(os.getpid).result() != first


def test_a_process_that_two_threads_end_at_once_is_closed_by_one(monkeypatch):
    """Its task fails as the grid is stopped; closing a pipe twice is an OSError."""
    process, inside, most = _Process(), [], []

    def shutdown():
        inside.append(1)
        time.sleep(0.05)
        most.append(len(inside))
        inside.pop()

    monkeypatch.setattr(process.pool, "shutdown", shutdown)
    with ThreadPoolExecutor(2) as executor:
        assert list(executor.map(lambda _: process.end(), range(2))) == [None, None]
    assert most == [1, 1]


def test_any_executor_runs_a_grid(tmp_path):
    """Here threads, which see the folder of the checkpoints."""
    one = run(model="rnn", hidden=2)
    with ThreadPoolExecutor(1) as executor:
        events = [event for _, event in run_all([one], executor, tmp_path)]
    assert [type(event) for event in events] == [Started, Epoch, Epoch, dict]
    assert [path.name for path in tmp_path.iterdir()] == [one.key]
    with ThreadPoolExecutor(1) as executor:
        events = [event for _, event in run_all([one], executor, tmp_path)]
    assert [type(event) for event in events] == [Started, PastEpoch, PastEpoch, dict]


def test_a_run_of_a_grid_that_has_ended_stops(tmp_path):
    with pytest.raises(FileNotFoundError, match="the run was canceled, or its machine does not"):
        train_run(run(model="rnn"), run(model="rnn").key, tmp_path / "gone" / "events")


def test_the_files_of_a_run_come_along_where_no_folder_is_shared(tmp_path):
    recipe, lines = run(model="rnn", hidden=2, epochs=1), []
    send = lambda path, line: lines.append(line)  # noqa: E731
    record, files = train_run(recipe, recipe.key, tmp_path / "events", send)
    assert record["key"] == recipe.key
    assert {"recipe.toml", "epoch-0001/model.safetensors"} <= set(files)
    assert len(lines) == 2
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "events").mkdir()
    record, files = train_run(recipe, recipe.key, tmp_path / "events", send)
    assert files == {}
    assert (tmp_path / recipe.key / "epoch-0001").is_dir()
