"""fixpoint data list, fetch and info, as a person uses them."""

import functools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from support.factories import write_tar, write_zip
from typer.testing import CliRunner

from fixpoint.cli.app import app
from fixpoint.data import DATASETS, SOURCES
from fixpoint.data.sources import ptb, yelp


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FIXPOINT_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def refused(result, message):
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert re.search(message, result.stderr), result.stderr
    assert result.stderr.startswith("fixpoint: ")


def test_list_shows_all_and_how_to_get_them(folder):
    result = run("data", "list")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert all(name in text for name in DATASETS)
    assert text.count("not there") == len(SOURCES)
    assert "fixpoint data fetch google30" in text
    assert not folder.exists()


def test_list_tells_ready_from_subset(folder):
    folder.mkdir()
    (folder / "ptb.npz").touch()
    (folder / "yelp10k.npz").touch()
    lines = run("data", "list").stdout.splitlines()
    (row,) = (line for line in lines if "ptb.npz" in line)
    assert re.search(r"ptb +│ ready +│", row)
    (row,) = (line for line in lines if "yelp10k.npz" in line)
    assert re.search(r"yelp5 +│ subset ready +│", row)


def test_info_shows_shapes_classes_counts_and_terms():
    result = run("data", "info", "har2-sample")
    assert result.exit_code == 0
    text = re.sub(r"[\s│]+", " ", result.stdout)
    for fact in (
        "756 train, 324 test",
        "128 steps x 9 channels, float32",
        "2: walking|walking_downstairs|standing",
        "of each class, train 378, 378",
        "21 train, 9 test",
        "no, a subset: 1080 of the 10299 windows",
        "CC BY 4.0",
        "10.24432/C54S4K",
    ):
        assert fact in text


def test_info_of_your_own_file(tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.zeros((10, 5, 2), np.uint8), y=[0, 1] * 5)
    text = " ".join(run("data", "info", str(tmp_path / "mine.npz")).stdout.split())
    assert "8 train, 2 test" in text
    assert "5 steps x 2 channels, float32, stored as uint8" in text
    assert "image" not in text
    np.savez(tmp_path / "mine.npz", x=np.zeros((10, 6, 2)), y=[0, 1] * 5, image=[2, 3])
    text = " ".join(run("data", "info", str(tmp_path / "mine.npz")).stdout.split())
    assert "image │ 2 rows x 3 columns │" in text


def test_info_of_a_recording(tmp_path):
    lines = [f"{p},{i},{-i},{'sit' if i < 50 else 'walk'}" for p in "ab" for i in range(100)]
    (tmp_path / "long.csv").write_text("\n".join(["person,u,v,activity", *lines]))
    options = ("--window", "10", "--label", "activity", "--subject", "person")
    shown = run("data", "info", str(tmp_path / "long.csv"), *options, "--channels", "v,u").stdout
    text = " ".join(shown.split())
    assert "18 train, 18 test" in text
    assert "10 steps x 2 channels" in text
    assert "channels │ v, u │" in text
    assert "2: sit, walk" in text
    wrong = run("data", "info", str(tmp_path / "long.csv"), *options[:2], "--label", "activty")
    assert wrong.exit_code == 2
    assert "unknown column for --label 'activty': expected one of person, u, v" in wrong.stderr


def test_info_names_the_checksums(folder, full_path, monkeypatch):
    monkeypatch.undo()  # the folder with the full data
    full_path("ptb.npz")
    text = re.sub(r"[\s│]+", " ", run("data", "info", "ptb").stdout)
    assert "929589 train, 73760 valid, 82430 test" in text
    assert "checksum: md5:30177ea32e27c525793142b6bf2c8e2d" in text
    assert "validation official" in text


@pytest.mark.parametrize("command", ["info", "fetch"])
def test_an_unknown_name_gets_one_line(folder, command):
    refused(run("data", command, "dsa"), "unknown data set 'dsa': .*did you mean 'dsa19'")


def test_what_is_not_there_or_needs_no_file(folder):
    refused(run("data", "info", "dsa19"), "dsa.npz was expected in .*'fixpoint data fetch dsa19'")
    refused(run("data", "fetch", "yelp5"), "registration: get the archive of reviews from")
    refused(run("data", "fetch", "ptb", "--archive", "none.tgz"), "there is no file none.tgz")
    assert "needs no file" in run("data", "fetch", "toy-walks").stdout


def test_fetch_makes_the_file_of_an_archive_at_hand(folder, tmp_path, monkeypatch):
    reviews = [{"stars": 1 + i % 5, "text": f"word{i} food"} for i in range(8)]
    text = "\n".join(json.dumps(review) for review in reviews).encode()
    path = write_zip(tmp_path / "a.zip", {"yelp_academic_dataset_review.json": text})
    refused(run("data", "fetch", "yelp5", "--archive", str(path)), "1000000 reviews .* got 8")
    assert not folder.exists()

    monkeypatch.setattr(yelp, "_REVIEWS", 4)  # the same way, for eight reviews
    monkeypatch.setattr(yelp, "VOCABULARY", 5)
    small = replace(SOURCES["yelp5"], parse=functools.partial(yelp.parse, reviews=4))
    monkeypatch.setitem(SOURCES, "yelp5", small)
    result = run("data", "fetch", "yelp5", "--archive", str(path))
    assert result.exit_code == 0, result.output
    assert "4 train + 4 test texts" in result.stdout
    assert [p.name for p in folder.iterdir()] == ["yelp5.npz"]
    again = run("data", "fetch", "yelp5")
    assert "yelp5 is ready" in again.stdout


def test_fetch_reads_the_folder_of_an_unpacked_archive(folder, tmp_path, monkeypatch):
    unpacked = tmp_path / "PTB" / "data"
    unpacked.mkdir(parents=True)
    for part in ("train", "valid", "test"):
        (unpacked / f"ptb.{part}.txt").write_bytes(b" a b \n a \n")
    refused(run("data", "fetch", "ptb", "--archive", str(tmp_path / "PTB")), r"uint16 \(929589")
    monkeypatch.setattr(ptb, "verify", lambda arrays: None)
    shape = {"x_train": ("uint16", (5,)), "x_valid": ("uint16", (5,)), "x_test": ("uint16", (5,)),
             "vocab": ("str", (3,))}  # fmt: skip
    monkeypatch.setattr(ptb, "_SCHEMA", shape)
    monkeypatch.setitem(SOURCES, "ptb", replace(SOURCES["ptb"], verify=lambda arrays: None))
    result = run("data", "fetch", "ptb", "--archive", str(tmp_path / "PTB"))
    assert result.exit_code == 0, result.output
    assert "ptb is ready" in result.stdout
    assert "checksum" not in result.stdout


def test_info_shows_names_as_they_are_and_what_was_not_read(tmp_path):
    for label in ("slow [m]", "[bold]fast"):
        (tmp_path / label).mkdir()
        for i in range(3):
            (tmp_path / label / f"{i}.csv").write_text("1.5,2\n" * (i + 1))
    (tmp_path / "[red]notes.txt").write_text("")
    text = re.sub(r"[\s│]+", " ", run("data", "info", str(tmp_path)).stdout)
    assert "2: [bold]fast, slow [m]" in text
    assert "notes not read: [red]notes.txt" in text
    assert "at most 3 steps x 2 channels" in text


def test_a_wrong_archive_leaves_what_was_there(folder, tmp_path):
    folder.mkdir()
    (folder / "ptb.npz").write_bytes(b"old")
    members = {f"data/ptb.{part}.txt": b" a b \n" for part in ("train", "valid", "test")}
    path = write_tar(tmp_path / "a.tgz", members)
    refused(run("data", "fetch", "ptb", "--archive", str(path)), r"x_train must be uint16 \(929589")
    assert (folder / "ptb.npz").read_bytes() == b"old"
    assert [p.name for p in folder.iterdir()] == ["ptb.npz"]


def test_fetch_without_a_network_says_what_to_do(folder, monkeypatch):
    nowhere = replace(SOURCES["ptb"].archives[0], url="http://127.0.0.1:1/a.tgz")
    monkeypatch.setitem(SOURCES, "ptb", replace(SOURCES["ptb"], archives=(nowhere,)))
    refused(run("data", "fetch", "ptb"), "could not be downloaded .*--archive FILE")
    assert not list(folder.rglob("*.npz"))


def test_compare_names_what_your_own_file_lacks(tmp_path):
    """A whole one is compared in `test_comparison.py`."""
    np.savez(tmp_path / "bad.npz", x=np.zeros((40, 6, 2)))
    refused(
        run("compare", "--dataset", str(tmp_path / "bad.npz"), "--out", str(tmp_path / "o")),
        "bad.npz has no y",
    )
