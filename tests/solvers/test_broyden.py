"""What is particular to Broyden's method."""

import math

import numpy as np
import pytest
import torch
from support.hard_problems import HARD, STIFF
from support.problems import PROBLEMS_BY_NAME

from fixpoint import Broyden, solve
from fixpoint.solvers._numbers import ARRAYS, FLOATS
from fixpoint.solvers._secant_factors import pair_weight

BY_NAME = {p.name: p for p in HARD + STIFF}


def evaluations(problem, **options):
    solver = Broyden(max_iter=299, rtol=1e-10, atol=0.0, **options)
    solution = solve(problem.phi, problem.z0, solver)
    return solution.evaluations if solution.converged.all() else math.inf


# Evaluations of torchdeq's Broyden, with a fifth more; of 20 factors and restarts: none solved.
TORCHDEQ = {
    "near_singular_1e-6": 39,
    "shift_0.999": 35,
    "rotations_0.999": 33,
    "saddle": 40,
    "tanh_gain_1.5": 50,
    "radius_0.99_d100": 94,
    "bratu_d50": 215,
    "sloshing_30": 69,
    "sloshing_300": 85,
}


@pytest.mark.parametrize(("name", "count"), TORCHDEQ.items())
def test_problems_that_need_all_their_secant_pairs(name, count):
    assert evaluations(BY_NAME[name]) <= 1.2 * count


@pytest.mark.parametrize(
    "name", ["tanh_gain_3", "van_der_pol", "arctan", "log_pole", "sqrt_domain"]
)
def test_steps_that_go_too_far_are_taken_back(name):
    assert evaluations(BY_NAME[name]) < 100


@pytest.mark.parametrize("name", ["hammarling_3", "helical_valley", "boggs", "chebyquad_5"])
def test_a_rejected_step_is_used_unless_it_went_far_away(name):
    """Systems that torchdeq's Broyden, which accepts each step, does not solve."""
    assert evaluations(PROBLEMS_BY_NAME[name]) < 300


@pytest.mark.parametrize(("largest", "scipy"), [(1.4771, 91), (2.4771, 97)])
def test_charge_sloshing_takes_no_more_than_scipy(largest, scipy):
    generator = torch.Generator().manual_seed(0)
    Q, _ = torch.linalg.qr(torch.randn(60, 60, generator=generator, dtype=torch.float64))
    K = Q @ torch.diag(torch.logspace(-1, largest, 60, dtype=torch.float64)) @ Q.T
    b = torch.randn(1, 60, generator=generator, dtype=torch.float64)
    solution = solve(lambda z: b - z @ K, torch.zeros_like(b), Broyden(max_iter=3000))
    assert solution.converged.all()
    assert solution.evaluations <= scipy


@pytest.mark.parametrize("memory", [4, 20])
def test_a_full_memory_keeps_its_last_half(memory):
    """The last secant equations still hold: H y = s, with y the change of g."""
    A = torch.diag(torch.linspace(-0.9, 0.9, 30, dtype=torch.float64))
    solver = Broyden(memory=memory, max_iter=memory + 2, rtol=0.0, atol=0.0)
    with torch.no_grad():
        _, state = solver.run_with_state(lambda z: z @ A + 1, torch.zeros(1, 30).double())
    assert state.filled == memory // 2 + 1
    s = state.factors.joined().S[:, -1]
    Hy = s - s @ A  # -y, as H starts from -I
    assert torch.allclose(state.factors.apply(Hy), s, rtol=1e-8, atol=1e-10)


def test_a_step_whose_square_vanishes_is_not_learned_from():
    """Alone and beside one whose pivot is small: its product with the change may not vanish."""
    for mate in (1.0, 0.0):
        numbers = [np.array([0.0, 1.0]), np.array([1e-44, mate])]
        assert pair_weight(ARRAYS, numbers, ())[0][0] == 0
    assert pair_weight(FLOATS, [0.0, 1e-44], ())[0] == 0


def test_the_default_memory_remains_within_its_bytes():
    assert Broyden(max_iter=1000).most_factors(1, torch.float32) == 20
    assert Broyden(max_iter=1000).most_factors(50, torch.float32) == 300
    assert Broyden(max_iter=30).most_factors(50, torch.float32) == 30
    assert Broyden(max_iter=1000).most_factors(16384, torch.float32) == 32
    assert Broyden(max_iter=1000).most_factors(10**6, torch.float32) == 20
