"""Yelp reviews and their stars, 1 to 5.

`yelp5.npz` holds texts of at most 300 words, each part with `x` (N, 300) uint16 (word ids, 0 after
the end, 1 for a word that is not among the 20000), `len` (N,) uint16 (words of the text), `y` (N,)
uint8 (stars - 1), and `vocab` (20000,), the most frequent words of train after `<pad>` and `<unk>`.

Words are what `[a-z0-9]+('[a-z]+)?|[!?]` finds in the text in lower case. FastGRNN takes 500,000
reviews for train and for test, 300 words and 20,000 words of vocabulary, and does not say which
reviews of the data set: here train is the first 500,000 that have a word, test the next.
`yelp10k.npz` is a subset in the same form, 8000 and 2000 of 10,000 reviews of 2013.

The reviews are Yelp's: take them from their page and do not pass them on.

Source: Kusupati et al., 2018, FastGRNN: A Fast, Accurate, Stable and Tiny Kilobyte Sized Gated
Recurrent Neural Network, supplement B.
"""

from __future__ import annotations

import itertools
import json
import posixpath
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import torch

from fixpoint.data.archives.archive import files
from fixpoint.data.dataset import Dataset
from fixpoint.data.schema import Arrays, Schema, check_counts, check_schema
from fixpoint.data.sources.source import Source
from fixpoint.data.storage import read_npz

PAGE = "https://www.yelp.com/dataset"
LICENSE = "Yelp Dataset terms of use: academic use, no redistribution"
CITATION = "Yelp Inc. Yelp Dataset Challenge, 2017. https://www.yelp.com/dataset"

WORDS = 300  # of a text
VOCABULARY = 20_000
_REVIEWS = 500_000  # of train, and of test
_TOKEN = re.compile(r"[a-z0-9]+(?:'[a-z]+)?|[!?]")
_LINE = 2**20  # bytes


def _schema(train: int, test: int) -> Schema:
    return {"vocab": ("str", (VOCABULARY,))} | {
        f"{key}_{part}": (dtype, (rows, *shape))
        for part, rows in (("train", train), ("test", test))
        for key, dtype, shape in (
            ("x", "uint16", (WORDS,)),
            ("len", "uint16", ()),
            ("y", "uint8", ()),
        )
    }


_SUBSET_COUNTS = {"y_train": [593, 746, 1190, 2798, 2673], "y_test": [156, 181, 271, 728, 664]}


def yelp5() -> Dataset:
    """Return Yelp-5: texts of at most 300 words and their stars, of yelp5.npz, else of the subset.

    Raises:
        FileNotFoundError: neither file exists.
        ValueError: the file is damaged, or belongs to another data set.
    """
    path, complete = SOURCE.find()
    arrays = read_npz(path, _schema(_REVIEWS, _REVIEWS) if complete else _schema(8000, 2000))
    if not complete:
        check_counts(arrays, _SUBSET_COUNTS, str(path), "replace it by a fresh copy")

    def int64(key: str) -> torch.Tensor:
        return torch.from_numpy(arrays[key].astype(np.int64))

    return Dataset(
        name="yelp5",
        kind="tokens",
        x_train=torch.from_numpy(arrays["x_train"].view(np.int16)),  # ids are below 2^15
        y_train=int64("y_train"),
        x_test=torch.from_numpy(arrays["x_test"].view(np.int16)),
        y_test=int64("y_test"),
        lengths_train=int64("len_train"),
        lengths_test=int64("len_test"),
        classes=("1 star", "2 stars", "3 stars", "4 stars", "5 stars"),
        vocabulary=tuple(arrays["vocab"].tolist()),
        subset="" if complete else "10,000 reviews of the 2013 challenge instead of 1,000,000",
        license=LICENSE,
        citation=CITATION,
    )


def parse(paths: Sequence[Path], *, reviews: int = _REVIEWS) -> dict[str, np.ndarray]:
    """Return arrays of yelp5.npz from the official archive or its file of reviews.

    Args:
        paths: the archive, or `yelp_academic_dataset_review.json`: one JSON object a line, with
            `stars` and `text`.
        reviews: of train, and of test.

    Raises:
        ValueError: a review lacks its text or stars, or there are too few.
    """
    stars, lengths, words, ids = array("B"), array("H"), array("I"), {"": 0}
    counts: Counter[str] = Counter()
    for star, tokens in itertools.islice(_reviews(paths), 2 * reviews):
        if len(stars) < reviews:
            counts.update(tokens)
        stars.append(star - 1)
        lengths.append(len(tokens))
        words.extend(ids.setdefault(token, len(ids)) for token in tokens)
    if len(stars) < 2 * reviews:
        raise ValueError(
            f"{2 * reviews} reviews with a word are needed, got {len(stars)}: give the archive of "
            f"{PAGE}, or its yelp_academic_dataset_review.json"
        )
    known = sorted(counts, key=lambda word: (-counts[word], word))[: VOCABULARY - 2]
    number = np.ones(len(ids), np.uint16)  # of each word that was seen; 1 is <unk>
    number[[ids[word] for word in known]] = np.arange(2, len(known) + 2)
    x = np.zeros((2 * reviews, WORDS), np.uint16)
    length = np.frombuffer(lengths, np.uint16)
    x[np.arange(WORDS) < length[:, None]] = number[np.frombuffer(words, f"u{words.itemsize}")]
    arrays = {"vocab": np.array(["<pad>", "<unk>", *known])}
    for part, rows in (("train", slice(reviews)), ("test", slice(reviews, None))):
        arrays[f"x_{part}"] = x[rows]
        arrays[f"len_{part}"] = length[rows]
        arrays[f"y_{part}"] = np.frombuffer(stars, np.uint8)[rows]
    return arrays


def verify(arrays: Arrays) -> None:
    """Refuse arrays that do not have the number of reviews and words, as a ValueError."""
    check_schema(arrays, _schema(_REVIEWS, _REVIEWS), "the archive", f"give that of {PAGE}")


def tokenize(text: str) -> list[str]:
    """Return the first 300 words of a text.

    >>> tokenize("It's GREAT!! 5/5")
    ["it's", 'great', '!', '!', '5', '5']
    """
    return [match.group() for match in itertools.islice(_TOKEN.finditer(text.lower()), WORDS)]


def _reviews(paths: Sequence[Path]) -> Iterator[tuple[int, list[str]]]:
    """Yield stars and words of each review that has words."""
    for path, file in files(paths):
        if posixpath.basename(path).lower().endswith("review.json"):
            for number, line in enumerate(_lines(file, path), 1):
                star, text = _review(line, f"line {number} of {path}")
                if tokens := tokenize(text):
                    yield star, tokens


def _lines(file: IO[bytes], path: str) -> Iterable[bytes]:
    while line := file.readline(_LINE + 1):
        if len(line) > _LINE:
            raise ValueError(f"{path} has a line of more than {_LINE} bytes: it is not a review")
        if line.strip():
            yield line


def _review(line: bytes, where: str) -> tuple[int, str]:
    try:
        review = json.loads(line)
        star, text = review["stars"], review["text"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{where} is not a review with stars and text") from None
    if star not in (1, 2, 3, 4, 5) or not isinstance(text, str):
        raise ValueError(f"{where} must have 1 to 5 stars and a text, got {str(star)[:20]} stars")
    return int(star), text


SOURCE = Source(
    name="yelp5",
    file="yelp5.npz",
    subset_file="yelp10k.npz",
    archives=(),
    page=PAGE,
    needs="the archive of reviews",
    parse=parse,
    verify=verify,
)
