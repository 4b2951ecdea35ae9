"""Broyden's product of factors, pending and joined."""

import pytest
import torch
from torch.testing import assert_close

from fixpoint import Broyden, solve
from fixpoint.solvers._secant_factors import MOST_PENDING, Factors


def random_pairs(n, B=3, D=5):
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(n, 2, B, D, generator=generator, dtype=torch.float64)
    return [(0.3 * u, 0.3 * s) for u, s in draw]


def product(pairs, B=3, D=5):
    """Return P, (B, D, D), factor by factor."""
    P = torch.eye(D, dtype=torch.float64).expand(B, D, D)
    for u, s in pairs:
        P = P + u.unsqueeze(2) * (s.unsqueeze(1) @ P)
    return P


@pytest.mark.parametrize("n", [0, 1, MOST_PENDING, MOST_PENDING + 1, 2 * MOST_PENDING + 5])
@pytest.mark.parametrize("joins", [False, True])
def test_product_and_its_transpose(n, joins):
    pairs = random_pairs(n)
    factors = Factors.none(torch.zeros(3, 5, dtype=torch.float64))
    for u, s in pairs:
        factors = factors.append(u, s)
    assert len(factors.pending) <= MOST_PENDING
    if joins:
        factors = factors.joined()
        assert factors.U.shape[1] == n
    P, p = product(pairs), torch.randn(3, 5, dtype=torch.float64)
    assert_close(factors.apply(p), (P @ p.unsqueeze(2)).squeeze(2))
    assert_close(factors.apply_transpose(p), (P.mT @ p.unsqueeze(2)).squeeze(2))


def test_rows_put_into_place_give_the_same_product():
    pairs = random_pairs(4)
    factors = Factors.none(torch.zeros(3, 5, dtype=torch.float64), 6)
    for j, (u, s) in enumerate(pairs):
        factors = factors.put(torch.full((3,), j), u, s)
    p = torch.randn(3, 5, dtype=torch.float64)
    assert_close(factors.apply(p), (product(pairs) @ p.unsqueeze(2)).squeeze(2))


def test_bits_of_a_sample_do_not_depend_on_its_batch_beyond_the_pending_factors():
    A = torch.diag(torch.linspace(-0.99, 0.9, 40))
    x = torch.randn(7, 40, generator=torch.Generator().manual_seed(0))
    solver = Broyden(rtol=1e-7, atol=0.0, max_iter=60)

    def run(x):
        return solve(lambda z: z * A.diagonal() + x, torch.zeros_like(x), solver)

    together = run(x)
    assert together.iterations.max() > MOST_PENDING + 4
    for i in range(len(x)):
        alone = run(x[i : i + 1])
        assert torch.equal(alone.z[0], together.z[i])


def test_a_state_can_be_updated_twice():
    A = torch.diag(torch.linspace(-0.9, 0.9, 8, dtype=torch.float64))
    solver = Broyden(rtol=0.0, atol=0.0)
    z, state = torch.zeros(2, 8, dtype=torch.float64), None
    for k in range(MOST_PENDING + 3):
        fz = z @ A + 1
        first, _ = solver.update(k, z, fz, state)
        again, after = solver.update(k, z, fz, state)
        assert torch.equal(first, again)
        z, state = again, after
