"""All states at once against the loop over time."""

import pytest
import torch
from sequence.problems import gated, inputs, leaky, loop

from fixpoint import ConvergenceError, Result
from fixpoint.sequence import (
    DiagonalJacobian,
    LeakyJacobian,
    solve_equilibrium_sequence,
    solve_sequence,
)

LENGTHS = (1, 2, 3, 31, 128, 1000)
B, n = 3, 8


def assert_close(found, expected):
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(found, expected, rtol=1e3 * eps, atol=1e3 * eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("jacobian", ["leaky", "zero", "identity", "diagonal", "dense"])
@pytest.mark.parametrize("T", LENGTHS)
def test_states_are_those_of_the_loop(T, jacobian, dtype):
    f, _, decay = leaky(n, eta=min(0.1, 4 / T), dtype=dtype)
    x, h0 = inputs(T, B, n, dtype=dtype)
    decay = decay if jacobian == "leaky" else None
    with torch.no_grad():
        solution = solve_sequence(f, x, h0, jacobian=jacobian, decay=decay)
        assert_close(solution.z, loop(f, x, h0))
    good = (solution.result == Result.CONVERGED) | (solution.result == Result.FALLBACK)
    assert good.all()
    if jacobian not in ("zero", "identity"):
        assert solution.check().converged.all()
        assert solution.iterations.max() <= 25


@pytest.mark.slow
def test_a_long_sequence():
    """T = 131072 in windows and as a whole."""
    T = 131072
    f, _, decay = leaky(4, eta=4 / T, dtype=torch.float32)
    x, h0 = inputs(T, 1, 4, dtype=torch.float32)
    with torch.no_grad():
        expected = loop(f, x, h0)
        for window in (None, 4096):
            solution = solve_sequence(f, x, h0, decay=decay, window=window)
            torch.testing.assert_close(solution.z, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("jacobian", ["zero", "leaky", "identity", "diagonal", "dense"])
def test_the_first_states_are_exact_after_as_many_iterations(jacobian):
    """Whatever A_t is, and for a recurrence that A_t fits badly."""
    f, _ = gated(n)
    x, h0 = inputs(20, B, n)
    expected = loop(f, x, h0)
    for i in (1, 2, 5, 20):
        decay = 0.3 if jacobian == "leaky" else None
        with torch.no_grad():
            solution = solve_sequence(
                f, x, h0, jacobian=jacobian, decay=decay, rtol=0.0, atol=0.0, max_iter=i
            )
        torch.testing.assert_close(solution.z[:i], expected[:i], rtol=1e-12, atol=1e-12)
        assert (solution.result == Result.FIXED_STEPS).all()
        assert solution.residual is None
        assert solution.evaluations == i


def test_iterations_do_not_depend_on_the_length():
    counts = []
    for T in (64, 128, 256, 512, 1024, 2048, 4096):
        f, _, decay = leaky(n, eta=2.56 / T)
        x, h0 = inputs(T, B, n)
        with torch.no_grad():
            counts.append(solve_sequence(f, x, h0, decay=decay, rtol=1e-5).iterations.max().item())
    assert max(counts) - min(counts) <= 2


@pytest.mark.parametrize("eta", [-0.05, 1.3])
def test_negative_and_large_eta(eta):
    f, _, decay = leaky(n, eta=eta, scale=0.3)
    x, h0 = inputs(60, B, n)
    with torch.no_grad():
        solution = solve_sequence(f, x, h0, decay=decay)
    assert solution.converged.all()
    assert_close(solution.z, loop(f, x, h0).detach())


def test_decay_of_every_step():
    eta = torch.rand(50, dtype=torch.float64) * 0.4 - 0.1
    A = torch.randn(n, n, dtype=torch.float64) / n**0.5

    def f(h, x):
        u, eta = x
        return (1 - eta) * h + eta * torch.tanh(h @ A.T + u)

    u, h0 = inputs(50, B, n)
    x = (u, eta[:, None, None].expand(-1, B, 1))
    solution = solve_sequence(f, x, h0, decay=1 - eta, window=17)
    assert solution.converged.all()
    expected = loop(lambda h, t: f(h, (u[t], x[1][t])), range(50), h0)
    assert_close(solution.z, expected)


def test_windows_and_a_warm_start():
    f, _, decay = leaky(n)
    x, h0 = inputs(300, B, n)
    with torch.no_grad():
        cold = solve_sequence(f, x, h0, decay=decay)
        windows = solve_sequence(f, x, h0, decay=decay, window=64)
        warm = solve_sequence(f, x + 1e-6, h0, decay=decay, start=cold.z)
        done = solve_sequence(f, x, h0, decay=decay, start=cold.z)
    assert_close(windows.z, cold.z)
    assert windows.iterations.max() < cold.iterations.max()
    assert warm.iterations.max() < cold.iterations.max()
    assert done.iterations.max() == 0


def test_samples_that_are_done_do_not_move():
    """An easy sample beside a hard one ends as it does alone, in fewer iterations."""
    f, _, decay = leaky(n, eta=0.2)
    x, h0 = inputs(200, 2, n)
    x[:, 0] = 30.0  # saturated: nearly linear
    with torch.no_grad():
        both = solve_sequence(f, x, h0, decay=decay, rtol=1e-6)
        alone = solve_sequence(f, x[:, :1], h0[:1], decay=decay, rtol=1e-6)
    assert both.iterations[0] < both.iterations[1]
    assert both.iterations[0] == alone.iterations[0]
    torch.testing.assert_close(both.z[:, :1], alone.z, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("jacobian", ["zero", "diagonal", "dense"])
def test_a_chaotic_recurrence_falls_back_and_says_so(jacobian):
    torch.manual_seed(0)
    V = 4 * torch.randn(n, n, dtype=torch.float64) / n**0.5
    x, h0 = inputs(300, B, n)

    def f(h, x):
        return torch.tanh(h @ V.T + 0.1 * x)

    with torch.no_grad():
        solution = solve_sequence(f, x, h0, jacobian=jacobian, max_iter=60)
    assert (solution.result == Result.FALLBACK).all()
    assert torch.equal(solution.z, loop(f, x, h0))
    assert not solution.converged.any()
    solution.check()  # the states are right
    kept = solve_sequence(f, x, h0, jacobian=jacobian, max_iter=60, fallback=None)
    codes = {Result.STALLED, Result.MAX_ITER, Result.NONFINITE}
    assert set(kept.result.tolist()) <= {int(code) for code in codes}
    with pytest.raises(ConvergenceError):
        kept.check()


def test_a_sample_that_is_not_finite_remains_so_from_there_on():
    f, A, decay = leaky(n)
    x, h0 = inputs(40, B, n)
    clean = solve_sequence(f, x, h0, decay=decay)
    clean.z[:, 0].sum().backward()
    expected, A.grad = A.grad, None
    x = x.clone()
    x[25, 1, 3], x[7, 2, 0] = torch.nan, torch.inf
    x.requires_grad_()
    solution = solve_sequence(f, x, h0, decay=decay)
    assert solution.result[:2].tolist() == [Result.CONVERGED, Result.NONFINITE]
    assert solution.z[25:, 1].isnan().any(1).all()
    assert_close(solution.z[:25, 1], clean.z[:25, 1])
    assert_close(solution.z[:, 0], clean.z[:, 0])
    (solution.z[:, 0].sum() + torch.nan_to_num(solution.z[:, 1]).sum()).backward()
    assert_close(A.grad, expected)
    assert (x.grad[:, 1] == 0).all()


def test_the_trust_region_solves_where_newton_does_not():
    """sin(1.1 h + x) forgets in the mean and expands in places, where Newton's steps grow."""
    x, h0 = inputs(256, B, n)

    def f(h, x):
        return torch.sin(1.1 * h + x)

    def formula(h, x):
        return f(h, x), 1.1 * torch.cos(1.1 * h + x)

    def solve(**options):
        return solve_sequence(
            f, x, h0, jacobian=DiagonalJacobian(formula, **options), fallback=None
        )

    with torch.no_grad():
        assert not solve(clip=None).converged.any()
        assert not solve(clip=1.0).converged.any()
        bounded = solve(clip=None, trust_region=0.1)
        assert bounded.converged.all()
        assert_close(bounded.z, loop(f, x, h0))


def test_a_map_that_acts_unit_by_unit_has_an_exact_diagonal():
    w = torch.linspace(-0.9, 0.9, n, dtype=torch.float64)
    x, h0 = inputs(500, B, n)
    with torch.no_grad():
        linear = solve_sequence(lambda h, x: w * h + x, x, h0, jacobian="diagonal")
        solution = solve_sequence(lambda h, x: torch.sin(w * h + x), x, h0, jacobian="diagonal")
    assert linear.iterations.max() == 1
    assert solution.iterations.max() <= 12
    assert_close(solution.z, loop(lambda h, x: torch.sin(w * h + x), x, h0))


@pytest.mark.parametrize("jacobian", ["zero", "diagonal", "dense"])
def test_equilibria_and_time_as_one_fixed_point(jacobian):
    generator = torch.Generator().manual_seed(0)
    U, V = torch.randn(2, n, n, generator=generator, dtype=torch.float64)
    U, V = 0.5 * U / torch.linalg.matrix_norm(U, 2), 0.6 * V / torch.linalg.matrix_norm(V, 2)
    x, h0 = inputs(50, B, n)

    def phi(h, h_prev, x):
        return torch.tanh(h @ U.T + h_prev @ V.T + x)

    with torch.no_grad():
        solution = solve_equilibrium_sequence(phi, x, h0, jacobian=jacobian, max_iter=150)
    assert solution.converged.all()
    before = torch.cat([h0[None], solution.z[:-1]])
    assert_close(phi(solution.z, before, x), solution.z)
    if jacobian == "dense":
        assert solution.iterations.max() <= 6


def test_a_joint_sequence_that_fails_is_solved_step_by_step():
    U = torch.zeros(2, 2, dtype=torch.float64)
    V = 3 * torch.tensor([[1.0, -1.4], [1.2, 1.0]], dtype=torch.float64)
    x, h0 = inputs(200, B, 2)

    def phi(h, h_prev, x):
        return torch.tanh(h @ U.T + h_prev @ V.T + 0.1 * x)

    with torch.no_grad():
        solution = solve_equilibrium_sequence(phi, x, h0, jacobian="zero", max_iter=30)
    assert (solution.result == Result.FALLBACK).all()
    assert_close(solution.z, loop(lambda h, x: phi(h, h, x), x, h0))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"jacobian": "newton"}, ValueError, "jacobian"),
        ({"jacobian": "leaky"}, ValueError, "needs decay"),
        ({"jacobian": "zero", "decay": 0.5}, ValueError, "leave it out"),
        ({"decay": torch.ones(3)}, ValueError, "T = 5"),
        ({"decay": torch.ones(5, 2)}, ValueError, "number or"),
        ({"window": 0}, ValueError, "window"),
        ({"start": torch.zeros(5, 1, 2)}, ValueError, "start"),
        ({"rtol": -1.0}, ValueError, "rtol"),
        ({"fallback": "loop"}, ValueError, "fallback"),
        ({"x": torch.zeros(0, 2, 3)}, ValueError, "time step"),
        ({"x": torch.zeros(5, 4, 3)}, ValueError, "B = 2"),
        ({"h0": torch.zeros(2)}, ValueError, "h0"),
        ({"h0": torch.zeros(2, 3, dtype=torch.int64)}, TypeError, "floating"),
        ({"f": lambda h, x: h[:, :1]}, ValueError, "shape"),
        ({"f": lambda h, x: h.double()}, TypeError, "dtype"),
        ({"x": None}, TypeError, "x must be"),
    ],
)
def test_errors_say_what_was_expected(change, error, words):
    arguments = {"f": lambda h, x: h + x, "x": torch.zeros(5, 2, 3), "h0": torch.zeros(2, 3)}
    with pytest.raises(error, match=words):
        solve_sequence(**(arguments | change))


def test_an_equilibrium_takes_no_leaky_jacobian():
    x, h0 = torch.zeros(5, 2, 3), torch.zeros(2, 3)
    with pytest.raises(ValueError, match="dense"):
        solve_equilibrium_sequence(
            lambda h, h_prev, x: x, x, h0, jacobian=LeakyJacobian(torch.tensor(0.5))
        )


def test_an_empty_batch():
    solution = solve_sequence(lambda h, x: 0.5 * h + x, torch.zeros(4, 0, 2), torch.zeros(0, 2))
    assert solution.z.shape == (4, 0, 2)
    assert solution.result.shape == (0,)


@pytest.mark.parametrize("jacobian", ["identity", "dense", "diagonal", "zero"])
def test_an_empty_batch_has_a_gradient(jacobian):
    x = torch.randn(5, 0, 3, requires_grad=True)
    f = lambda h, x: torch.tanh(h + x)  # noqa: E731
    solve_sequence(f, x, torch.zeros(0, 3), jacobian=jacobian).z.sum().backward()
    assert x.grad.shape == x.shape
