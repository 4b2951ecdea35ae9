"""Look at a GPU in under 8 minutes, the most telling part first, and write what is found at once.

    scripts/gpu_check.sh [--dry-run | --rehearse] [--out FOLDER]

report.json is written after each line that a part prints: the name of each part, its exit status
(null where it ran out of time), seconds, also to its first result, its results, and the end of its
output. The first five parts need torch, numpy and triton alone. --rehearse runs these on the CPU,
at tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
TOTAL = 470.0  # seconds
TAIL = 4000  # characters of output that are kept


class Step(NamedTuple):
    """A command, and its limit in seconds; what it leaves of the time serves the next ones."""

    name: str
    limit: float
    command: list[str]

    @property
    def tool(self) -> str | None:
        """A program that need not be there."""
        return None if self.command[0] == sys.executable else self.command[0]


def part(name: str, limit: float, *, rehearse: bool) -> Step:
    options = ["--rehearse"] if rehearse else []
    limit = 2 * limit if rehearse else limit  # of a machine that does other things beside it
    return Step(name, limit, [sys.executable, "scripts/gpu_parts.py", name, *options])


def sanitizer(tool: str) -> Step:
    """Races or accesses out of bounds, at sizes with padding, and with tiles in the cache."""
    few = [sys.executable, "scripts/gpu_parts.py", "few"]
    return Step(tool, 30, ["compute-sanitizer", "--tool", tool, *few])


def steps(out: Path, *, rehearse: bool = False) -> list[Step]:
    """In order of importance: what comes last is what is lost when time runs out."""
    parts = [
        part("kernels", 90, rehearse=rehearse),
        part("layers", 40, rehearse=rehearse),
        part("speed", 80, rehearse=rehearse),
        part("solvers", 45, rehearse=rehearse),
        part("graph", 55, rehearse=rehearse),
    ]
    if rehearse:
        return parts
    junit = f"--junitxml={out / 'tests.xml'}"
    pytest = ["-m", "pytest", "-m", "gpu", "-n", "4", "-p", "no:cacheprovider", junit, "tests"]
    return [
        *parts,
        sanitizer("racecheck"),
        sanitizer("memcheck"),
        Step("tests", 100, [sys.executable, *pytest]),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="list the parts")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, at tiny sizes")
    parser.add_argument("--out", type=Path, default=Path("gpu_report"), help="folder of the report")
    options = parser.parse_args()
    planned = steps(options.out.resolve(), rehearse=options.rehearse)
    if options.dry_run:
        for step in planned:
            print(f"{step.limit:4.0f} s  {step.name}: {' '.join(step.command[1:])}")
        return 0
    import torch

    if not (options.rehearse or torch.cuda.is_available()):
        print("gpu_check needs a CUDA device and a CUDA build of torch (--dry-run lists its parts)")
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    return run_all(planned, options.out / "report.json")


def run_all(planned: list[Step], report: Path) -> int:
    """Run the parts, write the report as they go, and return 1 where one failed."""
    start, results = time.monotonic(), []
    for step in planned:
        results.append({"name": step.name, "command": step.command, "rc": None, "results": []})
        if step.tool and shutil.which(step.tool) is None:
            results[-1] |= {"rc": 0, "seconds": 0.0, "output": f"{step.tool} is not here"}
        else:
            left = TOTAL - (time.monotonic() - start)
            run(step, min(step.limit, left), results[-1], lambda: write(report, results))
        write(report, results)
        status = "out of time" if results[-1]["rc"] is None else f"exit {results[-1]['rc']}"
        print(f"{results[-1]['seconds']:6.1f} s  {step.name}: {status}", flush=True)
    return int(any(result["rc"] != 0 for result in results))


def write(report: Path, results: list[dict[str, Any]]) -> None:
    new = report.with_suffix(".part")
    new.write_text(json.dumps({"parts": results}, indent=1) + "\n", encoding="utf-8")
    os.replace(new, report)


def run(step: Step, limit: float, result: dict[str, Any], note: Any) -> None:
    """Fill the result of one part; one that is out of time is ended with all its processes."""
    begin, text = time.monotonic(), ""
    process = subprocess.Popen(
        step.command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        rest = b""
        while (left := begin + limit - time.monotonic()) > 0:
            if not ready.select(left):
                continue
            if not (data := process.stdout.read()):
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                text += _note(line, result, note)
                if result["results"]:
                    result.setdefault("first_s", round(time.monotonic() - begin, 1))
    if process.poll() is None and time.monotonic() - begin < limit:
        process.wait(max(0.1, begin + limit - time.monotonic()))
    result["rc"] = process.poll()
    if result["rc"] is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    process.stdout.close()
    text += rest.decode(errors="replace")
    result |= {"seconds": round(time.monotonic() - begin, 1), "output": text[-TAIL:]}


def _note(line: bytes, result: dict[str, Any], note: Any) -> str:
    """Keep a line that is a result, and return any other."""
    try:
        found = json.loads(line)
    except ValueError:
        return line.decode(errors="replace") + "\n"
    if not isinstance(found, dict):
        return line.decode(errors="replace") + "\n"
    result["results"].append(found)
    note()
    return ""


if __name__ == "__main__":
    sys.exit(main())
