"""Run a benchmark, keep its figures, and compare them with another revision.

    python benchmarks/run.py                                  # the benchmarks, a line each
    python benchmarks/run.py solvers --quick                  # run it; add a line to the history
    python benchmarks/run.py solvers --base v0.1.0 --quick    # and the ratio to that revision

Other options go to the benchmark. The base is checked out into a folder of its own; the same
script runs on both packages, by turns, and each figure is the least of all rounds. The history has
one JSON line a run: date, revision, machine, options and milliseconds.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).parent.parent
HISTORY = Path("results/benchmarks.jsonl")
SLOW = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Variables that may force an older kernel on NumPy's products; users do not set them."""

Times = dict[str, float]
"""Milliseconds of each figure, by what was measured."""


def benchmarks(root: Path = ROOT) -> dict[str, str]:
    """List the benchmarks that write figures, each with the first line of its docstring."""
    found = {}
    for path in sorted((root / "benchmarks").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "Figures(" in source and "add_options(" in source:
            found[path.stem] = (ast.get_docstring(ast.parse(source)) or "").split("\n")[0]
    return found


def measure(name: str, package: Path, options: list[str], root: Path = ROOT) -> Times:
    """Run a benchmark of `root` with the package in a folder, and return its figures."""
    environment = {k: v for k, v in os.environ.items() if k not in SLOW}
    environment["PYTHONPATH"] = str(package)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.jsonl"
        script = root / "benchmarks" / f"{name}.py"
        subprocess.run(
            [sys.executable, str(script), *options, "--json", str(path)],
            env=environment,
            cwd=folder,
            check=True,
        )
        return times(path.read_text(encoding="utf-8").splitlines())


def times(lines: list[str]) -> Times:
    """Return the milliseconds of a benchmark's lines; other entries of a line name them."""
    found = {}
    for line in lines:
        entry = json.loads(line)
        values = {k: v for k, v in entry.items() if isinstance(v, dict)}
        label = ", ".join(f"{k} {v}" for k, v in entry.items() if k not in values)
        for kind, group in values.items():
            for name, value in group.items():
                if isinstance(value, int | float):
                    what = name if kind == "ms" else f"{kind} {name}"
                    found[f"{label}: {what}"] = float(value)
    return found


def least(rounds: list[Times]) -> Times:
    """Return the smallest value of each figure over the rounds."""
    return {name: min(r[name] for r in rounds if name in r) for r in rounds for name in r}


@contextmanager
def checkout(revision: str, root: Path = ROOT) -> Iterator[Path]:
    """Yield a folder with that revision, which is removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "base"
        _git("worktree", "add", "--detach", str(path), revision, root=root)
        try:
            yield path
        finally:
            _git("worktree", "remove", "--force", str(path), root=root)


def _git(*words: str, root: Path) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"git {' '.join(words)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def ratios(base: Times, now: Times) -> str:
    """Return a table of base, now and now / base, the largest ratio first, and their mean."""
    both = sorted((name for name in base if name in now), key=lambda n: -now[n] / base[n])
    rows = [f"{base[n]:10.3f} {now[n]:10.3f} {now[n] / base[n]:7.2f}  {n}" for n in both]
    if not rows:
        return "no figure is common to both"
    mean = math.exp(sum(math.log(now[n] / base[n]) for n in both) / len(both))
    head = f"{'base ms':>10} {'now ms':>10} {'ratio':>7}"
    return "\n".join([head, *rows, f"geometric mean of the ratios: {mean:.3f}"])


def record(path: Path, name: str, options: list[str], found: Times, root: Path = ROOT) -> None:
    """Append one run to the history."""
    from processor import processor

    line = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "benchmark": name,
        "options": options,
        "revision": _git("rev-parse", "HEAD", root=root),
        "changed": bool(_git("status", "--porcelain", root=root)),
        "machine": processor(),
        "ms": found,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def main(arguments: list[str] | None = None, root: Path = ROOT) -> None:
    parser = argparse.ArgumentParser(description="Run a benchmark and keep its figures.")
    parser.add_argument("name", nargs="?", choices=[*benchmarks(root)])
    parser.add_argument("--base", help="revision to compare with")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each revision, by turns")
    parser.add_argument("--history", type=Path, default=root / HISTORY)
    options, rest = parser.parse_known_args(arguments)
    if options.name is None:
        print("\n".join(f"{name:12} {line}" for name, line in benchmarks(root).items()))
        return
    now: list[Times] = []
    base: list[Times] = []
    if options.base is None:
        now = [measure(options.name, root, rest, root) for _ in range(options.rounds)]
    else:
        with checkout(options.base, root) as folder:
            for _ in range(options.rounds):
                base.append(measure(options.name, folder, rest, root))
                now.append(measure(options.name, root, rest, root))
        print(ratios(least(base), least(now)))
    record(options.history, options.name, rest, least(now), root)
    print(f"added to {options.history}")


if __name__ == "__main__":
    main()
