"""The data folder, and reading and writing of .npz files."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fixpoint._messages import missing_extra
from fixpoint.data.corrupt import as_value_error
from fixpoint.data.schema import Arrays, Schema, check_schema

_REPLACE = "replace it by a fresh copy"


def folder() -> Path:
    """Return the folder of the data files: FIXPOINT_DATA if it is set and not empty, else the
    user's cache.
    """
    given = os.environ.get("FIXPOINT_DATA")
    if given:
        return expand(given)
    try:
        import pooch
    except ModuleNotFoundError:
        raise missing_extra("the data cache", "pooch", "bench") from None

    return Path(pooch.os_cache("fixpoint"))


def expand(path: Path | str) -> Path:
    """Return the path with a home folder in the place of ~, where there is one.

    >>> expand("~nobody0/a")
    PosixPath('~nobody0/a')
    """
    return Path(os.path.expanduser(path))


def find(file_name: str, remedy: str) -> Path:
    """Return the path of a data file.

    Args:
        file_name: name inside `folder()`.
        remedy: how to get it, with the address: "make it from https://...".

    Raises:
        FileNotFoundError: it does not exist; the message has the expected path and the remedy.
    """
    path = folder() / file_name
    if path.is_file():
        return path
    given = os.environ.get("FIXPOINT_DATA")
    raise FileNotFoundError(
        f"{file_name} was expected in {path.parent} "
        f"(FIXPOINT_DATA {f'is {given}' if given else 'is not set'}); "
        f"{remedy}, or set FIXPOINT_DATA to a folder that has {file_name}"
    )


def read_npz(path: Path, schema: Schema) -> dict[str, np.ndarray]:
    """Return arrays of an .npz file, each with the dtype and shape of `schema`; others are not
    read.

    Raises:
        ValueError: the file is truncated or corrupt, or an array is missing or differs.
    """
    arrays = read_arrays(path, schema, _REPLACE)
    check_schema(arrays, schema, str(path), _REPLACE)
    return arrays


def read_arrays(path: Path, keys: Iterable[str], advice: str) -> dict[str, np.ndarray]:
    """Read the arrays of an .npz file that have one of some names, as they are.

    Raises:
        ValueError: the file is truncated, corrupt, or holds Python objects.
    """
    with path.open("rb") as file, as_value_error(path, advice, also=(ValueError,)):
        if not zipfile.is_zipfile(file):
            raise zipfile.BadZipFile("not an .npz file, or its end is missing")
        file.seek(0)
        with np.load(file, allow_pickle=False) as archive:
            return {key: archive[key] for key in keys if key in archive}


def array_headers(path: Path, advice: str) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Return the dtype and shape of each array in an .npz file, which are read without loading the
    arrays.

    Raises:
        ValueError: the file is truncated or corrupt.
    """
    headers = {}
    with as_value_error(path, advice, also=(ValueError,)), zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            with archive.open(member) as file:
                first = np.lib.format.read_magic(file) == (1, 0)
                read = (
                    np.lib.format.read_array_header_1_0
                    if first
                    else np.lib.format.read_array_header_2_0
                )
                shape, _, dtype = read(file)
            headers[member.removesuffix(".npy")] = dtype, shape
    return headers


def write_npz(path: Path, arrays: Arrays) -> None:
    """Write an .npz file atomically: it is complete as soon as it has its name.

    Raises:
        OSError: the folder cannot be written.

    >>> with tempfile.TemporaryDirectory() as name:
    ...     write_npz(Path(name, "new", "a.npz"), {"x": np.zeros(3)})
    ...     sorted(path.name for path in Path(name).rglob("*"))
    ['a.npz', 'new']
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
