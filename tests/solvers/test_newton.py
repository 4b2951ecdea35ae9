"""What is particular to Newton's method and to its Krylov solve."""

import warnings

import numpy as np
import pytest
import scipy.optimize
import torch
from support.hard_problems import HARD, bratu

from fixpoint import FixedPoint, LevenbergMarquardt, Newton, Result, Unrolled, solve
from fixpoint.solvers.gmres import LinearResult, gmres

TIGHT = {"rtol": 1e-10, "atol": 0.0}
F64 = torch.float64


def scipy_krylov_evaluations(phi, D):
    calls = 0

    def g(z):
        nonlocal calls
        calls += 1
        z = torch.from_numpy(z)
        return (phi(z) - z).numpy()

    answer = scipy.optimize.root(g, np.zeros(D), method="krylov", options={"fatol": 1e-10})
    assert answer.success
    return calls


@pytest.mark.parametrize(("D", "scipy_count"), [(50, 103), (100, 166), (200, 239), (400, 397)])
def test_bratu_takes_no_more_than_scipy_krylov(D, scipy_count):
    phi = bratu(3.0)
    solution = solve(phi, torch.zeros(1, D, dtype=F64), Newton(linear="gmres", **TIGHT))
    assert solution.converged.all()
    assert solution.evaluations + solution.products <= scipy_count


def test_the_counts_of_scipy_krylov():
    assert 0.8 * 166 <= scipy_krylov_evaluations(bratu(3.0), 100) <= 1.5 * 166


@pytest.mark.parametrize("memory", [5, 30])
def test_a_restart_loses_nothing(memory):
    """The directions of all cycles together need as many products as one full Krylov space."""
    phi, z0 = bratu(3.0), torch.zeros(1, 100, dtype=F64)
    few, full = (
        solve(phi, z0, Newton(linear="gmres", memory=m, max_iter=200, **TIGHT))
        for m in (memory, 100)
    )
    assert few.converged.all()
    if memory == 30:
        assert few.products <= 8 * full.products


def test_gmres_solves_each_sample_to_its_tolerance():
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(3, 40, 40, generator=generator, dtype=F64) / 40**0.5
    A = torch.eye(40, dtype=F64) - 0.8 * A
    b = torch.randn(3, 40, generator=generator, dtype=F64)
    rtol = torch.tensor([1e-2, 1e-6, 1e-12], dtype=F64)

    def matvec(v):
        return torch.einsum("bij,bj->bi", A, v)

    for memory in (10, 40):
        solution = gmres(matvec, b, rtol=rtol, memory=memory)
        exact = (b - matvec(solution.x)).norm(dim=1) / b.norm(dim=1)
        assert (exact <= 1.01 * rtol).all()
        assert torch.allclose(exact, solution.residual, rtol=1e-2, atol=1e-13)
        assert (solution.result == LinearResult.CONVERGED).all()
        alone = gmres(lambda v: v @ A[1].mT, b[1:2], rtol=rtol[1:2], memory=memory)
        assert torch.allclose(alone.x[0], solution.x[1], rtol=1e-9, atol=1e-12)
        again = gmres(matvec, b, rtol=rtol, memory=40, blocks=solution.blocks)
        assert (again.residual <= rtol).all()
        if memory == 40:
            assert again.blocks[-1].U.shape[1] == 1  # one product: A M = I on the space of b


def test_a_preconditioner_replaces_products():
    phi, z0 = bratu(3.0), torch.zeros(1, 100, dtype=F64)
    J = torch.diag(torch.full((99,), 0.5, dtype=F64), 1)
    inverse = torch.linalg.inv(torch.eye(100, dtype=F64) - J - J.mT)
    solver = Newton(linear="gmres", preconditioner=lambda z, v: v @ inverse, **TIGHT)
    solution = solve(phi, z0, solver)
    assert solution.converged.all()
    assert solution.products <= 20
    with pytest.raises(ValueError, match='preconditioner needs linear="gmres"'):
        Newton(preconditioner=lambda z, v: v)


def test_singular_systems_take_the_step_of_least_norm():
    """z <- M z + b with an eigenvalue of M that is 1 up to rounding."""
    Q = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=F64))[0]
    M = Q @ torch.diag(torch.tensor([0.3, 0.5, 0.7, 1.0], dtype=F64)) @ Q.mT
    b = torch.ones(1, 4, dtype=F64)
    none = solve(lambda z: z @ M + b, torch.zeros(1, 4, dtype=F64), Newton())
    assert none.result.item() != Result.CONVERGED
    assert none.z.abs().max() < 1e3
    # Without its part along the null vector b has a solution, the nearest to z0 by least norm.
    b = b - (b @ Q[:, 3:]) * Q[:, 3]
    some = solve(lambda z: z @ M + b, torch.zeros(1, 4, dtype=F64), Newton(**TIGHT))
    nearest = b @ torch.linalg.pinv(torch.eye(4, dtype=F64) - M, rtol=1e-10)
    assert some.converged.all()
    assert torch.allclose(some.z, nearest, rtol=1e-6, atol=1e-6)


def test_newton_writes_nothing_on_itself():
    problem = next(p for p in HARD if p.name == "bratu_d50")
    solver = Newton(linear="gmres", **TIGHT)
    before = dict(vars(solver))
    _, state = solver.run_with_state(problem.phi, problem.z0)
    assert vars(solver) == before
    assert state.linear_result.tolist() == [LinearResult.CONVERGED]


@pytest.mark.parametrize("linear", ["direct", "gmres"])
@pytest.mark.parametrize("start", [1.0001, 1.001, 1.01])
def test_a_step_out_of_the_domain_is_replaced_by_a_plain_one(linear, start):
    """At the pole n = 1, to which the Newton direction points, phi(n) - n has its limit 0."""

    def phi(n):
        return torch.log(3 / n) / torch.log(3.7477525683 * n / (n - 1)) + 1

    z0 = torch.tensor([[start]], dtype=torch.float64)
    solution = solve(phi, z0, Newton(linear=linear, rtol=1e-12))
    assert solution.check().iterations.item() <= 12
    assert abs(solution.z.item() - 1.3) < 1e-9


def test_newton_is_shortened_where_the_plain_step_leaves_the_domain_too():
    """From 4 the plain step ends at 10.9 and the Newton step at -1.5, of a domain (0, 5)."""

    def phi(z):
        return z + torch.where((z > 0) & (z < 5), 5 * torch.log(z), torch.nan)

    z0 = torch.tensor([[4.0]], dtype=torch.float64)
    solution = solve(phi, z0, Newton(rtol=1e-12))
    assert abs(solution.check().z.item() - 1) < 1e-9


@pytest.mark.parametrize("gain", ["1.5", "2"])
def test_undamped_steps_lead_out_of_a_valley_where_the_line_search_creeps(gain):
    """With the line search alone |g| falls by a few percent an update, for hundreds of them."""
    (problem,) = [p for p in HARD if p.name == f"tanh_gain_{gain}"]
    solution = solve(problem.phi, problem.z0, Newton(max_iter=40, **TIGHT))
    assert solution.converged.all()


def test_a_sample_returns_from_undamped_steps_that_do_not_help():
    """At a minimum of |g|, g = -(z^2 + 1): the state returned is not further than it was."""
    z0 = torch.tensor([[3.0], [-0.7]], dtype=F64)
    newton = Newton(max_iter=200, rtol=0.0, atol=1e-10)
    solution = solve(lambda z: z - z**2 - 1, z0, newton)
    assert (solution.result == Result.STALLED.value).all()
    assert (solution.z.abs() < 1e-3).all()


def test_undamped_steps_of_one_sample_leave_the_others_as_they_are():
    (problem,) = [p for p in HARD if p.name == "tanh_gain_2"]
    z0 = torch.cat([problem.z0, torch.randn(5, 50, generator=torch.Generator().manual_seed(0))])
    newton = Newton(max_iter=40, **TIGHT)
    together = solve(problem.phi, z0.to(F64), newton)
    alone = [solve(problem.phi, row[None].to(F64), newton) for row in z0]
    assert together.iterations.tolist() == [s.iterations.item() for s in alone]
    torch.testing.assert_close(together.z, torch.cat([s.z for s in alone]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("solver", [Newton(), LevenbergMarquardt()])
def test_a_jacobian_under_detect_anomaly(solver):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that it is slow
        with torch.autograd.detect_anomaly():
            assert solve(torch.cos, torch.zeros(2, 1), solver).converged.all()


@pytest.mark.parametrize("solver", [Newton(), LevenbergMarquardt()])
def test_a_jacobian_that_does_not_fit_names_gmres(solver):
    with pytest.raises(RuntimeError, match=r'4000000000000 bytes.*Newton\(linear="gmres"\)'):
        solve(torch.cos, torch.zeros(1, 10**6), solver)


class Half(torch.autograd.Function):
    """z / 2 whose backward pass reads numbers, so that it cannot be batched."""

    @staticmethod
    def forward(ctx, z):
        return 0.5 * z

    @staticmethod
    def backward(ctx, g):
        return 0.5 * g if g.sum().item() < torch.inf else g


def test_a_jacobian_without_a_batched_backward_pass():
    """By single passes where D is small; where it is large the solver to take is named."""
    solution = solve(lambda z: Half.apply(z) + 1, torch.zeros(2, 3), Newton())
    assert solution.iterations.tolist() == [1, 1]
    assert torch.allclose(solution.z, torch.full((2, 3), 2.0))
    with pytest.raises(RuntimeError, match=r'choose Newton\(linear="gmres"\)'):
        solve(lambda z: Half.apply(z) + 1, torch.zeros(1, 600), Newton())


@pytest.mark.parametrize("name", ["tanh_gain_1.5", "log_pole", "van_der_pol"])
@pytest.mark.parametrize("linear", ["direct", "gmres"])
def test_an_update_takes_one_evaluation(name, linear):
    """Where steps are refused and undamped steps taken back, too."""
    (problem,) = [p for p in HARD if p.name == name]
    solution = solve(problem.phi, problem.z0, Newton(linear=linear, max_iter=40, **TIGHT))
    assert solution.evaluations == solution.iterations.item() + 1


@pytest.mark.parametrize("width", [8, 18, 24])
def test_a_singular_sample_leaves_the_bits_of_differentiated_others(width):
    draw = {"generator": torch.Generator().manual_seed(width), "dtype": F64}
    W, b = torch.randn(4, width, width, **draw), torch.randn(4, width, **draw)
    W = (0.8 / width**0.5 * W).requires_grad_()
    free = torch.tensor([False, False, False, True])  # phi(z) = z + b has I - J = 0

    def found(rows):
        def phi(z):
            curved = torch.tanh((W[rows] * z[:, None]).sum(2) + b[rows])
            return torch.where(free[rows, None], z + b[rows], curved)

        return FixedPoint(Newton(max_iter=6), Unrolled())(phi, torch.zeros_like(b[rows])).z

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(found(slice(0, 3)), found(slice(0, 4))[:3])
