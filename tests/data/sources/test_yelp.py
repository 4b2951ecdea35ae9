"""Yelp: its archive, and the subset where it is at hand. The reviews here are made up."""

import json

import numpy as np
import pytest
import torch
from support.factories import truncated, write_tar, write_zip

from fixpoint.data import load_dataset, validation_split
from fixpoint.data.sources import yelp

REVIEWS = [
    (5, "Good good GOOD food!"),
    (1, "Bad food, isn't it?"),
    (4, "..."),  # no word: left out
    (3, "food " * 400),
    (2, "good new word"),
    (1, "bad"),
    (5, "beyond the last one"),
]


def lines(reviews=REVIEWS):
    rows = [{"review_id": "x", "stars": float(s), "text": t, "date": "2017"} for s, t in reviews]
    return "\n".join(json.dumps(row) for row in rows).encode() + b"\n"


MEMBERS = {
    "yelp_academic_dataset_business.json": b'{"stars": 3}\n',
    "yelp_academic_dataset_review.json": lines(),
}


@pytest.mark.parametrize("form", ["zip", "tar", "json"])
def test_texts_become_word_ids(form, tmp_path):
    if form == "json":
        path = tmp_path / "yelp_academic_dataset_review.json"
        path.write_bytes(lines())
    else:
        write, name = (write_zip, "a.zip") if form == "zip" else (write_tar, "a.tgz")
        path = write(tmp_path / name, MEMBERS)
    arrays = yelp.parse([path], reviews=2)
    # by how often they occur in the first two, then by the alphabet
    words = ["<pad>", "<unk>", "good", "food", "!", "?", "bad", "isn't", "it"]
    assert arrays["vocab"].tolist() == words
    assert arrays["x_train"].shape == arrays["x_test"].shape == (2, 300)
    assert arrays["x_train"][0, :6].tolist() == [2, 2, 2, 3, 4, 0]
    assert arrays["x_train"][1, :6].tolist() == [6, 3, 7, 8, 5, 0]
    assert arrays["x_test"][0].tolist() == [3] * 300
    assert arrays["x_test"][1, :4].tolist() == [2, 1, 1, 0]
    assert arrays["len_train"].tolist() == [5, 5]
    assert arrays["len_test"].tolist() == [300, 3]
    assert arrays["y_train"].tolist() == [4, 0]
    assert arrays["y_test"].tolist() == [2, 1]


def test_the_vocabulary_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(yelp, "VOCABULARY", 4)
    arrays = yelp.parse([write_zip(tmp_path / "a.zip", MEMBERS)], reviews=2)
    assert arrays["vocab"].tolist() == ["<pad>", "<unk>", "good", "food"]
    assert arrays["x_train"][0, :6].tolist() == [2, 2, 2, 3, 1, 0]


DAMAGE = {
    "few": (lines(REVIEWS[:3]), "1000000 reviews with a word are needed, got 2"),
    "no text": (b'{"stars": 3}\n', "line 1 of .*review.json is not a review with stars and text"),
    "no JSON": (lines()[:-30], "line 7 of .* is not a review"),
    "a list": (b"[1]\n", "is not a review"),
    "deep": (b"[" * 50_000 + b"\n", "is not a review"),
    "stars": (lines([(6, "good")]), r"must have 1 to 5 stars and a text, got 6\.0 stars"),
    "NaN": (b'{"stars": NaN, "text": "good"}\n', "got nan stars"),
    "number": (b'{"stars": 3, "text": 7}\n', "and a text"),
    "long": (b" " * 2**20 + b"\n", "has a line of more than"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_wrong_review_is_named(tmp_path, name):
    data, message = DAMAGE[name]
    path = write_zip(tmp_path / "a.zip", {"yelp_academic_dataset_review.json": data})
    with pytest.raises(ValueError, match=message) as error:
        yelp.SOURCE.make([path])
    assert "\n" not in str(error.value)


def test_a_truncated_archive(tmp_path):
    with pytest.raises(ValueError, match="is truncated or corrupt"):
        yelp.SOURCE.make([truncated(write_tar(tmp_path / "a.tgz", MEMBERS))])


def test_the_subset_of_yelp(full):
    arrays = full("yelp10k.npz")
    if yelp.SOURCE.find()[1]:
        pytest.skip("yelp5.npz, the whole data, is read instead")
    data = load_dataset("yelp5")
    assert data.kind == "tokens"
    assert "10,000" in data.subset
    assert (data.x_train.shape, data.x_test.shape) == ((8000, 300), (2000, 300))
    assert data.x_train.dtype == torch.int16
    assert np.array_equal(data.inputs(data.x_test), arrays["x_test"])
    ends = torch.arange(300) >= data.lengths_test[:, None]
    assert torch.equal(data.x_test == 0, ends)
    split = validation_split(data)
    fractions = split.y_valid.bincount() / data.y_train.bincount()
    assert ((fractions - 0.2).abs() < 0.001).all()
    assert len(split.lengths_valid) == len(split.x_valid)
