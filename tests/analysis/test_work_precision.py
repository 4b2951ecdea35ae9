"""Costs and gradient errors against counts and closed forms."""

import math

import pytest
import torch
from support.problems import PROBLEMS_BY_NAME

from fixpoint import Anderson, ConvergenceError, Newton, Picard, make_solver, solve
from fixpoint.analysis import gradient_error, residual_curves, work_precision


def numbers(values):
    return torch.tensor(values, dtype=torch.float64)


HALF = PROBLEMS_BY_NAME["affine_scalar"]  # 0.5 z + 1


def test_residuals_of_plain_iteration_in_closed_form():
    """From 0: z_k = 2 (1 - 2^-k), phi(z_k) - z_k = 2^-k."""
    z0 = numbers([[0.0]])
    curve = residual_curves(HALF.phi, z0, {"picard": Picard()}, max_iter=6)["picard"]
    assert curve.work.tolist() == [1, 2, 3, 4, 5, 6, 7]
    k = torch.arange(7.0, dtype=torch.float64)
    torch.testing.assert_close(curve.residual[:, 0], 2**-k / (2 - 2**-k), rtol=1e-12, atol=0)


def test_residual_never_rises_and_is_that_of_the_trace():
    problem = PROBLEMS_BY_NAME["rotation_1.05"]  # plain iteration diverges
    solvers = {
        name: make_solver(name) for name in ("picard", "anderson", "newton", "newton-krylov")
    }
    curves = residual_curves(problem.phi, problem.z0, solvers, max_iter=8, floor=-1)
    for name, curve in curves.items():
        assert (curve.residual.diff(dim=0) <= 0).all()
        fixed = solvers[name].with_options(max_iter=8, rtol=0.0, atol=0.0, record="residual")
        solution = solve(problem.phi, problem.z0, fixed)
        assert curve.work[-1] == solution.evaluations + solution.products
        torch.testing.assert_close(curve.residual, solution.trace.residual.cummin(0)[0])
    assert curves["anderson"].residual[-1].max() < 1e-12
    assert curves["picard"].residual[-1].min() > 0.1
    assert curves["newton"].work.tolist()[:2] == [1, 1 + 1 + 2]  # one J of two columns


def test_a_curve_ends_at_the_floor():
    z0 = numbers([[0.0], [1.0]])
    for floor, updates in ((0.1, 3), (1e-3, 9), (None, 48)):  # 2^-k <= floor (2 - 2^-k)
        solvers = {"picard": Picard()}
        curve = residual_curves(HALF.phi, z0, solvers, max_iter=100, floor=floor)["picard"]
        assert len(curve.work) == updates + 1


def test_a_work_point_is_what_the_solve_said():
    problem = PROBLEMS_BY_NAME["tanh_layer_0.9"]
    solvers = {"anderson": Anderson(), "newton": Newton()}
    given = work_precision(problem.phi, problem.z0, solvers, root=problem.root, rtols=[1e-2, 1e-9])
    for name, solver in solvers.items():
        loose, tight = given[name]
        for point in (loose, tight):
            solution = solve(
                problem.phi,
                problem.z0,
                solver.with_options(rtol=point.rtol, atol=0.0, max_iter=200),
            )
            assert point.work == solution.evaluations + solution.products
            assert point.fraction_converged == 1
            assert 0 <= point.residual <= point.rtol
            error = (solution.z - problem.root).norm(dim=1) / problem.root.norm(dim=1)
            assert point.error == pytest.approx(error.max().item(), rel=1e-12)
            assert 0 < point.seconds < 60
        assert loose.work < tight.work
        assert tight.error < 1e-8


def test_a_solver_that_fails_has_no_accuracy():
    (point,) = work_precision(lambda z: z + 1, numbers([[0.0]]), {"p": Picard()}, rtols=[1e-9])["p"]
    assert point.fraction_converged == 0
    assert math.isnan(point.residual)
    assert math.isnan(point.error)
    (point,) = work_precision(HALF.phi, HALF.z0, {"p": Picard()}, rtols=[1e-3])["p"]
    assert math.isnan(point.error)  # no root was given
    assert point.residual <= 1e-3


# Gradients.


def test_errors_in_closed_form():
    """z = a z + 1 from 0: z_K = (1 - a^K) / (1 - a); implicit from z and u that stopped early."""
    a = numbers([[0.5]]).requires_grad_()
    steps = [1, 2, 5, 20]
    given = gradient_error(
        lambda z: a * z + 1, numbers([[0.0]]), [a], steps=steps, rtols=[1e-2, 1e-10]
    )
    exact = 2 * 2 * 4.0  # d z^2 / da = 2 z* / (1 - a)^2
    for K, error in zip(steps, given.unrolled.tolist(), strict=True):
        z = (1 - 0.5**K) / 0.5
        slope = (-K * 0.5 ** (K - 1) * 0.5 + 1 - 0.5**K) / 0.25
        assert error == pytest.approx(abs(2 * z * slope - exact) / exact, rel=1e-9)
    assert given.unrolled_work.tolist() == steps
    assert 1e-4 < given.implicit[0] < 5e-2
    assert given.implicit[1] < 1e-9
    assert given.implicit_work.tolist() == [7, 34]  # 2^-k <= rtol (2 - 2^-k), + 1


def test_they_fall_with_more_work_on_a_curved_map():
    generator = torch.Generator().manual_seed(0)
    W = (torch.randn(6, 6, dtype=torch.float64, generator=generator) / 5).requires_grad_()
    x = torch.randn(3, 6, dtype=torch.float64, generator=generator)
    given = gradient_error(
        lambda z: torch.tanh(z @ W.T + x),
        torch.zeros_like(x),
        [
            W,
        ],
    )
    assert (given.unrolled.diff() < 0).all()
    assert given.implicit[-1] < 1e-7 < given.implicit[0]
    assert (given.implicit_work.diff() > 0).all()


def test_damping_slows_it():
    a = numbers([[0.5]]).requires_grad_()
    plain, damped = (
        gradient_error(lambda z: a * z + 1, numbers([[0.0]]), [a], steps=[8], rtols=[1e-3], beta=b)
        for b in (1.0, 0.5)
    )
    assert damped.unrolled > plain.unrolled
    assert damped.implicit_work > plain.implicit_work


@pytest.mark.filterwarnings("ignore::fixpoint.ConvergenceWarning")
def test_no_reference_without_a_fixed_point():
    a = numbers([[1.0]]).requires_grad_()
    with pytest.raises(ConvergenceError):
        gradient_error(lambda z: a * z + 1, numbers([[0.0]]), [a])
