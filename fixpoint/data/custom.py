"""A user's own data: an .npz file, or a folder of CSV files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fixpoint.data.csv_folder import read_folder
from fixpoint.data.dataset import Dataset
from fixpoint.data.splits import held_out
from fixpoint.data.storage import read_arrays

_HELD_OUT = 0.2
_KEYS = ("x", "y", "x_test", "y_test", "subject", "subject_test")


def load(path: Path | str) -> Dataset:
    """A user's own sequences: all of one length, with one class each.

    An .npz file has

    - `x` (N, T, d): the sequences, numbers;
    - `y` (N,): the class of each, whole numbers or strings;
    - optionally `x_test` and `y_test`, the same for test; without them a fifth is held out for
      test, by subject where there are subjects, else of each class, always the same fifth;
    - optionally `subject` (N,), and `subject_test`: who produced each sequence.

    A folder has one folder for each class, with one CSV file for each sequence: T lines of d
    numbers, between commas, and perhaps a first line with names. It may have the folders `train`
    and `test` above those of the classes; without them a fifth of each class is held out for test.

    Args:
        path: the file or folder.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: in one line: what the file lacks or has wrong.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "mine.npz")
    ...     np.savez(path, x=np.zeros((10, 5, 2)), y=[0, 1] * 5)
    ...     load(path)
    Dataset(mine: 8 train + 2 test windows of 5 steps x 2 channels, 2 classes)
    """
    path = Path(path).expanduser()
    if path.is_dir():
        arrays = read_folder(path)
    elif path.is_file():
        arrays = read_arrays(path, _KEYS, "save it by numpy.savez(path, x=..., y=...)")
    else:
        raise FileNotFoundError(f"there is no file or folder {path}: give an .npz file or a folder")
    return _dataset(path, _checked(path, arrays))


def _checked(path: Path, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    for key in ("x", "y", *(("x_test", "y_test") if {"x_test", "y_test"} & set(arrays) else ())):
        if key not in arrays:
            raise ValueError(
                f"{path} has no {key}: it needs x (N, T, d) and y (N,), and may have x_test and "
                "y_test"
            )
    for end in ("", "_test"):
        x, y = arrays.get(f"x{end}"), arrays.get(f"y{end}")
        if x is None or y is None:
            continue
        _check_x(path, f"x{end}", x)
        for key in (f"y{end}", f"subject{end}"):
            ids = arrays.get(key)
            if ids is not None and (ids.shape != x.shape[:1] or ids.dtype.kind not in "iubU"):
                raise ValueError(
                    f"{path}: {key} must be ({len(x)},) whole numbers or strings, one for each "
                    f"sequence of x{end}, got {ids.dtype} {ids.shape}: convert it before saving, "
                    f"as by {key}.astype(int)"
                )
    if "x_test" in arrays and arrays["x_test"].shape[1:] != arrays["x"].shape[1:]:
        raise ValueError(
            f"{path}: x and x_test must have one (T, d), got {arrays['x'].shape[1:]} and "
            f"{arrays['x_test'].shape[1:]}"
        )
    return arrays


def _check_x(path: Path, key: str, x: np.ndarray) -> None:
    if x.ndim != 3 or 0 in x.shape or not np.issubdtype(x.dtype, np.number) or x.dtype.kind == "c":
        hint = f"; give {key}[..., None] where d is 1" if x.ndim == 2 else ""
        raise ValueError(
            f"{path}: {key} must be numbers (N, T, d) and not empty, got {x.dtype} {x.shape}{hint}"
        )
    if x.dtype.kind == "f":
        with np.errstate(over="ignore"):
            bad = ~np.isfinite(x.astype(np.float32)).all((1, 2))
        if bad.any():
            raise ValueError(
                f"{path}: {key} holds NaN, inf or numbers beyond float32 in {bad.sum()} of "
                f"{len(x)} sequences, first in number {bad.argmax()}: mend them or leave them out"
            )


def _dataset(path: Path, arrays: dict[str, np.ndarray]) -> Dataset:
    classes, labels = np.unique(arrays["y"], return_inverse=True)
    y = torch.from_numpy(labels.astype(np.int64))
    names = [str(name) for name in classes]
    if len(names) < 2:
        raise ValueError(f"{path}: y must hold at least two classes, got only {names[0]!r}")
    x, subject = _compact(arrays["x"]), _numbers_of(arrays, "subject")
    common = {
        "name": path.name.removesuffix(".npz") or str(path.resolve().name),
        "classes": tuple(names),
        "license": "your own data",
        "citation": "your own data",
    }
    if "x_test" in arrays:
        unknown = sorted({str(label) for label in arrays["y_test"].tolist()} - set(names))
        if unknown:
            raise ValueError(f"{path}: y_test has the class {unknown[0]!r}, which y does not have")
        order = {name: i for i, name in enumerate(names)}
        y_test = torch.tensor([order[str(label)] for label in arrays["y_test"].tolist()])
        return Dataset(
            x_train=x,
            y_train=y,
            groups_train=subject,
            x_test=_compact(arrays["x_test"]),
            y_test=y_test,
            groups_test=_numbers_of(arrays, "subject_test"),
            **common,  # type: ignore[arg-type]
        )
    held = held_out(y, subject, _HELD_OUT, seed=0)
    if not held.any():
        raise ValueError(
            f"{path}: a fifth of each class is held out for test, but no class has 3 sequences: "
            "give more, or x_test and y_test"
        )
    return Dataset(
        x_train=x[~held],
        y_train=y[~held],
        groups_train=None if subject is None else subject[~held],
        x_test=x[held],
        y_test=y[held],
        groups_test=None if subject is None else subject[held],
        **common,  # type: ignore[arg-type]
    )


def _compact(x: np.ndarray) -> torch.Tensor:
    """As it is where a data set can hold it, else as float32."""
    own = x.dtype.newbyteorder("=")
    small = own in (np.float32, np.float16, np.int16, np.uint8)
    native = x.astype(own if small else np.float32, copy=False)
    return torch.from_numpy(np.ascontiguousarray(native))


def _numbers_of(arrays: dict[str, np.ndarray], key: str) -> torch.Tensor | None:
    """Subjects as whole numbers; of names, their places in sorted order."""
    if key not in arrays:
        return None
    if arrays[key].dtype.kind != "U":
        return torch.from_numpy(arrays[key].astype(np.int64))
    known = np.unique(np.concatenate([arrays.get(k, arrays[key]) for k in ("subject", key)]))
    return torch.from_numpy(np.searchsorted(known, arrays[key]).astype(np.int64))
