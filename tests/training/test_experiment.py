"""One run: its key, its model and its record."""

import json
from dataclasses import replace

import pytest
import torch

from fixpoint.training import Recipe, build_model, run_experiment

RUN = Recipe().changed(
    solver="inexact-newton",
    max_iter=2,
    backward="unrolled",
    cell="jordan",
    hidden=4,
    rank=2,
    epochs=2,
    halve_every=1,
)
PICARD = RUN.changed(
    solver="picard", max_iter=30, cell="self-feedback", backward="implicit", rank=None, rtol=1e-3
)


def test_equal_runs_have_equal_keys_and_others_do_not():
    assert RUN.key == RUN.changed().key
    others = [
        RUN.changed(**change)
        for change in (
            {"dataset": "har2"},
            {"max_iter": 1},
            {"hidden": 5},
            {"rank": 3},
            {"epochs": 3},
            {"lr": 0.02},
            {"seed": 1},
            {"batch_size": 64},
            {"normalize": "channel"},
            {"device": "cuda"},
        )
    ]
    assert len({RUN.key, PICARD.key, *(run.key for run in others)}) == 12


def test_the_model_is_what_the_run_says(tiny):
    model = build_model(RUN, tiny)
    assert model.layer.cell.rank == 2
    assert model.layer.fixed_point.solver.eta.shape == (16, 2)
    bounded = build_model(PICARD, tiny)
    assert bounded.layer.cell.bound == 0.8
    solver = bounded.layer.fixed_point.solver
    assert (solver.max_iter, solver.rtol, solver.atol) == (30, 1e-3, 1e-4)


@pytest.mark.parametrize("run", [RUN, PICARD], ids=["fixed steps", "tolerance"])
def test_record(tiny, run):
    seen = []
    record = run_experiment(run, tiny, seen.append)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["key"] == run.key
    assert [epoch.number for epoch in seen] == [1, 2]
    assert record["epochs"] == [epoch._asdict() for epoch in seen]
    assert record["accuracy_last"] == seen[-1].accuracy
    assert record["accuracy_best"] == max(epoch.accuracy for epoch in seen)
    assert record["loss"] == seen[-1].train_loss
    assert record["seconds_per_epoch"] == pytest.approx(sum(e.seconds for e in seen) / 2)
    weights = {"jordan": 2 * 4 * 2, "self-feedback": 4 * 4}[run.model.cell]
    eta = 16 * 2 if run is RUN else 0
    count = weights + 4 * 4 + 4 * 9 + 4 + eta + (2 * 4 + 2)
    assert record["parameters"] == count
    assert record["size_kb"] == 4 * count / 1024
    assert record["label"] == (
        "ERNN K=2 (inexact Newton, Jordan)" if run is RUN else "ERNN (Picard, self-feedback)"
    )
    if run is RUN:
        assert record["mean_iterations"] == 2
        assert record["fraction_converged"] is None
    else:
        assert 1 < record["mean_iterations"] < 30
        assert record["fraction_converged"] == 1.0
        assert record["mean_residual"] < 1e-2
    before, after = record["contraction"]["before"], record["contraction"]["after"]
    assert len(after["norm"]) == 16
    assert before["norm"] != after["norm"]
    if run is RUN:
        assert before["eta"] == [pytest.approx([0.01, 0.01])] * 16
        assert before["eta"] != after["eta"]


def test_a_run_is_repeatable_whatever_came_before(tiny):
    first = run_experiment(RUN, tiny)
    torch.rand(5)
    second = run_experiment(RUN, tiny)
    for name in ("loss", "accuracy_last", "mean_residual", "contraction"):
        assert first[name] == second[name]
    assert run_experiment(RUN.changed(seed=1), tiny)["loss"] != first["loss"]


@pytest.mark.parametrize("run", [RUN, PICARD], ids=["fixed steps", "tolerance"])
def test_a_nan_test_window_costs_that_window_alone(tiny, run):
    """The first test window is one of those that the condition is looked at for."""
    x = tiny.x_test.clone()
    x[0, 3, 2] = torch.nan
    clean, spoiled = run_experiment(run, tiny), run_experiment(run, replace(tiny, x_test=x))
    assert spoiled["loss"] == clean["loss"]
    lost = clean["accuracy_last"] - spoiled["accuracy_last"]
    assert lost in (0, pytest.approx(100 / 81))
    json.dumps(spoiled["mean_residual"], allow_nan=False)
