"""Every example runs, at a small size."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs_and_prints(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), "--epochs", "1"])
    runpy.run_path(str(path), run_name="__main__")
    assert "accuracy 0." in capsys.readouterr().out


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_short(path):
    assert len(path.read_text().splitlines()) < 60
