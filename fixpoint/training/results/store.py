"""The results of a comparison: one JSON line a run, appended when the run is finished."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from fixpoint.training.engine.checkpoint import replace_file
from fixpoint.training.recipe.names import run_label
from fixpoint.training.recipe.schema import FORMER

Record = dict[str, Any]

_NEEDED = ("run", "label", "metric", "epochs", "contraction", "versions", "device", "threads")

_FORMER = FORMER | {
    "share_converged": "fraction_converged",
    "share_holding": "fraction_holding",
}


class Records:
    """The file `runs.jsonl` in a folder, which is made if need be.

    Raises:
        OSError: the folder cannot be made or written.
        ValueError: a line that is not the last one is not a valid record.
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
    """The records in a file, which is left as it is; a last line still being written is left out.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line that is not the last one is not a valid record.
    """
    records = []
    lines = path.read_bytes().decode("utf-8", "replace").split("\n")
    for number, line in enumerate(lines[:-1], 1):
        record = _parse(line)
        if record is None:
            raise ValueError(
                f"line {number} of {path} is not a valid record: remove that line, or use another "
                "--out folder"
            )
        records.append(record)
    return records


def read_records(*sources: Path) -> list[Record]:
    """The records of finished runs in folders with a `runs.jsonl`, or in such files.

    Raises:
        ValueError: there is no such file, or a line in it is not a record of a run.
    """
    records: list[Record] = []
    for source in sources:
        folder = source if source.is_dir() else source.parent
        path = folder / "runs.jsonl"
        if not path.is_file() or (source.is_file() and source.name != "runs.jsonl"):
            raise ValueError(
                f"{source} is not a folder with a runs.jsonl: give the --out of other commands"
            )
        # Other processes may append to it: the file is not touched.
        found = {record["key"]: record for record in read_file(path)}
        for key, record in found.items():
            lacking = [name for name in _NEEDED if name not in record]
            if lacking:
                raise ValueError(
                    f"the record {key} in {path} lacks {', '.join(lacking)}: remove that line"
                )
        records += found.values()
    return records


def open_records(out: Path) -> Records:
    """The records in the folder that --out names.

    Raises:
        OSError: it cannot be made or written; the message says what to do.
        ValueError: a line in it is not a valid record.
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
    record = _renamed(record)
    if isinstance(record.get("run"), dict):
        record["label"] = run_label(record["run"])
    return record


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
