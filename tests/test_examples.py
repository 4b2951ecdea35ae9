"""The examples: every one runs as the notebook that the site offers, prints and draws."""

import json
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest
from matplotlib import pyplot

from fixpoint.data import load_dataset, normalize
from fixpoint.training import Recipe, run_experiment

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
SMALL = {
    "00_fixed_points_in_ten_minutes": (
        {},
        r"z\* = 0\.739085 .*STALLED|MAX_ITER.*damped .* 0\.8000, 1 updates.*= -0\.297",
    ),
    "01_inexact_newton": ({}, r"plain +error .*: 0\.6.*damped .*: 0\.1.*learned .*: 0\.0"),
    "02_compare_solvers": ({"EPOCHS": 1}, r"picard .* 100\.0 % solved.*newton .* solved"),
    "03_contraction": (
        {"EPOCHS": 1},
        r"accuracy \d+\.\d %.*ERNN with JordanMap.*The condition .* holds at.*drawn in",
    ),
    "04_deq": ({"EPOCHS": 1}, r"accuracy 0\.\d+.*spectral radius: 0\.\d"),
    "05_own_map_and_solver": ({}, r"HeavyBall: \[\d+, \d+\] updates.*slope in the discount"),
    "06_torchdeq": ({}, r"states differ by \de-1\d, gradients by \de-1\d"),
    "07_drop_in_for_rnn": (
        {"EPOCHS": 1, "EVERY": 50},
        r"RNN: test.*ERNN: test accuracy",
    ),
    "08_gradient_checks": ({}, r"gradgradcheck pass.*unrolled, 60 updates +relative error \de-1\d"),
    "09_tune_a_tolerance": ({}, r"1e-08 +\d+ +\de-08 +\de-07"),
    "10_read_results": ({"EPOCHS": 1}, r"ERNN K=1.* on har2-sample.*KB.*loss"),
    "11_live_stream": ({"EPOCHS": 1}, r"sample 128: walking.*\(\d+ %\).*sample 384: walking"),
}
"""Of each example the constants of a short run, and the words that it prints."""

LESSONS = ("00_fixed_points_in_ten_minutes",)
PUBLIC = re.compile(r"^from (fixpoint[\w.]*) import|^import (fixpoint[\w.]*)", re.MULTILINE)


def cells(source):
    """The cells of the notebook that sphinx-gallery makes of a script: split at `# %%`."""
    return re.split(r"^# %%.*$", source, flags=re.MULTILINE)


def with_constants(source, constants):
    for name, value in constants.items():
        source, count = re.subn(rf"^{name} = .*$", f"{name} = {value!r}", source, flags=re.M)
        assert count == 1, f"{name} is no constant at the top"
    return source


@pytest.fixture
def notebook(monkeypatch, tmp_path):
    """Run a source as Jupyter does: a kernel's arguments, no `__file__`, a folder of its own.

    Returns the number of figures that it showed.
    """

    def run(source):
        shown = []

        def show():
            shown.extend(pyplot.get_fignums())
            pyplot.close("all")

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
        monkeypatch.setattr("builtins.get_ipython", lambda: None, raising=False)
        monkeypatch.setattr(pyplot, "show", show)
        namespace = {"__name__": "__main__"}
        for number, cell in enumerate(cells(source), 1):
            exec(compile(cell, f"cell {number}", "exec"), namespace)
        show()  # Jupyter shows open figures below their cell
        return len(shown)

    with matplotlib.rc_context():
        yield run


def test_every_example_is_here():
    assert [path.stem for path in EXAMPLES] == sorted(SMALL)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs_as_a_notebook_prints_and_draws(path, capsys, notebook):
    constants, words = SMALL[path.stem]
    figures = notebook(with_constants(path.read_text(encoding="utf-8"), constants))
    assert re.search(words, " ".join(capsys.readouterr().out.split()))
    assert figures > 0  # the first one is its picture in the gallery


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_short(path):
    assert len(path.read_text().splitlines()) < (100 if path.stem in LESSONS else 66)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_takes_names_from_public_packages(path):
    """A public package has an `__all__`, as `fixpoint.models`; its modules are internal."""
    from test_docs import packages

    modules = {a or b for a, b in PUBLIC.findall(path.read_text(encoding="utf-8"))}
    assert modules - set(packages()) == set()


def test_finished_runs_are_read(tmp_path, monkeypatch, capsys):
    """The record of a real, short run, as `fixpoint compare` writes it."""
    data = normalize(load_dataset("har2-sample"))
    few = replace(data, x_train=data.x_train[:64], y_train=data.y_train[:64], groups_train=None)
    run = Recipe().changed(
        dataset="har2-sample",
        solver="inexact-newton",
        max_iter=1,
        hidden=4,
        rank=2,
        epochs=1,
        seed=7,
    )
    path = tmp_path / "runs/compare/runs.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(run_experiment(run, few)) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: pyplot.close("all"))
    runpy.run_path(str(EXAMPLES[0].parent / "10_read_results.py"), run_name="__main__")
    assert re.search(r"ERNN K=1.* on har2-sample, seed 7.*\n", capsys.readouterr().out)
