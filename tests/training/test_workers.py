"""Runs in processes of their own: one that fails costs no other."""

import pytest

from fixpoint.training import Epoch, Recipe
from fixpoint.training.workers import run_all


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


def test_no_runs():
    assert list(run_all([], jobs=2)) == []
