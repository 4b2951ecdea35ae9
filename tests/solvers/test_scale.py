"""fixpoint.solvers.loop.rules: tolerances of small states, and of states that run away."""

import pytest
import torch

from fixpoint import SOLVERS, Anderson, make_solver, solve

NAMES = [name for name in SOLVERS if name != "inexact-newton"]


@pytest.mark.parametrize("name", ["picard", "anderson", "broyden", "squarem", "auto"])
@pytest.mark.parametrize("N", [10**4, 10**6])
def test_pages_of_a_large_web_are_ranked(name, N):
    """A ring with shortcuts: ranks are of size 1 / N, far below a fixed atol of 1e-6."""
    to = torch.arange(N).roll(-1)
    other = (3 * torch.arange(N) + 1) % N
    start = torch.full((1, N), 1 / N, dtype=torch.float64)

    def phi(z):
        out = torch.full_like(z, 0.15 / N)
        out = out.index_add(1, to, 0.6 * z).index_add(1, other, 0.25 * z)
        return out

    solution = solve(phi, start, make_solver(name, max_iter=200))
    exact = start
    for _ in range(400):
        exact = phi(exact)
    assert solution.converged.all()
    assert (solution.z - exact).abs().sum() <= 1e-3


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_the_default_does_not_depend_on_the_units_of_a_small_state(name, scale):
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)

    def phi(z):
        return scale * torch.tanh(0.9 * z.roll(1, 1) / scale + x)

    solution = solve(phi, torch.zeros_like(x), make_solver(name, max_iter=300))
    assert solution.converged.all()
    error = (phi(solution.z) - solution.z).norm(dim=1) / solution.z.norm(dim=1)
    assert (error <= 2e-5).all()
    assert not solution.atol_decides.any()


@pytest.mark.parametrize("name", ["picard", "anderson", "broyden", "newton", "auto"])
@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_start_at_zero_is_measured_where_squares_leave_float32(dtype, B, name):
    z0 = torch.zeros(B, 2, dtype=dtype)
    solution = solve(lambda z: 0.5 * z + 1e-30, z0, make_solver(name))
    assert solution.converged.all()
    assert solution.z.numpy() == pytest.approx(2e-30, rel=1e-4, abs=0)


def test_a_given_atol_decides_and_is_said_to():
    solution = solve(lambda z: 0.5 * z + 1e-9, torch.zeros(2, 3), Anderson(atol=1e-6))
    assert solution.atol_decides.all()
    assert solution.iterations.max() == 0
    solution = solve(lambda z: 0.5 * z + 1e-9, torch.zeros(2, 3))
    assert solution.z.mean().item() == pytest.approx(2e-9, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rtol", [1e-4, 1e-5, 1e-8])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "f",
    [
        lambda z: torch.exp(-z.abs()) + 1e-3,
        lambda z: 1 / (1 + z.abs()),
        lambda z: 1 / (1 + z.abs()).sqrt(),
        lambda z: 0.1 + 1 / (1 + z.abs()),
    ],
    ids=["exp(-z)", "1/z", "1/sqrt(z)", "0.1 + 1/z"],
)
def test_no_solution_is_found_at_infinity(f, name, rtol, dtype):
    """z + f(z) with f > 0, which steps of any length make small beside z."""
    solver = make_solver(name, rtol=rtol, max_iter=200)
    solution = solve(lambda z: z + f(z), torch.zeros(2, 1, dtype=dtype), solver)
    assert not solution.converged.any()


def test_a_convergence_far_from_the_start_is_recognised():
    for root in (50.0, 1e3, 1e5):
        for name in NAMES:
            z0 = torch.zeros(1, 1, dtype=torch.float64)
            solver = make_solver(name, max_iter=3000)
            solution = solve(lambda z, root=root: 0.5 * z + 0.5 * root, z0, solver)
            assert solution.converged.all(), (root, name)
            assert solution.z.item() == pytest.approx(root, rel=1e-4)
