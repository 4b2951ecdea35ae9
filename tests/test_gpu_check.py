"""`scripts/gpu_check.sh`: its parts, its report of those that fail or hang, a rehearsal."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PARTS = ["kernels", "layers", "speed", "solvers", "graph"]
BLOCKED = "pooch tomli_w torchdeq distributed dask numba scipy matplotlib lightning_fabric typer"
WITHOUT = f"""
import importlib.machinery as machinery
find = machinery.PathFinder.find_spec
missing = set({BLOCKED.split()!r})
machinery.PathFinder.find_spec = lambda name, path=None, target=None: (
    None if name.split(".")[0] in missing else find(name, path, target)
)
"""
"""A `sitecustomize` for a machine that lacks packages."""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments, **environment):
    return subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh", *arguments],
        capture_output=True,
        text=True,
        cwd="/",
        env=os.environ | {"PYTHON": sys.executable} | environment,
    )


def test_a_dry_run_lists_the_parts(script, tmp_path):
    result = run("--dry-run")
    assert result.returncode == 0, result.stderr
    planned = script.steps(tmp_path)
    assert len(result.stdout.splitlines()) == len(planned)
    for step, line in zip(planned, result.stdout.splitlines(), strict=True):
        assert step.name in line
    assert sum(step.limit for step in planned) <= script.TOTAL < 480
    assert [step.name for step in planned[:5]] == PARTS
    assert all("scripts/gpu_parts.py" in step.command for step in planned[:5])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_gpu_it_says_so(tmp_path):
    result = run("--out", tmp_path / "report")
    assert result.returncode == 1
    assert "needs a CUDA device" in result.stdout
    assert len(result.stdout.splitlines()) == 1
    assert not result.stderr
    assert not (tmp_path / "report").exists()


def test_each_outcome_is_reported(script, tmp_path, capsys):
    hangs = "import time; print('{\"ms\": 1.5}', flush=True); time.sleep(60)"
    steps = [
        script.Step("fails", 60, [sys.executable, "-c", "print('why'); raise SystemExit(3)"]),
        script.Step("hangs", 2.0, [sys.executable, "-c", hangs]),
        script.Step("absent", 60, ["no-such-sanitizer", "x"]),
        script.Step("measures", 60, [sys.executable, "-c", "print('{\"ms\": 2}\\n3')"]),
    ]
    report = tmp_path / "report.json"
    assert script.run_all(steps, report) == 1
    fails, hangs, absent, measures = json.loads(report.read_text())["parts"]
    assert (fails["rc"], fails["output"], fails["results"]) == (3, "why\n", [])
    assert (hangs["rc"], hangs["results"]) == (None, [{"ms": 1.5}])
    assert (absent["rc"], absent["output"]) == (0, "no-such-sanitizer is not here")
    assert (measures["rc"], measures["results"], measures["output"]) == (0, [{"ms": 2}], "3\n")
    assert "hangs: out of time" in capsys.readouterr().out
    assert script.run_all(steps[2:], report) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
@pytest.mark.slow
def test_tasks_that_fail_are_reported_by_their_processes():
    """Here none of them has a device; each says so, and the last is done all the same."""
    pytest.importorskip("triton", reason="needs triton")
    code = "import gpu_parts as g; g.in_processes('kernels', g.kernels()[:4], at_a_time=2)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "scripts"
    )
    assert result.returncode == 0, result.stderr
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(found) == 4
    assert all("CUDA" in each["error"] for each in found)


@pytest.mark.slow
def test_a_rehearsal_on_a_machine_that_lacks_packages(tmp_path):
    """Without any package but torch, numpy and triton, each of the first parts finds something."""
    pytest.importorskip("triton", reason="needs triton")
    bare, out = tmp_path / "bare", tmp_path / "report"
    bare.mkdir()
    (bare / "sitecustomize.py").write_text(WITHOUT)
    result = run("--rehearse", "--out", out, PYTHONPATH=str(bare), OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stdout + result.stderr
    parts = {part["name"]: part for part in json.loads((out / "report.json").read_text())["parts"]}
    assert list(parts) == PARTS
    assert max(max(found["errors"]) for found in parts["graph"]["results"]) < 1e-3
    assert "torch" in parts["kernels"]["results"][0]["versions"]
    assert parts["kernels"]["first_s"] < 30
    for part in parts.values():
        assert part["rc"] == 0, part["output"]
        assert len(part["results"]) > 3
        errors = [found for found in part["results"] if isinstance(found.get("error"), str)]
        assert not errors
    found = parts["kernels"]["results"][1:4] + parts["layers"]["results"]
    errors = [each.get("error_of_gradients", 0.0) for each in found]
    assert max(errors) < 1e-3
    assert len(list(out.iterdir())) <= 8
