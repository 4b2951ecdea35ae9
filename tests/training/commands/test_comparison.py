"""`fixpoint compare` from end to end on the bundled sample."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fixpoint.cli.app import app
from fixpoint.training.commands.failures import read_failed, write_failed

COMMAND = [sys.executable, "-m", "fixpoint"]
SMALL = ["compare", "--hidden", "4", "--epochs", "1", "--jobs", "1"]

pytestmark = pytest.mark.slow


def invoke(*arguments):
    return CliRunner().invoke(app, [*SMALL, *arguments])


def strict(line):
    """A line of standard JSON, which knows neither NaN nor Infinity."""

    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    return json.loads(line, parse_constant=refuse)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a small comparison, what was printed and how it ended."""
    out = tmp_path_factory.mktemp("compare")
    return out, invoke("--solvers", "inexact-newton,picard", "--out", str(out))


def test_it_ends_well(finished):
    out, result = finished
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    names = {path.name for path in out.iterdir()}
    keys = {json.loads(line)["key"] for line in (out / "runs.jsonl").read_text().splitlines()}
    assert names == {"contraction.png", "contraction.txt", "report.html", "runs.jsonl", *keys}
    for key in keys:
        assert {path.name for path in (out / key).iterdir()} == {
            "recipe.toml",
            "history.csv",
            "data.json",
            "inputs.json",
            "epoch-0001",
            ".lock",
        }


def test_one_line_a_run(finished):
    out, _ = finished
    records = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    assert [(r["label"], r["run"]["backward"], r["run"]["map"]) for r in records] == [
        ("ERNN K=1 (inexact Newton, Jordan)", "unrolled", "jordan"),
        ("ERNN (Picard, self-feedback)", "unrolled", "self-feedback"),
        ("ERNN (Picard, self-feedback)", "implicit", "self-feedback"),
    ]
    for record in records:
        assert record["run"]["dataset"] == "har2-sample"
        assert record["run"]["hidden"] == 4
        assert 0 < record["accuracy_last"] <= record["accuracy_best"] <= 100
        assert record["seconds_per_epoch"] > 0
        assert record["threads"] == 1
        assert set(record["versions"]) == {"fixpoint", "torch", "python"}
    assert records[0]["fraction_converged"] is None
    assert records[1]["fraction_converged"] > 0.99
    # Both backwards start alike; unrolling and the implicit function theorem agree to rtol.
    assert records[1]["loss"] == pytest.approx(records[2]["loss"], rel=1e-2)


def test_lines_are_standard_json(finished):
    out, _ = finished
    for line in (out / "runs.jsonl").read_text().splitlines():
        strict(line)


def test_the_figure_is_a_png(finished):
    out, _ = finished
    assert (out / "contraction.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_what_is_printed(finished):
    out, result = finished
    text = result.stdout
    assert "756 train + 324 test windows" in text
    assert "ERNN on har2-sample, 4 hidden units, 1 epochs, seed 0" in text
    for name in ("K=1", "(I + U)(V h", "Picard unrolled", "implicit", "Rows of different maps"):
        assert name in text
    assert "||I + eta f'|| < 1 at" in text
    assert str(out / "runs.jsonl") in text
    assert str(out / "contraction.png") in text
    assert "inf of the target" not in text


def test_running_again_skips_finished_runs(finished):
    out, _ = finished
    before = (out / "runs.jsonl").read_bytes()
    again = invoke("--solvers", "inexact-newton,picard", "--out", str(out))
    assert again.exit_code == 0
    assert f"3 of 3 runs are already in {out / 'runs.jsonl'}" in " ".join(again.stdout.split())
    assert (out / "runs.jsonl").read_bytes() == before
    assert "K=1" in again.stdout


TWO = ["--solvers", "inexact-newton,inexact-newton:2"]


def started(out):
    """A comparison of two runs, one at a time, when the first is recorded and the second runs.

    Returns its process and the ids of its children; none are known where there is no /proc.
    """
    process = subprocess.Popen(
        [*COMMAND, *SMALL, *TWO, "--out", out],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    path, deadline = out / "runs.jsonl", time.monotonic() + 600
    while True:
        assert time.monotonic() < deadline
        assert process.poll() is None
        recorded = path.exists() and path.read_bytes().endswith(b"\n")
        if recorded and len(list(out.glob("*/.lock"))) == 2:
            return process, children_of(process)
        time.sleep(0.02)


def children_of(process):
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return {int(pid) for pid in path.read_text().split()} if path.exists() else set()


def gone(pids, seconds=600):
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_killed_comparison_is_resumed(tmp_path):
    process, children = started(tmp_path)
    process.kill()
    process.communicate(timeout=600)
    kept = (tmp_path / "runs.jsonl").read_bytes()
    assert kept.count(b"\n") == 1
    assert gone(children)  # no run goes on by itself

    result = invoke(*TWO, "--out", str(tmp_path))
    assert result.exit_code == 0
    assert "1 of 2 runs are already in" in result.stdout
    lines = (tmp_path / "runs.jsonl").read_bytes()
    assert lines.startswith(kept)
    keys = [json.loads(line)["key"] for line in lines.splitlines()]
    assert len(keys) == len(set(keys)) == 2


def test_stopping_keeps_what_is_finished(tmp_path):
    """SIGTERM; SIGINT is sent while modules load below, and to runs in `test_workers.py`."""
    process, children = started(tmp_path)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGTERM
    assert error.splitlines() == ["Stopped; finished epochs are kept, the same command continues."]
    assert (tmp_path / "runs.jsonl").read_bytes().count(b"\n") == 1
    assert gone(children)


def test_models_beside_each_other_and_pairs_that_make_no_sense_left_out(tmp_path):
    """On a user's own file; Jordan with Picard forgets the past."""
    y = np.arange(40) % 2
    x = np.random.default_rng(0).normal(size=(40, 6, 2)) + y[:, None, None]
    np.savez(tmp_path / "mine.npz", x=(100 * x).astype(np.int16), y=y)
    arguments = ["--models", "ernn,gru", "--solvers", "inexact-newton,picard", "--map", "jordan"]
    arguments += ["--backward", "unrolled", "--set", "clip=1.0"]
    arguments += ["--dataset", str(tmp_path / "mine.npz")]
    result = invoke(*arguments, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "Dataset(mine: 32 train + 8 test windows of 6 steps x 2 channels" in result.stdout
    assert "Left out: JordanMap sees" in " ".join(result.stdout.split())
    records = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [r["label"] for r in records] == ["ERNN K=1 (inexact Newton, Jordan)", "GRU"]
    assert all(r["run"]["clip"] == 1.0 for r in records)
    assert records[1]["contraction"] is None
    assert "GRU" in result.stdout


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("delay", [0.3, 1.0])
def test_stopping_while_modules_load_is_one_line(tmp_path, number, delay):
    process = subprocess.Popen(
        [*COMMAND, *SMALL, "--out", tmp_path], stderr=subprocess.PIPE, text=True
    )
    started = time.monotonic()
    while time.monotonic() < started + delay or not handles(process, signal.SIGTERM):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, error = process.communicate(timeout=600)
    assert process.returncode == 128 + number
    assert len(error.splitlines()) == 1
    assert error.startswith("Stopped")


def handles(process, number):
    """Whether the process has a handler for the signal, as Linux tells."""
    status = Path(f"/proc/{process.pid}/status")
    if not status.exists():
        return True
    caught = re.search(r"SigCgt:\s+(\w+)", status.read_text())
    return bool(int(caught.group(1), 16) >> (number - 1) & 1)


def test_a_dry_run_lists_the_runs_and_writes_nothing(tmp_path):
    result = invoke("--solvers", "picard", "--dry-run", "--out", str(tmp_path / "new"))
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if "to run" in line]
    assert len(lines) == 2
    assert all(re.match(r"[0-9a-f]{12}  to run  ", line) for line in lines)
    assert not (tmp_path / "new").exists()


def test_only_runs_that_failed_are_tried_again(tmp_path):
    result = invoke("--solvers", "picard", "--retry-failed", "--dry-run", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "no run of this command is in" in result.stderr
    planned = invoke("--solvers", "picard", "--dry-run", "--out", str(tmp_path)).stdout
    keys = re.findall(r"^([0-9a-f]{12})  to run", planned, re.MULTILINE)
    write_failed(tmp_path, {keys[1]: "no memory"}, {keys[1]})
    again = invoke("--solvers", "picard", "--retry-failed", "--dry-run", "--out", str(tmp_path))
    assert re.findall(r"^([0-9a-f]{12})  to run", again.stdout, re.MULTILINE) == [keys[1]]
    write_failed(tmp_path, {}, {keys[1]})
    assert read_failed(tmp_path) == {}
