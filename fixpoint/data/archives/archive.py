"""The files inside zip and tar archives, read in memory.

Nothing is unpacked to disk, so no member can write where its name points.
"""

from __future__ import annotations

import gzip
import io
import posixpath
import re
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from fixpoint.data.corrupt import ADVICE, as_value_error

_MEGABYTE = 2**20


def files(paths: Iterable[Path]) -> Iterator[tuple[str, IO[bytes]]]:
    """Name and content of each file in some archives, in their order.

    A path is a .zip, .tar, .tar.gz or .tgz archive, a .gz file, any other file, which is returned
    itself, or a folder, whose files are read as if they were given, with names relative to it.
    Names have forward slashes. Files that archivers of macOS add and hidden files of a folder are
    skipped. A file is open until the next one is requested.

    Raises:
        FileNotFoundError: the archive does not exist.
        ValueError: an archive is damaged, or has a member that is a link, is there twice, is
            encrypted, or whose name points outside.

    >>> [name for name, _ in files([Path(__file__)])]
    ['archive.py']
    """
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"there is no file {path}: give the path of an archive")
        for file, name in _below(path):
            with as_value_error(file):
                yield from _files(file, name)


def _below(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield files of a folder in a fixed order with their names inside it, or one file itself."""
    if path.is_file():
        yield path, path.name
        return
    for file in sorted(path.rglob("*")):
        inside = file.relative_to(path)
        if file.is_file() and not any(part.startswith(".") for part in inside.parts):
            yield file, inside.as_posix()


def _files(path: Path, name: str) -> Iterator[tuple[str, IO[bytes]]]:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic[:2] == b"PK" or path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            yield from zip_files(archive, str(path))
    elif path.name.endswith((".tar", ".tgz", ".tar.gz")) or tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            yield from _tar_files(archive, str(path))
    elif magic[:2] == b"\x1f\x8b":
        with gzip.open(path) as file:
            yield name.removesuffix(".gz"), file  # type: ignore[misc]
    elif not _is_of_macos(name):
        with path.open("rb") as file:
            yield name, file


def zip_files(archive: zipfile.ZipFile, title: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the files of an open zip archive, as `files` does; `title` names it in messages."""
    seen: set[str] = set()
    for member in archive.infolist():
        name = _checked(member.filename, title, seen)
        if member.is_dir() or _is_of_macos(name):
            continue
        if member.flag_bits & 1:
            raise ValueError(f"{title}: {name} is encrypted; give an archive without a password")
        if (member.external_attr >> 16) & 0o170000 == 0o120000:
            raise ValueError(f"{title}: {name} is a link, not a file; {ADVICE}")
        with archive.open(member) as file:
            yield name, file


def _tar_files(archive: tarfile.TarFile, title: str) -> Iterator[tuple[str, IO[bytes]]]:
    seen: set[str] = set()
    for member in archive:
        name = _checked(member.name, title, seen)
        if member.isdir() or _is_of_macos(name):
            continue
        file = archive.extractfile(member) if member.isfile() else None
        if file is None:
            raise ValueError(f"{title}: {name} is a link or a device, not a file; {ADVICE}")
        with file:
            yield name, file
    # the checksum of a compressed archive stands at its end
    while archive.fileobj is not None and archive.fileobj.read(_MEGABYTE):
        pass


def _checked(name: str, title: str, seen: set[str]) -> str:
    shown = ascii(name)[:100]
    outside = name.startswith(("/", "\\")) or re.match("[A-Za-z]:", name)
    if outside or ".." in re.split(r"[/\\]", name):
        raise ValueError(f"{title}: the member {shown} points outside the archive; {ADVICE}")
    plain = posixpath.normpath(name.replace("\\", "/"))
    if plain in seen:
        raise ValueError(f"{title}: the member {shown} is there twice; {ADVICE}")
    seen.add(plain)
    return plain


def _is_of_macos(name: str) -> bool:
    """Tell whether a file only holds attributes that an archiver of macOS adds."""
    folder, _, base = name.rpartition("/")
    return base.startswith("._") or "__MACOSX" in folder.split("/")


def read(file: IO[bytes], name: str, *, at_most: int = 64 * _MEGABYTE) -> bytes:
    """Return all bytes of a file.

    Raises:
        ValueError: it holds more than `at_most` bytes, or is damaged.

    >>> read(io.BytesIO(b"abc"), "abc.txt", at_most=3)
    b'abc'
    """
    with as_value_error(name):
        data = file.read(at_most + 1)
    if len(data) > at_most:
        raise ValueError(f"{name} holds more than the {at_most} bytes that it may; {ADVICE}")
    return data


def inner_zip(file: IO[bytes], name: str, *, at_most: int) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the files of a zip archive inside another one."""
    with zipfile.ZipFile(io.BytesIO(read(file, name, at_most=at_most))) as archive:
        yield from zip_files(archive, name)
