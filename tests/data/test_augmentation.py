"""Random rotations, and what they turn."""

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from fixpoint.data import check_vectors, load_dataset, normalize, random_rotations, rotate


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
