"""The results of a comparison: one JSON line a run, appended when the run is finished."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Records:
    """The file `runs.jsonl` in a folder, which is made if need be.

    Raises:
        OSError: the folder cannot be made or written.
        ValueError: a line that is not the last one is no JSON.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "runs.jsonl"
        with self.path.open("a"):
            pass
        self.by_key = {record["key"]: record for record in self._read()}

    def append(self, record: Record) -> None:
        """Add a record, on disk before this returns."""
        self.by_key[record["key"]] = record
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> list[Record]:
        text = self.path.read_text()
        lines = text.split("\n")
        if lines[-1]:
            # Killed while writing: drop the broken end, so that the next line starts afresh.
            self.path.write_text(text[: len(text) - len(lines[-1])])
        records = []
        for number, line in enumerate(lines[:-1], 1):
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                raise ValueError(
                    f"line {number} of {self.path} is no JSON: remove that line, or use another "
                    "--out folder"
                ) from None
        return records
