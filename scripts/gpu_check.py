"""Run every test and benchmark that needs a GPU, each within its own time limit.

    scripts/gpu_check.sh [--dry-run] [--out FILE]

The report is written after each step: versions, the device, and of each step its name, exit status
(null where it ran out of time), seconds, the end of its output, and the figures of a benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
TOTAL = 470.0  # seconds
TAIL = 4000  # characters of output that are kept


class Step(NamedTuple):
    """A command, by its arguments after `python`, and its limit in seconds.

    has_figures: whether it takes `--json`.
    """

    name: str
    limit: float
    command: list[str]
    has_figures: bool = False


def gpu_tests(name: str, limit: float, path: str, *, processes: int = 8) -> Step:
    options = ["-m", "gpu", "-n", str(processes), "-p", "no:cacheprovider", "--durations=5"]
    return Step(name, limit, ["-m", "pytest", path, *options])


def benchmark(name: str, limit: float) -> Step:
    command = [f"benchmarks/{name}.py", "--device", "cuda", "--quick"]
    return Step(f"benchmark of {name}", limit, command, has_figures=True)


STEPS = [
    gpu_tests("equilibrium kernels", 60, "tests/models/ops/test_equilibrium_triton.py"),
    gpu_tests("solvers, layers, autocast, training", 60, "tests/test_devices.py"),
    benchmark("equilibrium", 80),
    gpu_tests("leaky kernels", 70, "tests/models/ops/test_leaky_triton.py"),
    benchmark("recurrent", 80),
    gpu_tests("scan of a sequence", 20, "tests/sequence/test_triton.py", processes=2),
    gpu_tests("distributed", 30, "tests/test_distributed.py", processes=0),
    benchmark("sequence", 40),
    benchmark("solvers", 30),
]
"""In order of importance: what comes last is what is lost when time runs out."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="list the steps")
    parser.add_argument("--out", type=Path, default=Path("gpu_report.json"), help="the report")
    options = parser.parse_args()
    if options.dry_run:
        for step in STEPS:
            print(f"{step.limit:4.0f} s  {step.name}: python {' '.join(step.command)}")
        return 0
    import torch

    if not torch.cuda.is_available():
        print("gpu_check needs a CUDA device and a CUDA build of torch (--dry-run lists its steps)")
        return 1
    from fixpoint.cli.info import environment

    return run_all(STEPS, options.out, environment())


def run_all(steps: list[Step], out: Path, environment: dict[str, Any]) -> int:
    """Run the steps, write the report after each, and return 1 where one failed."""
    start, results = time.monotonic(), []
    for step in steps:
        left = TOTAL - (time.monotonic() - start)
        results.append(run(step, min(step.limit, left)))
        report = {"environment": environment, "steps": results}
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        status = "out of time" if results[-1]["rc"] is None else f"exit {results[-1]['rc']}"
        print(f"{results[-1]['seconds']:6.1f} s  {step.name}: {status}", flush=True)
    return int(any(result["rc"] != 0 for result in results))


def run(step: Step, limit: float) -> dict[str, Any]:
    """The outcome of one step; a step that is out of time is ended with all its processes."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        figures, log = Path(folder, "figures.jsonl"), Path(folder, "log")
        command = [sys.executable, *step.command]
        if step.has_figures:
            command += ["--json", str(figures)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
            )
            try:
                rc: int | None = process.wait(max(0.0, limit))
            except subprocess.TimeoutExpired:
                rc = None
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = log.read_text(encoding="utf-8", errors="replace")
        lines = figures.read_text(encoding="utf-8").splitlines() if figures.is_file() else []
    return {
        "name": step.name,
        "command": step.command,
        "rc": rc,
        "seconds": round(time.monotonic() - begin, 1),
        "figures": [json.loads(line) for line in lines if line.endswith("}")],
        "output": text[-TAIL:],
    }


if __name__ == "__main__":
    sys.exit(main())
