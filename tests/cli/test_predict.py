"""From one labelled CSV of two persons to predictions and to a C program with the same classes."""

import csv
import io
import json
import re
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
        ("pressure,other\n1,2\n", "has no channel 'kelvin': its columns are pressure, other"),
        (
            HEADER + "\n0,a,1,2,sit\n",
            "no stretch of one person without a gap has 20 samples, the longest has 1: the model "
            "takes windows of that length",
        ),
        ("", "is empty"),
        (HEADER, "has one line alone"),
        ("1,2,3\n4,5,6\n", "or each line hold 2 numbers, pressure, kelvin"),
    ],
)
def test_other_tables_are_refused_in_one_line(content, message, trained, tmp_path):
    (tmp_path / "a.csv").write_text(content)
    result = run("predict", trained, tmp_path / "a.csv")
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_numbers_without_a_header_are_the_channels_in_their_order(trained, tmp_path):
    new = trained.parents[1] / "new.csv"
    numbers = [",".join(line.split(",")[2:4]) for line in new.read_text().splitlines()[1:]]
    rows = read_json(run("predict", trained, new, "--format", "json"))
    piped = read_json(run("predict", trained, "-", "--format", "json", text="\n".join(numbers)))
    assert [row["scores"] for row in piped] == [row["scores"] for row in rows]


def test_windows_with_missing_values_have_no_class(trained, tmp_path):
    lines = (trained.parents[1] / "new.csv").read_text().splitlines()
    lines[26] = "0.50,cid,,293.15,sit"
    rows = read_json(run("predict", trained, "-", "--format", "json", text="\n".join(lines)))
    without = [row["start"] for row in rows if row["class"] is None]
    assert without == [10, 20]  # sample 25 is in those from 10 to 29 and 20 to 39
    shown = run("predict", trained, "-", text="\n".join(lines)).stdout
    assert "Note: 2 windows hold missing values and have no class." in shown
    known = [row for row in rows if row.get("truth") and row["class"]]
    assert f"of the {len(known)} windows whose class is known" in shown


def test_classes_that_the_model_does_not_have(trained):
    text = (trained.parents[1] / "new.csv").read_text().replace("walk", "run")
    shown = " ".join(run("predict", trained, "-", text=text).stdout.split())
    assert "Note: the model has no class run: windows of such a class are not in the acc" in shown
    assert "% of the 58 windows whose class is known" in shown


def test_gaps_are_told_below_the_table(trained):
    lines = (trained.parents[1] / "new.csv").read_text().splitlines()
    shown = run("predict", trained, "-", text="\n".join(lines[:100] + lines[150:]))
    assert "Note: 1 gaps in time, across which no window lies." in shown.stdout


@pytest.mark.parametrize(
    ("shape", "message"),
    [((0, 20, 2), "x has no windows"), ((3, 20, 4), r"windows must be \(B, 20, 2\)")],
)
def test_files_of_other_windows_are_named(shape, message, trained, tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros(shape))
    result = run("predict", trained, tmp_path / "a.npz")
    assert result.exit_code == 2
    assert re.search(rf"a\.npz: {message}", result.stderr)
    np.save(tmp_path / "a.npy", np.zeros((3, 20, 2)))
    assert "numpy.savez as NAME.npz" in run("predict", trained, tmp_path / "a.npy").stderr


class Frame:
    """A data frame, as pandas has."""

    def __init__(self, **columns):
        self.columns, self.values = list(columns), columns

    def __getitem__(self, names):
        return Frame(**{name: self.values[name] for name in names})

    def to_numpy(self):
        return np.stack(list(self.values.values()), 1)


def test_a_frame_is_read_by_the_names_of_its_columns(trained):
    model = load_trained(trained)
    p, k, t = np.random.default_rng(0).normal(size=(3, 20))
    expected = model.predict(np.stack([p, k], 1)).scores
    given = model.predict(Frame(time=t, kelvin=k, pressure=p)).scores
    np.testing.assert_array_equal(given, expected)
    with pytest.raises(ValueError, match="has no channel 'pressure': its columns are time, kelv"):
        model.predict(Frame(time=t, kelvin=k))


@pytest.mark.parametrize(
    ("x", "lengths", "error", "message"),
    [
        (np.zeros((3, 20, 4)), None, ValueError, r"windows must be \(B, 20, 2\), 20 samples of 2 "),
        ([[1.0, 2.0], [3.0]], None, TypeError, "of real numbers; got list"),
        ("a.csv", None, TypeError, "of real numbers; got str"),
        (np.zeros((3, 20, 2), complex), None, TypeError, "of real numbers; got ndarray"),
        (
            np.zeros((3, 20, 2)),
            [20],
            ValueError,
            r"lengths must be \(3,\) whole numbers",
        ),
        (np.zeros((3, 20, 2)), [20, 21, 1], ValueError, r"got torch.int64 \(3,\) from 1 to 21"),
        (np.zeros((3, 20, 2)), [20.0, 2.5, 1], ValueError, "whole numbers"),
    ],
)
def test_other_windows_are_refused(x, lengths, error, message, trained):
    with pytest.raises(error, match=message):
        load_trained(trained).predict(x, lengths)


@pytest.mark.parametrize("sizes", [(6, 6), (5, 6)], ids=["of one length", "of several"])
def test_headers_of_a_folder_order_the_columns(sizes, tmp_path):
    def write(path, x, header):
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savetxt(path, x, "%.6f", ",", header=header, comments="")

    draw = np.random.default_rng(0)
    for i in range(20):
        x = draw.normal(size=(sizes[i // 2 % 2], 3)) + (i % 2) * np.array([2, 0, -2])
        write(tmp_path / "data" / "ab"[i % 2] / f"{i}.csv", x, "ax,ay,az")
    trained = run(
        *("train", "--dataset", tmp_path / "data", "--model", "fastgrnn", "--hidden", 4),
        *("--epochs", 2, "--batch-size", 8, "--out", tmp_path / "runs"),
    )
    assert trained.exit_code == 0, trained.output
    (folder,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    x = draw.normal(size=(6, 3))
    write(tmp_path / "1.csv", x, "ax,ay,az")
    write(tmp_path / "2.csv", x[:, [2, 0, 1]], "az,ax,ay")
    np.savetxt(tmp_path / "3.csv", x, "%.6f", ",")
    files = [tmp_path / f"{i}.csv" for i in (1, 2, 3)]
    rows = read_json(run("predict", folder, *files, "--format", "json"))
    assert rows[0]["scores"] == rows[1]["scores"] == rows[2]["scores"]
    write(tmp_path / "4.csv", x, "foo,bar,baz")
    refused = run("predict", folder, tmp_path / "4.csv")
    assert refused.exit_code == 2
    message = "4.csv has the columns foo, bar, baz, but the model takes ax, ay, az: rename its"
    assert message in refused.stderr
    inputs = json.loads((folder / "inputs.json").read_text())
    (folder / "inputs.json").write_text(json.dumps(inputs | {"channels": []}))
    old = read_json(run("predict", folder, tmp_path / "1.csv", "--format", "json"))
    assert old[0]["scores"] == rows[0]["scores"]
