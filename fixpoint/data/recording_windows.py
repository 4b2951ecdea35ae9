"""Recordings cut into windows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fixpoint.data.missing import fill_missing
from fixpoint.data.recordings import Cutting, Fill, Recording

_GAP = 1.5
"""A step of time longer than this many usual ones is a gap."""


class Cut(NamedTuple):
    """Windows x (N, T, d), where each begins, and the recordings' remarks."""

    x: np.ndarray
    labels: np.ndarray
    subjects: np.ndarray
    starts: np.ndarray
    notes: tuple[str, ...]


def cut_recordings(recordings: list[Recording], cutting: Cutting, *, by_label: bool = True) -> Cut:
    """Cut windows that hold one person, no gap in time and, by label, one class.

    Without labels, windows keep values that are NaN or inf and not filled.

    Raises:
        ValueError: no stretch is as long as a window, or a value is missing or not finite.
    """
    T, hop = cutting.window, cutting.hop
    assert T is not None
    windows: list[np.ndarray] = []
    origin: list[tuple[str, str, int]] = []
    gaps = filled = infinite = unlabeled = repeated = longest = 0
    for number, recording in enumerate(recordings):
        labels, subjects = recording.labels, recording.subjects
        if labels is not None and by_label:
            unlabeled += int((labels == "").sum())
        if recording.times is not None:
            repeated += int((np.diff(recording.times) == 0).sum())
        for begin, end, is_gap in _stretches(recording):
            gaps += is_gap
            part = recording.values[begin:end]
            missing = int((~np.isfinite(part)).sum())
            if missing and (cutting.fill != "none" or by_label):
                part = _filled(recording, begin, end, cutting.fill)
                filled += missing
                infinite += int(np.isinf(recording.values[begin:end]).sum())
            for first, last in _Part(recording, begin, end).pieces(by_label):
                longest = max(longest, last - first)
                for start in range(first, last - T + 1, hop):
                    windows.append(part[start - begin : start - begin + T])
                    label = "" if labels is None else _label(labels[start : start + T])
                    person = str(number) if subjects is None else str(subjects[start])
                    place = start if recording.places is None else int(recording.places[start])
                    origin.append((label, person, place))
    if not windows:
        raise ValueError(_no_window(recordings[0].name, T, longest, gaps, unlabeled, by_label))
    names, people, starts = zip(*origin, strict=True)
    kind = "missing or infinite" if infinite else "missing"
    notes = [
        *([f"{gaps} gaps in time, across which no window lies"] if gaps else []),
        *([f"{repeated} samples have the time of the one before"] if repeated else []),
        *([f"{filled} {kind} values filled ({cutting.fill})"] if filled else []),
        *([f"{unlabeled} samples without a label are left out"] if unlabeled else []),
    ]
    unread = sorted({column for r in recordings for column in r.unread})
    notes += [f"not read: {', '.join(unread)}"] if unread else []
    return Cut(np.stack(windows), np.array(names), np.array(people), np.array(starts), tuple(notes))


def _no_window(name: str, T: int, longest: int, gaps: int, unlabeled: int, by_label: bool) -> str:
    if unlabeled and not longest:
        return f"{name}: the column of --label is empty, so there is nothing to learn"
    parts = [
        f"no stretch of one {'class and ' if by_label else ''}person without a gap has {T} "
        f"samples, the longest has {longest}",
        *([f"gaps in time: {gaps}"] if gaps else []),
        *([f"samples without a label: {unlabeled}"] if unlabeled else []),
    ]
    advice = "take a shorter --window" if by_label else "the model takes windows of that length"
    return f"{name}: {'; '.join(parts)}: {advice}"


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
    lost = ~np.isfinite(values)
    if fill == "none":
        raise ValueError(_first_lost(recording, begin, *np.argwhere(lost)[0]))
    return fill_missing(np.where(lost, np.nan, values)[None], fill)[0]


def _first_lost(recording: Recording, begin: int, row: int, column: int) -> str:
    """Say which value is missing or not finite."""
    place = begin + row if recording.places is None else int(recording.places[begin + row])
    value, channel = recording.values[begin + row, column], recording.channels[column]
    count = int((~np.isfinite(recording.values)).sum())
    what, kind, advice = f"has no {channel}", "missing", "fill"
    if np.isinf(recording.values).any():
        kind, advice = "missing or not finite", "correct them, or fill"
    if np.isinf(value):
        what = f"has {channel} = {value}, which is not finite"
    return (
        f"{recording.name}: sample {place + 1} {what}, and {count} values are {kind} in all: "
        f"{advice} them by --fill hold or --fill linear"
    )


def _label(labels: np.ndarray) -> str:
    """Return the class that all samples have, else none."""
    return str(labels[0]) if (labels == labels[0]).all() else ""
