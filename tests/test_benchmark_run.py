"""benchmarks/run.py: the registry, the history, and the ratio to another revision."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("benchmark_run", ROOT / "benchmarks/run.py")
run = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(run)

SCRIPT = '''"""Figures of the package's own constant."""

import argparse

from figures import Figures, add_options

from fixpoint import MS

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true")
add_options(parser)
options = parser.parse_args()
Figures(options.json).add(shape="small", threads=1, ms={"fast": MS, "slow": 10 * MS})
'''


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository whose tag `before` takes 4 ms, and whose working tree takes 1."""
    root = tmp_path / "repository"
    (root / "benchmarks").mkdir(parents=True)
    (root / "fixpoint").mkdir()
    for name in ("figures.py", "processor.py"):
        shutil.copy(ROOT / "benchmarks" / name, root / "benchmarks" / name)
    (root / "benchmarks" / "constant.py").write_text(SCRIPT)
    package = root / "fixpoint" / "__init__.py"
    package.write_text("MS = 4.0\n")
    who = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "x"], ["tag", "before"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    package.write_text("MS = 1.0\n")
    monkeypatch.setattr(sys, "path", [str(root / "benchmarks"), *sys.path])
    return root


def test_the_benchmarks_that_write_figures_are_listed(capsys):
    run.main([])
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert {"solvers", "recurrent", "equilibrium", "sequence"} <= listed
    assert all(run.benchmarks().values())


def test_a_run_is_added_to_the_history(repository):
    run.main(["constant", "--quick"], repository)
    run.main(["constant"], repository)
    lines = (repository / run.HISTORY).read_text().splitlines()
    first, second = map(json.loads, lines)
    assert first["ms"] == {
        "shape small, threads 1: fast": 1.0,
        "shape small, threads 1: slow": 10.0,
    }
    assert (first["benchmark"], first["options"], second["options"]) == (
        "constant",
        ["--quick"],
        [],
    )
    assert first["changed"]
    assert len(first["revision"]) == 40


def test_a_base_is_compared_and_removed(repository, capsys):
    run.main(["constant", "--base", "before", "--rounds", "2"], repository)
    printed = capsys.readouterr().out
    assert printed.count("0.25") == 3  # two figures and their mean
    listed = subprocess.run(
        ["git", "worktree", "list"], cwd=repository, capture_output=True, text=True, check=True
    ).stdout
    assert len(listed.splitlines()) == 1


def test_an_unknown_revision_is_named(repository):
    with pytest.raises(SystemExit, match=r"worktree add.*nowhere.*failed"):
        run.main(["constant", "--base", "nowhere"], repository)


def test_the_least_of_the_rounds_counts():
    assert run.least([{"a": 2.0, "b": 1.0}, {"a": 1.0, "b": 3.0}]) == {"a": 1.0, "b": 1.0}
