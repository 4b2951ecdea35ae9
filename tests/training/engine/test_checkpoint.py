"""A training that was stopped goes on bit for bit; what cannot be written costs nothing else."""

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from lightning_fabric import Fabric
from safetensors.torch import load_file
from typer.testing import CliRunner

from fixpoint.cli.app import app
from fixpoint.training import Recipe, build_model, fit, make_task
from fixpoint.training.engine import checkpoint as module
from fixpoint.training.engine.checkpoint import Checkpoint


def train(folder, data, recipe, epochs=None):
    """Train for all epochs, or stop after some; gives weights and untimed history."""
    torch.manual_seed(3)
    model = build_model(recipe, data)
    fabric = Fabric(accelerator="cpu", devices=1)
    task = make_task(fabric, data, recipe.training)
    steps = fit(fabric, model, task, recipe.training, checkpoint=Checkpoint(folder))
    history = []
    for epoch in steps:
        history.append(epoch._replace(seconds=0.0))
        if len(history) == epochs:
            steps.close()
    return model.state_dict(), history


SMALL = {"hidden": 4, "epochs": 4, "input_dropout": 0.2}
CASES = {
    "adam, halved": {"batch_size": 64, "halve_every": 1},
    "adamw, cosine": {"optimizer": "adamw", "weight_decay": 0.1, "schedule": "cosine"},
    "two rates": {"schedule": "cosine", "recurrent_lr": 0.1},
    "sgd, plateau": {
        **{"optimizer": "sgd", "momentum": 0.9, "schedule": "plateau", "patience": 0},
        **{"validation": 0.3, "weight_dropout": 0.2},
    },
    "rotated": {"batch_size": 16, "rotate": 30},
    "moved": {"batch_size": 16, "move": 1},
    "text": {"batch_size": 4, "bptt": 9, "output_dropout": 0.5, "model": "lstm", "clip": 0.1},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stop", [1, 3])
def test_a_stopped_training_continues_bit_for_bit(tmp_path, request, name, stop):
    recipe = Recipe().changed(**SMALL, **CASES[name])
    part = "held_out" if recipe.data.validation else "tiny"
    fixtures = {"text": "text", "rotated": "late", "moved": "late"}
    data = request.getfixturevalue(fixtures.get(name, part))
    if name == "moved":
        data = replace(data, image=(4, 4))
    whole, history = train(tmp_path / "whole", data, recipe)
    train(tmp_path / "parts", data, recipe, epochs=stop)
    torch.rand(5)
    resumed, again = train(tmp_path / "parts", data, recipe)
    assert again == history
    assert len(history) == 4
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    assert [path.name for path in Checkpoint(tmp_path / "parts").epochs] == ["epoch-0004"]
    saved = load_file(tmp_path / "parts" / "epoch-0004" / "model.safetensors")
    assert all(torch.equal(whole[key], saved[key]) for key in whole)


def test_the_best_weights_are_those_of_the_best_validation_score(tmp_path, held_out):
    data = held_out
    recipe = Recipe().changed(hidden=4, epochs=6, lr=0.05, validation=0.3)
    _, history = train(tmp_path, data, recipe)
    scores = [epoch.valid_score for epoch in history]
    best = scores.index(max(scores))
    assert best < 5  # else this says nothing
    model = build_model(recipe, data)
    model.load_state_dict(load_file(tmp_path / "best.safetensors"))
    right = (model(data.x_valid).argmax(1) == data.y_valid).sum().item()
    assert 100 * right / 40 == pytest.approx(scores[best])


def full_disk(monkeypatch, after):
    """The disk is full after this many files."""
    real, count = module.write_bytes, []

    def write(path, content):
        count.append(path)
        if len(count) > after:
            path.write_bytes(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, content)

    monkeypatch.setattr(module, "write_bytes", write)


@pytest.mark.parametrize("after", [4, 5])
def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, tiny, monkeypatch, after):
    """Two files an epoch: the third epoch fails at its first or at its second file."""
    recipe = Recipe().changed(**SMALL)
    whole, history = train(tmp_path / "whole", tiny, recipe)
    with monkeypatch.context() as patch:
        full_disk(patch, after)
        with pytest.raises(OSError, match="epoch 3 cannot be written .*No space left") as caught:
            train(tmp_path / "full", tiny, recipe)
    assert "epoch-0002 is kept: free some space" in str(caught.value)
    assert os.listdir(tmp_path / "full") == ["epoch-0002"]
    resumed, again = train(tmp_path / "full", tiny, recipe)
    assert again == history
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


COMMAND = ["train", "--hidden", "4", "--epochs", "3", "--set", "validation=0.2"]


def test_a_full_disk_gets_one_line(tmp_path, monkeypatch):
    full_disk(monkeypatch, 7)
    result = CliRunner().invoke(app, [*COMMAND, "--out", str(tmp_path)])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("fixpoint: ")
    assert "No space left on device" in line
    assert "run again" in line


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("kept")
    result = CliRunner().invoke(app, [*COMMAND, "--out", str(tmp_path / "file" / "below")])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "--out must be a folder that can be written" in line


def test_a_run_whose_folder_cannot_be_written(tmp_path):
    key = Recipe().changed(hidden=4, epochs=3, validation=0.2)
    from dataclasses import replace

    from fixpoint.training.engine.model_factory import resolve

    key = replace(key, model=resolve(key.model)).key
    (tmp_path / key).write_text("in the way")
    result = CliRunner().invoke(app, [*COMMAND, "--out", str(tmp_path)])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert f"the folder {tmp_path / key} cannot be made (File exists): give another --out" in line


def damaged(path, change):
    content = path.read_bytes()
    path.write_bytes(change(content))


@pytest.mark.parametrize("file", ["model.safetensors", "training.pt"])
def test_a_damaged_checkpoint_is_named(tmp_path, tiny, file):
    recipe = Recipe().changed(**SMALL)
    train(tmp_path, tiny, recipe, epochs=1)
    damaged(tmp_path / "epoch-0001" / file, lambda content: content[:100])
    with pytest.raises(ValueError, match="epoch-0001 cannot be used .*: remove it") as caught:
        train(tmp_path, tiny, recipe)
    assert "weights_only" not in str(caught.value)


def test_a_checkpoint_that_another_program_wrote_is_named_in_one_line(tmp_path, tiny, recwarn):
    recipe = Recipe().changed(**SMALL)
    train(tmp_path, tiny, recipe, epochs=1)
    damaged(tmp_path / "epoch-0001" / "training.pt", lambda _: pickle.dumps(recipe, protocol=4))
    with pytest.raises(ValueError, match="epoch-0001 cannot be used .*: remove it"):
        train(tmp_path, tiny, recipe)
    assert [str(w.message) for w in recwarn if "Unpickler" in str(w.message)] == []


def test_a_checkpoint_of_another_model_is_refused(tmp_path, tiny):
    train(tmp_path, tiny, Recipe().changed(**SMALL), epochs=1)
    with pytest.raises(ValueError, match="epoch-0001 cannot be used"):
        train(tmp_path, tiny, Recipe().changed(**SMALL | {"hidden": 5}))


def test_what_was_half_written_does_not_count(tmp_path, tiny):
    recipe = Recipe().changed(**SMALL)
    whole, _ = train(tmp_path / "whole", tiny, recipe)
    train(tmp_path / "killed", tiny, recipe, epochs=2)
    half = tmp_path / "killed" / "epoch-0003.tmp"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    resumed, _ = train(tmp_path / "killed", tiny, recipe)
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


LONG = ["train", "--hidden", "4", "--epochs", "12"]
LONG += ["--set", "weight_dropout=0.1", "--set", "validation=0.2"]


def untimed(record):
    """A record without times and memory."""
    clean = {k: v for k, v in record.items() if k not in ("seconds_per_epoch", "peak_memory_mib")}
    clean["epochs"] = [
        {k: v for k, v in epoch.items() if k not in ("seconds", "peak_memory_mib")}
        for epoch in record["epochs"]
    ]
    return clean


@pytest.mark.slow
def test_killed_in_the_middle_it_gives_the_same_results(tmp_path):
    """The process that is killed is one of its own; the others need not be."""
    killed = subprocess.Popen(
        [sys.executable, "-m", "fixpoint", *LONG, "--out", tmp_path / "killed"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 600
    while not list((tmp_path / "killed").glob("*/epoch-000[3-9]")):
        assert time.monotonic() < deadline
        assert killed.poll() is None
        time.sleep(0.005)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=600)
    assert not (tmp_path / "killed" / "runs.jsonl").read_text()
    for name in ("killed", "whole"):
        result = CliRunner().invoke(app, [*LONG, "--out", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
    records = []
    for name in ("whole", "killed"):
        (line,) = (tmp_path / name / "runs.jsonl").read_text().splitlines()
        records.append(untimed(json.loads(line)))
    assert records[0] == records[1]
    assert len(records[0]["epochs"]) == 12
    for file in ("epoch-0012/model.safetensors", "best.safetensors"):
        paths = [next((tmp_path / name).glob(f"*/{file}")) for name in ("whole", "killed")]
        assert paths[0].read_bytes() == paths[1].read_bytes()
