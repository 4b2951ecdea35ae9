"""One run: its key, its model and its record."""

import json
import math
from dataclasses import replace

import pytest
import torch

from fixpoint.training import Recipe, build_model, fit, make_task, run_experiment
from fixpoint.training.experiment import make_fabric
from fixpoint.training.results.store import _standard
from fixpoint.training.results.table import comparison_table
from fixpoint.training.results.verdict import divergence

RUN = Recipe().changed(
    solver="inexact-newton",
    max_iter=2,
    backward="unrolled",
    map="jordan",
    hidden=4,
    rank=2,
    epochs=2,
    halve_every=1,
)
PICARD = RUN.changed(
    solver="picard", max_iter=30, map="self-feedback", backward="implicit", rank=None, rtol=1e-3
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
    assert model.layer.map.rank == 2
    assert model.layer.fixed_point.solver.eta.shape == (16, 2)
    bounded = build_model(PICARD, tiny)
    assert bounded.layer.map.bound == 0.8
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
    assert record["seconds_per_epoch"] == pytest.approx(seen[-1].seconds)  # the first compiles
    weights = {"jordan": 2 * 4 * 2, "self-feedback": 4 * 4}[run.model.map]
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


def _right_in_the_end(run, data):
    """Whether the model of a run, trained by hand, has the first test window right."""
    torch.manual_seed(run.training.seed)
    model = build_model(run, data)
    fabric = make_fabric(run.machine)
    *_, last = fit(fabric, model, make_task(fabric, data, run.training), run.training)
    assert last.number == run.training.epochs
    return bool(model(data.x_test[:1]).argmax(1) == data.y_test[0])


@pytest.mark.parametrize("run", [RUN, PICARD], ids=["fixed steps", "tolerance"])
def test_a_nan_test_window_costs_that_window_alone(tiny, run):
    """The first test window is one of those that the condition is looked at for."""
    x = tiny.x_test.clone()
    x[0, 3, 2] = torch.nan
    clean, spoiled = run_experiment(run, tiny), run_experiment(run, replace(tiny, x_test=x))
    assert spoiled["loss"] == clean["loss"]
    right = _right_in_the_end(run, tiny)
    lost = clean["accuracy_last"] - spoiled["accuracy_last"]
    assert lost == pytest.approx(100 / 81 if right else 0)
    json.dumps(spoiled["mean_residual"], allow_nan=False)


def test_a_training_that_diverges_stops_and_is_recorded(tiny, tmp_path):
    """Its loss is null, nothing is measured on weights that are lost, the last finite ones stay."""
    run = RUN.changed(lr=1e30, epochs=5)
    record = run_experiment(run, tiny, folder=tmp_path)
    assert len(record["epochs"]) < 5
    assert not math.isfinite(record["loss"])
    assert record["contraction"] is None
    assert record["mean_residual"] is record["gap"] is None
    assert "diverged in epoch" in divergence(record)
    assert "lower training.lr (1e+30) or set training.clip" in divergence(record)
    assert len(list(tmp_path.glob("epoch-*"))) == (1 if len(record["epochs"]) > 1 else 0)
    comparison_table([record])
    json.dumps(_standard(record), allow_nan=False)


def test_a_model_that_does_not_fit_into_memory(tiny):
    for hidden in (10**8, 10**12, 10**20):
        with pytest.raises(MemoryError, match=rf"not enough memory for model.hidden={hidden} and"):
            build_model(Recipe().changed(hidden=hidden), tiny)


def test_a_folder_with_another_training_is_refused(tiny, tmp_path):
    """Its result would be given for this one."""
    recipe = Recipe().changed(hidden=4, epochs=1)
    done = run_experiment(recipe, tiny, folder=tmp_path)
    rounded = replace(tiny, x_train=tiny.x_train * (1 + 1e-6))
    assert run_experiment(recipe, rounded, folder=tmp_path)["epochs"] == done["epochs"]
    flipped = replace(tiny, y_train=1 - tiny.y_train)
    other = replace(tiny, x_train=2 * tiny.x_train)
    for given, data, name in (
        (recipe.changed(lr=0.5), tiny, "recipe"),
        (recipe.changed(epochs=2), tiny, "recipe"),
        (recipe, flipped, "labels or shapes"),
        (recipe, other, "x_train"),
    ):
        with pytest.raises(ValueError, match=rf"it is of another training: {name} differs\): rem"):
            run_experiment(given, data, folder=tmp_path)
