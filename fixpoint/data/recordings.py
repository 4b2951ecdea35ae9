"""Long recordings, tables with a line a sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fixpoint._messages import no_channel, unknown_name
from fixpoint.data.csv_folder import tables_in
from fixpoint.data.csv_table import parse_columns, unnamed_column
from fixpoint.data.recording_cells import read_classes, read_names, read_numbers, read_times

Fill = Literal["none", "hold", "linear"]

TIMES = ("time", "timestamp", "datetime", "date")
_INDEX = {"": "the first column, which has no name", "Unnamed: 0": "Unnamed: 0"}
"""Names of an index written by pandas, and their names in notes."""


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """Length and step of windows, and the columns of a recording.

    Args:
        window: samples T of a window.
        step: samples from one window to the next; half a window if None.
        label: column of the class of each sample. Of a folder without it, the class of a file is
            the name of its folder.
        subject: column of the person. Of a folder without it the person is the file, or the folder
            that it is in.
        time: column of the time; one called time, timestamp, datetime or date if None.
        channels: columns to learn from; if empty, all others that hold numbers.
        fill: "hold" fills missing values by the last one, "linear" by a line between neighbors.
    """

    window: int | None = None
    step: int | None = None
    label: str | None = None
    subject: str | None = None
    time: str | None = None
    channels: tuple[str, ...] = ()
    fill: Fill = "none"

    @property
    def hop(self) -> int:
        """Samples from one window to the next."""
        assert self.window is not None
        return self.step or max(1, self.window // 2)


class Recording(NamedTuple):
    """Samples in the order of time, one person after the other.

    values: (N, d) float64, NaN where they are missing. channels: names of the columns.
    labels: class of each sample, "" where it has none, (N,), or None.
    subjects: person of each sample (N,), or None.
    times: (N,) float64, or None.
    unread: columns that are not learned from.
    places: place of each sample in the table (N,), or None where all are in its order.
    """

    name: str
    values: np.ndarray
    channels: tuple[str, ...]
    labels: np.ndarray | None
    subjects: np.ndarray | None
    times: np.ndarray | None
    unread: tuple[str, ...] = ()
    places: np.ndarray | None = None


def read_recording(table: Mapping[str, Any], cutting: Cutting, name: str) -> Recording:
    """Return a recording of columns by name: lists of text or numbers, arrays, a data frame.

    Raises:
        ValueError: a column is missing or, but for the first, has no name, a channel holds text, or
            the label real numbers.
    """
    if not isinstance(table, Mapping) and not hasattr(table, "columns"):
        raise TypeError(
            "a recording must be a file, a folder, a data frame or a mapping of columns by name; "
            f"got {type(table).__name__}"
        )
    keys = [str(key) for key in table]
    if "" in keys[1:]:
        raise ValueError(unnamed_column(name, keys.index("", 1) + 1))
    columns = _columns(table, cutting)
    if not all(map(len, columns.values())):
        raise ValueError(f"{name} has no samples")
    for option in ("label", "subject", "time"):
        wanted = getattr(cutting, option)
        if wanted is not None and wanted not in columns:
            raise ValueError(f"{name}: {unknown_name(f'column for --{option}', wanted, columns)}")
    named = [c for c in (cutting.label, cutting.subject, cutting.time) if c is not None]
    if len(set(named)) < len(named):
        raise ValueError(f"{name}: --label, --subject and --time must name different columns")
    time = cutting.time or next((c for c in columns if c.lower() in TIMES), None)
    other = {cutting.label, cutting.subject, time, *_INDEX}
    numbers = {}
    for key in cutting.channels or [key for key in columns if key not in other]:
        if key not in columns:
            raise ValueError(no_channel(name, key, columns))
        values, texts = read_numbers(columns[key])
        if not len(texts):
            numbers[key] = values
        elif cutting.channels or 2 * len(texts) < len(values):
            n = int(texts[0])
            raise ValueError(
                f"{name}: the channel {key!r} holds text, not numbers: {str(columns[key][n])!r} in "
                f"sample {n + 1}: correct it"
                + ("" if cutting.channels else ", or learn from other columns by --channels")
            )
    if not numbers:
        raise ValueError(f"{name} has no column of numbers to learn from")
    unread = tuple(k for k in columns if k not in other and k not in numbers)
    unread += tuple(_INDEX[k] for k in columns if k in _INDEX and k not in named)
    label = cutting.label
    recording = Recording(
        name,
        np.stack(list(numbers.values()), 1),
        tuple(numbers),
        None if label is None else read_classes(columns[label], label, name),
        None if cutting.subject is None else read_names(columns[cutting.subject]),
        None if time is None else read_times(columns[time], f"{name}: the column {time!r}"),
        unread if not cutting.channels else (),
    )
    return _by_person(recording)


def _by_person(recording: Recording) -> Recording:
    """Return the samples of each person together, where times show what does not belong together.

    Tables in the order of time have the persons in turn.
    """
    people, times = recording.subjects, recording.times
    if people is None or times is None:
        return recording
    _, first, number = np.unique(people, return_index=True, return_inverse=True)
    places = np.argsort(first[number], kind="stable")
    labels = None if recording.labels is None else recording.labels[places]
    return recording._replace(
        values=recording.values[places],
        labels=labels,
        subjects=people[places],
        times=times[places],
        places=places,
    )


def _columns(table: Mapping[str, Any], cutting: Cutting) -> dict[str, np.ndarray]:
    """Return the columns by name; the index of a data frame is one if it is named or a time."""
    columns = {str(key): np.asarray(table[key]) for key in table}
    index = getattr(table, "index", None)
    dated = getattr(getattr(index, "dtype", None), "kind", "") == "M"
    key = str(getattr(index, "name", None) or ("time" if dated else ""))
    wanted = dated or key.lower() in TIMES or key in (cutting.label, cutting.subject, cutting.time)
    return {key: np.asarray(index)} | columns if wanted else columns


def read_recordings(path: Path, cutting: Cutting) -> list[Recording]:
    """Return the recordings in a file, or in all files of a folder.

    Raises:
        ValueError: a file is not a table with a header, or files differ in their columns.
    """
    files = tables_in(path) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} has no CSV files: give the folder of the recordings")
    found: list[Recording] = []
    for file in files:
        recording = read_recording(parse_columns(file.read_bytes(), str(file)), cutting, str(file))
        size = len(recording.values)
        if path.is_dir() and cutting.label is None:
            recording = recording._replace(labels=np.full(size, file.parent.name))
        if path.is_dir() and recording.subjects is None and cutting.label is not None:
            inner = file.relative_to(path)
            person = inner.parts[0] if len(inner.parts) > 1 else file.stem
            recording = recording._replace(subjects=np.full(size, person))
        if found and recording.channels != found[0].channels:
            raise ValueError(
                f"{file} has the channels {', '.join(recording.channels)}, but {files[0]} has "
                f"{', '.join(found[0].channels)}: name those to learn from by --channels"
            )
        found.append(recording)
    return found
