"""Sequences in a folder: a folder for each class, a CSV file for each sequence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fixpoint.data.csv_table import CsvTable, parse_csv

_PARTS = {
    **dict.fromkeys(("train", "training"), ""),
    **dict.fromkeys(("valid", "validation", "val", "dev"), "_valid"),
    **dict.fromkeys(("test", "testing"), "_test"),
}


class FolderData(NamedTuple):
    """Arrays as those of an .npz file (see `fixpoint.data.load`), and notes for the user.

    channels: names of the columns, or empty.
    """

    arrays: dict[str, np.ndarray]
    notes: tuple[str, ...]
    channels: tuple[str, ...] = ()


def read_folder(path: Path) -> FolderData:
    """Read a folder of CSV files.

    The arrays are x (N, T, d) float64 and y (N,), and lengths (N,) if the sequences differ in
    length: they are padded with zeros to the longest. With the folders `train` and `valid` or
    `test` above those of the classes there are arrays of each part. Columns are in the order of
    names of the first file with a header; a file without one is taken by position.

    Raises:
        ValueError: there is no CSV file, a file is not a numeric table, or two files differ in
            their number of columns or in their names.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     for label in ("down", "up"):
    ...         Path(name, label).mkdir()
    ...         _ = Path(name, label, "1.csv").write_text("a,b\\n1,2\\n3,4\\n5,6\\n")
    ...     read_folder(Path(name)).arrays["x"].shape
    (2, 3, 2)
    """
    parts = _parts(path)
    files = {end: list(_files_of_classes(folder)) for end, folder in parts.items()}
    for end, folder in parts.items():
        if not files[end]:
            raise ValueError(
                f"{folder} has no CSV files{_found_instead(folder)}: it needs a folder for each "
                "class, with a file NAME.csv for each sequence; or give window and label to cut "
                "recordings, as --window 128 --label activity"
            )
    paths = [file for found in files.values() for file in found]
    tables = dict(zip(paths, _without_header([_read(file) for file in paths]), strict=True))
    _check_columns(tables)
    tables, channels = _in_one_order(tables)
    steps = {file: len(table.values) for file, table in tables.items()}
    longest = max(steps.values())
    arrays: dict[str, np.ndarray] = {}
    for end, found in files.items():
        arrays[f"x{end}"] = np.stack([_padded(tables[file].values, longest) for file in found])
        arrays[f"y{end}"] = np.array([file.parent.name for file in found])
        if min(steps.values()) < longest:
            arrays[f"lengths{end}"] = np.array([steps[file] for file in found])
    return FolderData(arrays, _notes(path, parts, tables), channels)


def csv_files(path: Path, endings: tuple[str, ...] = (".csv",)) -> list[Path]:
    """Return all CSV files below a folder that are not hidden, sorted.

    >>> csv_files(Path(__file__).parent)
    []
    """
    files = (file for file in path.rglob("*") if file.suffix.lower() in endings and file.is_file())
    return sorted(f for f in files if not any(map(_is_hidden, f.relative_to(path).parts)))


def tables_in(path: Path) -> list[Path]:
    """Return the CSV files below a folder, or where there are none its .tsv and .txt files."""
    return csv_files(path) or csv_files(path, (".tsv", ".txt"))


def _is_hidden(name: str) -> bool:
    """Tell whether a file or folder is hidden, a lock of an office program, or added by macOS."""
    return name.startswith((".", "~$")) or name == "__MACOSX"


def _visible(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if not _is_hidden(entry.name))


def _sequences(folder: Path) -> list[Path]:
    """Return the CSV files of a class."""
    return [f for f in _visible(folder) if f.suffix.lower() == ".csv" and f.is_file()]


def _files_of_classes(path: Path) -> Iterator[Path]:
    for folder in _visible(path):
        if folder.is_dir():
            yield from _sequences(folder)


def _parts(path: Path) -> dict[str, Path]:
    """Return the folder of each part by the end of its arrays' names; one of all where there are
    none.

    A folder `train` alone is all.
    """
    found: dict[str, Path] = {}
    for folder in _visible(path):
        end = _PARTS.get(folder.name.lower())
        if end is not None and folder.is_dir() and not _sequences(folder):
            if end in found:
                raise ValueError(f"{found[end]} and {folder} are the same part: merge them")
            found[end] = folder
    if "" in found and (len(found) > 1 or not any(_files_of_classes(path))):
        return dict(sorted(found.items()))
    return {"": path}


def _found_instead(folder: Path) -> str:
    """Say where the files of a folder without sequences are; "" where there are none."""
    files = (f for f in sorted(folder.rglob("*")) if f.is_file())
    names = (f.relative_to(folder) for f in files)
    shown = next((n for n in names if not any(map(_is_hidden, n.parts))), None)
    return "" if shown is None else f" in folders of classes, but {shown}"


def _read(file: Path) -> CsvTable:
    return parse_csv(file.read_bytes(), str(file))


def _without_header(tables: list[CsvTable]) -> list[CsvTable]:
    """Return the tables without line 1 where it is the header 0, 1, ..., d - 1 in all of them."""
    if not all(table.counting_header for table in tables):
        return tables
    return [table._replace(values=table.values[1:]) for table in tables]


def _check_columns(tables: dict[Path, CsvTable]) -> None:
    first = next(iter(tables))
    for file, table in tables.items():
        width, expected = table.values.shape[1], tables[first].values.shape[1]
        if width != expected:
            raise ValueError(
                f"{file} has {width} columns, but {first} has {expected}: all sequences need the "
                "same channels"
            )


def _in_one_order(
    tables: dict[Path, CsvTable],
) -> tuple[dict[Path, CsvTable], tuple[str, ...]]:
    """Return the tables with their columns in the order of the first header, and its names."""
    first = next((file for file, table in tables.items() if table.names), None)
    if first is None:
        return tables, ()
    names = tables[first].names
    return {
        file: table._replace(values=table.ordered(names, str(file), f"{first} has"))
        for file, table in tables.items()
    }, names


def _padded(values: np.ndarray, steps: int) -> np.ndarray:
    return np.pad(values, ((0, steps - len(values)), (0, 0)))


def _notes(path: Path, parts: dict[str, Path], tables: dict[Path, CsvTable]) -> tuple[str, ...]:
    """Return what was not read, and what a user should verify in the first file that has such a
    note.
    """
    unread = sorted(
        str(entry.relative_to(path))
        for folder in {path, *parts.values(), *(file.parent for file in tables)}
        for entry in _visible(folder)
        if entry not in tables
        and entry not in parts.values()
        and not any(entry in file.parents for file in tables)
    )
    notes = []
    if unread:
        shown = ", ".join(unread[:3]) + (f" and {len(unread) - 3} more" if len(unread) > 3 else "")
        notes.append(f"not read: {shown}")
    doubts = {table.note: file for file, table in reversed(tables.items()) if table.note}
    notes += [f"{file.name}: {note}" for note, file in list(doubts.items())[-1:]]
    return tuple(notes)
