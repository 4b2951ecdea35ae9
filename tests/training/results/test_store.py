"""`runs.jsonl`: what is appended is there, a broken end costs one run, anything else is said."""

import json
from pathlib import Path

import pytest

from fixpoint.training import Recipe
from fixpoint.training.engine.model_factory import resolved
from fixpoint.training.results.store import Records, read_file


def test_append_and_read(tmp_path):
    records = Records(tmp_path)
    assert records.by_key == {}
    first, second = {"key": "a", "loss": 0.25}, {"key": "b", "epochs": [1, 2], "x": None}
    records.append(first)
    assert Records(tmp_path).by_key == {"a": first}
    records.append(second)
    assert records.by_key == Records(tmp_path).by_key == {"a": first, "b": second}
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [first, second]


def test_the_folder_is_made(tmp_path):
    Records(tmp_path / "a" / "b").append({"key": "a"})
    assert (tmp_path / "a" / "b" / "runs.jsonl").read_text() == '{"key": "a"}\n'


def test_the_last_record_of_a_key_counts(tmp_path):
    records = Records(tmp_path)
    records.append({"key": "a", "n": 1})
    records.append({"key": "a", "n": 2})
    assert Records(tmp_path).by_key["a"]["n"] == 2


@pytest.mark.parametrize("end", ['{"key": "c", "lo', '{"key": "c"}', "{", '"'])
def test_a_last_line_that_was_cut_is_dropped(tmp_path, end):
    path = tmp_path / "runs.jsonl"
    whole = '{"key": "a"}\n{"key": "b"}\n'
    path.write_text(whole + end)
    records = Records(tmp_path)
    assert list(records.by_key) == ["a", "b"]
    assert path.read_text() == whole
    records.append({"key": "d"})
    assert list(Records(tmp_path).by_key) == ["a", "b", "d"]


@pytest.mark.parametrize("line", ['{"key": "b', "", "loss", "5", "[]", "null", "{}"])
def test_a_broken_line_before_the_last_is_named_and_skipped(tmp_path, line):
    """Also one that is JSON, but no record."""
    path = tmp_path / "runs.jsonl"
    text = f'{{"key": "a"}}\n{line}\n{{"key": "c"}}\n'
    path.write_text(text)
    with pytest.warns(UserWarning, match=r"line 2 of .*runs\.jsonl: not a record of a run, skip"):
        records = Records(tmp_path)
    assert list(records.by_key) == ["a", "c"]
    assert path.read_text() == text
    records.forget("a")
    assert path.read_text() == f'{line}\n{{"key": "c"}}\n'


def test_seconds_are_those_of_the_epochs_after_the_first(tmp_path):
    """Also in records of versions that took the mean, with compiling in it."""
    epochs = [{"seconds": s} for s in (24.06, 0.45, 0.47)]
    line = {"key": "a", "seconds_per_epoch": 8.33, "epochs": epochs}
    (tmp_path / "runs.jsonl").write_text(json.dumps(line) + "\n")
    assert Records(tmp_path).by_key["a"]["seconds_per_epoch"] == pytest.approx(0.46)


@pytest.mark.parametrize("changes", [{}, {"solver": "anderson"}, {"model": "lstm"}])
def test_a_recipe_has_one_key_with_or_without_its_defaults(changes):
    recipe = Recipe().changed(**changes)
    full = resolved(recipe)
    assert recipe.key == full.key


@pytest.mark.parametrize("name", ["runs", "solvers_har2", "paper_protocol/runs"])
def test_the_keys_of_the_committed_records_are_those_of_their_recipes(name):
    for record in read_file(Path(__file__).parents[3] / f"results/{name}.jsonl"):
        values = record.get("recipe") or record["run"]
        recipe = Recipe().changed(**{k: v for k, v in values.items() if v is not None})
        assert record["key"] == recipe.key


def test_a_folder_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match="file"):
            Records(folder)
