"""Parts for training and for tests of recordings cut into windows."""

from __future__ import annotations

from typing import Any

import numpy as np

from fixpoint.data.recording_windows import Cut, cut_recordings
from fixpoint.data.recordings import Cutting, Recording

_TEST = 0.2


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
    found = sorted(set(cut.labels.tolist()))
    if len(found) < 2:
        raise ValueError(
            f"{recordings[0].name}: at least two classes are needed, all windows are {found[0]!r}"
        )
    arrays: dict[str, Any] = {"x": cut.x, "y": cut.labels}
    people = cut.subjects.tolist() if recordings[0].subjects is not None else []
    if len(set(people)) > 1:
        return arrays | {"subject": cut.subjects}, cut
    if people and cutting.subject is not None:
        raise ValueError(
            f"{recordings[0].name}: all windows are of the person {people[0]!r}: leave --subject "
            "out, so that the last fifth in time of each class is the test part"
        )
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
