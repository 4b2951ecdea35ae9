"""Random rotations, and what they turn."""

import numpy as np
import pytest
import torch
from scipy import ndimage
from scipy.spatial.transform import Rotation
from support.factories import make

from fixpoint.data import (
    check_image,
    check_vectors,
    load_dataset,
    move,
    normalize,
    random_moves,
    random_rotations,
    rotate,
)


def draw(count, degrees, seed=0):
    return random_rotations(count, degrees, generator=torch.Generator().manual_seed(seed))


def test_random_rotations_have_any_axis_and_at_most_the_angle():
    R = draw(20_000, 30.0)
    one = torch.eye(3).expand_as(R)
    torch.testing.assert_close(R @ R.mT, one, rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.linalg.det(R), torch.ones(len(R)), rtol=0, atol=1e-6)
    turns = Rotation.from_matrix(R.double().numpy()).as_rotvec(degrees=True)
    angle = np.linalg.norm(turns, axis=1)
    assert angle.max() <= 30.001
    # uniform: quarters hold 5000 +- 61 each
    assert abs(np.histogram(angle, bins=4, range=(0, 30))[0] - 5000).max() < 4 * 61
    axis = turns / angle[:, None]
    # any direction: mean 0 and E[u u^T] = I / 3, with a s.d. below 0.005 each
    assert abs(axis.mean(0)).max() < 0.02
    assert abs(axis.T @ axis / len(R) - np.eye(3) / 3).max() < 0.02


def test_rotation_by_zero_is_the_identity_and_a_seed_is_repeatable():
    assert torch.equal(draw(4, 0.0), torch.eye(3).expand(4, 3, 3))
    assert torch.equal(draw(4, 90.0), draw(4, 90.0))
    assert not torch.equal(draw(4, 90.0), draw(4, 90.0, seed=1))


def test_each_vector_of_a_sequence_turns_by_its_rotation():
    x, R = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(0)), draw(5, 180.0)
    before = x.clone()
    vectors = ((1, 2, 3), (7, 0, 5))
    turned = rotate(x, vectors, R)
    assert torch.equal(x, before)
    for b in range(5):
        turn = Rotation.from_matrix(R[b].double().numpy())
        for channels in map(list, vectors):
            expected = torch.from_numpy(turn.apply(x[b][:, channels].double().numpy())).float()
            torch.testing.assert_close(turned[b][:, channels], expected, rtol=0, atol=3e-6)
    assert torch.equal(turned[..., [4, 6]], x[..., [4, 6]])


def test_vectors_of_one_sensor_turn_alike():
    x, R = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(0)), draw(4, 90.0)
    R, vectors = R.view(2, 2, 3, 3), ((0, 1, 2), (8, 7, 6), (3, 4, 5))
    turned = rotate(x, vectors, R, sensors=(1, 0, 1))
    for vector, sensor in zip(vectors, (1, 0, 1), strict=True):
        alone = rotate(x, (vector,), R[:, sensor])
        torch.testing.assert_close(turned[..., list(vector)], alone[..., list(vector)])


def test_rotation_preserves_norms_of_real_windows():
    data = load_dataset("har2-sample")
    x = data.x_train[:64]
    turned = rotate(x, data.vectors, draw(64, 30.0))
    norms = [v[..., list(c)].norm(dim=-1) for c in data.vectors for v in (x, turned)]
    for before, after in zip(norms[::2], norms[1::2], strict=True):
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
    assert (turned - x).abs().max() > 0.3


@pytest.mark.parametrize("name", ["toy-walks", "normalized"])
def test_data_without_vectors_are_not_rotated(name):
    data = normalize(load_dataset("har2-sample")) if name == "normalized" else load_dataset(name)
    with pytest.raises(ValueError, match=r"training\.rotate turns vectors .* has none"):
        check_vectors(data)


def test_random_moves_are_equally_likely_and_a_seed_is_repeatable():
    draws = [random_moves(9000, 1, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    # each of nine 1000 +- 30 times
    counts = torch.bincount((draws[0][:, 0] + 1) * 3 + draws[0][:, 1] + 1, minlength=9)
    assert (counts - 1000).abs().max() < 4 * 30
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert random_moves(5, 0, generator=torch.Generator()).abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_an_image_moves_as_scipy_moves_it(dtype):
    x = torch.randint(1, 200, (7, 5 * 4, 2), generator=torch.Generator().manual_seed(0)).to(dtype)
    before = x.clone()
    moves = torch.tensor([[0, 0], [1, 0], [0, 1], [-1, -2], [3, -3], [4, 0], [-5, 9]])
    moved = move(x, (5, 4), moves)
    assert torch.equal(x, before)
    assert moved.dtype == dtype
    for b in range(7):
        image = x[b].view(5, 4, 2).numpy()
        expected = ndimage.shift(image, (*moves[b].tolist(), 0), order=0, cval=0)
        assert np.array_equal(moved[b].view(5, 4, 2).numpy(), expected)


def test_moves_of_masks_and_bad_input():
    x, one = torch.ones(1, 6, 1), torch.tensor([[1, 0]])
    assert torch.equal(move(x.bool(), (2, 3), one), move(x, (2, 3), one).bool())
    for given in (x[0], x[:, :5], x.expand(2, 6, 1)):
        with pytest.raises(ValueError, match=r"x must be \(B, T, d\)|moves must be integers, \(2"):
            move(given, (2, 3), one)
    for moves in (one.float(), one[0], one[:, :1]):
        with pytest.raises(ValueError, match=r"moves must be integers, \(1, 2\), a pair for each"):
            move(x, (2, 3), moves)
    with pytest.raises(ValueError, match="x must be .*; got .* and"):
        move(x, (2, 3, 1), one)
    with pytest.raises(ValueError, match="pixels must be at least 0; got -1"):
        random_moves(4, -1, generator=torch.Generator())


def test_moves_of_what_is_not_a_tensor():
    x, one = torch.ones(1, 6, 1), torch.tensor([[1, 0]])
    with pytest.raises(TypeError, match=r"x must be a tensor \(B, T, d\); got ndarray"):
        move(x.numpy(), (2, 3), one)
    with pytest.raises(TypeError, match=r"moves must be a tensor \(B, 2\); got list"):
        move(x, (2, 3), one.tolist())
    with pytest.raises(TypeError, match="image must be rows and columns, .*; got None"):
        move(x, None, one)


@pytest.mark.parametrize("pixels", [1.5, "2", None])
def test_random_moves_are_of_whole_pixels(pixels):
    draw = torch.Generator().manual_seed(0)
    with pytest.raises(TypeError, match=f"pixels must be a whole number; got {pixels!r}"):
        random_moves(3, pixels, generator=draw)
    with pytest.raises(TypeError, match="count must be a whole number; got 3.0"):
        random_moves(3.0, 1, generator=draw)
    assert random_moves(np.int64(3), np.int64(1), generator=draw).shape == (3, 2)


def test_only_images_in_their_units_are_moved():
    images = make(image=(2, 3))
    check_image(images)
    check_image(normalize(images, late=True))
    for data in (normalize(images), load_dataset("har2-sample")):
        with pytest.raises(ValueError, match=f"{data.name} has none: use pixel-mnist"):
            check_image(data)
