"""The arrays of a user's .npz file: known names, dtypes and shapes, or one clear line."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from fixpoint._messages import unknown_name
from fixpoint.data.images import as_image
from fixpoint.data.storage import array_headers, read_arrays

ENDS = ("", "_valid", "_test")
"""Ends of the names of the arrays of train, valid and test."""

_NAMES = ("x", "y", "subject", "lengths")
_IMAGE = "image"
_KEYS = (*(f"{name}{end}" for end in ENDS for name in _NAMES), _IMAGE)
_TABLES = {".csv", ".tsv", ".txt", ".xlsx"}
_MISSING = ["", "nan", "NaN", "None", "NaT", "<NA>"]
"""Texts that astype(str) writes for missing labels."""
_ADVICE = "save it by numpy.savez(path, x=..., y=...)"


def read_user_npz(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a user's .npz file, by the names of `fixpoint.data.load`.

    Raises:
        ValueError: the file is damaged, is not an .npz file, or has an array that is unknown or of
            Python objects.
    """
    if path.suffix.lower() == ".arff":
        raise ValueError(
            f"{path} is an .arff file: take NAME_TRAIN.ts or .tsv of the same archive, or {_ADVICE}"
        )
    if path.suffix.lower() in _TABLES:
        raise ValueError(
            f"{path} is one table: to cut a recording into windows give window and label, as "
            "--window 128 --label activity; else give a folder with a folder for each class, with "
            "a CSV file for each sequence, or an .npz file"
        )
    if path.suffix.lower() != ".npz" and not _holds_arrays(path):
        raise ValueError(
            f"{path} is not an .npz file: give what it holds to numpy.savez(path, x=..., y=...)"
        )
    names: dict[str, str] = {}
    read_arrays(path, (), _ADVICE)  # whether it is whole
    for name, (dtype, shape) in array_headers(path, _ADVICE).items():
        key = name.removesuffix("_train")
        key = key[:1].lower() + key[1:] if key[:2] in ("X", "X_") else key
        if key not in _KEYS:
            raise ValueError(f"{path}: {unknown_name('array', name, _KEYS)}; {_ADVICE}")
        if key in names:
            raise ValueError(f"{path} has both {name} and {names[key]}, the same array: keep one")
        if dtype.hasobject:
            raise ValueError(f"{path}: {_objects(key, name, shape)}")
        names[key] = name
    arrays = read_arrays(path, names.values(), _ADVICE)
    return {key: arrays[name] for key, name in names.items()}


def _holds_arrays(path: Path) -> bool:
    """Tell whether a file is a zip archive of .npy files, as an .npz file is."""
    try:
        with zipfile.ZipFile(path) as archive:
            return all(name.endswith(".npy") for name in archive.namelist())
    except zipfile.BadZipFile:
        return False


def check_arrays(path: Path, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays of a file or folder, where they fit together; labels and padding in one
    form.

    Raises:
        ValueError: an array is missing, or has another dtype or shape than it needs.
    """
    for end in ENDS:
        part = [f"{name}{end}" for name in _NAMES]
        for key in part[:2]:
            if key not in arrays and (not end or arrays.keys() & part):
                raise ValueError(
                    f"{path} has no {key}: it needs x (N, T, d) and y (N,), and may have x_valid "
                    "and y_valid, x_test and y_test"
                )
    made = dict(arrays)
    if _IMAGE in made:
        _check_image(path, made)
    for end in ENDS:
        if f"x{end}" in made:
            _check_part(path, made, end)
    return _of_one_size(path, made)


def _check_image(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Refuse rows and columns that are not those of the pixels of x."""
    if any(key.startswith("lengths") for key in arrays):
        raise ValueError(f"{path}: an image has all pixels: leave out lengths or {_IMAGE}")
    try:
        as_image(arrays[_IMAGE], arrays["x"].shape)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _objects(key: str, name: str, shape: tuple[int, ...]) -> str:
    what = f"{name} is an array of Python objects {shape}"
    if key.startswith("lengths"):
        return f"{what}: where all are whole numbers, save it as {name}.astype(int)"
    if key == _IMAGE:
        return f"{what}: save it as [rows, columns], two whole numbers"
    if key.startswith("x"):
        if len(shape) == 3:
            return f"{what}: save it as numbers, {name}.astype(float)"
        return (
            f"{what}, as sequences of different length are: pad them to one length, (N, T, d), and "
            f"give lengths{key[1:]} (N,), the steps of each"
        )
    return (
        f"{what}, as strings of pandas are: leave out sequences where it is missing, then save "
        f"it as {name}.astype(str)"
    )


def _check_part(path: Path, arrays: dict[str, np.ndarray], end: str) -> None:
    x = arrays[f"x{end}"]
    _check_x(path, f"x{end}", x)
    for key in (f"y{end}", f"subject{end}"):
        if key in arrays:
            arrays[key] = _labels(path, key, arrays[key], len(x), f"x{end}")
    lengths = arrays.get(f"lengths{end}")
    if lengths is not None:
        _check_lengths(path, f"lengths{end}", lengths, x)
        padding = np.arange(x.shape[1]) >= lengths[:, None]
        if x[padding].any():  # NaN too
            arrays[f"x{end}"] = np.where(padding[..., None], x.dtype.type(0), x)
    _check_finite(path, f"x{end}", arrays[f"x{end}"], given=lengths is not None)


def _check_x(path: Path, key: str, x: np.ndarray) -> None:
    if x.ndim != 3 or 0 in x.shape or x.dtype.kind not in "iuf":
        hint = f"; give {key}[..., None] where d is 1" if x.ndim == 2 else ""
        raise ValueError(
            f"{path}: {key} must be numbers (N, T, d) and not empty, got {x.dtype} {x.shape}{hint}"
        )


def _labels(path: Path, key: str, ids: np.ndarray, count: int, of: str) -> np.ndarray:
    if ids.dtype.kind == "S":
        ids = np.char.decode(ids, "utf-8", "replace")
    if ids.shape == (count,) and ids.dtype.kind in "iubU":
        _check_missing(path, key, ids)
        return ids
    advice = "save classes by their numbers or names"
    if ids.shape == (count,) and ids.dtype.kind == "f":
        advice = _of_floats(key, ids)
    elif ids.shape != (count,):
        advice = "save one value for each sequence"
    if ids.ndim == 2 and ids.shape[1] == 1:
        advice = f"save {key}[:, 0]"
    elif ids.ndim == 2 and len(ids) == count and _is_one_hot(ids):
        advice = f"it is one-hot, save {key}.argmax(1)"
    elif ids.ndim != 1 and ids.size == count:
        advice = f"save {key}.reshape(-1)"
    elif len(ids) != count if ids.ndim else True:
        advice = f"leave out what does not belong to a sequence of {of}"
    raise ValueError(
        f"{path}: {key} must be ({count},) whole numbers or strings, one for each sequence of "
        f"{of}, got {ids.dtype} {ids.shape}: {advice}"
    )


def _check_missing(path: Path, key: str, ids: np.ndarray) -> None:
    """Refuse names that stand for a missing label, as astype(str) writes NaN."""
    missing = np.isin(ids, _MISSING) if ids.dtype.kind == "U" else np.zeros(1)
    if missing.any():
        raise ValueError(
            f"{path}: {key} is {str(ids[missing.argmax()])!r} in {int(missing.sum())} of "
            f"{len(ids)} sequences, a missing value it seems: leave these sequences out"
        )


def _of_floats(key: str, ids: np.ndarray) -> str:
    """Return the advice that loses no label."""
    missing = ~np.isfinite(ids)
    if missing.any():
        return (
            f"{int(missing.sum())} are NaN or inf, first number {int(missing.argmax())}: leave "
            "these sequences out"
        )
    if (ids == np.rint(ids)).all():
        if np.abs(ids).max() < 2**53:
            return f"they are whole, save {key}.astype(int)"
        return "they are beyond 2^53, where floats are not exact: save classes by their names"
    value = float(ids[(ids != np.rint(ids)).argmax()])
    return (
        f"they are real numbers, as {value:.4g}, and regression is not offered: give the class of "
        "each sequence"
    )


def _is_one_hot(ids: np.ndarray) -> bool:
    return ids.dtype.kind in "iubf" and bool(((ids == 0) | (ids == 1)).all() and
                                             (ids.sum(1) == 1).all())  # fmt: skip


def _check_lengths(path: Path, key: str, lengths: np.ndarray, x: np.ndarray) -> None:
    fits = lengths.shape == x.shape[:1] and lengths.dtype.kind in "iu"
    if not fits or not 1 <= lengths.min() <= lengths.max() <= x.shape[1]:
        got = f"{lengths.dtype} {lengths.shape}"
        if fits:
            got = f"{lengths.min()} to {lengths.max()}"
        raise ValueError(
            f"{path}: {key} must be ({len(x)},) whole numbers, the steps of each sequence, from 1 "
            f"to {x.shape[1]}, got {got}"
        )


def _check_finite(path: Path, key: str, x: np.ndarray, *, given: bool) -> None:
    if x.dtype.kind != "f":
        return
    with np.errstate(over="ignore"):
        bad: Any = ~np.isfinite(x.astype(np.float32))
    rows = bad.any((1, 2))
    if rows.any():
        ends = bad.any(2)[rows]
        only_ends = not given and (np.diff(ends.astype(int), axis=1) >= 0).all()
        only_ends = only_ends and not ends[:, 0].any() and np.isnan(x[bad]).all()
        advice = "correct them, leave them out, or fill them by fill='hold' or 'linear'"
        if only_ends:
            advice = f"where they pad shorter sequences, give lengths{key[1:]} (N,)"
        raise ValueError(
            f"{path}: {key} holds NaN, inf or numbers beyond float32 in {rows.sum()} of {len(x)} "
            f"sequences, first in number {rows.argmax()}: {advice}"
        )


def _of_one_size(path: Path, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Pad all parts to one T where lengths are given, else refuse them where (T, d) differs."""
    ends = [end for end in ENDS if f"x{end}" in arrays]
    lengths = [f"lengths{end}" for end in ends]
    missing = [key for key in lengths if key not in arrays]
    if missing and len(missing) < len(lengths):
        raise ValueError(f"{path} has no {missing[0]}: give lengths of each part, or of none")
    longest = max(arrays[f"x{end}"].shape[1] for end in ends)
    for end in ends:
        x = arrays[f"x{end}"]
        if not missing and x.shape[1] < longest:
            x = np.pad(x, ((0, 0), (0, longest - x.shape[1]), (0, 0)))
            arrays[f"x{end}"] = x
        if x.shape[1:] != arrays["x"].shape[1:]:
            same_channels = x.shape[2] == arrays["x"].shape[2]
            raise ValueError(
                f"{path}: x and x{end} must have one (T, d), got {arrays['x'].shape[1:]} and "
                f"{x.shape[1:]}"
                + ("; give lengths to pad shorter ones" if missing and same_channels else "")
            )
    return arrays
