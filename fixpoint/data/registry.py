"""The data sets by name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fixpoint._messages import unknown_name
from fixpoint.data.archive_format import archive_file_in, is_archive_file
from fixpoint.data.csv_folder import tables_in
from fixpoint.data.custom import load
from fixpoint.data.dataset import Dataset
from fixpoint.data.sources import dsa, har, mnist, ptb, speech, yelp
from fixpoint.data.sources.sample import har2_sample
from fixpoint.data.sources.source import Source
from fixpoint.data.sources.toy_walks import toy_walks
from fixpoint.data.storage import expand

DATASETS: dict[str, Callable[[], Dataset]] = {
    "har2-sample": har2_sample,
    "toy-walks": toy_walks,
    "har2": har.har2,
    "har6": har.har6,
    "dsa19": dsa.dsa19,
    "google12": speech.google12,
    "google30": speech.google30,
    "pixel-mnist": mnist.pixel_mnist,
    "permuted-mnist": mnist.permuted_mnist,
    "yelp5": yelp.yelp5,
    "ptb": ptb.ptb,
}
"""Loader of each data set by name; "har2-sample" and "toy-walks" need no file."""

SOURCES: dict[str, Source] = {
    "har2": har.SOURCE,
    "har6": har.SOURCE,
    "dsa19": dsa.SOURCE,
    **speech.SOURCES,
    "pixel-mnist": mnist.SOURCE,
    "permuted-mnist": mnist.SOURCE,
    "yelp5": yelp.SOURCE,
    "ptb": ptb.SOURCE,
}
"""Source of the file of each other data set."""


def load_dataset(name: str, **cutting: Any) -> Dataset:
    """Load a data set by name, or from a user's own file or folder, in its original units.

    Args:
        name: name in `DATASETS`, or a path (see `load`). A name takes precedence over a path.
        cutting: see `load`.

    Raises:
        ValueError: the name is unknown, or the file is damaged.
        FileNotFoundError: the file does not exist; the message says where to get it.

    >>> load_dataset("toy-walks").x_train.shape
    torch.Size([10000, 100, 2])
    """
    check_name(name)
    if name not in DATASETS:
        return load(name, **cutting)
    given = [option for option, value in cutting.items() if value not in (None, (), "none")]
    if given:
        raise ValueError(f"{name} has windows already: leave {', '.join(given)} out")
    return DATASETS[name]()


def fingerprint(name: str) -> str:
    """Return the hash of the contents of a user's own file or folder; empty for a data set of
    `DATASETS`.

    >>> fingerprint("har2")
    ''
    """
    path = expand(name)
    return "" if name in DATASETS or not os.path.exists(path) else _digest(path)


def _digest(path: Path) -> str:
    path = (archive_file_in(path) if path.is_dir() else None) or path
    files = tables_in(path) if path.is_dir() else _with_pair(path)
    digest = hashlib.sha256()
    for file in files:
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        place = file.relative_to(path if path.is_dir() or file == path else path.parent)
        digest.update(f"{place} {content}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _with_pair(path: Path) -> list[Path]:
    """Return a file, and the other one of NAME_TRAIN and NAME_TEST."""
    if not is_archive_file(path):
        return [path]
    stem = path.stem.rpartition("_")[0]
    pair = (path.with_stem(f"{stem}_{part}") for part in ("TRAIN", "TEST"))
    return sorted({path, *(file for file in pair if file.is_file())})


def check_name(name: str) -> None:
    """Raise unless `name` is the name of a data set or an existing path.

    Raises:
        ValueError: the name is unknown; the message lists the known names.
        FileNotFoundError: it is a path that does not exist.

    >>> check_name("har2")
    """
    if not name.isprintable() and any("\ud800" <= c <= "\udfff" for c in name):
        raise ValueError(f"the name {name!r} is not UTF-8: rename the file")
    if name in DATASETS or os.path.exists(expand(name)):
        return
    if any(character in name for character in "./\\"):
        raise FileNotFoundError(
            f"there is no file or folder {name}: give an .npz file or a folder of CSV files, or "
            f"one of {', '.join(DATASETS)}"
        )
    path = "the path of an .npz file or a folder of CSV files"
    raise ValueError(unknown_name("data set", name, DATASETS, other=path))
