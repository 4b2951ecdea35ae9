"""What is particular to one solver."""

import pytest
import torch

from fixpoint import (
    Anderson,
    Broyden,
    InexactNewton,
    Picard,
    Result,
    make_solver,
    solve,
)


def linear_map(spectrum, seed=0):
    """phi(z) = z A^T + 1 with a symmetric A of that spectrum, and its solution, (1, D)."""
    generator = torch.Generator().manual_seed(seed)
    D = len(spectrum)
    Q, _ = torch.linalg.qr(torch.randn(D, D, generator=generator, dtype=torch.float64))
    A = Q @ torch.diag(spectrum) @ Q.T
    root = torch.linalg.solve(torch.eye(D, dtype=A.dtype) - A, torch.ones(D, dtype=A.dtype))
    return (lambda z: z @ A.T + 1), root[None]


def test_picard_follows_its_formula():
    solver = Picard(beta=0.25, max_iter=3, rtol=0.0, atol=0.0)
    z = torch.tensor([[0.3]], dtype=torch.float64)
    expected = z
    for _ in range(3):
        expected = expected + 0.25 * (torch.cos(expected) - expected)
    assert torch.allclose(solve(torch.cos, z, solver).z, expected, rtol=1e-15)


def test_damping_does_not_fake_convergence():
    solution = solve(
        lambda z: 0.5 * z + 1, torch.zeros(1, 1), Picard(beta=0.01, max_iter=3, atol=0.1, rtol=0.0)
    )
    z = 2 * (1 - 0.995**3)
    assert solution.z.item() == pytest.approx(z, rel=1e-5)
    assert solution.residual.item() == pytest.approx((2 - z) / 2 / 0.1, rel=1e-5)
    assert solution.result.item() == Result.MAX_ITER


def test_slow_convergence_is_called_max_iter_and_a_cycle_stalled():
    slow = solve(torch.sin, torch.ones(1, 1, dtype=torch.float64), Picard(rtol=1e-9, atol=0.0))
    assert slow.result.item() == Result.MAX_ITER
    cycle = solve(lambda z: 1 - z, torch.zeros(1, 1), Picard())
    assert cycle.result.item() == Result.STALLED
    diverging = solve(lambda z: -1.1 * z + 1, torch.zeros(1, 1), Picard(max_iter=40))
    assert diverging.result.item() == Result.STALLED
    assert diverging.z.item() == 0  # the best state, not the last


def test_keep_best_false_returns_the_last_state():
    solver = Picard(max_iter=3, keep_best=False)
    assert solve(lambda z: -2 * z + 1, torch.zeros(1, 1), solver).z.item() == 3


def test_inexact_newton_uses_the_step_of_its_time_and_update():
    solver = InexactNewton(max_iter=2, timesteps=3)
    assert solver.eta.shape == (3, 2)
    assert (solver.eta == 0.01).all()
    with torch.no_grad():
        solver.eta.copy_(torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, -0.6]]))
    z0 = torch.zeros(1, 1)
    for t, (first, second) in enumerate(solver.eta.tolist()):
        z = first * (1 - 0)
        z = z + second * (1 - z)
        assert solve(torch.ones_like, z0, solver, t=t).z.item() == pytest.approx(z)


@pytest.mark.parametrize("t", [None, 3, -1])
def test_inexact_newton_refuses_a_time_without_steps(t):
    with pytest.raises(ValueError, match=r"timesteps=3.*timesteps=None to share eta over time"):
        solve(torch.cos, torch.zeros(1, 1), InexactNewton(timesteps=3), t=t)


def test_eta_is_a_parameter_only_where_it_is_learned():
    assert [name for name, _ in InexactNewton().named_parameters()] == ["eta"]
    fixed = InexactNewton(max_iter=3, learn=False)
    assert not list(fixed.parameters())
    assert fixed.state_dict()["eta"].shape == (3,)


@pytest.mark.parametrize("memory", [1, 2, 20])
@pytest.mark.parametrize("D", [1, 3])
def test_anderson_with_any_memory(memory, D):
    spectrum = torch.linspace(-0.5, 0.9, D, dtype=torch.float64)
    phi, root = linear_map(spectrum)
    solver = Anderson(memory=memory, rtol=1e-12, atol=0.0, max_iter=200)
    solution = solve(phi, torch.zeros_like(root), solver)
    assert solution.converged.all()
    assert torch.allclose(solution.z, root, rtol=1e-10)


def test_anderson_is_gmres_on_a_linear_map():
    # On a linear map with full memory, Anderson's iterate k + 1 is phi of GMRES' iterate k, so
    # that D + 1 updates solve it (Walker and Ni, 2011, Theorem 2.2).
    spectrum = torch.tensor([-0.9, -0.3, 0.2, 0.7, 0.95], dtype=torch.float64)
    phi, root = linear_map(spectrum)
    solution = solve(phi, torch.zeros_like(root), Anderson(memory=5, rtol=1e-9, atol=0.0))
    assert solution.converged.all()
    assert solution.iterations.item() <= 6 + 1


@pytest.mark.parametrize("spectrum", [(0.5, 0.9), (-0.99, 0.9)])
def test_anderson_needs_no_more_evaluations_than_plain_iteration(spectrum):
    phi, root = linear_map(torch.linspace(*spectrum, 100, dtype=torch.float64))
    counts = [
        solve(phi, torch.zeros_like(root), kind(rtol=1e-8, atol=0.0, max_iter=3000)).evaluations
        for kind in (Anderson, Picard)
    ]
    assert counts[0] <= counts[1]


def test_anderson_survives_a_row_that_is_solved_beside_one_that_is_not():
    def phi(z):
        return torch.cat([torch.full_like(z[:1], 2.0), torch.cos(z[1:])])

    solution = solve(phi, torch.zeros(2, 4), Anderson(memory=4))
    assert solution.converged.all()
    assert solution.iterations[0] == 1


@pytest.mark.parametrize("memory", [5, 10, 30])
def test_broyden_restarts_and_converges_within_its_memory(memory):
    phi, root = linear_map(torch.linspace(-0.99, 0.9, 100, dtype=torch.float64))
    largest = 0

    class Watched(Broyden):
        def update(self, k, z, fz, state):
            nonlocal largest
            z, state = super().update(k, z, fz, state)
            largest = max(largest, state.filled)
            return z, state

    solver = Watched(memory=memory, rtol=1e-9, atol=0.0, max_iter=2000)
    solution = solve(phi, torch.zeros_like(root), solver)
    assert solution.converged.all()
    assert torch.allclose(solution.z, root, atol=1e-6)
    assert largest == memory


def test_broyden_is_the_secant_method_in_one_dimension():
    solver = Broyden(max_iter=4, rtol=0.0, atol=0.0, record="iterates")
    z = solve(torch.cos, torch.zeros(1, 1, dtype=torch.float64), solver).trace.iterates.flatten()
    g = torch.cos(z) - z
    for k in (1, 2, 3):
        expected = z[k] - g[k] * (z[k] - z[k - 1]) / (g[k] - g[k - 1])
        assert z[k + 1].item() == pytest.approx(expected.item(), rel=1e-9)


def test_broyden_does_not_run_away_where_no_fixed_point_exists():
    solution = solve(lambda z: z + 1, torch.zeros(1, 1), Broyden(rtol=0.0, atol=1e-3))
    assert not solution.converged.any()


HALF = ("picard", "barzilai-borwein", "anderson", "broyden", "newton", "newton-krylov")


@pytest.mark.parametrize("name", HALF)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_dtype(name, dtype):
    solution = solve(
        torch.cos, torch.zeros(3, 2, dtype=dtype), make_solver(name, rtol=2e-2, atol=0.0)
    )
    assert solution.z.dtype == dtype
    assert solution.residual.dtype == torch.float32
    assert solution.converged.all()


@pytest.mark.parametrize("name", HALF)
def test_squares_may_leave_float16(name):
    size = 50 if name == "newton" else 2000
    x = torch.linspace(100, 200, size).half().expand(3, size)
    solver = make_solver(name, rtol=1e-2, atol=0.0)
    solution = solve(lambda z: 0.5 * z + x, torch.zeros(3, size).half(), solver)
    assert solution.converged.all()
    assert torch.allclose(solution.z.float(), 2 * x.float(), rtol=0.03)


def test_names_make_solvers():
    assert isinstance(make_solver("anderson", memory=2), Anderson)
    ready = Picard()
    assert make_solver(ready) is ready
    with pytest.raises(ValueError, match=r"unknown solver 'andersn'.*did you mean 'anderson'"):
        make_solver("andersn")
    with pytest.raises(TypeError, match="ready solver"):
        make_solver(ready, rtol=1e-3)
