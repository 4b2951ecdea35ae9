"""The results of a comparison: one JSON line a run, appended when the run is finished."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from fixpoint.training.engine.checkpoint import replace_file
from fixpoint.training.recipe.schema import FORMER

Record = dict[str, Any]

_FORMER = FORMER | {
    "share_converged": "fraction_converged",
    "share_holding": "fraction_holding",
}


class Records:
    """The file `runs.jsonl` in a folder, which is made if need be.

    Raises:
        OSError: the folder cannot be made or written.
        ValueError: a line that is not the last one is no record.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "runs.jsonl"
        with self.path.open("a"):
            pass
        self.by_key = {record["key"]: record for record in self._read()}

    def forget(self, key: str) -> None:
        """Take the records of a key out of the file."""
        if self.by_key.pop(key, None) is not None:
            kept = [json.dumps(r, allow_nan=False) + "\n" for r in self._read() if r["key"] != key]
            replace_file(self.path, "".join(kept).encode())

    def append(self, record: Record) -> None:
        """Add a record, on disk before this returns."""
        record = _standard(record)
        self.by_key[record["key"]] = record
        with self.path.open("a") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> list[Record]:
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            # Killed while writing: drop the broken end, so that the next line starts afresh.
            self.path.write_bytes(whole)
        return read_file(self.path)


def read_file(path: Path) -> list[Record]:
    """The records in a file, which is left as it is; a last line still being written is none.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line that is not the last one is no record.
    """
    records = []
    lines = path.read_bytes().decode("utf-8", "replace").split("\n")
    for number, line in enumerate(lines[:-1], 1):
        record = _parse(line)
        if record is None:
            raise ValueError(
                f"line {number} of {path} is no record: remove that line, or use another "
                "--out folder"
            )
        records.append(record)
    return records


def open_records(out: Path) -> Records:
    """The records in the folder that --out names.

    Raises:
        OSError: it cannot be made or written; the message says what to do.
        ValueError: a line in it is no record.
    """
    try:
        return Records(out)
    except OSError as error:
        raise OSError(
            f"--out must be a folder that can be written; {out} cannot ({error.strerror}): give "
            "another one"
        ) from None


def _parse(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    if not isinstance(record, dict) or "key" not in record:
        return None
    return _renamed(record)


def _renamed(record: Record) -> Record:
    """The record, and each object in it, with the names of today."""
    return {
        _FORMER.get(name, name): _renamed(value) if isinstance(value, dict) else value
        for name, value in record.items()
    }


def _standard(value: Any) -> Any:
    """The value with NaN and inf, which JSON does not have, as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _standard(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_standard(part) for part in value]
    return value
