"""How a solve ends: what may be called CONVERGED, when a solve stops, and why it stalled."""

import math

import numpy as np
import pytest
import torch

from fixpoint import (
    SOLVERS,
    Anderson,
    FixedPoint,
    Implicit,
    Phantom,
    Picard,
    Result,
    Stall,
    Unrolled,
    make_solver,
    solve,
)
from fixpoint.solvers.loop.course import Course
from fixpoint.solvers.loop.norms import Norms

NAMES = [name for name in SOLVERS if name != "inexact-newton"]
DTYPES = [torch.float32, torch.float64]


def rotated_map(dtype, seed=0):
    """phi(z) = z M + 1 with an eigenvalue 1 of M: it has no fixed point."""
    generator = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64))[0]
    M = Q @ torch.diag(torch.tensor([0.3, 0.5, 0.7, 1.0], dtype=torch.float64)) @ Q.T
    return lambda z: z @ M.to(dtype) + 1


RUNAWAYS = {
    "z + 1": (1, lambda dtype: lambda z: z + 1),
    "relu": (3, lambda dtype: lambda z: z.relu() + 0.5),
    "rotated": (4, rotated_map),
    "rotated otherwise": (4, lambda dtype: rotated_map(dtype, 5)),
    "waves": (1, lambda dtype: lambda z: z + 1 + 0.9 * z.sin()),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("c", [0.01, 0.3])
def test_growth_alone_does_not_converge(name, c):
    """|phi(z) - z| = c at every z: within 1e-3 of |z| it is still that of the start."""
    solver = make_solver(name, max_iter=200, rtol=1e-3, atol=0.0)
    solution = solve(lambda z: z + c, torch.full((2, 3), 200 * c, dtype=torch.float64), solver)
    assert not solution.converged.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("problem", RUNAWAYS)
def test_a_state_that_runs_away_has_not_converged(problem, name, dtype):
    size, make = RUNAWAYS[problem]
    phi = make(dtype)
    for options in ({"max_iter": 150}, {"rtol": 1e-3, "atol": 0.0}):
        solution = solve(phi, torch.zeros(2, size, dtype=dtype), make_solver(name, **options))
        assert not solution.converged.any()
        assert (solution.residual > 1).all()


@pytest.mark.parametrize("name", ["newton", "levenberg-marquardt", "auto", "anderson", "picard"])
def test_a_state_that_runs_away_between_the_looks_of_the_host(name):
    """|phi(z) - z| = 1 / (1 + |z|): each step is as long as z, the secant of four far shorter."""
    for options in ({"rtol": 1e-3}, {"rtol": 1e-5}):
        solver = make_solver(name, check_every=4, max_iter=20, **options)
        start = torch.zeros(1, 1, dtype=torch.float64)
        assert not solve(lambda z: z + 1 / (1 + z.abs()), start, solver).converged.any()


def test_growth_from_a_small_start_may_converge():
    """From 1e-8 near the unstable origin of tanh(2 z)."""
    start = torch.full((1, 1), 1e-8, dtype=torch.float64)
    solution = solve(lambda z: (2 * z).tanh(), start, make_solver("picard", rtol=1e-6, atol=0.0))
    assert solution.converged.all()
    assert solution.z.item() == pytest.approx(0.9575040, abs=1e-5)


# Steps of damped iteration are no longer than plain ones.
@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("picard", "damped-picard")])
def test_a_far_fixed_point_may_be_reached_in_large_steps(name):
    solver = make_solver(name, max_iter=200, rtol=1e-6, atol=0.0)
    solution = solve(lambda z: 0.9999 * z + 1, torch.zeros(1, 1, dtype=torch.float64), solver)
    assert solution.converged.all()
    assert solution.z.item() == pytest.approx(1e4, rel=1e-2)


def path_graph(n, dtype):
    off = torch.ones(n - 1, dtype=dtype)
    L = torch.diag(-off, 1) + torch.diag(-off, -1)
    return L - torch.diag(L.sum(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [2, 5])
def test_a_gradient_that_does_not_exist_is_not_converged(name, n, dtype):
    """Potentials of a graph are fixed up to a constant, and so are functions of them."""
    L, b = path_graph(n, dtype), torch.linspace(-1, 1, n, dtype=dtype)[None].requires_grad_()
    backward = Implicit(on_failure="ignore")
    layer = FixedPoint(make_solver(name, max_iter=200), backward)
    solution = layer(lambda z: z - 0.3 * z @ L + b, torch.zeros(1, n, dtype=dtype))
    assert solution.converged.all()
    torch.autograd.grad(solution.z.sum(), b, retain_graph=True)
    assert not backward.adjoint.converged.any()
    # The differences do not depend on the constant: z = L^+ b / 0.3.
    weights = torch.linspace(-1, 1, n, dtype=dtype)
    (gradient,) = torch.autograd.grad((solution.z * weights).sum(), b)
    assert backward.adjoint.converged.all()
    expected = torch.linalg.pinv(L.double()) @ weights.double() / 0.3
    gradient = gradient.double()
    assert torch.allclose(gradient - gradient.mean(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["picard", "anderson", "broyden", "barzilai-borwein"])
@pytest.mark.parametrize(
    ("dtype", "rtol", "most"),
    [(torch.float32, 1e-8, 90), (torch.float64, 1e-17, 150), (torch.bfloat16, 1e-5, 60)],
)
def test_a_solve_ends_at_its_rounding_floor(name, dtype, rtol, most):
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(64, 64, generator=generator, dtype=torch.float64)
    W = (0.7 * W / torch.linalg.matrix_norm(W, 2)).to(dtype)
    x = torch.randn(64, 64, generator=generator, dtype=torch.float64).to(dtype)
    solver = make_solver(name, rtol=rtol, atol=0.0, max_iter=1000)
    solution = solve(lambda z: torch.tanh(z @ W.T + x), torch.zeros_like(x), solver)
    assert solution.evaluations <= most
    failed = ~solution.converged
    assert failed.any()
    assert (solution.result[failed] == Result.STALLED).all()
    if name != "broyden":  # whose line search may refuse what is rounding noise
        assert (solution.stall[failed] == Stall.ROUNDING).all()
    with pytest.raises(RuntimeError, match=r"as small as the rounding of the state allows"):
        solution.check()


def test_autocast_lowers_the_floor():
    W = torch.eye(8).roll(1, 0) * 0.7
    x = torch.linspace(-1, 1, 64).reshape(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        solution = solve(
            lambda z: torch.tanh(z @ W + x), torch.zeros(8, 8), make_solver("anderson", rtol=1e-7)
        )
    assert solution.evaluations < 50
    assert not ((solution.result == Result.MAX_ITER).any())


def domain(a):
    """phi(n) with the fixed point 1.3 for a = 3; it is defined for n > 1 only."""
    return lambda n: torch.log(a / n) / torch.log(3.7477525683 * n / (n - 1)) + 1


@pytest.mark.parametrize("check_every", [1, 3])
@pytest.mark.parametrize("name", ["picard", "anderson", "broyden", "barzilai-borwein"])
def test_a_step_out_of_the_domain_is_taken_back(name, check_every):
    a = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    z0 = torch.tensor([[1.001], [1.2], [1.5]], dtype=torch.float64)
    layer = FixedPoint(make_solver(name, rtol=1e-10, atol=0.0, check_every=check_every))
    solution = layer(domain(a), z0)
    assert solution.converged.all()
    assert torch.allclose(solution.z, torch.full_like(z0, 1.3), atol=1e-7)
    (gradient,) = torch.autograd.grad(solution.z[0].sum(), a)
    assert gradient.item() == pytest.approx(0.1196, abs=1e-4)


@pytest.mark.parametrize("name", ["anderson", "barzilai-borwein"])
def test_a_sample_that_restarts_does_not_change_its_batch_mates(name):
    phi = domain(torch.tensor(3.0, dtype=torch.float64))
    z0 = torch.tensor([[1.2], [1.5], [1.001]], dtype=torch.float64)
    solver = make_solver(name, rtol=1e-10, atol=0.0)
    whole = solve(phi, z0, solver)
    for row in range(3):
        alone = solve(phi, z0[row : row + 1], solver)
        for field in ("z", "iterations", "residual", "result"):
            assert torch.equal(getattr(alone, field)[0], getattr(whole, field)[row]), field


@pytest.mark.parametrize("name", NAMES)
def test_it_is_lost_where_a_plain_step_is_lost_too(name):
    def phi(z):  # at 1 alone: shortened steps do not find another state
        return torch.where(z == 1, 5.0, z / 0)

    solution = solve(phi, torch.ones(1, 1, dtype=torch.float64), make_solver(name, max_iter=60))
    lost = solution.result.item() == Result.NONFINITE
    # A line search that refuses every step has found no better state, and says so.
    assert lost or solution.stall.item() == Stall.STEP_REFUSED
    assert lost == (name in ("picard", "damped-picard", "anderson", "barzilai-borwein", "squarem"))
    assert solution.z.item() == 1
    assert solution.residual.isfinite().all()


@pytest.mark.parametrize("name", ["newton", "broyden", "anderson", "barzilai-borwein"])
def test_the_code_does_not_tell_whether_the_last_step_is_taken_back(name):
    """From a finite start on a map with a domain every budget ends as MAX_ITER or better."""
    phi = domain(torch.tensor(3.0, dtype=torch.float64))
    start = torch.tensor([[1.001]], dtype=torch.float64)
    for max_iter in (*range(1, 13), *range(46, 52)):
        solution = solve(phi, start, make_solver(name, max_iter=max_iter))
        assert solution.result.item() in (Result.CONVERGED, Result.MAX_ITER, Result.STALLED)
        assert solution.residual.isfinite().all()
        assert solution.z.isfinite().all()


def test_the_tolerance_of_a_lost_sample_does_not_depend_on_its_mates():
    x = torch.tensor([[3.0], [0.0]], dtype=torch.float64)

    def phi(z):
        return torch.where(x[: len(z)] > 0, torch.log(z) - 1, 0.9 * z + 1)

    solver = make_solver("picard", rtol=0.0, atol=1e-3)
    alone = solve(phi, x[:1], solver)
    together = solve(phi, x, solver)
    assert alone.result.item() == together.result[0].item() == Result.NONFINITE
    assert alone.atol_decides.tolist() == together.atol_decides[:1].tolist() == [False]


def test_a_budget_that_ends_in_a_step_to_be_taken_back():
    """The state before it is finite and has a residual: more updates are the remedy."""
    for name, start in (("broyden", 4.0), ("newton", 9.0)):
        solver = make_solver(name, max_iter=1, rtol=1e-6)
        z0 = torch.full((1, 1), start)
        solution = solve(lambda z: z - 20 * (z.sqrt() - 1), z0, solver)
        assert solution.result.item() == Result.MAX_ITER
        assert torch.equal(solution.z, z0)
        assert solution.residual.isfinite().all()


def test_steady_growth_is_called_running_away_and_a_slow_fall_is_not():
    steady = solve(lambda z: z + 1, torch.zeros(1, 1), make_solver("picard"))
    assert steady.result.item() == Result.STALLED
    assert steady.stall.item() == Stall.RUNAWAY
    for rate in (0.999, 0.9999):
        slow = solve(lambda z, r=rate: r * z + 1, torch.zeros(1, 1), make_solver("picard"))
        assert slow.result.item() == Result.MAX_ITER


def test_memory_does_not_grow_with_updates():
    """Nothing is kept of an update but running minima, unless `record` asks for it."""
    z, solver = torch.ones(3, 2), make_solver("picard", rtol=1e-30, atol=0.0)
    watched = Course(solver, z, Norms(z, solver.tolerance), every=1, most=99)
    for k in range(50):
        z, _ = watched.observe(k, z, 0.9 * z, lambda z: 0.9 * z)
        z = watched.freeze(0.9 * z, z)
    assert not watched.residuals
    assert not watched.iterates
    kept = [*vars(watched).values(), *watched.status, *watched.m]
    arrays = [x for x in kept if isinstance(x, (torch.Tensor, np.ndarray))]
    assert sum(math.prod(x.shape) for x in arrays) < 40 * z.numel()


@pytest.mark.parametrize("name", NAMES)
def test_the_axis_of_vmap_becomes_rows(name):
    """Of z0, and of a tensor that phi closes over."""
    x, solver = torch.linspace(0, 1, 24).view(4, 3, 2), make_solver(name)

    def by_input(x):
        solution = solve(lambda z: 0.5 * torch.cos(z) + x, x.new_zeros(3, 2), solver)
        return solution.z, solution.result, solution.iterations

    z, result, iterations = torch.func.vmap(by_input)(x)
    rows = solve(lambda z: 0.5 * torch.cos(z) + x.view(12, 2), torch.zeros(12, 2), solver)
    assert torch.allclose(z.view(12, 2), rows.z, atol=1e-6)
    assert torch.equal(result.view(12), rows.result)
    assert torch.equal(iterations.view(12), rows.iterations)
    z = torch.func.vmap(lambda z: solve(torch.cos, z, solver).z)(x)
    assert torch.allclose(z, torch.full_like(z, 0.7390851), atol=1e-5)


def test_vmap_through_the_updates_of_a_solve_to_a_tolerance_is_refused():
    layer, x = FixedPoint(make_solver("anderson"), Unrolled()), torch.zeros(4, 3, 2)
    with pytest.raises(RuntimeError, match=r"vmap cannot pass through the updates of.*Implicit"):
        torch.func.vmap(lambda z: layer(torch.cos, z).z)(x)


@pytest.mark.parametrize(
    "backward", [None, Implicit(), Phantom()], ids=["solve", "implicit", "phantom"]
)
def test_an_ensemble_solves_all_its_members_at_once(backward):
    torch.manual_seed(0)
    members, x = [torch.nn.Linear(3, 3) for _ in range(4)], torch.randn(5, 3)
    weights, _ = torch.func.stack_module_state(members)

    def state(weights, x):
        def phi(z):
            return 0.5 * torch.tanh(torch.func.functional_call(members[0], weights, z) + x)

        z0 = torch.zeros_like(x)
        return solve(phi, z0).z if backward is None else FixedPoint("anderson", backward)(phi, z0).z

    found = torch.func.vmap(state, (0, None))(weights, x)
    each = torch.stack([state(dict(member.named_parameters()), x) for member in members])
    assert torch.allclose(found, each, atol=1e-5)
    if backward is not None:
        found.square().sum().backward()
        each.square().sum().backward()
        for i, member in enumerate(members):
            for name, parameter in member.named_parameters():
                assert torch.allclose(weights[name].grad[i], parameter.grad, rtol=1e-3, atol=1e-4)


def test_the_default_absolute_tolerance_follows_rtol():
    z0 = torch.zeros(1, 1, dtype=torch.float64)
    solution = solve(torch.cos, z0, make_solver("picard", rtol=1e-14, max_iter=100))
    assert solution.converged.all()
    assert solution.z.item() == pytest.approx(0.7390851332151607, abs=1e-13)
    for options, atol in (({}, 1e-6), ({"rtol": 0.0}, 1e-6), ({"rtol": 1e-2}, 1e-6)):
        assert make_solver("picard", **options).atol == pytest.approx(atol)
    assert make_solver("picard", rtol=1e-9).atol == pytest.approx(1e-10)


@pytest.mark.parametrize("rate", [0.9, 0.99, 0.999])
@pytest.mark.parametrize("name", ["picard", "anderson", "broyden"])
def test_the_error_estimate_is_the_error_of_a_slow_map(rate, name):
    """z - 1 is the error of r z + 1 - r, the residual over 1 - r."""

    def phi(z):
        return rate * z + 1 - rate

    z0 = torch.zeros(3, 2, dtype=torch.float64)
    solution = solve(phi, z0, make_solver(name, max_iter=20_000))
    estimate = solution.error_estimate(phi)
    error = (solution.z - 1).square().mean(1).sqrt()
    assert torch.allclose(estimate.rate, torch.full((3,), rate).double(), atol=1e-6)
    assert torch.allclose(estimate.error, error, rtol=0.01, atol=1e-11)
    assert "may exceed their residual" in estimate.describe() or rate < 0.95


@pytest.mark.parametrize("kind", ["slow", "not normal"])
def test_the_error_estimate_is_of_the_size_of_the_error(kind):
    """By the slowest rate alone it would be up to hundreds of times too large, or too small."""
    generator, D = torch.Generator().manual_seed(0), 20
    for _ in range(5):
        A = torch.randn(D, D, generator=generator, dtype=torch.float64)
        if kind == "slow":
            slopes = 1 - torch.logspace(-3, 0, D, dtype=torch.float64)
            A = torch.linalg.qr(A)[0]
            A = (A * slopes) @ A.mT
        else:
            A = 0.3 * A.triu(1) + torch.diag(torch.linspace(-0.9, 0.9, D, dtype=torch.float64))
        phi = lambda z, A=A: z @ A.mT + 1  # noqa: E731
        root = torch.linalg.solve(torch.eye(D).double() - A, torch.ones(D).double())
        z0 = torch.zeros(1, D, dtype=torch.float64)
        solution = solve(phi, z0, make_solver("anderson", rtol=1e-4, max_iter=2000))
        error = (solution.z - root).square().mean(1).sqrt()
        assert (solution.error_estimate(phi).error / error - 1).abs().item() < 0.7


def test_the_error_estimate_bounds_the_error_of_trees_and_has_no_expansion():
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    W = 0.8 * W / torch.linalg.matrix_norm(W, 2)
    b = torch.randn(4, 6, generator=generator, dtype=torch.float64)

    def phi(tree):
        z = torch.cat((tree[0], tree[1]), 1) @ W.T + b
        return z[:, :2], z[:, 2:]

    start = (torch.zeros(4, 2).double(), torch.zeros(4, 4).double())
    solution = solve(phi, start, make_solver("picard", rtol=1e-3))
    root = torch.linalg.solve(torch.eye(6).double() - W, b.T).T
    error = (torch.cat(solution.z, 1) - root).square().mean(1).sqrt()
    estimate = solution.error_estimate(phi)
    assert (estimate.error >= error / 2).all()
    assert (estimate.rate < 0.8 + 1e-6).all()
    assert "errors are of the size of residuals" in estimate.describe()
    expanding = solve(lambda z: 3 * z - 2, torch.zeros(1, 1), make_solver("newton"))
    assert expanding.error_estimate(lambda z: 3 * z - 2).error.item() == math.inf


@pytest.mark.parametrize("slope", [3.0, 1.5, -3.0])
def test_a_state_that_explodes_is_not_said_to_need_more_updates(slope):
    solution = solve(lambda z: slope * z + 1, torch.zeros(1, 1), "picard")
    assert solution.result.item() == Result.STALLED
    slow = solve(lambda z: 0.999 * z + 1, torch.zeros(1, 1), "picard")
    assert slow.result.item() == Result.MAX_ITER


@pytest.mark.parametrize("options", [{}, {"keep_best": False}, {"check_every": 7}])
@pytest.mark.parametrize("kind", [Picard, Anderson])
def test_a_state_that_runs_as_far_as_its_tolerance_is_not_lost(kind, options):
    """|phi(z) - z| = 1 is within the tolerance where z is 1 / rtol."""
    solver = kind(max_iter=250, rtol=1e-2, atol=0.0, **options)
    solution = solve(lambda z: z + 1, torch.zeros(1, 1), solver)
    assert solution.result.item() == Result.STALLED
    assert solution.stall.item() == Stall.RUNAWAY
