"""Google speech commands: one-second clips of spoken words, as log mel energies (99, 32).

Google-30 has all thirty words of version 0.01. Google-12 has ten of them, the class `_unknown_`,
clips of the other twenty, and `_silence_`, pieces of the recordings of background noise; both have
a tenth as many clips as the ten words together, which gives the published sizes, 22246 and 3081.
Which clips stand for the two is not published and our choice: for unknown those with the least
SHA-1 of their path, for silence pieces of the first 80 % (train), the next 10 % (valid) and the
last 10 % (test) of each recording, drawn with a fixed seed. Train, valid and test are those of the
lists in the archive. No speaker is in two of them.

`google30.npz` and `google12.npz` hold of each part `x` (N, 99, 32) int16, which times `scale` (1,)
are the log energies (see `log_mel`), `y` uint8 into `classes`, `speaker` (8 hex digits, empty for
silence) and `file`. `gsc12_v002_testset_logmel.npz` is a subset in the same form without valid: the
4890 clips of the test archive of version 0.02, 3956 for train and 934 for test by speaker, our
split.

Source: Warden, 2018 (see `CITATION`); sizes: Kusupati et al., 2018, FastGRNN: A Fast, Accurate,
Stable and Tiny Kilobyte Sized Gated Recurrent Neural Network, supplement B.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from fixpoint.data.archives.download import Archive
from fixpoint.data.archives.log_mel import FILTERS, FRAMES
from fixpoint.data.archives.speech_archive import URL, WORDS, parse
from fixpoint.data.dataset import Dataset
from fixpoint.data.schema import Arrays, Schema, check_schema
from fixpoint.data.sources.source import Source
from fixpoint.data.storage import read_npz

LICENSE = "CC BY 4.0"
CITATION = (
    "P. Warden. Speech Commands: A Dataset for Limited-Vocabulary Speech Recognition. "
    "arXiv:1804.03209, 2018"
)

_SIZES: dict[str, dict[str, int | None]] = {
    "google30": {"train": 51_088, "valid": 6798, "test": 6835},
    "google12": {"train": 22_246, "valid": None, "test": 3081},
}
_SUBSET = {"train": 3956, "test": 934}


def google12() -> Dataset:
    """Return Google-12: ten words, unknown and silence, of google12.npz, else of the subset.

    Raises:
        FileNotFoundError: neither file exists.
        ValueError: the file is damaged, or belongs to another data set.
    """
    path, complete = SOURCES["google12"].find()
    subset = "" if complete else "the test archive of version 0.02, split by speaker"
    return _dataset("google12", path, _SIZES["google12"] if complete else _SUBSET, subset)


def google30() -> Dataset:
    """Return Google-30: 51088 train, 6798 valid and 6835 test clips of thirty words.

    Raises:
        FileNotFoundError: google30.npz does not exist.
        ValueError: google30.npz is damaged, or belongs to another data set.
    """
    return _dataset("google30", SOURCES["google30"].find()[0], _SIZES["google30"], "")


def _dataset(name: str, path: Path, sizes: Mapping[str, int | None], subset: str) -> Dataset:
    arrays = read_npz(path, _schema(name, sizes))
    tensors = {}
    for part in sizes:
        tensors[f"x_{part}"] = torch.from_numpy(arrays[f"x_{part}"])
        tensors[f"y_{part}"] = torch.from_numpy(arrays[f"y_{part}"].astype(np.int64))
        tensors[f"groups_{part}"] = _groups(arrays[f"speaker_{part}"])
    return Dataset(
        name=name,
        classes=tuple(arrays["classes"].tolist()),
        scale=torch.from_numpy(arrays["scale"]),
        subset=subset,
        license=LICENSE,
        citation=CITATION,
        **tensors,  # type: ignore[arg-type]
    )


def _groups(speakers: np.ndarray) -> torch.Tensor:
    """Return a number for each speaker; each clip of silence is a group of its own, below 0."""
    return torch.tensor(
        [
            int(speaker, 16) if speaker else -1 - row
            for row, speaker in enumerate(speakers.tolist())
        ],
        dtype=torch.int64,
    )


def _schema(name: str, sizes: Mapping[str, int | None]) -> Schema:
    classes = 12 if name == "google12" else len(WORDS)
    return {"scale": ("float32", (1,)), "classes": ("str", (classes,))} | {
        f"{key}_{part}": (dtype, (rows, *shape))
        for part, rows in sizes.items()
        for key, dtype, shape in (
            ("x", "int16", (FRAMES, FILTERS)),
            ("y", "uint8", ()),
            ("speaker", "str", ()),
        )
    }


def verify(name: str, arrays: Arrays) -> None:
    """Refuse arrays that do not have the published numbers of clips, as a ValueError."""
    remedy = f"give the official one, {URL}"
    check_schema(arrays, _schema(name, _SIZES[name]), "the archive", remedy)


SOURCES = {
    name: Source(
        name=name,
        file=f"{name}.npz",
        subset_file="gsc12_v002_testset_logmel.npz" if name == "google12" else "",
        archives=(
            Archive(
                url=URL,
                file="speech_commands_v0.01.tar.gz",
                checksum="sha256:743935421bb51cccdb6bdd152e04c5c70274e935c82119ad7faeec31780d811d",
            ),
        ),
        page=URL,
        needs="the archive",
        parse=functools.partial(parse, name),
        verify=functools.partial(verify, name),
    )
    for name in ("google12", "google30")
}
