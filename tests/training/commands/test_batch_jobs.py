"""Runs as jobs of submitit, here of its executor of local processes."""

import pytest
from typer.testing import CliRunner

from fixpoint.cli.app import app
from fixpoint.training import Epoch, Recipe
from fixpoint.training.commands.executors import make_executor
from fixpoint.training.commands.workers import Started, run_all

pytest.importorskip("submitit")


@pytest.mark.slow
def test_a_job_that_fails_or_is_lost_costs_no_other(tmp_path):
    good = Recipe().changed(model="rnn", hidden=3, epochs=2)
    bad, lost = good.changed(dataset="nope"), good.changed(epochs=2000)
    events = {run: [] for run in (good, bad, lost)}
    with make_executor(list(events), 1, "local:timeout_min=10", tmp_path) as executor:
        for run, event in run_all(list(events), executor, tmp_path):
            if run == lost and isinstance(event, Epoch):
                executor.jobs[2].cancel()
            events[run].append(event)
    assert isinstance(events[good][0], Started)
    assert [event.number for event in events[good][1:-1]] == [1, 2]
    assert events[good][-1]["key"] == good.key
    assert events[good][-1]["threads"] == 1
    assert events[bad][-1].startswith("ValueError: unknown data set 'nope'")
    assert events[lost][-1].startswith("its job ")
    assert events[lost][-1].endswith(".err")


@pytest.mark.slow
def test_leaving_early_cancels_the_jobs(tmp_path):
    run = Recipe().changed(model="rnn", hidden=3, epochs=2000)
    with make_executor([run], 1, "local", tmp_path) as executor:
        events = run_all([run], executor, tmp_path)
        next(events)
        events.close()
        assert not executor.jobs[0].done()
    assert executor.jobs[0].done()


@pytest.mark.parametrize("settings", ["tiem=3", "timeout_min=long", "timeout_min"])
def test_a_wrong_parameter_is_named(tmp_path, settings):
    options = ["compare", "--out", str(tmp_path), "--cluster", f"local:{settings}"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 2
    assert settings.partition("=")[0] in result.output
    assert "submitit's names" in " ".join(result.output.split())
