"""`scripts/gpu_check.sh`: what it lists, and what it reports of steps that fail or hang."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments):
    return subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh", *arguments],
        capture_output=True,
        text=True,
        cwd="/",
        env=os.environ | {"PYTHON": sys.executable},
    )


def test_a_dry_run_lists_the_steps(script):
    result = run("--dry-run")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == len(script.STEPS)
    for step, line in zip(script.STEPS, result.stdout.splitlines(), strict=True):
        assert step.name in line
        (path,) = (part for part in step.command if part.endswith(".py"))
        assert path in line
        assert (ROOT / path).is_file()
        if path.startswith("benchmarks/"):
            assert "add_options(parser)" in (ROOT / path).read_text(encoding="utf-8")
    assert sum(step.limit for step in script.STEPS) <= script.TOTAL < 480


def test_all_tests_for_a_gpu_are_steps(script):
    marked = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark." + "gpu" in path.read_text(encoding="utf-8")
    }
    assert marked == {part for step in script.STEPS for part in step.command if "tests/" in part}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_gpu_it_says_so(tmp_path):
    result = run("--out", tmp_path / "report.json")
    assert result.returncode == 1
    assert "needs a CUDA device" in result.stdout
    assert len(result.stdout.splitlines()) == 1
    assert not result.stderr
    assert not (tmp_path / "report.json").exists()


def test_each_outcome_is_reported(script, tmp_path, capsys):
    write = "import sys; open(sys.argv[2], 'w').write('{\"ms\": 1.5}\\n{\"ms')"
    steps = [
        script.Step("fails", 60, ["-c", "print('why'); raise SystemExit(3)"]),
        script.Step("hangs", 0.5, ["-c", "while True: pass"]),
        script.Step("measures", 60, ["-c", write], has_figures=True),
    ]
    assert script.run_all(steps, tmp_path / "report.json", {"device": "none"}) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["environment"] == {"device": "none"}
    fails, hangs, measures = report["steps"]
    assert (fails["rc"], fails["output"]) == (3, "why\n")
    assert hangs["rc"] is None
    assert (measures["rc"], measures["figures"]) == (0, [{"ms": 1.5}])
    assert "hangs: out of time" in capsys.readouterr().out
    assert script.run_all(steps[2:], tmp_path / "report.json", {}) == 0
