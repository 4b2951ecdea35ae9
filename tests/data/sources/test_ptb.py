"""Penn Treebank: its archive, and the full data where it is at hand. The words here are made up."""

import numpy as np
import pytest
import torch
from support.factories import truncated, write_tar

from fixpoint.data import load_dataset, stream_batches
from fixpoint.data.sources import ptb

TEXT = {
    "train": " a cat saw <unk> \n a dog saw N cats \n",
    "valid": " a dog saw <unk> \n",
    "test": " cats saw a cat \n N \n",
}


def members(text=TEXT):
    top = "./simple-examples/data"
    made = {f"{top}/ptb.{part}.txt": words.encode() for part, words in text.items()}
    return {"./simple-examples/1-train/train.sh": b"", f"{top}/ptb.char.train.txt": b"x", **made}


def test_words_are_numbered_as_they_occur(tmp_path):
    arrays = ptb.parse([write_tar(tmp_path / "a.tgz", members())])
    words = ["a", "cat", "saw", "<unk>", "<eos>", "dog", "N", "cats"]
    assert arrays["vocab"].tolist() == words
    assert arrays["x_train"].tolist() == [0, 1, 2, 3, 4, 0, 5, 2, 6, 7, 4]
    assert arrays["x_test"].tolist() == [7, 2, 0, 1, 4, 6, 4]
    assert arrays["x_train"].dtype == np.uint16


def test_the_text_files_will_do(tmp_path):
    for part, words in TEXT.items():
        (tmp_path / f"ptb.{part}.txt").write_text(words)
    arrays = ptb.parse(sorted(tmp_path.iterdir()))
    assert arrays["x_valid"].tolist() == [0, 5, 2, 3, 4]


def test_a_wrong_file_of_ptb_is_named(tmp_path):
    path = write_tar(tmp_path / "a.tgz", members())
    with pytest.raises(ValueError, match=r"x_train must be uint16 \(929589,\), got uint16 \(11,\)"):
        ptb.SOURCE.make([path])
    with pytest.raises(ValueError, match="is truncated or corrupt"):
        ptb.SOURCE.make([truncated(path)])
    for text, message in (
        ({"train": " a \n", "test": " a \n"}, "lacks ptb.valid.txt"),
        (TEXT | {"valid": " a bird \n"}, "ptb.valid.txt has 1 words that ptb.train.txt does not"),
    ):
        with pytest.raises(ValueError, match=message):
            ptb.SOURCE.make([write_tar(tmp_path / "b.tgz", members(text))])
    binary = members()
    binary["./simple-examples/data/ptb.test.txt"] = b"\xff\xfe"
    with pytest.raises(ValueError, match="is truncated or corrupt"):
        ptb.SOURCE.make([write_tar(tmp_path / "c.tgz", binary)])


def test_the_full_data_is_word_for_word_the_official_one(full):
    arrays = full("ptb.npz")
    ptb.verify(arrays)
    swapped = arrays["x_valid"].copy()
    swapped[[10, 11]] = swapped[[11, 10]]
    with pytest.raises(ValueError, match=r"ptb\.valid\.txt is not the published one"):
        ptb.verify({**arrays, "x_valid": swapped})


def test_the_stream_of_ptb(full):
    arrays = full("ptb.npz")
    data = load_dataset("ptb")
    assert data.kind == "language-model"
    assert (len(data.vocabulary), data.vocabulary[24]) == (10_000, "<eos>")
    for part, tokens in (("train", 929_589), ("valid", 73_760), ("test", 82_430)):
        x, y = getattr(data, f"x_{part}"), getattr(data, f"y_{part}")
        assert len(x) == len(y) == tokens - 1
        assert torch.equal(data.inputs(x[1:]), y[:-1])
        assert np.array_equal(y, arrays[f"x_{part}"][1:])
    x, y = next(stream_batches(data.x_train, data.y_train, batch_size=20, steps=300))
    assert x.shape == y.shape == (20, 300)
