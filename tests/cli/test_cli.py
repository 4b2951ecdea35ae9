"""The command line: help, version, and one line for whatever was wrong."""

import re
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fixpoint
from fixpoint.analysis import plots
from fixpoint.cli.app import app

SCRIPT = Path(sysconfig.get_path("scripts")) / "fixpoint"
SMALL = ["compare", "--solvers", "inexact-newton", "--hidden", "4", "--epochs", "1"]


def run(*arguments, **environment):
    return CliRunner().invoke(app, list(arguments), env=environment)


def test_version():
    result = run("--version")
    assert (result.exit_code, result.stdout.strip()) == (0, fixpoint.__version__)


def test_the_installed_command():
    result = subprocess.run([SCRIPT, "--version"], capture_output=True, text=True, check=True)
    assert (result.stdout.strip(), result.stderr) == (fixpoint.__version__, "")


def test_help_lists_commands_and_options():
    result = run("--help")
    assert result.exit_code == 0
    assert "compare" in result.stdout
    assert "compare" in run("-h").stdout
    text = run("compare", "-h").stdout
    for option in (
        *("--dataset", "--solvers", "--backward", "--map", "--hidden", "--epochs", "--seeds"),
        *("--out", "--device", "--batch-size", "--lr", "--jobs", "--models", "--set"),
    ):
        assert option in text


@pytest.mark.parametrize(
    ("command", "default"),
    [
        ("train", "ERNN"),
        ("compare", "per solver"),
        ("compare", "jordan for inexact-newton, self-feedback for the others"),
        ("compare", "cores"),
        ("report", "report.html in the first folder"),
        ("reproduce", "all"),
        ("reproduce", "0,1,2,3,4; figures: 0"),
        ("diagnose", "diagnosis in that of the training"),
    ],
)
def test_help_shows_defaults_that_depend_on_others(command, default):
    text = " ".join(run(command, "--help", COLUMNS="200").stdout.split())
    assert re.search(rf"\[default: \(?{default}\)?\]", text)


@pytest.mark.parametrize(("group", "command"), [([], "compare"), (["data"], "fetch")])
def test_no_command_shows_the_help_and_nothing_else(group, command):
    result = run(*group)
    assert command in result.stdout
    assert not result.stderr


@pytest.mark.parametrize(
    ("words", "near"), [(["comapre"], "compare"), (["data", "fecth"], "fetch")]
)
def test_a_misspelled_command_gets_the_nearest(words, near):
    result = run(*words)
    assert result.exit_code == 2
    assert f"unknown command {words[-1]!r}" in result.stderr
    assert f"did you mean {near!r}?" in result.stderr


BAD = {
    "solver": (["--solvers", "picrd"], "unknown solver 'picrd': expected one of .*'picard'"),
    "capitals": (["--models", "LSTM"], "unknown model 'LSTM': .*did you mean 'lstm'"),
    "updates": (["--solvers", "picard:0"], "NAME or NAME:MAX_ITER .*got 'picard:0', try picard:2"),
    "no solver": (["--solvers", ","], "--solvers is empty"),
    "data set": (["--dataset", "har"], "unknown data set 'har': expected one of har2-sample"),
    "map": (["--map", "jordon"], "unknown map 'jordon': expected one of .*'jordan'"),
    "backward": (["--backward", "implict"], "unknown backward 'implict': expected one of unrolled"),
    "no backward": (["--backward", ""], "--backward"),
    "learned eta": (
        ["--solvers", "inexact-newton", "--backward", "implicit"],
        r"eta receives no gradient under Implicit: use Unrolled\(\)",
    ),
    "forgets the past": (
        ["--solvers", "picard", "--map", "jordan"],
        "Picard with a tolerance would make it forget the past: use .*the self-feedback map",
    ),
    "seeds": (["--seeds", "1,x"], "--seeds takes whole numbers by comma, as 0,1,2; got '1,x'"),
    "fractional seeds": (["--seeds", "1.5"], "--seeds takes whole numbers .* got '1.5'"),
    "no seeds": (["--seeds", ","], "--seeds is empty"),
    "huge seed": (["--seeds", "99999999999999999999"], "--seeds .*99999999999999999999"),
    "device": (["--device", "gpu"], "value of machine.device .gpu.: expected one of cpu, cuda"),
    "epochs": (["--epochs", "0"], "--epochs.* 1.* 0"),
    "hidden": (["--hidden", "0"], "--hidden.* 1.* 0"),
    "batch size": (["--batch-size", "0"], "--batch-size.* 1.* 0"),
    "jobs": (["--jobs", "0"], "--jobs.* 1.* 0"),
    "epochs as a word": (["--epochs", "two"], "--epochs.*two"),
    "zero rate": (["--lr", "0"], r"training.lr must be above 0 and finite; got 0\.0"),
    "infinite rate": (["--lr", "inf"], "training.lr must be above 0 and finite; got inf"),
    "unknown option": (["--epoch", "1"], "--epoch.*--epochs"),
    "letter of the paper": (["--learning-rate", "1"], "'--learning-rate' is '--lr' here"),
}


def assert_one_line(result, message):
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("fixpoint: ")
    assert re.search(message, lines[0]), lines[0]
    assert "Traceback" not in result.output


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_line_and_status_2(name, tmp_path, capfd):
    arguments, message = BAD[name]
    small = ["--hidden", "4"] if "--hidden" not in arguments else []
    small += ["--epochs", "1"] if not {"--epochs", "--epoch"} & set(arguments) else []
    if not {"--map", "--solvers"} & set(arguments):
        small += ["--solvers", "inexact-newton"]
    out = tmp_path / "out"
    result = run("compare", *small, *arguments, "--out", str(out))
    assert "Traceback" not in capfd.readouterr().err  # of a process of its own
    assert_one_line(result, message)
    assert not out.exists()  # nothing has been run


def test_a_missing_file_says_where_to_get_it(tmp_path):
    result = run("compare", "--dataset", "har2", FIXPOINT_DATA=str(tmp_path))
    assert_one_line(
        result, f"har.npz was expected in {tmp_path} .*https://.*or set FIXPOINT_DATA to a folder"
    )


@pytest.mark.parametrize("below", ["", "below", "below/further"])
def test_a_folder_that_cannot_be_written(tmp_path, below):
    (tmp_path / "file").write_text("kept")
    out = tmp_path / "file" / below
    result = run(*SMALL, "--out", str(out))
    assert_one_line(result, f"--out must be a folder that can be written; {out} cannot .*another")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("line", ["loss", "5", "{}"])
@pytest.mark.filterwarnings("default")
def test_results_that_cannot_be_read_are_named(tmp_path, line):
    (tmp_path / "runs.jsonl").write_text(f"{line}\n")
    result = run("report", str(tmp_path))
    assert result.exit_code == 2
    first, second = result.stderr.splitlines()
    assert first.endswith("runs.jsonl: not a record of a run, skipped")
    assert first.startswith("fixpoint: warning: line 1 of ")
    assert "no run is recorded in" in second


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--epochs", "1", "--epochs=5"], "--epochs is given twice: give it once"),
        (
            ["train", "--epochs", "1", "--set", "training.epochs=5"],
            "training.epochs is given twice, by --epochs and --set: give it once",
        ),
        (
            ["train", "--set", "lr=1.0", "--set", "training.lr=2.0"],
            "training.lr is given twice, by --set and --set: give it once",
        ),
        (
            ["compare", "--models", "rnn", "--set", "model.model=lstm"],
            "model is set by --models here: leave it out of --set",
        ),
        (["compare", "--set", "training.seed=7"], "seed is set by --seeds here"),
        (["compare", "--cluster", ""], "--cluster is empty: give a value, or leave it out"),
        (["compare", "--out="], "--out is empty"),
        (["compare", "--map", ","], "--map is empty"),
        (["figures", "--seeds", " , "], "--seeds is empty"),
        (["reproduce", "table2", "--seeds", ","], "--seeds is empty"),
        (["predict", ""], "an argument is empty: give a value, or leave it out"),
        (["data", "info", ""], "an argument is empty"),
        (["data", "fetch", "har2", "--archive", ""], "--archive is empty"),
        (
            ["reproduce", "table2", "--epochs", "1", "--set", "epochs=2"],
            "training.epochs is given twice, by --epochs and --set: give it once",
        ),
        (["reproduce", "table2", "--set", "seed=2"], "seed is set by --seeds here"),
        (["export", "run", "--bits", "0"], "--bits must be 32, 16 or 8; got 0"),
        (["report", "none/TYPO"], "there is no folder or file none/TYPO"),
        (["compare", "--cluster", "x", "--models", "rnn"], "--cluster takes the address that"),
        (["train", "--dataset", "a\udcff.npz"], "is not UTF-8: rename the file"),
    ],
)
def test_options_given_twice_empty_or_mistyped(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_damaged_data_file(tmp_path):
    (tmp_path / "har.npz").write_bytes(b"PK\x03\x04")
    result = run("compare", "--dataset", "har2", FIXPOINT_DATA=str(tmp_path))
    assert_one_line(result, "har.npz is truncated or corrupt .*replace it by a fresh copy")


def test_an_archive_that_is_not_there(tmp_path):
    result = run("data", "fetch", "har2", "--archive", "none.zip", FIXPOINT_DATA=str(tmp_path))
    assert_one_line(result, "^fixpoint: there is no file none.zip: give ")


# figures


def test_figures_are_drawn_and_named(tmp_path):
    result = run(
        *("figures", "phi", "h2", "--epochs", "1", "--walks", "20"),
        *("--out", str(tmp_path / "new"), "--dataset", "har2-sample"),
    )
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "h2.png",
        "h2.txt",
        "phi.png",
        "phi.txt",
    ]
    text = " ".join(result.stdout.split())
    assert "phi.png: Phi and Phi' over alpha" in text
    assert re.search(r"toy walks after 1 epochs: RNN \d+\.\d %, ERNN \d+\.\d %", text)


def test_eta_without_dsa19_says_what_to_do(tmp_path, monkeypatch):
    drawn = {}

    def figure(name, runs):
        drawn[name] = runs
        return plots.panel(None).figure

    monkeypatch.setattr("fixpoint.paper.figures.figure", figure)
    arguments = ("figures", "eta", "--dataset", "har2-sample", "--out", str(tmp_path / "new"))
    result = run(*arguments, FIXPOINT_DATA=str(tmp_path))
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "eta is drawn without DSA-19: dsa.npz was expected in" in text
    assert "'fixpoint data fetch dsa19'" in text
    assert drawn["eta"].other is None
    x = np.random.default_rng(0).normal(size=(40, 5, 2))
    np.savez(tmp_path / "own.npz", x=(100 * x).astype("int16"), y=np.arange(40) % 2)
    arguments = ("figures", "h1", "--dataset", str(tmp_path / "own.npz"), "--out", str(tmp_path))
    assert run(*arguments).exit_code == 0
    assert drawn["h1"].data.x_train.dtype == torch.float32
    assert drawn["h1"].data.x_train.std().item() == pytest.approx(1, abs=0.1)


def test_a_figure_that_is_not_there_is_refused_before_anything_is_trained(tmp_path):
    result = run("figures", "h1", "h4", "--out", str(tmp_path / "new"))
    assert result.exit_code == 2
    assert "unknown figure 'h4': expected one of phi, steps, h1" in result.output
    assert result.stderr.startswith("fixpoint: ")
    assert not (tmp_path / "new").exists()
