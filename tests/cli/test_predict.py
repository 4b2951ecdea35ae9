"""From one labelled CSV of two persons to predictions and to a C program with the same classes."""

import csv
import io
import json
import shutil
import subprocess

import numpy as np
import pytest
from typer.testing import CliRunner

from fixpoint.cli.app import app
from fixpoint.training import load_trained


def run(*arguments, text=None):
    return CliRunner().invoke(app, [str(a) for a in arguments], input=text)


def person(name, seed):
    """Lines of a person who walks and sits in turn, at 50 Hz."""
    draw = np.random.default_rng(seed)
    for i in range(1200):
        walks = i // 300 % 2
        a = np.sin(0.8 * i) if walks else 0.0
        values = 101325 + 3 * (a + draw.normal(0, 0.3)), 293.15 + 0.2 * draw.normal()
        yield f"{i / 50:.2f},{name},{values[0]:.3f},{values[1]:.4f},{'walk' if walks else 'sit'}"


HEADER = "time,person,pressure,kelvin,activity"
RECORDING = ("--window", 20, "--step", 10, "--label", "activity", "--subject", "person")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder of a run on a recording of two persons that is gone, and a new one beside it."""
    place = tmp_path_factory.mktemp("recording")
    lines = [HEADER, *person("ann", 0), *person("bob", 1)]
    (place / "two.csv").write_text("\n".join(lines))
    result = run(
        *("train", "--dataset", place / "two.csv", *RECORDING, "--model", "fastgrnn"),
        *("--hidden", 8, "--epochs", 12, "--batch-size", 8, "--out", place / "runs"),
    )
    assert result.exit_code == 0, result.output
    (place / "two.csv").unlink()
    (place / "new.csv").write_text("\n".join([HEADER, *person("cid", 2)]))
    (folder,) = (path for path in (place / "runs").iterdir() if path.is_dir())
    return folder


def read_json(result):
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_recording_is_classified_without_the_training_data(trained):
    new = trained.parents[1] / "new.csv"
    rows = read_json(run("predict", trained, new, "--format", "json"))
    assert [row["start"] for row in rows] == list(range(0, 1181, 10))
    known = [row for row in rows if "truth" in row]
    right = [row["class"] == row["truth"] for row in known]
    assert len(known) > 100
    assert np.mean(right) > 0.9
    assert abs(sum(rows[0]["probabilities"].values()) - 1) < 1e-6
    shown = run("predict", trained, new)
    assert f"of the {len(known)} windows whose class is known" in shown.stdout
    table = list(csv.reader(io.StringIO(run("predict", trained, new, "--format", "csv").stdout)))
    assert table[0] == ["file", "start", "truth", "class", "sit", "walk"]
    assert [row[3] for row in table[1:]] == [row["class"] for row in rows]


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
@pytest.mark.parametrize("bits", [32, 16, 8])
def test_the_c_program_gives_the_same_classes(bits, trained, tmp_path):
    new = trained.parents[1] / "new.csv"
    lines = [HEADER, *person("ann", 0), *person("bob", 1)]
    (trained.parents[1] / "two.csv").write_text("\n".join(lines))
    result = run("export", trained, "--bits", bits, "--out", tmp_path)
    (trained.parents[1] / "two.csv").unlink()
    assert result.exit_code == 0, result.output
    sources = ("fixpoint.c", "selftest.c", "main.c")
    subprocess.run(["gcc", "-std=c99", "-O2", *sources, "-o", "classify"], cwd=tmp_path, check=True)
    command = [tmp_path / "classify", new]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    expected = read_json(run("predict", trained, new, "--format", "json"))
    given = [line.split("\t")[1] for line in out.splitlines()]
    wrong = sum(a != row["class"] for a, row in zip(given, expected, strict=True))
    # Windows across a change of class are near ties.
    assert wrong <= (3 if bits == 8 else 0)


def test_export_to_float_needs_no_data(trained, tmp_path):
    result = run("export", trained, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "The program was not compared with torch: the data" in result.stdout


def test_other_sources_give_the_same(trained, tmp_path):
    new = trained.parents[1] / "new.csv"
    rows = read_json(run("predict", trained, new, "--format", "json"))
    piped = read_json(run("predict", trained, "-", "--format", "json", text=new.read_text()))
    (tmp_path / "folder").mkdir()
    shutil.copy(new, tmp_path / "folder" / "a.csv")
    below = read_json(run("predict", trained, tmp_path / "folder", "--format", "json"))
    columns = np.loadtxt(new, delimiter=",", skiprows=1, usecols=(2, 3))
    x = np.stack([columns[row["start"] : row["start"] + 20] for row in rows])
    np.savez(tmp_path / "x.npz", x=x)
    packed = read_json(run("predict", trained, tmp_path / "x.npz", "--format", "json"))
    for other in (piped, below, packed):
        assert [row["class"] for row in other] == [row["class"] for row in rows]
    found = load_trained(trained).predict(x)
    assert found.names == [row["class"] for row in rows]
    assert found.scores.shape == (len(rows), 2)
    x[3, 4, 1] = np.nan
    spoiled = load_trained(trained).predict(x)
    assert (spoiled.names[3], spoiled.labels[3].item()) == ("", -1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("pressure,other\n1,2\n", "unknown column for --channels 'kelvin'"),
        (HEADER + "\n0,a,1,2,sit\n", "no stretch of one person without a gap has 20 samples"),
        ("", "is empty"),
    ],
)
def test_other_tables_are_refused_in_one_line(content, message, trained, tmp_path):
    (tmp_path / "a.csv").write_text(content)
    result = run("predict", trained, tmp_path / "a.csv")
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_windows_of_another_shape_are_refused(trained):
    with pytest.raises(ValueError, match=r"windows must be \(B, 20, 2\), 20 samples of 2 channels"):
        load_trained(trained).predict(np.zeros((3, 20, 4)))
