"""Long recordings, tables with a line a sample, cut into windows."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fixpoint._messages import unknown_name
from fixpoint.data.csv_folder import tables_in
from fixpoint.data.csv_table import parse_columns
from fixpoint.data.missing import fill_missing

Fill = Literal["none", "hold", "linear"]

_TIMES = ("time", "timestamp", "datetime", "date")
_INDEX = ("", "Unnamed: 0")
_MISSING = ("", "nan", "na", "n/a", "null", "none", "?")
_GAP = 1.5
"""A step of time longer than this many usual ones is a gap."""
_TEST = 0.2


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

    values: (N, d) float64. channels: names of the columns.
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


class Cut(NamedTuple):
    """Windows x (N, T, d), where each begins, and the recordings' remarks."""

    x: np.ndarray
    labels: np.ndarray
    subjects: np.ndarray
    starts: np.ndarray
    notes: tuple[str, ...]


def read_recording(table: Mapping[str, Any], cutting: Cutting, name: str) -> Recording:
    """Return a recording of columns by name: lists of text or numbers, arrays, a data frame.

    Raises:
        ValueError: a column is missing, a channel holds text, or the label real numbers.
    """
    if not isinstance(table, Mapping) and not hasattr(table, "columns"):
        raise TypeError(
            "a recording must be a file, a folder, a data frame or a mapping of columns by name; "
            f"got {type(table).__name__}"
        )
    columns = _columns(table, cutting)
    if not all(map(len, columns.values())):
        raise ValueError(f"{name} has no samples")
    for option in ("label", "subject", "time"):
        wanted = getattr(cutting, option)
        if wanted is not None and wanted not in columns:
            raise ValueError(f"{name}: {unknown_name(f'column for --{option}', wanted, columns)}")
    time = cutting.time or next((c for c in columns if c.lower() in _TIMES), None)
    other = {cutting.label, cutting.subject, time, *_INDEX}
    numbers = {}
    for key in cutting.channels or [key for key in columns if key not in other]:
        if key not in columns:
            raise ValueError(f"{name}: {unknown_name('channel', key, columns)}")
        values, texts = _numbers(columns[key])
        if not len(texts):
            numbers[key] = values
        elif cutting.channels or 2 * len(texts) < len(values):
            n = int(texts[0])
            raise ValueError(
                f"{name}: the channel {key!r} holds text, not numbers: {str(columns[key][n])!r} in "
                f"sample {n + 1}: correct it, or learn from other columns by --channels"
            )
    if not numbers:
        raise ValueError(f"{name} has no column of numbers to learn from")
    unread = tuple(k for k in columns if k not in other and k not in numbers)
    recording = Recording(
        name,
        np.stack(list(numbers.values()), 1),
        tuple(numbers),
        None if cutting.label is None else _classes(columns[cutting.label], cutting.label, name),
        None if cutting.subject is None else _texts(columns[cutting.subject]),
        None if time is None else _times(columns[time], f"{name}: the column {time!r}"),
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
    wanted = dated or key.lower() in _TIMES or key in (cutting.label, cutting.subject, cutting.time)
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


def cut_recordings(recordings: list[Recording], cutting: Cutting, *, by_label: bool = True) -> Cut:
    """Cut windows that hold one person, no gap in time and, by label, one class.

    Without labels, windows keep missing values that are not filled, as NaN.

    Raises:
        ValueError: no stretch is as long as a window, or a value is missing.
    """
    T, hop = cutting.window, cutting.hop
    assert T is not None
    windows: list[np.ndarray] = []
    origin: list[tuple[str, str, int]] = []
    gaps = filled = unlabeled = repeated = longest = 0
    for number, recording in enumerate(recordings):
        labels, subjects = recording.labels, recording.subjects
        if labels is not None and by_label:
            unlabeled += int((labels == "").sum())
        if recording.times is not None:
            repeated += int((np.diff(recording.times) == 0).sum())
        for begin, end, is_gap in _stretches(recording):
            gaps += is_gap
            part = recording.values[begin:end]
            missing = int(np.isnan(part).sum())
            if missing and (cutting.fill != "none" or by_label):
                part = _filled(recording, begin, end, cutting.fill)
                filled += missing
            for first, last in _Part(recording, begin, end).pieces(by_label):
                longest = max(longest, last - first)
                for start in range(first, last - T + 1, hop):
                    windows.append(part[start - begin : start - begin + T])
                    label = "" if labels is None else _label(labels[start : start + T])
                    person = str(number) if subjects is None else str(subjects[start])
                    place = start if recording.places is None else int(recording.places[start])
                    origin.append((label, person, place))
    if not windows:
        advice = "take a shorter --window" if by_label else "the model takes windows of that length"
        raise ValueError(
            f"{recordings[0].name}: no stretch of one {'class and ' if by_label else ''}person "
            f"without a gap has {T} samples, the longest has {longest}"
            + (f", there are {gaps} gaps in time" if gaps else "")
            + f": {advice}"
        )
    names, people, starts = zip(*origin, strict=True)
    notes = [
        *([f"{gaps} gaps in time, across which no window lies"] if gaps else []),
        *([f"{repeated} samples have the time of the one before"] if repeated else []),
        *([f"{filled} missing values filled ({cutting.fill})"] if filled else []),
        *([f"{unlabeled} samples without a label are left out"] if unlabeled else []),
    ]
    unread = sorted({column for r in recordings for column in r.unread})
    notes += [f"not read: {', '.join(unread)}"] if unread else []
    return Cut(np.stack(windows), np.array(names), np.array(people), np.array(starts), tuple(notes))


def dataset_arrays(recordings: list[Recording], cutting: Cutting) -> tuple[dict[str, Any], Cut]:
    """Return the arrays of `fixpoint.data.load`: by person where there are any, else the last fifth
    tests.

    Without persons, of each class the last fifth in time is the test part; windows across its
    beginning belong to none.
    """
    if all(recording.labels is None for recording in recordings):
        raise ValueError(
            f"{recordings[0].name} has no classes: name the column of the class by --label"
        )
    cut = cut_recordings(recordings, cutting)
    arrays: dict[str, Any] = {"x": cut.x, "y": cut.labels}
    if recordings[0].subjects is not None:
        return arrays | {"subject": cut.subjects}, cut
    train, test = _in_time(cut, cutting)
    if not test.any():
        raise ValueError(
            f"{recordings[0].name}: no class has the windows for a test part; give a column of "
            "persons by --subject, or a smaller --step"
        )
    parts = {"": train, "_test": test}
    arrays = {f"{k}{end}": v[rows] for k, v in arrays.items() for end, rows in parts.items()}
    note = "no persons are known: of each class the last fifth in time is the test part"
    return arrays, cut._replace(notes=(*cut.notes, note))


def _in_time(cut: Cut, cutting: Cutting) -> tuple[np.ndarray, np.ndarray]:
    """Return masks of the training and the test windows."""
    assert cutting.window is not None
    train, test = np.zeros((2, len(cut.labels)), bool)
    for label in np.unique(cut.labels):
        rows = np.flatnonzero(cut.labels == label)
        taken = rows[len(rows) - round(_TEST * len(rows)) :]
        test[taken] = True
        before = rows[: len(rows) - len(taken)]
        if len(taken):
            first, number = cut.starts[taken[0]], cut.subjects[taken[0]]
            across = cut.starts[before] + cutting.window > first
            before = before[~(across & (cut.subjects[before] == number))]
        train[before] = True
    return train, test


class _Part(NamedTuple):
    """Samples from `begin` to `end` of a recording: one person, no gap."""

    recording: Recording
    begin: int
    end: int

    def pieces(self, by_label: bool) -> Iterator[tuple[int, int]]:
        """Yield ranges of samples of one class each, or all."""
        labels = self.recording.labels
        if labels is None or not by_label:
            yield self.begin, self.end
            return
        own = labels[self.begin : self.end]
        edges = self.begin + 1 + np.flatnonzero(own[1:] != own[:-1])
        for first, last in zip([self.begin, *edges], [*edges, self.end], strict=True):
            if labels[first] != "":
                yield int(first), int(last)


def _stretches(recording: Recording) -> Iterator[tuple[int, int, bool]]:
    """Yield ranges of samples of one person without a gap in time, and whether one comes before."""
    size = len(recording.values)
    gap = np.zeros(max(size - 1, 0), bool)
    if recording.times is not None and size > 1:
        steps = np.diff(recording.times)
        usual = np.median(steps[steps > 0]) if (steps > 0).any() else 0.0
        gap = (steps < 0) | (steps > _GAP * usual)
    other = np.zeros_like(gap)
    if recording.subjects is not None:
        other = recording.subjects[1:] != recording.subjects[:-1]
    edges = 1 + np.flatnonzero(gap | other)
    for begin, end in zip([0, *edges], [*edges, size], strict=True):
        is_gap = begin > 0 and bool(gap[begin - 1]) and not bool(other[begin - 1])
        yield int(begin), int(end), is_gap


def _filled(recording: Recording, begin: int, end: int, fill: Fill) -> np.ndarray:
    values = recording.values[begin:end]
    if fill == "none":
        row, column = np.argwhere(np.isnan(values))[0]
        raise ValueError(
            f"{recording.name}: sample {begin + row + 1} has no {recording.channels[column]}, and "
            f"{int(np.isnan(recording.values).sum())} values are missing in all: fill them by "
            "--fill hold or --fill linear"
        )
    return fill_missing(values[None], fill)[0]


def _label(labels: np.ndarray) -> str:
    """Return the class that all samples have, else none."""
    return str(labels[0]) if (labels == labels[0]).all() else ""


def _numbers(column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return float64 with NaN for missing values and text, and the places of the texts."""
    if column.dtype.kind in "biuf":
        values, texts = column.astype(np.float64), np.zeros(0, int)
    else:
        cells = [_number(str(cell).strip()) for cell in column]
        values = np.array([np.nan if v is None else v for v in cells], np.float64)
        texts = np.flatnonzero([v is None for v in cells])
    return np.where(np.isinf(values), np.nan, values), texts


def _number(cell: str) -> float | None:
    """Return a number, NaN for a missing one, None for text."""
    if cell.lower() in _MISSING:
        return np.nan
    try:
        return float(cell)
    except ValueError:
        return None


def _classes(column: np.ndarray, key: str, name: str) -> np.ndarray:
    """Return names of classes.

    Raises:
        ValueError: they are real numbers.
    """
    values, texts = _numbers(column)
    real = values[np.isfinite(values) & (values != np.rint(values))]
    if len(real) and not len(texts):
        raise ValueError(
            f"{name}: the column {key!r} holds real numbers, as {real[0]:.4g}, and regression is "
            "not offered: name a column of classes by --label"
        )
    return _texts(column)


def _texts(column: np.ndarray) -> np.ndarray:
    """Return names, "" for missing ones; whole numbers without a point."""
    cells = ["" if _is_missing(c) else str(c).strip() for c in column]
    if any("." in c for c in cells) and all(re.fullmatch(r"-?\d+(\.0*)?|", c) for c in cells):
        cells = [c.partition(".")[0] for c in cells]
    return np.array(cells)


def _is_missing(cell: Any) -> bool:
    return cell is None or str(cell).strip().lower() in ("", "nan", "na", "n/a", "nat", "<na>")


def _times(column: np.ndarray, name: str) -> np.ndarray:
    """Return times as float64; of dates in seconds."""
    values, texts = _numbers(column) if column.dtype.kind != "M" else (column, column)
    if len(texts):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a time zone: taken into account
                dates = np.array(column, "datetime64[ns]")
        except ValueError:
            raise ValueError(
                f"{name} holds neither numbers nor dates, as 2026-01-31T12:00:00.25"
            ) from None
        values = np.where(np.isnat(dates), np.nan, dates.astype(np.int64) / 1e9)
    if np.isnan(values).any():
        raise ValueError(f"{name} has no time in {int(np.isnan(values).sum())} lines")
    return values
