"""A user's own data: an .npz file, or a folder of CSV files."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fixpoint.data.archive_format import (
    archive_file_in,
    is_archive_file,
    read_archive_file,
)
from fixpoint.data.csv_folder import read_folder
from fixpoint.data.dataset import Dataset
from fixpoint.data.missing import fill_missing
from fixpoint.data.npz_file import ENDS, check_arrays, read_user_npz
from fixpoint.data.precision import to_float32
from fixpoint.data.recording_parts import dataset_arrays
from fixpoint.data.recordings import Cutting, Recording, read_recording, read_recordings
from fixpoint.data.splits import held_out, take
from fixpoint.data.storage import expand

_HELD_OUT = 0.2
_PARTS = {"": "train", "_valid": "valid", "_test": "test"}


def load(source: Any, *, name: str = "recording", **cutting: Any) -> Dataset:
    """Load a user's own sequences, with one class each, or cut recordings into such windows.

    A recording is a table with a header and a line a sample, as CSV, a data frame or a mapping of
    columns; or a folder of such files. `window` says that it is one, see `Cutting`. No window
    lies across a change of person or class, or a gap in time. Tests are by person where there are
    any; else the last fifth in time of each class.

    A pair NAME_TRAIN, NAME_TEST of the UCR or UEA archive, .tsv or .ts, or the folder of one, is
    read as it is.

    An .npz file has

    - `x` (N, T, d): the sequences, numbers;
    - `y` (N,): the class of each, whole numbers or strings;
    - optionally `x_test` and `y_test`, the test part; without them a fifth is held out for test, by
      subject if there are subjects, else stratified by class, always the same fifth;
    - optionally `x_valid` and `y_valid`, the validation part;
    - optionally `subject` (N,), `subject_valid`, `subject_test`: who produced each sequence;
    - optionally `lengths` (N,), `lengths_valid`, `lengths_test`: the time steps of each sequence,
      from 1 to T, where shorter ones are padded at their end;
    - optionally `image` (2,): rows and columns of images whose pixels, row by row, are the T time
      steps, on a background of 0. The recipe's `training.move` moves them.

    `x_train` is another name of `x`, and so on. An array with another name is an error.

    A folder has one folder for each class, with one CSV file for each sequence: T lines of d
    numbers, between commas, semicolons or tabs, optionally with a header. Columns are brought into
    the order of names of the first header, and are kept as `Dataset.channels`; a file without one
    is taken by position. Sequences may differ in length. The folders of the classes may be in
    folders `train`, `valid` and `test`; without `test` a fifth of each class is held out. Hidden
    files and folders are not read.

    Values are stored as float32. Where that would round away the differences between sequences, as
    of float64 values with a large mean, the mean of each column is subtracted before and kept in
    `Dataset.shift`.

    Args:
        source: the file or folder, or a data frame.
        name: of a data frame.
        cutting: options of `Cutting`: window, step, label, subject, time, channels, fill.

    Raises:
        FileNotFoundError: the path does not exist.
        ValueError: in one line: what the file lacks or has wrong.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "mine.npz")
    ...     np.savez(path, x=np.zeros((10, 5, 2)), y=[0, 1] * 5)
    ...     load(path)
    Dataset(mine: 8 train + 2 test windows of 5 steps x 2 channels, 2 classes)
    """
    options = Cutting(**cutting)
    if not isinstance(source, str | os.PathLike):
        return _cut(Path(name), [read_recording(source, options, name)], options)
    path = expand(os.fspath(source))
    notes: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}: give an .npz file or a folder")
    if options.window is not None and path.suffix.lower() != ".npz":
        return _cut(path, read_recordings(path, options), options)
    _refuse_columns(path, options)
    path = (archive_file_in(path) if path.is_dir() else None) or path
    if path.is_dir():
        arrays, notes, channels = read_folder(path)
    elif is_archive_file(path):
        arrays = read_archive_file(path)
    else:
        arrays = read_user_npz(path)
    if options.fill != "none":
        arrays, filled = _filled(arrays, options.fill)
        notes = (*notes, *([f"{filled} missing values filled ({options.fill})"] if filled else []))
    return replace(_dataset(path, check_arrays(path, arrays), notes), channels=channels)


def _cut(path: Path, recordings: list[Recording], options: Cutting) -> Dataset:
    arrays, cut = dataset_arrays(recordings, options)
    found = _dataset(path, check_arrays(path, arrays), cut.notes)
    return replace(found, channels=recordings[0].channels)


def _refuse_columns(path: Path, options: Cutting) -> None:
    """Refuse options of recordings for data that are windows already."""
    given = [
        field.name
        for field in fields(options)
        if field.name != "fill" and getattr(options, field.name) != field.default
    ]
    if given:
        what = "it has windows already" if options.window else "the length of a window is missing"
        raise ValueError(
            f"{path}: {', '.join(given)} cut recordings, and {what}: "
            + ("leave them out" if options.window else "give window too, as 128 samples")
        )


def _filled(arrays: dict[str, np.ndarray], fill: Any) -> tuple[dict[str, np.ndarray], int]:
    """Return the arrays with missing values of x filled within the length of each sequence."""
    filled, changed = 0, dict(arrays)
    for end in ENDS:
        x, lengths = arrays.get(f"x{end}"), arrays.get(f"lengths{end}")
        if x is None or x.ndim != 3 or x.dtype.kind != "f":
            continue
        missing = np.isnan(x)
        if lengths is not None and lengths.shape == x.shape[:1]:
            missing &= (np.arange(x.shape[1]) < lengths[:, None])[..., None]
        rows = missing.any((1, 2))
        filled += int(missing.sum())
        if rows.any():
            changed[f"x{end}"] = np.array(x)
            changed[f"x{end}"][rows] = fill_missing(x[rows], fill)
    return changed, filled


def _dataset(path: Path, arrays: dict[str, np.ndarray], notes: tuple[str, ...]) -> Dataset:
    classes = [str(label) for label in np.unique(arrays["y"])]
    if len(classes) < 2:
        raise ValueError(f"{path}: y must hold at least two classes, got only {classes[0]!r}")
    ends = [end for end in ENDS if f"x{end}" in arrays]
    stored = to_float32(
        {_PARTS[end]: arrays[f"x{end}"] for end in ends}, arrays.get("lengths"), path
    )
    if "image" in arrays and stored.shift is not None:
        raise ValueError(
            f"{path}: an image needs a background of 0, and the pixels vary little around a large "
            "mean: subtract it before saving, or leave out image"
        )
    made: dict[str, Any] = {"image": arrays.get("image")}
    for end in ends:
        part = _PARTS[end]
        made[f"x_{part}"] = stored.x[part]
        made[f"y_{part}"] = _classes(path, f"y{end}", arrays, classes)
        made[f"groups_{part}"] = _groups(arrays, f"subject{end}")
        if f"lengths{end}" in arrays:
            made[f"lengths_{part}"] = torch.from_numpy(arrays[f"lengths{end}"].astype(np.int64))
    made |= {
        "name": _name(path),
        "classes": tuple(classes),
        "shift": stored.shift,
        "notes": (*notes, *stored.notes),
        "license": "your own data",
        "citation": "your own data",
    }
    if "x_test" in made:
        return Dataset(**made)
    rows = _test_rows(path, made["y_train"], made["groups_train"])
    test = {
        key.replace("_train", "_test"): value
        for key, value in made.items()
        if key.endswith("_train")
    }
    whole = Dataset(**made, **test)
    return take(take(whole, "train", ~rows), "test", rows)


def _name(path: Path) -> str:
    """Return the name of a file without its suffix, or of a folder, as of "."."""
    whole = Path(os.path.abspath(path))
    known = (".npz", ".csv", ".tsv", ".txt", ".ts")
    return whole.stem if whole.suffix.lower() in known and path.is_file() else whole.name


def _test_rows(path: Path, y: torch.Tensor, subject: torch.Tensor | None) -> torch.Tensor:
    try:
        rows = held_out(y, subject, _HELD_OUT, seed=0)
    except ValueError as error:
        raise ValueError(f"{path}: {error}, or give x_test and y_test") from None
    if not rows.any():
        raise ValueError(
            f"{path}: a fifth of each class is held out for test, but no class has 3 sequences: "
            "give more, or x_test and y_test"
        )
    return rows


def _classes(
    path: Path, key: str, arrays: dict[str, np.ndarray], classes: list[str]
) -> torch.Tensor:
    """Return the index of the class of each sequence, int64."""
    index = {name: i for i, name in enumerate(classes)}
    labels = [str(label) for label in arrays[key].tolist()]
    unknown = sorted(set(labels) - set(classes))
    if unknown:
        raise ValueError(f"{path}: {key} has the class {unknown[0]!r}, which y does not have")
    return torch.tensor([index[label] for label in labels])


def _groups(arrays: dict[str, np.ndarray], key: str) -> torch.Tensor | None:
    """Return subjects as whole numbers; those of names are their indices in sorted order."""
    if key not in arrays:
        return None
    if arrays[key].dtype.kind != "U":
        return torch.from_numpy(arrays[key].astype(np.int64))
    named = [a for k, a in arrays.items() if k.startswith("subject") and a.dtype.kind == "U"]
    known = np.unique(np.concatenate(named))
    return torch.from_numpy(np.searchsorted(known, arrays[key]).astype(np.int64))
