"""Results of a comparison: one JSON line a run, appended when the run is finished."""

from __future__ import annotations

import json
import math
import os
import statistics
import warnings
from pathlib import Path
from typing import Any

from fixpoint.training.engine.checkpoint import replace_file
from fixpoint.training.recipe.names import run_label

Record = dict[str, Any]

_NEEDED = ("run", "label", "metric", "epochs", "contraction", "versions", "device", "threads")


class Records:
    """The file `runs.jsonl` in a folder, which is made if need be.

    Raises:
        OSError: the folder cannot be made or written.
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
            lines = self.path.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if not _has_key(line, key)]
            replace_file(self.path, b"".join(kept))

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
    """Return the records in a file, which is left as it is; a last line still being written is left
    out.

    Other lines that are not records are skipped, with a warning that names them.

    Raises:
        OSError: the file cannot be read.
    """
    records, bad = [], []
    lines = path.read_bytes().decode("utf-8", "replace").split("\n")
    for number, line in enumerate(lines[:-1], 1):
        record = _parse(line)
        if record is None:
            bad.append(str(number))
        else:
            records.append(record)
    if bad:
        which = f"line {bad[0]}" if len(bad) == 1 else f"lines {', '.join(bad)}"
        warnings.warn(f"{which} of {path}: not a record of a run, skipped", stacklevel=2)
    return records


def read_records(*sources: Path) -> list[Record]:
    """Return the records of finished runs in folders with a `runs.jsonl`, or in such files.

    Records that lack something are left out, with a warning that names them; a file given twice
    counts once.

    Raises:
        ValueError: there is no such file.
    """
    records: list[Record] = []
    read: set[Path] = set()
    for source in sources:
        if not source.exists():
            raise ValueError(f"there is no folder or file {source}: give the --out of a command")
        folder = source if source.is_dir() else source.parent
        path = folder / "runs.jsonl"
        if not path.is_file() or (source.is_file() and source.name != "runs.jsonl"):
            raise ValueError(
                f"{source} is not a folder with a runs.jsonl: give the --out of other commands"
            )
        if path.resolve() in read:
            continue
        read.add(path.resolve())
        # Other processes may append to it: the file is not touched.
        found = {record["key"]: record for record in read_file(path)}
        for key, record in found.items():
            lacking = [name for name in _NEEDED if name not in record]
            if lacking:
                what = f"the record {key} in {path} lacks {', '.join(lacking)}, left out"
                warnings.warn(what, stacklevel=2)
            else:
                records.append(record)
    return records


def open_records(out: Path) -> Records:
    """Return the records in the folder that --out names.

    Raises:
        OSError: it cannot be made or written; the message says what to do.
    """
    try:
        return Records(out)
    except OSError as error:
        raise OSError(
            f"--out must be a folder that can be written; {out} cannot ({error.strerror}): give "
            "another one"
        ) from None


def _has_key(line: bytes, key: str) -> bool:
    record = _parse(line.decode("utf-8", "replace"))
    return record is not None and record["key"] == key


def _parse(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("key"), str):
        return None
    if isinstance(record.get("run"), dict):
        record["label"] = run_label(record["run"])
    epochs = record.get("epochs")
    if isinstance(epochs, list) and all(isinstance(e, dict) and "seconds" in e for e in epochs):
        # Records of earlier versions have a mean with the first epoch, which compiles.
        record["seconds_per_epoch"] = seconds_per_epoch([e["seconds"] for e in epochs])
    return record


def seconds_per_epoch(seconds: list[float]) -> float | None:
    """Return the median over the epochs after the first, which may compile; of one epoch its own.

    >>> seconds_per_epoch([24.06, 0.45, 0.47, 0.44])
    0.45
    """
    return statistics.median(seconds[1:] or seconds) if seconds else None


def _standard(value: Any) -> Any:
    """Return the value with NaN and inf, which JSON does not have, as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _standard(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_standard(part) for part in value]
    return value
