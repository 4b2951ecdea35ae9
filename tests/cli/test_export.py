"""`fixpoint export`: one line for whatever is wrong, and files that compile."""

import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from fixpoint.cli.app import app
from fixpoint.training import Recipe
from fixpoint.training.commands.single_run import train_recipe

# Two updates do not reach the tolerance of "anderson".
pytestmark = pytest.mark.filterwarnings("ignore::fixpoint.ConvergenceWarning")


def run(*arguments):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders of trained runs by model; those that are refused have few windows."""
    out = tmp_path_factory.mktemp("runs")
    few = {"dataset": str(out / "few.npz"), "hidden": 4, "epochs": 1}
    x = np.random.default_rng(0).normal(size=(40, 6, 2)).astype(np.float32)
    np.savez(few["dataset"], x=x, y=np.arange(40) % 2)
    recipes = {
        "ernn": Recipe().changed(hidden=6, rank=2, epochs=1),
        "eurnn": Recipe().changed(model="eurnn", **few),
        "anderson": Recipe().changed(solver="anderson", max_iter=2, backward="unrolled", **few),
    }
    for recipe in recipes.values():
        train_recipe(recipe, out, lambda epoch: None)
    return {name: out / recipe.key for name, recipe in recipes.items()}


@pytest.mark.parametrize("bits", [32, 16, 8])
@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_it_writes_a_program_and_says_how_far_it_agrees(bits, trained, tmp_path):
    result = run(trained["ernn"], "--bits", bits, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == {
        *("fixpoint.c", "fixpoint.h", "main.c", "selftest.c")
    }
    assert "of 324 labels as torch" in result.stdout
    assert ("rounding error of an entry at most" in result.stdout) == (bits < 32)
    assert "FIXPOINT_CLASS_WALKING_UPSTAIRS_SITTING_LAYING" in result.stdout


def test_constants_are_named_with_the_prefix(trained, tmp_path):
    result = run(trained["ernn"], "--prefix", "gait", "--out", tmp_path)
    name = "GAIT_CLASS_WALKING_UPSTAIRS_SITTING_LAYING"
    assert name in result.stdout
    assert name in (tmp_path / "gait.h").read_text()


def test_without_a_compiler_fixed_point_is_compared_all_the_same(trained, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    result = run(trained["ernn"], "--bits", "16", "--out", tmp_path)
    assert "by the same integer arithmetic in NumPy: " in result.stdout
    result = run(trained["ernn"], "--out", tmp_path)
    assert "No C compiler was found" in result.stdout


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("eurnn", [], "EURNN has no device program; supported are ERNN"),
        ("anderson", [], "Anderson solves to a tolerance"),
        ("ernn", ["--bits", "12"], "--bits must be 32, 16 or 8; got 12"),
        ("ernn", ["--to", "rust"], "--to must be c or onnx; got 'rust'"),
        ("ernn", ["--streaming"], "--streaming is for --to onnx"),
        (
            "ernn",
            ["--to", "onnx", "--bits", "8"],
            "--bits, --input, --prefix and --no-fold are for --to c",
        ),
        ("none", [], "there is no file or folder"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(model, arguments, message, trained, tmp_path):
    result = run(trained.get(model, tmp_path / "none"), "--out", tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written(trained, tmp_path):
    (tmp_path / "file").write_text("")
    result = run(trained["ernn"], "--out", tmp_path / "file")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "--out must be a folder that can be written" in result.stderr
