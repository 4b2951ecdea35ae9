"""Every example runs, at a small size, and prints what it promises."""

import json
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fixpoint.data import load_dataset, normalize
from fixpoint.training import Recipe, run_experiment

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
SMALL = {
    "01_inexact_newton": ([], r"plain +error .*: 0\.6.*damped .*: 0\.1.*learned .*: 0\.0"),
    "02_compare_solvers": (["--epochs", "1"], r"picard .* 100\.0 % solved.*newton .* solved"),
    "03_contraction": (
        ["--epochs", "1", "--out", "{folder}/contraction.png"],
        r"accuracy \d+\.\d %.*ERNN with JordanMap.*The condition .* holds at.*drawn in",
    ),
    "04_deq": (["--epochs", "1"], r"accuracy 0\.\d+.*spectral radius: 0\.\d"),
    "05_own_map_and_solver": ([], r"HeavyBall: \[\d+, \d+\] updates.*slope in the discount"),
    "06_torchdeq": ([], r"states differ by \de-1\d, gradients by \de-1\d"),
    "07_drop_in_for_rnn": (["--epochs", "1", "--walks", "100"], r"RNN: test.*ERNN: test accuracy"),
    "08_gradient_checks": ([], r"gradgradcheck pass.*unrolled, 60 updates +relative error \de-1\d"),
    "09_tune_a_tolerance": ([], r"1e-08 +\d+ +\de-08 +\de-07"),
    "10_read_results": (
        ["--out", "{folder}"],
        r"ERNN K=1 .* on har2-sample.*KB.*loss",
    ),
    "11_live_stream": (["--epochs", "1"], r"sample 128: walking.*\(\d+ %\).*sample 384: walking"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds the record of a real, short run, as `fixpoint compare` writes it."""
    data = normalize(load_dataset("har2-sample"))
    few = replace(data, x_train=data.x_train[:64], y_train=data.y_train[:64], groups_train=None)
    run = Recipe().changed(
        dataset="har2-sample",
        solver="inexact-newton",
        max_iter=1,
        backward="unrolled",
        cell="jordan",
        hidden=4,
        rank=2,
        epochs=1,
        halve_every=1,
    )
    path = tmp_path_factory.mktemp("runs")
    (path / "runs.jsonl").write_text(json.dumps(run_experiment(run, few)) + "\n")
    return path


def test_every_example_is_here():
    assert [path.stem for path in EXAMPLES] == sorted(SMALL)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs_and_prints(path, monkeypatch, capsys, folder):
    arguments, words = SMALL[path.stem]
    filled = [a.replace("{folder}", str(folder)) for a in arguments]
    monkeypatch.setattr(sys, "argv", [str(path), *filled])
    runpy.run_path(str(path), run_name="__main__")
    assert re.search(words, " ".join(capsys.readouterr().out.split()))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_short(path):
    assert len(path.read_text().splitlines()) < 60


def test_results_that_are_not_there(tmp_path, monkeypatch):
    path = next(path for path in EXAMPLES if path.stem.endswith("read_results"))
    monkeypatch.setattr(sys, "argv", [str(path), "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="is not there: run `fixpoint compare` first"):
        runpy.run_path(str(path), run_name="__main__")
