"""Files of the UCR and UEA archives of time series: .tsv, .txt and .ts."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

_PARTS = {"": "TRAIN", "_test": "TEST"}
_ADVICE = "get a fresh copy"


def is_archive_file(path: Path) -> bool:
    """Tell whether a file is one of such an archive, by its name.

    >>> is_archive_file(Path("GunPoint_TRAIN.tsv")), is_archive_file(Path("walk.tsv"))
    (True, False)
    """
    named = re.search(r"_(TRAIN|TEST)$", path.stem) is not None
    return path.suffix == ".ts" or (path.suffix in (".tsv", ".txt") and named)


def archive_file_in(folder: Path) -> Path | None:
    """Return NAME_TRAIN of a folder with one pair, as the archives have; None of another folder."""
    for suffix in (".ts", ".tsv", ".txt"):
        found = sorted(folder.glob(f"*_TRAIN{suffix}"))
        if len(found) == 1:
            return found[0]
    return None


def read_archive_file(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a pair NAME_TRAIN, NAME_TEST, as those of an .npz file (see `load`).

    Either file may be given; without the other one it is all. Shorter series are padded, with
    `lengths`. Missing values are NaN.

    Raises:
        ValueError: a line is not a series with a class.
    """
    stem, named, _ = path.stem.rpartition("_")
    files = {end: path.with_stem(f"{stem}_{part}") for end, part in _PARTS.items()}
    if not named or not all(file.is_file() for file in files.values()):
        files = {"": path}
    read = _read_ts if path.suffix == ".ts" else _read_tsv
    series = {end: read(file) for end, file in files.items()}
    longest = max(len(x) for rows in series.values() for x, _ in rows)
    shortest = min(len(x) for rows in series.values() for x, _ in rows)
    arrays: dict[str, np.ndarray] = {}
    for end, rows in series.items():
        arrays[f"x{end}"] = np.stack([np.pad(x, ((0, longest - len(x)), (0, 0))) for x, _ in rows])
        arrays[f"y{end}"] = np.array([label for _, label in rows])
        if shortest < longest:
            arrays[f"lengths{end}"] = np.array([len(x) for x, _ in rows])
    return arrays


def _lines(path: Path) -> list[tuple[int, str]]:
    text = path.read_bytes().decode("utf-8", "replace").lstrip("\ufeff")
    lines = [(n, line.strip()) for n, line in enumerate(text.splitlines(), 1)]
    return [(n, line) for n, line in lines if line and not line.startswith("#")]


def _read_tsv(path: Path) -> list[tuple[np.ndarray, str]]:
    """Return lines of a class and the values of a series, which end with NaN where they are
    shorter.
    """
    rows = []
    for n, line in _lines(path):
        label, *cells = re.split(r"[\s,]+", line)
        values = _numbers(cells, f"{path}, line {n}")
        known = np.flatnonzero(~np.isnan(values))
        if not len(known):
            raise ValueError(f"{path}, line {n} has no values: {_ADVICE}")
        rows.append((values[: known[-1] + 1, None], _class_name(label)))
    return _some(rows, path)


def _read_ts(path: Path) -> list[tuple[np.ndarray, str]]:
    """Read the lines below @data: channels between colons, the class at last."""
    lines = _lines(path)
    tags = {
        line.split()[0].lower(): line.lower().split()[1:] for _, line in lines if line[0] == "@"
    }
    if tags.get("@timestamps", ["false"])[0] == "true":
        raise ValueError(f"{path} has time stamps, which are not read: save it without them")
    if "@targetlabel" in tags or tags.get("@classlabel", ["true"])[0] == "false":
        raise ValueError(f"{path} has no classes, as its header says; regression is not offered")
    rows = []
    for n, line in lines:
        if line[0] == "@":
            continue
        *channels, label = line.split(":")
        parts = [_numbers(channel.split(","), f"{path}, line {n}") for channel in channels]
        if not parts or len({len(part) for part in parts}) > 1:
            raise ValueError(f"{path}, line {n}: all channels of a series need one length")
        rows.append((np.stack(parts, 1), _class_name(label.strip())))
    return _some(rows, path)


def _some(rows: list[tuple[np.ndarray, str]], path: Path) -> list[tuple[np.ndarray, str]]:
    if not rows:
        raise ValueError(f"{path} has no series: {_ADVICE}")
    real = [label for _, label in rows if re.fullmatch(r"[+-]?\d*\.\d+(e[+-]?\d+)?", label, re.I)]
    if real:
        raise ValueError(
            f"{path} has real numbers in the place of classes, as {real[0]}; regression is not "
            "offered"
        )
    return rows


def _numbers(cells: list[str], where: str) -> np.ndarray:
    try:
        return np.array([np.nan if c.strip() == "?" else float(c) for c in cells], np.float64)
    except ValueError as error:
        raise ValueError(f"{where} is not a series of numbers ({error}): {_ADVICE}") from None


def _class_name(label: str) -> str:
    """Return a class that is a number without a point where it is whole."""
    try:
        number = float(label)
    except ValueError:
        return label
    return str(int(number)) if number.is_integer() else label
