"""Runs that failed, kept so that they alone can be tried again."""

from __future__ import annotations

import json
from pathlib import Path

from fixpoint.training.engine.checkpoint import replace_file

FAILED = "failed.json"
"""File of the reasons, by key of the run, in the folder of `runs.jsonl`."""


def read_failed(out: Path) -> dict[str, str]:
    """Return the reason of each run that failed, by its key."""
    path = out / FAILED
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        found = {}
    return found if isinstance(found, dict) else {}


def write_failed(out: Path, failed: dict[str, str], tried: set[str]) -> None:
    """Note the runs that failed now; the others keep their earlier reason."""
    kept = {key: reason for key, reason in read_failed(out).items() if key not in tried}
    if kept | failed:
        replace_file(out / FAILED, json.dumps(kept | failed, indent=1).encode())
    else:
        (out / FAILED).unlink(missing_ok=True)
