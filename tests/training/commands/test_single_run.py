"""What is trained, and how: text, validation, the paper's protocol, options, several processes."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from safetensors.torch import load_file
from torch.nn import functional as F
from typer.testing import CliRunner

from fixpoint.cli.app import app
from fixpoint.data import load_dataset, validation_split
from fixpoint.training import Recipe, build_model, fit, make_task, prepare
from fixpoint.training.commands.single_run import train_recipe
from fixpoint.training.engine.fit import PastEpoch
from fixpoint.training.experiment import make_fabric, run_experiment, tuned


def train(data, recipe):
    torch.manual_seed(recipe.training.seed)
    model = build_model(recipe, data)
    fabric = Fabric(accelerator="cpu", devices=1)
    task = make_task(fabric, data, recipe.training)
    return model, list(fit(fabric, model, task, recipe.training))


def test_a_text_with_a_rule_is_learned(rule):
    """Perplexity is 1 for a model with a state; without one it would be sqrt 2."""
    recipe = Recipe().changed(
        model="gru", hidden=12, epochs=12, batch_size=4, bptt=10, lr=0.05, schedule="constant"
    )
    _, history = train(rule, recipe)
    assert history[0].accuracy is None
    assert history[-1].perplexity < 1.1
    assert history[-1].valid_score < 1.1


def test_text_is_truncated_bptt(text):
    """Bit for bit the loop of four streams, cut every 9 steps, the state carried and detached."""
    recipe = Recipe().changed(
        model="lstm", hidden=5, epochs=2, batch_size=4, bptt=9, optimizer="sgd", lr=1.0, clip=0.25
    )
    model, history = train(text, recipe)
    torch.manual_seed(0)
    plain = build_model(recipe, text)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    streams, following = text.x_train.view(4, 100), text.y_train.view(4, 100)
    for _ in range(2):
        state, total = None, 0.0
        for start in range(0, 100, 9):
            x, y = streams[:, start : start + 9], following[:, start : start + 9]
            logits, state = plain(x, state)
            state = tuple(part.detach() for part in state)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.25)
            optimizer.step()
            total += loss.item() * y.shape[1]
        for group in optimizer.param_groups:
            group["lr"] /= 2
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
    assert history[-1].train_loss == pytest.approx(total / 100, rel=1e-6)
    # 83 words in four streams of 20, three left out
    logits, _ = plain(text.x_test[:80].view(4, 20))
    loss = F.cross_entropy(logits.flatten(0, 1), text.y_test[:80])
    assert history[-1].perplexity == pytest.approx(math.exp(loss.item()), rel=1e-6)


def test_too_short_a_text(text):
    recipe = Recipe().changed(model="gru", hidden=4, batch_size=64)
    with pytest.raises(ValueError, match="60 tokens cannot be cut into 64 pieces"):
        train(text, recipe)


def test_a_record_of_text(text):
    recipe = Recipe().changed(hidden=4, epochs=2, batch_size=4, bptt=9, tied=True)
    record = run_experiment(recipe, text)
    json.dumps(record, allow_nan=False)
    history = record["epochs"]
    assert record["perplexity_last"] == history[-1]["perplexity"]
    assert record["perplexity_best"] == min(e["perplexity"] for e in history)
    assert record["contraction"]["after"]["eta"]
    assert history[0]["residual"] > 0


def test_statistics_come_from_what_is_trained_on():
    """Not from the people held out, of whom none is left in training."""
    data, *_ = prepare(Recipe().changed(validation=0.2))
    raw = validation_split(load_dataset("har2-sample"), 0.2, seed=0)
    assert len(data.x_train) + len(data.x_valid) == 756
    assert data.x_train.mean(0).abs().max() < 1e-3
    shift, scale = raw.x_train.mean(0), raw.x_train.std(0, correction=0)
    assert torch.allclose(data.x_valid, (raw.x_valid - shift) / scale, atol=1e-2)
    assert torch.allclose(data.x_test, (raw.x_test - shift) / scale, atol=1e-2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"schedule": "plateau"},
            "schedule='plateau' needs a validation part: set data.validation",
        ),
        ({"stop_after": 2}, "stop_after needs a validation part"),
        ({"halve_choices": [1, 2]}, "halve_choices needs a validation part"),
        ({"bptt": 7}, "bptt is for language models; har2-sample has classes: leave it out"),
    ],
)
def test_settings_that_the_data_do_not_allow(changes, message):
    with pytest.raises(ValueError, match=message):
        prepare(Recipe().changed(**changes))


def test_rotated_data_keep_their_units():
    data, *_ = prepare(Recipe().changed(rotate=30, normalize="asinh"))
    raw = load_dataset("har2-sample")
    assert torch.equal(data.x_train, raw.x_train)
    assert data.inputs(data.x_test).median().abs() < 0.1
    plain, *_ = prepare(Recipe().changed(normalize="asinh"))
    torch.testing.assert_close(data.inputs(raw.x_test), plain.x_test, rtol=1e-4, atol=1e-5)


def test_moved_images_keep_their_units(sample):
    images = replace(sample, image=(8, 16))
    data, *_ = prepare(Recipe().changed(move=2), images)
    assert data.image == (8, 16)
    assert torch.equal(data.x_train, sample.x_train)
    plain, *_ = prepare(Recipe(), images)
    assert plain.image is None
    torch.testing.assert_close(data.inputs(data.x_test), plain.x_test, rtol=1e-4, atol=1e-4)


def test_what_has_no_image_is_not_moved(sample):
    for data in (sample, load_dataset("toy-walks")):
        with pytest.raises(ValueError, match=f"{data.name} has none: use pixel-mnist"):
            prepare(Recipe().changed(move=1), data)


def test_images_are_not_moved_out_of_sight(sample):
    images = replace(sample, image=(8, 16))
    prepare(Recipe().changed(move=7), images)
    with pytest.raises(ValueError, match="must be less than 8, as .* have 8 x 16 pixels; got 8"):
        prepare(Recipe().changed(move=8), images)


def test_what_has_no_vectors_is_not_rotated(text):
    with pytest.raises(ValueError, match="toy-walks has none"):
        prepare(Recipe().changed(dataset="toy-walks", rotate=5))
    with pytest.raises(ValueError, match="text has none"):
        prepare(Recipe().changed(rotate=5), text)


def test_no_window_is_left_for_validation(tiny):
    with pytest.raises(ValueError, match="leaves no window of 189 for validation"):
        prepare(Recipe().changed(validation=0.001), tiny)


def test_a_validation_part_that_is_there_is_taken(text, held_out):
    for data in (text, held_out):
        ready, *_ = prepare(Recipe().changed(stop_after=2, validation=0.3), data)
        assert torch.equal(ready.y_valid, data.y_valid)


def test_early_stopping(held_out):
    """With a learning rate of next to nothing no epoch is better than the first."""
    recipe = Recipe().changed(hidden=4, epochs=9, lr=1e-12, validation=0.3, stop_after=3)
    _, history = train(held_out, recipe)
    assert len(history) == 4


def test_plateau_halves_the_learning_rate(held_out):
    recipe = Recipe().changed(
        hidden=4, epochs=5, lr=1e-6, validation=0.3, schedule="plateau", patience=0
    )
    _, history = train(held_out, recipe)
    # the first epoch is the best; each later one, no better by 1e-4 of the loss, halves
    assert [e.lr / 1e-6 for e in history] == pytest.approx([1, 1, 0.5, 0.25, 0.125])


def test_cosine(tiny):
    _, history = train(tiny, Recipe().changed(hidden=4, epochs=4, schedule="cosine"))
    expected = [0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]
    assert [e.lr / 1e-2 for e in history] == pytest.approx(expected)


def test_halving_by_default_is_twice(tiny):
    _, history = train(tiny, Recipe().changed(hidden=4, epochs=7))
    assert [e.lr / 1e-2 for e in history] == pytest.approx([1, 1, 1, 0.5, 0.5, 0.5, 0.25])


def test_label_smoothing_and_weight_decay_matter(tiny):
    plain, _ = train(tiny, Recipe().changed(hidden=4, epochs=1))
    for changes in ({"label_smoothing": 0.3}, {"weight_decay": 0.3}, {"clip": 1e-3}):
        other, _ = train(tiny, Recipe().changed(hidden=4, epochs=1, **changes))
        assert not torch.equal(plain.head.weight, other.head.weight)


def test_the_best_period_is_trained_on_all():
    """The paper's protocol with made-up validation scores."""
    recipe = Recipe().changed(validation=0.2, halve_choices=[3, 5, 7])
    asked = []

    def run(choice):
        asked.append(choice)
        score = {3: 80.0, 5: 90.0, 7: 85.0}[choice.training.halve_every]
        epoch = dict.fromkeys(
            ("train_loss", "test_loss", "accuracy", "perplexity", "seconds", "lr")
        )
        epochs = [epoch | {"number": 1, "valid_score": score}]
        return {"metric": "accuracy", "epochs": epochs, "key": choice.key}

    final, trials = tuned(recipe, run)
    assert [choice.training.halve_every for choice in asked] == [3, 5, 7]
    assert all(choice.data.validation == 0.2 for choice in asked)
    assert final == Recipe().changed(halve_every=5)
    assert [trial["valid_score"] for trial in trials] == [80.0, 90.0, 85.0]


def test_trials_are_kept(tmp_path):
    recipe = Recipe().changed(hidden=4, epochs=2, validation=0.2, halve_choices=[1, 2])
    seen = []
    record = train_recipe(recipe, tmp_path, seen.append)
    assert [epoch.number for epoch in seen] == [1, 2] * 3
    assert record["key"] == recipe.key
    assert record["run"]["halve_every"] in (1, 2)
    assert record["run"]["validation"] == 0
    assert record["accuracy_chosen"] is None
    assert len(record["tuning"]) == 2
    lines = (tmp_path / recipe.key / "tuning" / "runs.jsonl").read_text().splitlines()
    assert len(lines) == 2
    again = []
    train_recipe(recipe, tmp_path, again.append)
    assert [epoch.number for epoch in again] == [1, 2] * 3  # from records and checkpoint
    assert all(isinstance(epoch, PastEpoch) for epoch in again)


def invoke(*arguments):
    own = [
        w
        for pair in (("--hidden", "4"), ("--epochs", "2"))
        if pair[0] not in arguments
        for w in pair
    ]
    return CliRunner().invoke(app, ["train", *own, *arguments])


def test_the_command(tmp_path):
    arguments = ["--set", "training.lr=0.02", "--model", "gru", "--out", str(tmp_path)]
    result = invoke(*arguments, "--tensorboard")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    (line,) = (tmp_path / "runs.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["recipe"] == {"hidden": 4, "epochs": 2, "lr": 0.02, "model": "gru"}
    assert record["label"] == "GRU"
    assert "GRU" in result.stdout
    folder = tmp_path / record["key"]
    history = (folder / "history.csv").read_text().splitlines()
    assert len(history) == 3
    assert history[0].startswith("number,train_loss,test_loss,accuracy,")
    assert float(history[2].split(",")[3]) == record["accuracy_last"]
    assert list((folder / "tensorboard").glob("events.*"))
    result = invoke(str(folder / "recipe.toml"), "--out", str(tmp_path))
    assert "This recipe is finished" in result.stdout
    result = invoke(*arguments, "--fresh")
    (again,) = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert json.loads(again)["loss"] == record["loss"]
    assert json.loads(again)["seconds_per_epoch"] != record["seconds_per_epoch"]


def test_progress_as_json_is_all_of_standard_output(tmp_path, monkeypatch):
    monkeypatch.setenv("FIXPOINT_PROGRESS", "json")
    result = invoke("--model", "gru", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    events = [json.loads(line)["event"] for line in result.stdout.splitlines()]
    assert events == ["planned", "epoch", "epoch", "finished"]
    assert "Results: " in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["har2-ern"],
            "unknown recipe 'har2-ern'.*, or the path of a .toml file; did you mean 'har2-ernn'",
        ),
        (["--set", "lrr=1"], "unknown key 'lrr'.*did you mean 'lr'"),
        (["--set", "lr"], "--set takes KEY=VALUE"),
        (
            ["--set", "batch_size=1.5", "--lr", "1"],
            "batch_size must be a whole number; got 1.5",
        ),
        (["--model", "lstm", "--map", "jordan"], "lstm has no map"),
        (["--solver", "picard", "--map", "jordan"], "would make it forget the past"),
        (["--precision", "16-mixed"], "--precision 16-mixed needs a GPU"),
        (["--precision", "8"], "unknown value of machine.precision '8'"),
        (["--devices", "0"], "--devices"),
        (["ptb-lstm", "--dataset", "ptbb"], "unknown data set 'ptbb'"),
    ],
)
def test_what_is_wrong_gets_one_line(tmp_path, arguments, message):
    result = invoke(*arguments, "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("fixpoint: ")
    assert re.search(message, line), line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_precision(tmp_path, precision):
    result = invoke("--precision", precision, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("*/epoch-0002/model.safetensors")
    dtypes = {value.dtype for value in load_file(path).values()}
    assert dtypes == {torch.float64 if precision == "64-true" else torch.float32}


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
IN_PARTS = ["train", "--precision", "64-true", "--set", "label_smoothing=0.1"]
IN_PARTS += ["--batch-size", "125", "--hidden", "4", "--epochs", "2"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Folder of the run in one process."""
    out = tmp_path_factory.mktemp("one")
    result = CliRunner().invoke(app, [*IN_PARTS, "--out", str(out)])
    assert result.exit_code == 0, result.output
    return out


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["alone", "torchrun"])
def test_two_processes_equal_one(tmp_path, launcher, one_process):
    """756 windows in batches of 125: the last batch has 6, three a process, then an odd one."""
    command = [sys.executable, *launcher, "-m", "fixpoint", *IN_PARTS]
    two = subprocess.run(
        [*command, "--devices", "2", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=200,
    )
    assert two.returncode == 0, two.stderr
    assert "terminate called" not in two.stderr
    weights = []
    for out in (one_process, tmp_path):
        assert len((out / "runs.jsonl").read_text().splitlines()) == 1
        (path,) = out.glob("*/epoch-0002/model.safetensors")
        weights.append(load_file(path))
    for name, value in weights[0].items():
        assert torch.allclose(value, weights[1][name], rtol=1e-9, atol=1e-12)


def test_the_processes_of_torchrun_are_those_of_the_recipe(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="torchrun started 4 processes.*give --devices 4"):
        make_fabric(Recipe().changed(devices=2).machine)


def test_a_run_is_trained_by_one_process_at_a_time(tmp_path):
    """Another that starts meanwhile is refused and changes nothing; a dead one is no hindrance."""
    recipe = Recipe().changed(model="rnn", hidden=2, epochs=1)

    def second(epoch):
        with pytest.raises(OSError, match="another process trains this run in"):
            train_recipe(recipe, tmp_path, lambda epoch: None)

    first = train_recipe(recipe, tmp_path, second)
    assert len(first["epochs"]) == 1
    assert train_recipe(recipe, tmp_path, lambda epoch: None)["epochs"] == first["epochs"]


def test_fresh_removes_nothing_that_another_process_writes(tmp_path):
    """--fresh is refused before it removes what another process writes."""
    recipe = Recipe().changed(model="rnn", hidden=4, epochs=2)
    folder = tmp_path / recipe.key

    def second(epoch):
        before = sorted(path.name for path in folder.rglob("*"))
        result = invoke("--model", "rnn", "--out", str(tmp_path), "--fresh")
        assert result.exit_code == 2
        assert "another process trains this run in" in result.stderr
        assert sorted(path.name for path in folder.rglob("*")) == before

    record = train_recipe(recipe, tmp_path, second)
    assert len(record["epochs"]) == 2


def test_names_of_users_are_not_markup(tmp_path):
    out = tmp_path / "x[/bold]" / "runs[old]\x1b[31m"
    result = invoke("--model", "rnn", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert str(out).replace("\x1b", "\\x1b") in result.stdout
    assert "\x1b" not in result.stdout


def test_progress_without_a_terminal_is_a_line_for_each_epoch(tmp_path):
    lines = invoke("--model", "rnn", "--out", str(tmp_path)).stdout.splitlines()
    found = [line for line in lines if "epoch " in line and " of 2" in line]
    assert re.fullmatch(
        r"har2-sample: RNN, seed 0: epoch 1 of 2, loss \d\.\d+, test \d+\.\d %",
        found[0],
    )
    assert "left" not in found[1]


PLUGIN = """
import torch
import fixpoint.training
from fixpoint import SOLVERS, Picard
from fixpoint.models import MAPS, SelfFeedbackMap

class Halved(Picard):
    pass

SOLVERS["halved"] = Halved
MAPS["mine"] = SelfFeedbackMap
fixpoint.training.LAYERS["plain"] = torch.nn.RNN
seen = []
fixpoint.training.LOGGERS["mine"] = lambda folder: lambda epoch: seen.append((folder, epoch))
"""


@pytest.fixture
def plugin(tmp_path):
    import fixpoint.training
    from fixpoint import SOLVERS
    from fixpoint.models import MAPS

    path = tmp_path / "plugin.py"
    path.write_text(PLUGIN)
    yield path
    for registry in (SOLVERS, MAPS, fixpoint.training.LAYERS, fixpoint.training.LOGGERS):
        for name in ("halved", "mine", "plain"):
            registry.pop(name, None)


@pytest.fixture
def few(tmp_path):
    """Options for few and short windows of a user."""
    x = np.random.default_rng(0).normal(size=(40, 6, 2)).astype(np.float32)
    np.savez(tmp_path / "few.npz", x=x, y=np.arange(40) % 2)
    return ["--dataset", str(tmp_path / "few.npz"), "--set", "rotate=0"]


def test_a_plugin_registers_solver_map_and_model(tmp_path, plugin, few):
    out = [*few, "--plugin", str(plugin), "--out", str(tmp_path / "out")]
    result = invoke("--solver", "halved", "--map", "mine", *out)
    assert result.exit_code == 0, result.output
    assert "ERNN (halved, mine)" in " ".join(result.stdout.split())
    result = invoke("--model", "plain", "--logger", "mine", *out)
    assert result.exit_code == 0, result.output
    (seen,) = (m.seen for name, m in sys.modules.items() if name.startswith("fixpoint_plugin_"))
    assert [epoch.number for _, epoch in seen] == [1, 2]
    lines = (tmp_path / "out" / "runs.jsonl").read_text().splitlines()
    keys = {json.loads(line)["key"] for line in lines}
    # Another content of the file is another run.
    recipe = Recipe().changed(plugins=[str(plugin)])
    key = recipe.key
    plugin.write_text(PLUGIN + "\n")
    assert Recipe().changed(plugins=[str(plugin)]).key != key
    assert len(keys) == 2


def test_classes_by_their_place(tmp_path, few):
    result = invoke(
        *few,
        *("--solver", "fixpoint.solvers:Picard", "--map", "fixpoint.models:SelfFeedbackMap"),
        *("--out", str(tmp_path)),
    )
    assert result.exit_code == 0, result.output
    assert "ERNN (Picard, SelfFeedbackMap)" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plugin", "nowhere.py"], "the plugin .*nowhere.py cannot be imported .*path of a .py"),
        (["--logger", "wandbb"], "unknown logger 'wandbb': expected one of tensorboard"),
        (["--map", "nowhere:Cell"], "the map 'nowhere:Cell' cannot be imported: No module named"),
        (["--hidden", "100000000"], "not enough memory for model.hidden=100000000"),
    ],
)
def test_what_cannot_be_had_gets_one_line(tmp_path, arguments, message):
    result = invoke(*arguments, "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert re.search(message, line), line


def test_a_diverged_run_is_shown_and_not_run_again(tmp_path):
    arguments = ["--lr", "1e30", "--out", str(tmp_path)]
    for text in ("Results:", "This recipe is finished"):
        result = invoke(*arguments)
        assert result.exit_code == 0, result.output
        assert text in result.stdout
        assert ", unrolled: The training diverged in epoch" in result.stdout
    assert json.loads((tmp_path / "runs.jsonl").read_text())["loss"] is None
