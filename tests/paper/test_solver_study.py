"""The study of solvers: its measures, its command, and the page beside its committed runs."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.nn import functional as F

from fixpoint import Implicit, Phantom, Picard, Unrolled
from fixpoint.analysis import plots
from fixpoint.models import ERNN, LastStateClassifier, SelfFeedbackMap
from fixpoint.paper.solver_measures import (
    GRID_PAIRS,
    GRID_TOLERANCES,
    LOST,
    gradient_error,
    tight_gradient,
)
from fixpoint.paper.solver_study import (
    DESIGN,
    EQUILIBRIUM,
    STEPS,
    grid_run,
    reproduce_solvers,
    study_runs,
    tables,
)
from fixpoint.training.results.store import read_file

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "results/solvers_har2.jsonl"


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(0)
    cell = SelfFeedbackMap(3, 6, bound=0.6)
    layer = ERNN(3, 6, map=cell, solver=Picard(), backward=Implicit(), batch_first=True)
    model = LastStateClassifier(layer, 6, 2).double()
    return model, torch.randn(5, 7, 3, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 1])


def test_the_tight_gradient_is_that_of_long_unrolling(small):
    model, x, y = small
    cell, h = model.layer.map, torch.zeros(5, 6, dtype=torch.float64)
    for t in range(7):
        past = h
        for _ in range(80):  # 0.6^80 < 1e-17
            h = torch.tanh(h @ cell.U.mT + past @ cell.V.mT + x[:, t] @ cell.W.mT + cell.b)
    loss = F.cross_entropy(model.head(h), y)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    given = tight_gradient(model, x, y)
    torch.testing.assert_close(
        given.norm(), torch.cat([g.flatten() for g in expected]).norm(), rtol=1e-9, atol=0
    )
    assert gradient_error(model, x, y, given, Picard(rtol=1e-12, atol=0), Unrolled()) < 1e-9


def test_the_error_of_the_gradient_falls_with_the_tolerance(small):
    model, x, y = small
    exact = tight_gradient(model, x, y)
    errors = [
        gradient_error(model, x, y, exact, Picard(rtol=rtol, atol=0, max_iter=100), Implicit())
        for rtol in (1e-2, 1e-5, 1e-9)
    ]
    assert errors[0] > 100 * errors[1] > 1e4 * errors[2]
    phantom = gradient_error(model, x, y, exact, Picard(rtol=1e-9, atol=0), Phantom())
    assert phantom > 0.05  # J is not 0, so one term of its series is not enough


@pytest.mark.filterwarnings("ignore::fixpoint.ConvergenceWarning")
def test_without_an_equilibrium_there_is_no_error(small):
    _, x, y = small
    cell = SelfFeedbackMap(3, 6, nonlinearity="relu")
    with torch.no_grad():  # h = relu(2 h + 1) has no solution
        for parameter in cell.parameters():
            parameter.zero_()
        cell.U.copy_(2 * torch.eye(6))
        cell.b.fill_(1.0)
    layer = ERNN(3, 6, map=cell, solver=Picard(), batch_first=True)
    assert tight_gradient(LastStateClassifier(layer, 6, 2).double(), x, y) is None


def test_the_design_has_no_run_twice():
    runs = study_runs()
    assert len({run.key for run in runs}) == len(runs) == sum(len(seeds) for _, seeds in DESIGN)
    assert {run.training.seed for run in study_runs(seeds=[4])} == {4}
    short = study_runs(epochs=1)
    assert {run.training.epochs for run in short} == {1}
    assert len({run.key for run in short}) == len(short)  # the sweep has a main row once more


def test_the_grid_is_measured_on_the_longest_run_of_an_equilibrium():
    runs = study_runs()
    (measured,) = [run for run in runs if run.key == grid_run(runs)]
    assert measured.training.epochs == max(run.training.epochs for run in runs)
    assert measured.model.solver == EQUILIBRIUM["solver"]
    assert measured.training.seed == 0
    assert grid_run([run for run in runs if run.model.solver == STEPS["solver"]]) is None


@pytest.fixture
def own(tmp_path):
    """Data of a user: two classes that each step tells apart, 12 steps."""
    y = np.arange(80) % 2
    x = np.random.default_rng(0).normal(size=(80, 12, 2)) + y[:, None, None]
    np.savez(tmp_path / "own.npz", x=x.astype(np.float32), y=y)
    return str(tmp_path / "own.npz")


def test_without_the_data_nothing_is_started(tmp_path, monkeypatch):
    monkeypatch.setenv("FIXPOINT_DATA", str(tmp_path))
    with pytest.raises(OSError, match="har2"):
        reproduce_solvers(Console(), out=tmp_path / "out", jobs=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command_trains_measures_and_draws(tmp_path, own):
    design = [({**STEPS, "max_iter": 1}, (0,)), ({**EQUILIBRIUM}, (0,))]
    changes = {"dataset": own, "rotate": 0.0, "epochs": 1, "hidden": 4}
    console = Console(width=300)

    def run():
        with console.capture() as capture:
            records = reproduce_solvers(
                console, out=tmp_path, jobs=1, changes=changes, design=design
            )
        return records, capture.get()

    records, text = run()
    steps, solved = (record["measures"] for record in records)
    assert steps["gradient_error"] is None
    assert steps["grid"] == []
    assert set(steps["iterations"]) == {1.0}
    assert 0 < solved["gradient_error"] < 0.5
    assert len(solved["iterations"]) == 12
    assert {(row["solver"], row["backward"]) for row in solved["grid"]} == set(GRID_PAIRS)
    errors = {row["rtol"]: row["gradient_error"] for row in solved["grid"][: len(GRID_TOLERANCES)]}
    assert errors[1e-5] < errors[1e-1]  # Picard, implicit
    assert steps["seconds_per_epoch"] > 0
    page = (tmp_path / "solvers.md").read_text()
    for table in tables(records):
        assert table in text
        assert table in page
    for name in plots.STUDY_FIGURES:
        assert (tmp_path / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    before = (tmp_path / "runs.jsonl").read_bytes()
    assert run()[0] == records  # nothing is trained or measured again
    assert (tmp_path / "runs.jsonl").read_bytes() == before


def test_the_page_has_the_table_of_the_committed_runs():
    page = (ROOT / "docs/solvers_on_har2.md").read_text(encoding="utf-8")
    records = read_file(RUNS)
    assert all(table in page for table in tables(records))


def test_the_committed_runs_are_of_the_design():
    known = {run.key for run in study_runs()}
    records = read_file(RUNS)
    assert {record["key"] for record in records} <= known
    for line, record in zip(RUNS.read_text().splitlines(), records, strict=True):
        accuracies = [epoch["accuracy"] for epoch in record["epochs"]]
        if record["accuracy_last"] is None:
            assert record["measures"] == LOST
            continue
        assert record["accuracy_last"] == accuracies[-1]
        assert record["accuracy_best"] == max(accuracies)
        assert len(accuracies) == record["run"]["epochs"]
        assert json.loads(line)["measures"]["seconds_per_epoch"] > 0


def test_a_seed_that_diverged_is_not_drawn():
    first = json.loads(RUNS.read_text(encoding="utf-8").splitlines()[0])
    diverged = {**first, "accuracy_last": None, "epochs": first["epochs"][:1]}
    (axes,) = plots.STUDY_FIGURES["accuracy"]([first, diverged]).axes
    (line,) = axes.lines
    assert line.get_ydata().tolist() == [epoch["accuracy"] for epoch in first["epochs"]]


def test_the_sweep_has_a_row_for_each_solver_with_the_backwards_beside_each_other():
    def record(backward, epochs, accuracy, **run):
        run = {"map": "self-feedback", "bound": 0.9, "solver": "picard", "rtol": 1e-3, **run}
        return {
            **{"run": {**run, "backward": backward, "epochs": epochs, "seed": 0}},
            **{"accuracy_last": accuracy, "accuracy_best": accuracy, "mean_iterations": 2.0},
            **{"epochs": [{"accuracy": 50.0}], "fraction_converged": 1.0},
            "measures": {"seconds_per_epoch": 3.0, "gradient_error": 0.1, "grid": []},
        }

    long = record("implicit", 5, 90.0)
    short = [record("implicit", 1, 80.0), record("phantom", 1, None), record("implicit", 1, 70.0)]
    short[2]["run"]["solver"] = "newton"
    main, sweep, _ = tables([long, *short])
    assert "90.00" in main
    assert "80.00" not in main
    rows = sweep.splitlines()[2:]
    assert [row.count("|") for row in rows] == [14, 14]
    start = "| bound 0.9 | Picard | 1e-3 | 2.0 | 80.00 | 3.0 | 0.1 |"
    assert rows[0] == f"{start} - | - | - | diverged | 3.0 | 0.1 |"
    assert rows[1].startswith("| bound 0.9 | Newton | 1e-3 | 2.0 | 70.00 ")
