"""`fixpoint diagnose`: sentences and figures of a trained model, and one line for bad input."""

import re
import shutil
import sys
from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from typer.testing import CliRunner

from fixpoint.analysis import diagnose as diagnose_layer
from fixpoint.analysis import evenly_spaced
from fixpoint.cli.app import app
from fixpoint.training import Recipe, load_trained, prepare
from fixpoint.training.commands.single_run import train_recipe
from fixpoint.training.evaluation_subset import subset

SMALL = {"hidden": 6, "epochs": 2, "dataset": "har2-sample"}


def trained_in(folder, **changes):
    """Train a small recipe below the folder, and give that of the run."""
    recipe = Recipe().changed(**SMALL | changes)
    train_recipe(recipe, folder, lambda epoch: None)
    return folder / recipe.key


@pytest.fixture(scope="module")
def ernn(tmp_path_factory):
    return trained_in(
        tmp_path_factory.mktemp("ernn"), solver="inexact-newton", map="jordan", max_iter=2
    )


@pytest.fixture(scope="module")
def lstm(tmp_path_factory):
    changes = {"model": "lstm", "validation": 0.2, "output_dropout": 0.2, "precision": "64-true"}
    return trained_in(tmp_path_factory.mktemp("lstm"), **changes)


@pytest.fixture
def own(tmp_path):
    """A user's own data: eight classes that the first step tells apart, short windows."""
    x = np.random.default_rng(0).normal(size=(64, 12, 2)).astype("float32")
    y = np.arange(64) % 8
    x[:, 0, 0] += 4 * y
    np.savez(tmp_path / "own.npz", x=x, y=y, x_test=x[:32], y_test=y[:32])
    return tmp_path / "own.npz"


def invoke(*arguments):
    return CliRunner().invoke(app, ["diagnose", *map(str, arguments)])


def test_an_ernn_is_put_into_words_and_figures(ernn):
    result = invoke(ernn)
    assert (result.exit_code, result.stderr) == (0, "")
    trained = load_trained(ernn)
    said = diagnose_layer(trained.model, trained.data.x_test).sentences
    lines = result.stdout.splitlines()
    weights = ernn / "epoch-0002" / "model.safetensors"
    assert lines[0] == f"ERNN K=2 (inexact Newton, Jordan) on har2-sample: {weights}"
    logits = trained.model(trained.data.x_test)
    accuracy = 100 * (logits.argmax(1) == trained.data.y_test).double().mean().item()
    assert lines[1].startswith(f"All 324 test windows: accuracy {accuracy:.1f} %; by class: walk")
    assert lines[2 : 2 + len(said)] == list(said)
    assert "\nThis layer " in result.stdout
    assert re.search(r"gradient of the loss by h_t at t = 1 is \S+ of that at t = 128", lines[-3])
    names = ("condition", "eta", "lyapunov", "gradients", "discrimination")
    assert lines[-1].split()[1:] == [str(ernn / "diagnosis" / f"{name}.png") for name in names]
    for name in names:
        assert matplotlib.image.imread(ernn / "diagnosis" / f"{name}.png")[..., :3].std() > 0.05


def test_eta_is_that_of_every_time_step(ernn, tmp_path):
    """A negative eta between the time steps at which the condition is looked at is named."""
    shutil.copytree(ernn, tmp_path / "run")
    weights = tmp_path / "run" / "epoch-0002" / "model.safetensors"
    state = load_file(weights)
    (eta,) = (value for name, value in state.items() if name.endswith("eta"))
    eta.abs_()
    eta[50, 1] = -0.125
    save_file(state, weights)
    text = invoke(tmp_path / "run").stdout
    assert "eta lies between -0.125 and" in text
    assert "; 1 of 256 are negative, at t = 51 for k = 2." in text


def test_another_model_is_said_to_have_no_condition(lstm, tmp_path):
    result = invoke(lstm / "best.safetensors", "--windows", "20", "--out", tmp_path / "new" / "er")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"LSTM on har2-sample: {lstm / 'best.safetensors'}"
    assert lines[1].startswith("20 of 324 test windows: accuracy")
    assert lines[2] == "LSTM solves for no equilibrium: no condition is asked of it."
    assert "(median of 20 windows)" in lines[3]
    assert {p.name for p in (tmp_path / "new" / "er").iterdir()} == {
        "gradients.png",
        "gradients.txt",
        "discrimination.png",
        "discrimination.txt",
    }
    assert load_trained(lstm).dtype == torch.float64
    assert "144 valid windows" in invoke(lstm, "--part", "valid", "--out", tmp_path).stdout


def test_a_solver_with_a_tolerance(tmp_path, own):
    run = trained_in(
        tmp_path, dataset=str(own), map="self-feedback", solver="anderson", bound=0.8, rtol=1e-3
    )
    text = invoke(run).stdout
    assert "accuracy" in text
    assert re.search(r"worst of the classes: \d \d+\.\d %, \d \d+\.\d %, \d \d+\.\d %\.", text)
    assert "ERNN with SelfFeedbackMap and Anderson, rtol = 0.001; 32 windows of 12 time" in text
    assert "This layer equilibrates: its states solve h = phi(h)." in text
    names = {path.name for path in (run / "diagnosis").glob("*.png")}
    assert names == {
        "condition.png",
        "solves.png",
        "lyapunov.png",
        "gradients.png",
        "discrimination.png",
    }


@pytest.mark.parametrize("name", ["", "recipe.toml", "history.csv", "epoch-0002", "epoch-0002/*"])
def test_every_way_to_name_a_checkpoint(ernn, name):
    paths = [ernn] if not name else sorted(ernn.glob(name))
    assert paths
    for path in paths:
        trained = load_trained(path)
        assert trained.folder == ernn
        assert trained.weights == ernn / "epoch-0002" / "model.safetensors"
        assert not trained.model.training
    state = load_file(trained.weights)
    for key, value in trained.model.state_dict().items():
        assert torch.equal(value, state[key])


def test_a_model_whose_period_was_chosen_was_trained_on_all(tmp_path):
    recipe = Recipe().changed(hidden=4, epochs=1, validation=0.2, halve_choices=[1, 2])
    train_recipe(recipe, tmp_path, lambda epoch: None)
    trained = load_trained(tmp_path / recipe.key)
    assert trained.data.x_valid is None
    assert torch.equal(trained.data.x_test, prepare(Recipe()).data.x_test)
    (trial, _) = (path for path in (tmp_path / recipe.key / "tuning").iterdir() if path.is_dir())
    for path in (trial, trial / "epoch-0001"):
        assert_one_line(invoke(path), "is not a training run, it has no recipe.toml")
    result = invoke(tmp_path / recipe.key, "--part", "valid")
    assert_one_line(result, "har2-sample, as this model was .* has the parts train, test; got 'va")


def test_a_text(tmp_path, text, monkeypatch):
    module = sys.modules["fixpoint.training.engine.run_data"]
    monkeypatch.setattr(module, "load_dataset", lambda name, **windows: text)
    run = trained_in(tmp_path, batch_size=4, bptt=9, map="jordan", solver="inexact-newton")
    trained = load_trained(run)
    words, following = text.x_test[:80].view(4, 20)[:, :9], text.y_test[:80].view(4, 20)[:, :9]
    logits, _ = trained.model(words)
    perplexity = F.cross_entropy(logits.flatten(0, 1), following.flatten()).exp().item()
    shown = invoke(run).stdout
    assert f"The first 9 words of 4 pieces of test: perplexity {perplexity:.1f}." in shown
    assert "4 windows of 9 time steps" in shown
    assert not (run / "diagnosis" / "discrimination.png").exists()


def test_rows_are_spread():
    assert evenly_spaced(5, 9).tolist() == [0, 1, 2, 3, 4]
    assert evenly_spaced(1, 9).tolist() == [0]
    rows = evenly_spaced(2947, 512)
    assert len(rows.unique()) == 512
    assert (rows[0], rows[-1]) == (0, 2946)


def with_data(trained, data):
    """The same model, with other data in place of those of its recipe."""
    other = replace(trained)
    other.__dict__["data"] = data
    return other


def test_windows_that_are_not_finite_count_for_the_score_alone(ernn):
    trained = load_trained(ernn)
    x = trained.data.x_test.clone()
    x[[3, 5], 7, 0] = torch.nan
    chosen = subset(with_data(trained, replace(trained.data, x_test=x)), "test", 10)
    assert chosen.features.shape == (10, 128, 9)  # every 36th
    chosen = subset(with_data(trained, replace(trained.data, x_test=x)), "test", 999)
    assert chosen.features.shape == (322, 128, 9)
    assert chosen.sentences[1] == "2 of them hold NaN or inf and are left out below."
    nothing = replace(trained.data, x_test=x * torch.nan)
    with pytest.raises(ValueError, match="no test window of har2-sample is finite"):
        subset(with_data(trained, nothing), "test", 9)


def test_texts_of_different_lengths_are_cut(ernn):
    """Where a tenth of them goes on; the score is that of the whole texts."""
    data = load_trained(ernn).data
    torch.manual_seed(0)
    model = torch.nn.Module()
    lengths = torch.arange(1, 21)
    x = torch.arange(20)[None] < lengths[:, None]
    model.register_parameter("w", torch.nn.Parameter(torch.ones(1)))
    model.forward = lambda x, lengths: torch.eye(2)[(lengths > 5).long()]
    model.features = lambda x: x.unsqueeze(2).float()
    texts = replace(
        data,
        kind="tokens",
        vocabulary=("a", "b"),
        **{f"x_{part}": x.long() for part in ("train", "test")},
        **{f"y_{part}": (lengths > 10).long() for part in ("train", "test")},
        **{f"lengths_{part}": lengths for part in ("train", "test")},
        groups_train=None,
        groups_test=None,
    )
    chosen = subset(with_data(replace(load_trained(ernn), model=model), texts), "test", 100)
    assert chosen.features.shape == (3, 18, 1)
    assert bool((chosen.features == 1).all())
    assert chosen.sentences[0].startswith("All 20 test windows: accuracy 75.0 %")
    assert chosen.sentences[1] == "Below are the first 18 words of the 3 texts that have as many."


# What is wrong.


def assert_one_line(result, message):
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("fixpoint: ")
    assert re.search(message, line), line
    assert "Traceback" not in result.output


def test_a_folder_that_is_none_of_a_training(ernn, tmp_path):
    assert_one_line(
        invoke(tmp_path / "none"), "there is no file or folder .*none: give the folder of a train"
    )
    assert_one_line(
        invoke(tmp_path), "is not a training run, it has no recipe.toml: give the folder"
    )
    assert_one_line(invoke(ernn.parent), f"holds 1 training run.*: give one, of {ernn}$")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run, weights: shutil.rmtree(weights.parent), "has no checkpoint: one is"),
        (lambda run, weights: weights.unlink(), "weights .*model.safetensors cannot be read"),
        (
            lambda run, weights: weights.write_bytes(weights.read_bytes()[:-9]),
            "model.safetensors is truncated or not a safetensors file .*another checkpoint",
        ),
        (lambda run, weights: weights.write_bytes(b""), "is truncated or not a safetensors file"),
        (
            lambda run, weights: save_file({"head.weight": torch.ones(2, 6)}, weights),
            "does not fit the model of .*recipe.toml .Missing key.*of different runs",
        ),
        (
            lambda run, weights: save_file(
                {k: v * torch.nan for k, v in load_file(weights).items()}, weights
            ),
            "[0-9]+ of the weights in .* are NaN or inf: the training diverged; train again with a",
        ),
        (
            lambda run, weights: (run / "recipe.toml").write_text("[training]\nlrr = 1"),
            "recipe.toml: unknown key of training 'lrr'",
        ),
        (
            lambda run, weights: (run / "recipe.toml").write_text(
                (run / "recipe.toml").read_text().replace('"har2-sample"', '"har2"')
            ),
            "har.npz was expected in .*set FIXPOINT_DATA",
        ),
        (
            lambda run, weights: (run / "diagnosis").write_text("in the way"),
            "--out must be a folder that can be written; .*diagnosis cannot .*give another one",
        ),
    ],
)
def test_damage_gets_one_line(ernn, tmp_path, monkeypatch, damage, message):
    monkeypatch.setenv("FIXPOINT_DATA", str(tmp_path))
    shutil.copytree(ernn, tmp_path / "run", ignore=shutil.ignore_patterns("diagnosis"))
    damage(tmp_path / "run", tmp_path / "run" / "epoch-0002" / "model.safetensors")
    assert_one_line(invoke(tmp_path / "run"), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--part", "tests"], "har2-sample, .* has the parts train, test; got 'tests'"),
        (["--windows", "0"], "--windows.* 1.* 0"),
    ],
)
def test_options_out_of_range(ernn, arguments, message):
    assert_one_line(invoke(ernn, *arguments), message)


def test_data_that_changed_or_moved(tmp_path, own, monkeypatch):
    """Only the data that a run was trained on are taken, wherever they are now."""
    run = trained_in(tmp_path / "runs", dataset=str(own), model="rnn")
    score = re.search(r"accuracy (\S+) %", invoke(run).stdout).group(1)
    elsewhere = tmp_path / "elsewhere.npz"
    shutil.move(own, elsewhere)
    assert_one_line(
        invoke(run), "the data .*own.npz are not there: give their place by --data PATH"
    )
    monkeypatch.chdir(tmp_path)
    result = invoke(run, "--data", "elsewhere.npz")
    assert re.search(r"accuracy (\S+) %", result.stdout).group(1) == score
    with np.load(elsewhere) as arrays:
        np.savez(own, **{name: arrays[name][::-1] for name in arrays})
    assert_one_line(
        invoke(run), "own.npz is not what this model was trained on, its content differs"
    )


def test_a_relative_path_is_found_from_another_folder(tmp_path, own, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = trained_in(tmp_path / "runs", dataset="own.npz", model="rnn")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert invoke(run).exit_code == 0


def test_formats_and_captions(lstm, tmp_path):
    result = invoke(lstm, "--format", "pdf,svg", "--out", tmp_path, "--windows", "9")
    assert result.exit_code == 0, result.output
    assert {path.suffix for path in tmp_path.iterdir()} == {".pdf", ".svg", ".txt"}
    assert "gradient" in (tmp_path / "gradients.txt").read_text()
    assert_one_line(
        invoke(lstm, "--format", "png,eps"), "unknown format 'eps': expected one of png"
    )
