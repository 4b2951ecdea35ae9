"""Basins of maps whose fixed points and separators are known."""

import torch

from fixpoint import Newton, Picard
from fixpoint.analysis import basins, trajectories


def heron(z):
    """Each coordinate goes to sqrt(2) of its own sign."""
    return (z + 2 / z) / 2


def test_four_quadrants():
    ends = basins(heron, Picard(rtol=1e-12, atol=0), lower=(-2, -1), upper=(2, 3), size=10)
    assert ends.basin.shape == ends.iterations.shape == (10, 10)
    assert len(ends.roots) == 4
    torch.testing.assert_close(ends.roots.abs(), torch.full((4, 2), 2.0).double().sqrt())
    X, Y = ends.x.expand(10, 10), ends.y[:, None].expand(10, 10)
    reached = ends.roots[ends.basin]
    assert torch.equal(reached[..., 0].sign(), X.sign())
    assert torch.equal(reached[..., 1].sign(), Y.sign())
    counts = torch.bincount(ends.basin.flatten())
    assert counts.sum() == 100
    assert (counts.diff() <= 0).all()  # most starts first


def test_starts_that_do_not_converge():
    """z -> 2 z leaves from every start but 0; Newton solves it from everywhere."""
    ends = basins(lambda z: 2 * z, Picard(max_iter=10), size=3)
    assert ends.basin.tolist() == [[-1, -1, -1], [-1, 0, -1], [-1, -1, -1]]
    assert ends.iterations[1, 1] == 0
    ends = basins(lambda z: 2 * z, Newton(), size=3)
    assert not ends.basin.any()
    none = basins(lambda z: z + 1, Picard(max_iter=3), size=2)
    assert none.roots.shape == (0, 2)
    assert (none.basin == -1).all()


def test_trajectories_are_the_iterates():
    z0 = torch.tensor([[0.0, 1.0], [4.0, 2.0]], dtype=torch.float64)
    path = trajectories(lambda z: 0.5 * z + 1, z0, Picard(rtol=0, atol=0), max_iter=3)
    expected = torch.stack([2 + (z0 - 2) * 0.5**k for k in range(4)])
    torch.testing.assert_close(path, expected)


def test_known_roots_come_first_and_keep_their_order():
    roots = torch.tensor([[1.0, -1.0], [9.0, 9.0]], dtype=torch.float64) * 2**0.5
    ends = basins(heron, Picard(rtol=1e-12, atol=0), size=4, roots=roots)
    assert len(ends.roots) == 5
    assert torch.equal(ends.roots[:2], roots)
    assert (ends.basin == 0).sum() == 4
    assert not (ends.basin == 1).any()
    assert torch.equal(ends.roots[ends.basin[0, 0]].sign(), torch.tensor([-1.0, -1.0]).double())
