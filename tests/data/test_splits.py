"""validation_split and held_out, and batches of a stream."""

from dataclasses import replace

import pytest
import torch
from support.factories import N, make

from fixpoint.data import Dataset, load_dataset, stream_batches, validation_split
from fixpoint.data.splits import held_out


def rows_of(x, whole):
    """Which rows of `whole` the rows of x are."""
    return [int((whole == row).flatten(1).all(1).nonzero().item()) for row in x]


def test_no_subject_is_in_train_and_valid():
    data = load_dataset("har2-sample")
    split = validation_split(data)
    train, valid = set(split.groups_train.tolist()), set(split.groups_valid.tolist())
    assert not train & valid
    assert train | valid == set(data.groups_train.tolist())
    # 36 windows of each of 21 subjects: 4 subjects are nearest to a fifth
    assert (len(split.x_train), len(split.x_valid), len(split.x_test)) == (17 * 36, 4 * 36, 324)
    assert split.x_test is data.x_test
    assert validation_split(split) is split


def test_split_rows_keep_their_labels_and_none_is_lost():
    data = make(groups_train=torch.arange(N) // 5)
    split = validation_split(data, 0.3)
    train, valid = rows_of(split.x_train, data.x_train), rows_of(split.x_valid, data.x_train)
    assert sorted(train + valid) == list(range(N))
    for name, rows in (("train", train), ("valid", valid)):
        assert getattr(split, f"y_{name}").tolist() == data.y_train[rows].tolist()
        assert getattr(split, f"groups_{name}").tolist() == data.groups_train[rows].tolist()


def test_a_split_without_groups_is_stratified():
    y = torch.tensor([0] * 40 + [1] * 10 + [2] * 2)
    mask = held_out(y, None, 0.2, seed=0)
    assert y[mask].bincount(minlength=3).tolist() == [8, 2, 0]
    assert torch.equal(mask, held_out(y, None, 0.2, seed=0))
    assert not torch.equal(mask, held_out(y, None, 0.2, seed=1))


@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.5, 0.99])
def test_a_split_takes_whole_groups_and_never_all(fraction):
    groups = torch.arange(30) % 3
    mask = held_out(torch.zeros(30).long(), groups, fraction, seed=0)
    sizes = {int(mask[groups == g].sum()) for g in range(3)}
    assert sizes == {0, 10}
    nearest = {0.01: [10], 0.2: [10], 0.5: [10, 20], 0.99: [20]}
    assert int(mask.sum()) in nearest[fraction]


@pytest.mark.parametrize("fraction", [0, 1, -0.1, float("nan")])
def test_a_fraction_outside_0_to_1_is_refused(fraction):
    with pytest.raises(ValueError, match="fraction must lie between 0 and 1"):
        validation_split(make(), fraction)


def test_one_group_and_a_stream_are_not_split():
    with pytest.raises(ValueError, match="all 50 training sequences are of one group"):
        validation_split(make(groups_train=torch.zeros(N).long()))
    stream = torch.arange(9) % 3
    data = Dataset(
        name="stream", kind="language-model", x_train=stream, y_train=stream, x_test=stream,
        y_test=stream, classes=("a", "b", "c"), vocabulary=("a", "b", "c"), license="", citation="",
    )  # fmt: skip
    with pytest.raises(ValueError, match="stream is one stream without a validation part"):
        validation_split(data)
    official = replace(data, x_valid=stream, y_valid=stream)
    assert validation_split(official) is official


@pytest.mark.parametrize(("n", "size", "steps"), [(103, 4, 7), (20, 1, 30), (12, 12, 1)])
def test_stream_batches_cover_a_stream_once(n, size, steps):
    stream = torch.arange(n + 1)
    batches = list(stream_batches(stream[:-1], stream[1:], batch_size=size, steps=steps))
    x = torch.cat([x for x, _ in batches], dim=1)
    assert x.shape == (size, n // size)
    assert x.flatten().tolist() == list(range(n // size * size))
    for x, y in batches:
        assert torch.equal(y, x + 1)
        assert x.shape[1] <= steps


def test_stream_batches_need_one_axis_and_enough_tokens():
    one = torch.arange(5)
    with pytest.raises(ValueError, match="x and y must be"):
        list(stream_batches(one, one[1:], batch_size=1, steps=1))
    with pytest.raises(ValueError, match="5 tokens cannot be cut into 6 pieces"):
        list(stream_batches(one, one, batch_size=6, steps=1))
