"""What is said before the first epoch, which is longer where numba compiles."""

import io
import json

import pytest
import torch
from rich.console import Console

from fixpoint.models.ops.common.dispatch import MAX_SIZE
from fixpoint.models.rnn.base_cell import RecurrentCell
from fixpoint.training.commands import progress
from fixpoint.training.commands.progress import (
    COMPILED,
    RunProgress,
    TimeLeft,
    make_progress,
    short_names,
)
from fixpoint.training.engine.fit import Epoch, PastEpoch
from fixpoint.training.engine.model_factory import LAYERS, _layer, resolve, resolved
from fixpoint.training.recipe.schema import Recipe

LINE = "Compiling the recurrence once, which may take some 10 s.\n"


def printed(recipe, *, terminal=False):
    text = io.StringIO()
    with RunProgress(Console(file=text, force_terminal=terminal, width=200), [recipe]):
        pass
    return text.getvalue()


@pytest.mark.parametrize(
    ("precision", "capabilities", "says"),
    [
        ("bf16-mixed", {"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False}, True),
        ("bf16-mixed", {"architecture": "x86_64", "avx512_bf16": True, "amx_bf16": False}, False),
        ("bf16-mixed", {"architecture": "aarch64"}, False),
        ("32-true", {"architecture": "x86_64", "avx512_bf16": False}, False),
    ],
)
def test_slow_bfloat16_is_said(precision, capabilities, says, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    recipe = Recipe().changed(model="lstm", precision=precision)
    assert ("--precision 32-true is faster" in printed(recipe)) == says


@pytest.fixture
def numba(monkeypatch):
    """A switch: whether numba seems to be installed."""

    def seems(installed):
        monkeypatch.setattr(progress, "find_spec", lambda name: object() if installed else None)

    return seems


@pytest.mark.parametrize("model", COMPILED)
def test_the_first_run_says_that_it_compiles(model, numba):
    numba(True)
    recipe = Recipe().changed(model=model)
    assert printed(recipe) == LINE
    assert "compiling once" in printed(recipe, terminal=True)


def test_a_slow_training_without_numba_is_said(numba):
    numba(False)
    for terminal in (False, True):
        text = printed(Recipe(), terminal=terminal)
        assert "numba is not installed, without which training on the CPU takes about" in text
        assert "pip install 'torch-fixpoint[fast]'" in text
        assert "ompiling" not in text
    assert printed(Recipe().changed(device="cuda")) == ""


@pytest.mark.parametrize(
    ("installed", "changes"),
    [
        (False, {"model": "eurnn"}),
        (True, {"model": "eurnn"}),
        (True, {"device": "cuda"}),
        (True, {"model": "rnn", "precision": "16-true"}),
        (False, {"hidden": MAX_SIZE + 1}),
        (True, {"model": "lstm", "hidden": MAX_SIZE + 1}),
    ],
)
def test_nothing_is_said_where_nothing_is_compiled(installed, changes, numba):
    numba(installed)
    recipe = Recipe().changed(**changes)
    assert printed(recipe) == ""
    assert "compiling" not in printed(recipe, terminal=True)


@pytest.mark.parametrize("model", LAYERS)
def test_the_models_that_compile_are_those_with_a_fused_path(model):
    options = resolve(Recipe().changed(model=model, hidden=4).model)
    layer = _layer(options, 3, 5)
    cell = getattr(layer, "l0", None)
    layer.implementation = "fused"  # also where numba is missing
    fused = cell.no_fused_path() is None if isinstance(cell, RecurrentCell) else layer.plan().fused
    assert fused == (model in COMPILED)


def test_no_number_is_cut_on_a_narrow_terminal():
    recipe, text = Recipe().changed(dataset="a-long-name-of-a-data-set"), io.StringIO()
    epoch = Epoch(1, 1.0984, 1.0, 33.33, None, 1.0, 0.01, None, None, None, None, None)
    for width in (40, 80, 100, 200):
        with RunProgress(Console(file=text, force_terminal=True, width=width), [recipe]) as shown:
            shown.advance(recipe, epoch)
        assert "…" not in text.getvalue()
        assert "loss 1.098, test 33.3 %" in text.getvalue()
        text.truncate(0)


def epoch(number, seconds):
    return Epoch(number, 0.5, 0.5, 90.0, None, seconds, 0.01)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that have gone by, which a test may add to."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("past", [0, 1, 5])
def test_the_time_left_leaves_out_compiling_and_epochs_of_before(past, clock):
    run = Recipe().changed(epochs=60)
    left = TimeLeft({run: 60})
    for number in range(1, past + 1):  # all at once
        clock[0] += 0.001
        assert left.after(run, PastEpoch(*epoch(number, 0.0001))) == ""
    clock[0] += 44.0
    assert left.after(run, epoch(past + 1, 40.0)) == ""  # compiles
    for number in (past + 2, past + 3):
        clock[0] += 2.0
        text = left.after(run, epoch(number, 1.9))
    assert text == f"about {2 * (57 - past) / 60:.0f} min left"


def test_the_time_left_of_a_run_whose_worker_was_lost(clock):
    run = Recipe().changed(epochs=60)
    left = TimeLeft({run: 60})
    for number in range(1, 41):
        left.after(run, epoch(number, 1.0))
        clock[0] += 1.0
    left.begin(run)
    for number in range(1, 41):
        left.after(run, PastEpoch(*epoch(number, 1.0)))
    clock[0] += 30.0
    assert left.after(run, epoch(41, 29.0)) == "about 19 s left"


def test_names_in_lines_are_short():
    base = Recipe()
    runs = [
        resolved(base.changed(solver=solver, backward=backward))
        for solver in ("picard", "anderson")
        for backward in ("unrolled", "implicit")
    ]
    runs.append(resolved(base))
    names = list(short_names(runs).values())
    assert names == [
        *("Picard unrolled", "Picard implicit", "Anderson unrolled", "Anderson implicit"),
        "K=1 unrolled",
    ]
    two = [run.changed(seed=seed) for run in runs[:1] for seed in (0, 1)]
    assert list(short_names(two).values()) == ["seed 0", "seed 1"]


def test_progress_as_json(monkeypatch):
    monkeypatch.setenv("FIXPOINT_PROGRESS", "json")
    text, run = io.StringIO(), resolved(Recipe())
    with make_progress(Console(file=text), [run]) as shown:
        shown.advance(run, epoch(1, 2.0)._replace(valid_loss=float("nan")))
        shown.fail(run, "no memory")
    lines = [json.loads(line) for line in text.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["planned", "epoch", "failed"]
    assert all(line["key"] == run.key for line in lines)
    assert (lines[1]["seconds"], lines[1]["valid_loss"]) == (2.0, None)
    monkeypatch.setenv("FIXPOINT_PROGRESS", "xml")
    with pytest.raises(ValueError, match="FIXPOINT_PROGRESS must be json or not set"):
        make_progress(Console(file=text), [run])


def test_the_epochs_of_a_checkpoint_are_marked():
    text, recipe = io.StringIO(), Recipe().changed(model="eurnn")
    with RunProgress(Console(file=text, width=200), [recipe]) as shown:
        shown.advance(recipe, PastEpoch(*epoch(1, 1.0)))
        shown.advance(recipe, epoch(2, 1.0))
    assert [line.endswith("; done before") for line in text.getvalue().splitlines()] == [
        True,
        False,
    ]
