"""Penn Treebank, word level: newspaper text of a million words, as one stream.

`ptb.npz` holds Mikolov's preprocessed text: `x_train` (929589,), `x_valid` (73760,), `x_test`
(82430,) uint16, the ids of the words with each line's end as `<eos>`, and `vocab` (10000,), the
words in the order in which they first occur in train.

The text is copyright of the Linguistic Data Consortium and Dow Jones: do not pass it on.

Source: Marcus et al., 1993 (see `CITATION`); Mikolov et al., 2010, Recurrent Neural Network Based
Language Model.
"""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fixpoint.data.archives.archive import files, read
from fixpoint.data.archives.download import Archive
from fixpoint.data.dataset import PARTS, Dataset
from fixpoint.data.schema import Arrays, Schema, check_schema
from fixpoint.data.sources.source import Source
from fixpoint.data.storage import read_npz

URL = "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz"
LICENSE = (
    "copyright Linguistic Data Consortium (Treebank-3, LDC99T42) and Dow Jones; not openly "
    "licensed: do not pass it on"
)
CITATION = (
    "M. P. Marcus, B. Santorini, M. A. Marcinkiewicz. Building a Large Annotated Corpus of "
    "English: The Penn Treebank. Computational Linguistics 19(2), 1993. Preprocessing: T. Mikolov "
    "et al. Recurrent Neural Network Based Language Model. Interspeech 2010"
)

_END = "<eos>"
_SHA256 = {
    "train": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "valid": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "test": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}
_SCHEMA: Schema = {
    "x_train": ("uint16", (929_589,)),
    "x_valid": ("uint16", (73_760,)),
    "x_test": ("uint16", (82_430,)),
    "vocab": ("str", (10_000,)),
}


def ptb() -> Dataset:
    """Return Penn Treebank: streams of 929589, 73760 and 82430 words of 10000.

    Raises:
        FileNotFoundError: ptb.npz does not exist.
        ValueError: ptb.npz is damaged, or belongs to another data set.
    """
    path, _ = SOURCE.find()
    arrays = read_npz(path, _SCHEMA)
    vocabulary = tuple(arrays["vocab"].tolist())
    streams = {part: torch.from_numpy(arrays[f"x_{part}"].astype(np.int16)) for part in PARTS}
    return Dataset(
        name="ptb",
        kind="language-model",
        x_train=streams["train"][:-1],
        y_train=streams["train"][1:].long(),
        x_valid=streams["valid"][:-1],
        y_valid=streams["valid"][1:].long(),
        x_test=streams["test"][:-1],
        y_test=streams["test"][1:].long(),
        classes=vocabulary,
        vocabulary=vocabulary,
        license=LICENSE,
        citation=CITATION,
    )


def parse(paths: Sequence[Path]) -> dict[str, np.ndarray]:
    """Return arrays of ptb.npz from the official archive, or from its three text files.

    Raises:
        ValueError: a file is missing, or contains a word that is not in train.
    """
    words: dict[str, list[str]] = {}
    for path, file in files(paths):
        for part in PARTS:
            if posixpath.basename(path).lower() == f"ptb.{part}.txt":
                lines = read(file, path).decode().splitlines()
                words[part] = [word for line in lines for word in (*line.split(), _END)]
    missing = [f"ptb.{part}.txt" for part in PARTS if part not in words]
    if missing:
        raise ValueError(f"the archive lacks {', '.join(missing)}: give the official one, {URL}")
    ids = {word: i for i, word in enumerate(dict.fromkeys(words["train"]))}
    for part in PARTS:
        unknown = set(words[part]) - set(ids)
        if unknown:
            raise ValueError(
                f"ptb.{part}.txt has {len(unknown)} words that ptb.train.txt does not have: give "
                f"the official archive, {URL}"
            )
    arrays = {f"x_{part}": np.array([ids[w] for w in words[part]], np.uint16) for part in PARTS}
    return {**arrays, "vocab": np.array(list(ids))}


def verify(arrays: Arrays) -> None:
    """Refuse arrays that are not word for word the official text, as a ValueError."""
    remedy = f"give the official archive, {URL}"
    check_schema(arrays, _SCHEMA, "the archive", remedy)
    vocabulary = arrays["vocab"].tolist()
    for part, expected in _SHA256.items():
        text = _text([vocabulary[i] for i in arrays[f"x_{part}"]])
        if hashlib.sha256(text).hexdigest() != expected:
            raise ValueError(
                f"ptb.{part}.txt is not the published one (sha256 {expected}); {remedy}"
            )


def _text(words: list[str]) -> bytes:
    """Write the text file of some words: ` the first line \\n the second one \\n`."""
    return (" " + " ".join(words).replace(f"{_END} ", "\n ").removesuffix(_END) + "\n").encode()


SOURCE = Source(
    name="ptb",
    file="ptb.npz",
    archives=(
        Archive(
            url=URL,
            file="simple-examples.tgz",
            checksum="md5:30177ea32e27c525793142b6bf2c8e2d",
        ),
    ),
    page=URL,
    needs="the archive",
    parse=parse,
    verify=verify,
)
