"""`fixpoint predict`: classes and scores of new windows by a trained model."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from fixpoint._messages import unknown_name
from fixpoint.data import Cutting
from fixpoint.data.csv_folder import tables_in
from fixpoint.data.csv_table import parse_columns, parse_csv
from fixpoint.data.missing import fill_missing
from fixpoint.data.npz_file import read_user_npz
from fixpoint.data.recording_windows import cut_recordings
from fixpoint.data.recordings import TIMES, read_recording
from fixpoint.data.text_file import decode
from fixpoint.training.commands.console import say
from fixpoint.training.loading import Trained, load_trained
from fixpoint.training.prediction import Predictions
from fixpoint.training.results.table import FittingTable

FORMATS = ("table", "csv", "json")

STDIN = Path("-")


class Windows(NamedTuple):
    """Windows of a file, x (B, T, d) in the units of the sensor.

    starts: first sample of each window in the file, from 0.
    labels: true class of each, "" where it is not known.
    lengths: time steps of each, or None.
    notes: what a user should know of them.
    """

    name: str
    x: np.ndarray
    starts: Sequence[int]
    labels: Sequence[str]
    lengths: np.ndarray | None = None
    notes: tuple[str, ...] = ()


class Row(NamedTuple):
    """The prediction of one window."""

    file: str
    start: int
    truth: str
    name: str
    probabilities: list[float]
    scores: list[float]


def predict_files(
    console: Console, path: Path, files: Sequence[Path], *, form: str = "table"
) -> list[Row]:
    """Print the class of each window in files.

    Args:
        path: the folder of a run, or a checkpoint in it.
        files: .npz files, CSV files, folders of CSV files, or - for CSV on standard input.
        form: table, csv or json, an object a line.

    Raises:
        ValueError: the model takes other windows.
        OSError: a file is missing.
    """
    if form not in FORMATS:
        raise ValueError(unknown_name("format", form, FORMATS))
    run = load_trained(path)
    read = [windows for file in files for windows in _read(run, file)]
    rows = [row for windows in read for row in _rows(run, windows)]
    if form == "json":
        for row in rows:
            print(json.dumps(_as_object(row, run.form.classes), allow_nan=False))
    elif form == "csv":
        _write_csv(rows, run.form.classes)
    else:
        console.print(_table(rows, run))
        for text in (*_accuracy(rows, run.form.classes), *_notes(read)):
            say(console, text)
    return rows


def _rows(run: Trained, windows: Windows) -> Iterator[Row]:
    try:
        found: Predictions = run.predict(windows.x, windows.lengths)
    except ValueError as error:
        raise ValueError(f"{windows.name}: {error}") from None
    probabilities, scores = found.probabilities.tolist(), found.scores.tolist()
    for i, name in enumerate(found.names):
        yield Row(
            windows.name,
            int(windows.starts[i]),
            windows.labels[i],
            name,
            probabilities[i],
            scores[i],
        )


def _read(run: Trained, path: Path) -> Iterator[Windows]:
    path = path.expanduser()
    if path == STDIN:
        yield _read_table(run, sys.stdin.buffer.read(), "standard input")
    elif path.is_dir():
        files = tables_in(path)
        if not files:
            raise ValueError(f"{path} has no CSV files")
        for file in files:
            yield _read_table(run, file.read_bytes(), str(file))
    elif not path.is_file():
        raise FileNotFoundError(f"there is no file or folder {path}")
    elif path.suffix.lower() == ".npz":
        yield _read_npz(run, path)
    else:
        yield _read_table(run, path.read_bytes(), str(path))


def _read_npz(run: Trained, path: Path) -> Windows:
    arrays = read_user_npz(path)
    key = next((key for key in ("x", "x_test", "x_valid") if key in arrays), None)
    if key is None:
        raise ValueError(f"{path} has no x: it needs windows x (N, T, d)")
    if not len(arrays[key]):
        raise ValueError(f"{path}: {key} has no windows")
    x, end = arrays[key], key[1:]
    if run.recipe.windows.fill != "none" and x.dtype.kind == "f" and np.isnan(x).any():
        x = fill_missing(x, run.recipe.windows.fill)
    y = arrays.get(f"y{end}")
    labels = [""] * len(x) if y is None else [str(label) for label in y.tolist()]
    return Windows(str(path), x, range(len(x)), labels, arrays.get(f"lengths{end}"))


def _read_table(run: Trained, data: bytes, name: str) -> Windows:
    """Return the windows of a recording, or of a table of numbers alone, one after the other."""
    form, windows = run.form, run.recipe.windows
    # A table of a run of sequences is one of them, and a time among its channels is a number.
    alone = form.lengths or any(channel.lower() in TIMES for channel in form.channels)
    if windows.window is None and (alone or not _has_header(data, name, form.channels)):
        table = parse_csv(data, name)
        return _cut_numbers(run, table.ordered(form.channels, name, "the model takes"), name)
    columns = parse_columns(data, name, form.channels)
    cutting = Cutting(**asdict(windows))
    known = {
        option: getattr(cutting, option)
        for option in ("label", "subject", "time")
        if getattr(cutting, option) in columns
    }
    cutting = replace(
        Cutting(**known),
        window=form.timesteps,
        step=cutting.hop if windows.window else form.timesteps,
        channels=form.channels,
        fill=windows.fill,
    )
    recording = read_recording(columns, cutting, name)
    cut = cut_recordings([recording], cutting, by_label=False)
    return Windows(name, cut.x, cut.starts.tolist(), cut.labels.tolist(), None, cut.notes)


def _has_header(data: bytes, name: str, channels: Sequence[str]) -> bool:
    first = re.split(r"[\r\n]", decode(data, name), maxsplit=1)[0]
    return bool(channels) and first != "" and all(channel in first for channel in channels)


def _cut_numbers(run: Trained, values: np.ndarray, name: str) -> Windows:
    T, d = run.form.timesteps, run.form.size
    if values.shape[1] != d:
        raise ValueError(f"{name} has {values.shape[1]} columns, the model takes {d} channels")
    if run.form.lengths:
        return Windows(name, values[None], [0], [""])
    count, rest = divmod(len(values), T)
    if rest:
        raise ValueError(
            f"{name}: sample {len(values)} ends within a window of {T}: give whole windows, one "
            "after the other"
        )
    starts = range(0, len(values), T)
    return Windows(name, values.reshape(count, T, d), starts, [""] * count)


def _as_object(row: Row, classes: tuple[str, ...]) -> dict[str, Any]:
    known = row.name != ""
    return {
        "file": row.file,
        "start": row.start,
        "class": row.name if known else None,
        **({"truth": row.truth} if row.truth else {}),
        "probabilities": dict(zip(classes, row.probabilities, strict=True)) if known else None,
        "scores": dict(zip(classes, row.scores, strict=True)) if known else None,
    }


def _write_csv(rows: list[Row], classes: tuple[str, ...]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["file", "start", "truth", "class", *classes])
    for row in rows:
        writer.writerow([row.file, row.start, row.truth, row.name, *row.probabilities])


def _table(rows: list[Row], run: Trained) -> FittingTable:
    truth = any(row.truth for row in rows)
    files = len({row.file for row in rows}) > 1
    heads = ["start", "class", *(["truth"] if truth else []), *run.form.classes]
    lines = []
    for row in rows:
        cells = [str(row.start), row.name or "none: NaN or inf", *([row.truth] if truth else [])]
        cells += [f"{p:.3f}" for p in row.probabilities]
        lines.append(([row.file] if files else [], cells))
    title = f"{len(rows)} windows of {', '.join(dict.fromkeys(Path(r.file).name for r in rows))}"
    caption = "Below the name of each class is its probability."
    return FittingTable(title, ["file"] if files else [], heads, lines, caption)


def _notes(read: list[Windows]) -> list[str]:
    """Return the notes of all files, with the name of the file where there are several."""
    return [
        f"{windows.name}: {note}" if len(read) > 1 else f"Note: {note}."
        for windows in read
        for note in windows.notes
    ]


def _accuracy(rows: list[Row], classes: tuple[str, ...]) -> Iterator[str]:
    """Yield the accuracy over the windows of known class, and what it leaves out."""
    other = sorted({row.truth for row in rows} - {"", *classes})
    if other:
        yield (
            f"Note: the model has no class {', '.join(other)}: windows of such a class are not in "
            f"the accuracy; its classes are {', '.join(classes)}."
        )
    missing = sum(not row.name for row in rows)
    if missing:
        yield f"Note: {missing} windows hold missing values and have no class."
    known = [row for row in rows if row.truth in classes and row.name]
    if known:
        right = sum(row.truth == row.name for row in known) / len(known)
        yield f"Accuracy {100 * right:.2f} % of the {len(known)} windows whose class is known."
