"""Sequences in a folder: a folder for each class, a CSV file for each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fixpoint.data.numeric_table import numbers


def read_folder(path: Path) -> dict[str, np.ndarray]:
    """Arrays x (N, T, d) float32 and y (N,), and perhaps x_test and y_test, of a folder.

    Raises:
        ValueError: no file is there, one is no table of numbers, or two differ in size.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     for label in ("down", "up"):
    ...         Path(name, label).mkdir()
    ...         _ = Path(name, label, "1.csv").write_text("a,b\\n1,2\\n3,4\\n5,6\\n")
    ...     read_folder(Path(name))["x"].shape
    (2, 3, 2)
    """
    if (path / "train").is_dir() and (path / "test").is_dir():
        train, test = _read_classes(path / "train"), _read_classes(path / "test")
        return {"x": train[0], "y": train[1], "x_test": test[0], "y_test": test[1]}
    x, y = _read_classes(path)
    return {"x": x, "y": y}


def _read_classes(path: Path) -> tuple[np.ndarray, np.ndarray]:
    found = [
        (file, folder.name)
        for folder in sorted(path.iterdir())
        if folder.is_dir()
        for file in sorted(folder.glob("*.csv"))
    ]
    if not found:
        raise ValueError(
            f"{path} has no CSV files: it needs a folder for each class, with a file NAME.csv for "
            "each sequence"
        )
    sequences = [_read_csv(file) for file, _ in found]
    for (file, _), sequence in zip(found, sequences, strict=True):
        if sequence.shape != sequences[0].shape:
            raise ValueError(
                f"{file} has {_size(sequence.shape)}, but {found[0][0]} has "
                f"{_size(sequences[0].shape)}: all sequences must be of one length"
            )
    return np.stack(sequences), np.array([name for _, name in found])


def _size(shape: Sequence[int]) -> str:
    return f"{shape[0]} lines of {shape[1]} numbers"


def _read_csv(file: Path) -> np.ndarray:
    data = file.read_bytes()
    first, _, rest = data.partition(b"\n")
    return numbers(rest if _is_header(first) else data, str(file), delimiter=",").astype(np.float32)


def _is_header(line: bytes) -> bool:
    """Whether no cell of the line is a number."""
    for cell in line.decode("utf-8", "replace").split(","):
        try:
            float(cell)
        except ValueError:
            continue
        return False
    return True
