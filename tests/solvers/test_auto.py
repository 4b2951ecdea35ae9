"""Solvers in turn, and those that only `Auto` and expansive maps need."""

import pytest
import torch
from support.hard_problems import HARD, STIFF, tanh_layer
from support.problems import PROBLEMS
from support.standard_problems import STANDARD

from fixpoint import (
    SQUAREM,
    Anderson,
    Auto,
    DampedPicard,
    LevenbergMarquardt,
    Newton,
    Picard,
    solve,
)

BY_NAME = {p.name: p for p in HARD + STIFF + PROBLEMS}
TIGHT = {"max_iter": 299, "rtol": 1e-10, "atol": 0.0}
EASY = [
    "tanh_gain_0.9",
    "tanh_gain_3",
    "radius_1.01",
    "relu_layer",
    "bratu_2d_d225",
    "log_pole",
    "log",
]


@pytest.mark.parametrize("name", EASY)
def test_auto_costs_what_anderson_costs_where_that_solves(name):
    problem = BY_NAME[name]
    one, both = (solve(problem.phi, problem.z0, s) for s in (Anderson(**TIGHT), Auto(**TIGHT)))
    assert one.converged.all()
    assert both.evaluations == one.evaluations
    assert torch.equal(both.z, one.z)
    assert set(both.solved_by) == {"anderson"}


@pytest.mark.parametrize(
    ("name", "solver"),
    [("saddle", "newton"), ("scipy_f4", "newton"), ("bratu_d100", "newton-krylov")],
)
def test_auto_solves_what_anderson_does_not(name, solver):
    problem = BY_NAME[name]
    options = TIGHT | {"max_iter": 299}
    assert not solve(problem.phi, problem.z0, Anderson(**options)).converged.any()
    solution = solve(problem.phi, problem.z0, Auto(**options))
    assert solution.converged.all()
    assert solution.solved_by == (solver,)
    assert (solution.iterations <= 299).all()


def test_auto_moves_only_samples_that_are_left():
    def phi(z):
        return torch.cat((z[:1].cos(), BY_NAME["scipy_f4"].phi(z[1:2]), z[2:] + 1))

    z0 = torch.tensor([[0.0, 0.0], [-1.0, -2.0], [0.0, 0.0]], dtype=torch.float64)
    solution = solve(phi, z0, Auto(**TIGHT))
    alone = solve(torch.cos, z0[:1], Anderson(**TIGHT))
    assert solution.converged.tolist() == [True, True, False]
    assert solution.solved_by[0] == "anderson"
    assert solution.solved_by[2] is None
    assert torch.equal(solution.z[:1], alone.z)
    assert torch.equal(solution.iterations[:1], alone.iterations)


def random_layers(count, D, gain):
    """Tanh layers z -> tanh(W z + b), one a sample, by operations that do not mix the rows."""
    generator = torch.Generator().manual_seed(1)
    W = gain * torch.randn(count, D, D, generator=generator, dtype=torch.float64) / D**0.5
    b = 0.5 * torch.randn(count, D, generator=generator, dtype=torch.float64)

    def of(rows):
        return lambda z: torch.tanh((W[rows] * z.unsqueeze(1)).sum(2) + b[rows])

    return of, torch.zeros(count, D, dtype=torch.float64)


def test_auto_solves_random_layers_of_large_gain():
    """Of these, Anderson leaves ten and Newton more than that."""
    of, z0 = random_layers(60, 5, 6.0)
    phi = of(slice(None))
    solution = solve(phi, z0, Auto(rtol=1e-8))
    assert solution.converged.sum() >= 59
    residual = (phi(solution.z) - solution.z).square().mean(1).sqrt()
    assert (residual[solution.converged] <= 1.2e-8).all()


@pytest.mark.parametrize("solver", [Auto, LevenbergMarquardt, Newton])
def test_rows_are_the_same_bits_in_any_batch(solver):
    of, z0 = random_layers(12, 5, 4.0)
    solver = solver(rtol=1e-8, max_iter=60)
    whole = solve(of(slice(None)), z0, solver)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(2))
    permuted = solve(of(order), z0, solver)
    assert torch.equal(permuted.z, whole.z[order])
    assert torch.equal(permuted.iterations, whole.iterations[order])
    if solver.__class__ is not Auto:
        for row in range(3):
            assert torch.equal(solve(of([row]), z0[:1], solver).z, whole.z[row : row + 1])


@pytest.mark.parametrize(
    "name",
    ["freudenstein_roth -", "hammarling_2 +", "scipy_f4 +", "variably_dimensioned -", "wood -"],
)
def test_auto_solves_standard_systems(name):
    (problem,) = [p for p in STANDARD if p.name == name]
    solution = solve(problem.phi, problem.z0, Auto(rtol=1e-8, max_iter=1000))
    assert solution.converged.all()
    assert (problem.phi(solution.z) - solution.z).abs().max() <= 1e-7 * (1 + solution.z.abs().max())


@pytest.mark.parametrize("keep_best", [True, False])
def test_auto_hands_on_all_options(keep_best):
    """z^2 + 1 has no fixed point: the last state is not the best."""
    phi, z0 = (lambda z: z * z + 1), torch.tensor([[0.6]], dtype=torch.float64)
    options = {"max_iter": 15, "rtol": 1e-6, "keep_best": keep_best}
    one, other = solve(phi, z0, Anderson(**options)), solve(phi, z0, Auto(**options))
    assert torch.equal(one.z, other.z)
    best = solve(phi, z0, Anderson(**options | {"keep_best": True}))
    assert torch.equal(best.z, other.z) == keep_best


def test_auto_keeps_its_budget_where_the_last_update_improved():
    for max_iter in range(1, 16):
        solution = solve(lambda z: 0 / z, torch.ones(1, 1), Auto(max_iter=max_iter))
        assert solution.iterations.item() <= max_iter


def test_damping_follows_the_residual():
    """J = -30 .. 0.5: plain iteration diverges; beta = 1/16 and below converges."""
    slopes = torch.tensor([-30.0, -3.0, 0.5], dtype=torch.float64)
    phi, z0 = (lambda z: slopes * z + 1), torch.zeros(1, 3, dtype=torch.float64)
    assert not solve(phi, z0, Picard(**TIGHT | {"max_iter": 2000})).converged.any()
    solution = solve(phi, z0, DampedPicard(**TIGHT | {"max_iter": 2000}))
    assert solution.converged.all()
    assert torch.allclose(solution.z, 1 / (1 - slopes), rtol=1e-8)


def test_a_slow_oscillation_is_damped_at_once():
    """cos z + pi/2 has J = -1 at its fixed point pi/2: |g| falls, but without end."""
    z0 = torch.tensor([[0.8]], dtype=torch.float64)
    solution = solve(lambda z: z.cos() + torch.pi / 2, z0, DampedPicard(rtol=1e-8))
    assert solution.converged.all()
    assert solution.evaluations <= 8


def test_damping_keeps_a_domain():
    problem = BY_NAME["log_pole"]
    assert solve(problem.phi, torch.tensor([[1.0001]]).double(), DampedPicard()).converged.all()


def test_squarem_follows_its_formula():
    solver = SQUAREM(max_iter=3, rtol=0.0, atol=0.0, record="iterates")
    z = torch.tensor([[0.3, 2.0]], dtype=torch.float64)
    iterates = solve(torch.cos, z, solver).trace.iterates[:, 0]
    one, two = torch.cos(z[0]), torch.cos(torch.cos(z[0]))
    r, v = one - z[0], two - 2 * one + z[0]
    alpha = -min((r.norm() / v.norm()).item(), 1.0)
    expected = z[0] - 2 * alpha * r + alpha**2 * v
    assert torch.allclose(iterates[2], expected, rtol=1e-14)
    assert torch.allclose(iterates[3], torch.cos(expected), rtol=1e-14)


@pytest.mark.parametrize("name", ["em_linkage", "sinkhorn", "bellman", "affine_rho_0.99"])
def test_squarem_needs_no_more_than_plain_iteration(name):
    problem, options = BY_NAME[name], {"max_iter": 5000, "rtol": 1e-10, "atol": 0.0}
    plain, squared = (solve(problem.phi, problem.z0, s(**options)) for s in (Picard, SQUAREM))
    assert squared.converged.all()
    assert squared.evaluations <= plain.evaluations


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_levenberg_marquardt_solves_a_tanh_layer_of_gain_6(seed):
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(50, 50, generator=generator, dtype=torch.float64)
    x = torch.randn(1, 50, generator=generator, dtype=torch.float64)
    Q = torch.linalg.qr(W)[0]

    def phi(z):
        return torch.tanh(6 * z @ Q.mT + x)

    options = {"max_iter": 150, "rtol": 1e-10, "atol": 0.0}
    newton, lm = (
        solve(phi, torch.zeros_like(x), s(**options)) for s in (Newton, LevenbergMarquardt)
    )
    assert not newton.converged.any()
    assert lm.converged.all()
    assert lm.iterations.item() <= 20


@pytest.mark.parametrize("seed", [102, 114, 128])
def test_levenberg_marquardt_leaves_minima_that_are_not_solutions(seed):
    """Without plain steps it ends at a minimum of |phi(z) - z| in each of these layers."""
    phi, z0 = tanh_layer(6.0, 10, seed=seed), torch.zeros(1, 10, dtype=torch.float64)
    solver = LevenbergMarquardt(max_iter=300, rtol=1e-10, atol=0.0)
    z = solve(phi, z0, solver).check().z
    assert torch.allclose(phi(z), z, rtol=1e-8)


def test_levenberg_marquardt_stops_where_there_is_no_solution():
    """z^2 + 1 = phi(z) - z has its minimum at 0, where plain steps lead away."""
    solution = solve(lambda z: z + z**2 + 1, torch.full((1, 1), -0.5), LevenbergMarquardt())
    assert not solution.converged.any()
    assert solution.residual.isfinite().all()
