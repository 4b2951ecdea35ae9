"""Unrolling past convergence, from warm starts, and in forward mode."""

import itertools

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import jvp

from fixpoint import (
    Anderson,
    BarzilaiBorwein,
    Broyden,
    DampedPicard,
    FixedPoint,
    Implicit,
    Newton,
    Phantom,
    Picard,
    Unrolled,
    make_solver,
)

NAMES = ["picard", "anderson", "broyden", "barzilai-borwein", "newton"]


def weight_gradient(solver, backward, dtype, *, rho=0.7, seed=1):
    """dL/dW of a loss on the fixed point of tanh(z W^T + x), ||W||_2 = rho, B = 16, D = 8."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    W = (rho * W / torch.linalg.matrix_norm(W, 2)).to(dtype).requires_grad_()
    x, c = torch.randn(2, 16, 8, generator=generator, dtype=torch.float64).to(dtype)
    layer = FixedPoint(solver, backward, on_failure="ignore")
    z = layer(lambda z: torch.tanh(z @ W.T + x), torch.zeros_like(x)).z
    return torch.autograd.grad((z * c).sum(), W)[0].double()


def relative_error(found, exact):
    return ((found - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("rho", [0.5, 0.9])
@pytest.mark.parametrize("kind", [Anderson, Broyden, BarzilaiBorwein])
def test_fixed_steps_past_convergence_have_the_gradient_of_the_solution(kind, rho):
    exact = weight_gradient(Newton(rtol=1e-13, atol=0.0), Implicit(), torch.float64, rho=rho)
    for max_iter in (20, 60):
        solver = kind(max_iter=max_iter, rtol=0.0, atol=0.0)
        for dtype, bound in ((torch.float32, 1e-4), (torch.float64, 1e-6)):
            found = weight_gradient(solver, Unrolled(), dtype, rho=rho)
            assert relative_error(found, exact) < bound


@pytest.mark.parametrize("kind", [Anderson, Broyden, BarzilaiBorwein, DampedPicard, Newton])
def test_the_last_of_fixed_steps_past_convergence_have_the_gradient_of_the_solution(kind):
    exact = weight_gradient(Newton(rtol=1e-13, atol=0.0), Implicit(), torch.float64)
    solver = kind(max_iter=80, rtol=0.0, atol=0.0)
    for last in (3, 20):
        for dtype, bound in ((torch.float32, 1e-4), (torch.float64, 1e-6)):
            found = weight_gradient(solver, Unrolled(last=last), dtype)
            assert relative_error(found, exact) < bound


def test_fixed_steps_past_convergence_keep_the_best_state():
    for kind in (Anderson, Broyden, BarzilaiBorwein):
        layer = FixedPoint(kind(max_iter=60, rtol=0.0, atol=0.0), Unrolled())
        with torch.no_grad():
            z = layer(torch.cos, torch.zeros(4, 1)).z
        assert (z - 0.739085133).abs().max() < 2e-7
        assert torch.equal(layer(torch.cos, torch.zeros(4, 1)).z, z)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_more_updates_from_the_solution_give_a_better_gradient(name, dtype):
    exact = weight_gradient(Newton(rtol=1e-13, atol=0.0), Implicit(), torch.float64)
    rtol = 1e-6 if dtype == torch.float32 else 1e-13
    solver = make_solver(name, rtol=rtol, atol=0.0, max_iter=200)
    errors = [
        relative_error(weight_gradient(solver, Unrolled(last=n), dtype), exact)
        for n in (1, 3, 10, 40)
    ]
    floor = 1e-5 if dtype == torch.float32 else 1e-9
    assert errors[-1] < floor
    assert all(b < max(0.5 * a, floor) for a, b in itertools.pairwise(errors))
    if name == "newton":
        assert errors[0] < floor


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_through_time_of_warm_starts_is_that_of_the_equilibrium(name):
    # The input is constant, so from some time on the last state is the solution already.
    x = torch.full((40, 2, 1), 0.3, dtype=torch.float64)
    x[:, 1] = 0.8
    found = []
    for backward in (Unrolled(), Implicit()):
        given = x.clone().requires_grad_()
        layer = FixedPoint(make_solver(name, rtol=1e-8, atol=0.0, max_iter=100), backward)
        h = torch.zeros(2, 1, dtype=torch.float64)
        for x_t in given:
            h = layer(lambda z, x=x_t: torch.tanh(0.5 * z + x), h).z
        found.append(torch.autograd.grad(h.sum(), given)[0])
    assert torch.allclose(*found, rtol=1e-5, atol=1e-6)


def test_warm_rows_beside_cold_ones_and_empty_batches():
    layer, x = FixedPoint(Anderson(), Unrolled()), torch.tensor([[0.3], [0.8]])
    phi = lambda z: torch.tanh(0.5 * z + x)  # noqa: E731
    z0 = layer(phi, torch.zeros(2, 1)).z.detach()
    z0[1] = 0
    x.requires_grad_()
    solution = layer(phi, z0)
    assert solution.iterations[0] == 0
    solution.z.sum().backward()
    slope = 0.5 * (1 - solution.z.detach().square())
    assert torch.allclose(x.grad, 2 * slope / (1 - slope), rtol=1e-3)
    for backward in (Unrolled(), Unrolled(last=2), Implicit(), Phantom()):
        w = torch.tensor(0.5, requires_grad=True)
        FixedPoint(Anderson(), backward)(lambda z: w * z, torch.zeros(0, 3)).z.sum().backward()
        assert w.grad is None or w.grad == 0


@pytest.mark.parametrize(
    ("backward", "expected"), [(Phantom(60), 4.0), (Phantom(1), 2.0), (Unrolled(last=2), 3.0)]
)
def test_forward_mode_equals_reverse_mode(backward, expected):
    a, one = torch.tensor([[0.5]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    solvers = [Picard(rtol=1e-14, atol=0.0, max_iter=100)]
    if isinstance(backward, Unrolled):
        solvers.append(Picard(rtol=0.0, atol=0.0, max_iter=60))
    for solver in solvers:

        def f(a, solver=solver):
            return FixedPoint(solver, backward)(lambda z: a * z + 1, torch.zeros_like(one)).z

        assert jvp(f, (a,), (one,))[1].item() == pytest.approx(expected, rel=1e-10)
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(f(forward_ad.make_dual(a, one)))
            assert dual.tangent.item() == pytest.approx(expected, rel=1e-10)
        weight = a.clone().requires_grad_()
        f(weight).backward()
        assert weight.grad.item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("backward", [Implicit(), Phantom(3), Unrolled(last=3)])
def test_a_sample_lost_where_phi_has_no_derivative_spoils_no_weight(backward):
    # The second sample walks to 0, where the square root has no derivative, and then to NaN.
    w = torch.tensor(0.5, requires_grad=True)
    shift = torch.tensor([[1.0], [0.0]])
    offset = torch.tensor([[0.0], [-1.0]])

    def phi(z):
        return w * torch.sqrt(z + shift) + offset

    layer = FixedPoint(Picard(), backward, on_failure="ignore")
    solution = layer(phi, torch.tensor([[0.0], [4.0]]))
    assert solution.result.tolist() == [0, 4]
    solution.z[0].sum().backward()
    assert w.grad.isfinite()
