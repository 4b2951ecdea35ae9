"""What is said before the first epoch, which is longer where numba compiles."""

import io

import pytest
from rich.console import Console

from fixpoint.models.rnn.base_cell import RecurrentCell
from fixpoint.training.commands import progress
from fixpoint.training.commands.progress import COMPILED, RunProgress
from fixpoint.training.engine.fit import Epoch
from fixpoint.training.engine.model_factory import LAYERS, _layer, resolve
from fixpoint.training.recipe.schema import Recipe

LINE = "Compiling the recurrence once, which may take some 10 s.\n"


def printed(recipe, *, terminal=False):
    text = io.StringIO()
    with RunProgress(Console(file=text, force_terminal=terminal, width=200), [recipe]):
        pass
    return text.getvalue()


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


@pytest.mark.parametrize(
    ("installed", "changes"),
    [(False, {}), (True, {"model": "lstm"}), (True, {"device": "cuda"})],
)
def test_nothing_is_said_where_nothing_is_compiled(installed, changes, numba):
    numba(installed)
    recipe = Recipe().changed(**changes)
    assert printed(recipe) == ""
    assert "compiling" not in printed(recipe, terminal=True)


@pytest.mark.parametrize("model", LAYERS)
def test_the_models_that_compile_are_those_with_a_fused_path(model):
    options = resolve(Recipe().changed(model=model, hidden=4).model)
    cell = getattr(_layer(options, 3, 5), "l0", None)
    fused = isinstance(cell, RecurrentCell) and cell.no_fused_path() is None
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
