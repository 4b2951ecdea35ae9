"""Recipes of the paper's tables: what is run, and ours beside the paper's numbers."""

import json
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fixpoint.cli.app import app
from fixpoint.cli.options import seeds_or_count
from fixpoint.paper.table_runs import beside_table, paper_recipe
from fixpoint.paper.tables import TABLES
from fixpoint.training import Recipe, load_recipe


def invoke(*arguments, **environment):
    return CliRunner().invoke(app, ["reproduce", *arguments], env=environment)


SAMPLE = ["--set", "dataset=har2-sample", "--set", "hidden=4", "--set", "halve_choices=[]"]
SAMPLE += ["--set", "validation=0.0", "--epochs", "1", "--jobs", "1", "--seeds", "0"]


@pytest.mark.slow
def test_a_table_on_the_sample(tmp_path):
    arguments = ["table4", *SAMPLE, "--models", "lstm,rnn", "--out", str(tmp_path)]
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [r["label"] for r in records] == ["RNN", "LSTM"]
    assert records[0]["run"]["clip"] == 1.0  # of the recipe
    assert records[0]["run"]["epochs"] == 1
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith(" HAR-2")]
    for row, record, paper in zip(rows, records, ("91.31", "93.65"), strict=True):
        assert row[2:5] == [
            paper,
            f"{record['accuracy_best']:.2f}",
            f"{record['accuracy_last']:.2f}",
        ]
    assert "RNN" in (tmp_path / "report.html").read_text()
    again = invoke(*arguments)
    assert "2 of 2 runs are already in" in again.stdout


def test_figures_of_the_paper(tmp_path, monkeypatch):
    """The same as `fixpoint figures`; DSA-19 is named where it is not there."""
    asked = []

    def drawn(console, names, **options):
        asked.append((names, options))

    monkeypatch.setattr("fixpoint.paper.figure_files.draw_figures", drawn)
    monkeypatch.delenv("FIXPOINT_DATA", raising=False)
    out = tmp_path / "figures"
    result = CliRunner().invoke(
        app, ["reproduce", "figures", "--epochs", "1", "--seeds", "3", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    options = {"out": out, "dataset": "har2-sample", "epochs": 1, "seeds": [3], "formats": ["png"]}
    assert asked == [(["phi", "h1", "h2", "h3", "convergence", "eta"], options)]


def shown(ours):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(beside_table("table2", ours))
    return capture.get()


def test_rows_left_out_for_one_reason_are_named_together(tmp_path, monkeypatch):
    from fixpoint.paper import table_runs as module

    monkeypatch.setenv("FIXPOINT_DATA", str(tmp_path))
    recipes = {
        name: Recipe().changed(model="rnn", dataset=dataset)
        for name, dataset in (("a", "har2"), ("b", "har2"), ("c", "har2-sample"))
    }
    console = Console(width=400)
    with console.capture() as capture:
        assert list(module._runnable(console, recipes)) == ["c"]
    left, part = capture.get().splitlines()
    assert left.startswith("a, b left out: har.npz was expected in")
    assert part.startswith("har2-sample is a part here, not comparable with the paper: 1080 of the")


def test_a_dry_run_lists_the_runs_and_writes_nothing(tmp_path, monkeypatch):
    from fixpoint.paper import table_runs as module

    monkeypatch.setattr(module, "_runnable", lambda console, recipes: recipes)
    options = {"out": tmp_path / "out", "datasets": ["har2"], "models": ["lstm"], "changes": {}}
    console = Console(width=200)
    with console.capture() as capture:
        assert not module.reproduce_table(
            console, "table4", jobs=1, seeds=[0, 3], dry=True, **options
        )
    keys = [load_recipe("har2-lstm").changed(seed=seed).key for seed in (0, 3)]
    assert [line.split()[:3] for line in capture.get().splitlines()] == [
        [key, "to", "run"] for key in keys
    ]
    assert not (tmp_path / "out").exists()


def test_ours_beside_the_papers():
    row = TABLES["table2"][0]
    record = {
        **{"metric": "accuracy", "accuracy_best": 94.0, "accuracy_last": 93.0, "size_kb": 29.4},
        **{"seconds_per_epoch": 36.0, "epochs": [{}] * 50},
    }
    other = record | {"accuracy_best": 95.0}
    text = shown({row: [record, other]})
    assert re.search(r"HAR-2 +FastRNN +94\.50 +94\.50 +93\.00 +29 +29 +0\.063 +0\.5 +2", text)
    assert "± 0.71" in text
    assert re.search(r"HAR-2 +FastRNN +94\.50 +- +- +29 +- +0\.063 +- +0", shown({row: []}))
    recipe = load_recipe("har2-fastrnn").changed(epochs=2, seed=1)
    text = shown({row: [record | {"recipe": recipe.differing}]})
    for difference in ("epochs 2 (paper 60)", "rotate 30 (paper 0)", "normalize asinh (paper"):
        assert difference in " ".join(text.split())
    assert "seed" not in text.replace("seeds", "")


def test_the_recipe_of_the_papers_protocol():
    for name in (row.recipe for row in TABLES["table2"] if row.dataset == "HAR-2"):
        ours, paper = load_recipe(name), paper_recipe(name)
        assert paper.training.halve_choices == (10, 20, 30)
        assert (paper.training.rotate, paper.data.normalize) == (0, "column")
        assert paper.model == ours.model
    assert paper_recipe("yelp5-lstm") == load_recipe("yelp5-lstm")
    assert paper_recipe("ptb-ernn").training.optimizer == "sgd"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table5"], "unknown table 'table5': expected one of table2, table3, table4, figures"),
        (["table4", "--dataset", "har6"], "unknown dataset of this table 'har6'"),
        (["table4", "--models", "lsmt"], "unknown model of this table 'lsmt'.*mean 'lstm'"),
        (["table4", "--set", "lrr=1"], "unknown key 'lrr'"),
        (["table4", "--seeds", "x"], "--seeds takes whole numbers"),
        (["table4", "--seeds", "101"], "--seeds 101 asks for 101 seeds, at most 100"),
        (["table4", "--models", "lstm"], "no row can be run: har.npz was expected in"),
        (["figures", "--models", "lstm"], "--models is for tables: leave it out to draw the fig"),
        (["figures", "--set", "lr=1"], "--set is for tables"),
        (["figures", "--jobs", "2"], "--jobs is for tables"),
        (["figures", "--device", "cuda"], "--device is for tables"),
        (["figures", "--dry-run"], "--dry-run is for tables"),
        (["solvers", "--dry-run"], "--dry-run is for tables"),
        (["figures", "--dataset", "harr"], "unknown data set 'harr'"),
    ],
)
def test_what_is_wrong_gets_one_line(tmp_path, arguments, message):
    out = tmp_path / "out"
    result = invoke(*arguments, "--out", str(out), FIXPOINT_DATA=str(tmp_path))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert re.search(message, line), line
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("5", [0, 1, 2, 3, 4]), ("1", [0]), ("0", [0]), ("7,", [7]), ("3,1", [3, 1]), ("", [])],
)
def test_seeds_are_counted_or_listed(text, seeds):
    assert seeds_or_count("--seeds", text) == seeds
