"""Samples that fail, in the solve or in the adjoint, and the gradients of weights they share."""

import warnings

import pytest
import torch
from torch.testing import assert_close

from fixpoint import (
    SQUAREM,
    Anderson,
    ConvergenceError,
    ConvergenceWarning,
    FixedPoint,
    Implicit,
    Phantom,
    Picard,
    Unrolled,
    row_guard,
    solve,
)
from fixpoint.solution import has_failed

D = torch.float64
QUIET = {"on_failure": "ignore"}
TIGHT = {"rtol": 1e-12, "atol": 1e-13, "max_iter": 200}
NAN = float("nan")


@pytest.mark.parametrize("backward", [Implicit(), Unrolled(), Unrolled(last=80), Phantom(80)])
def test_a_sample_that_is_not_finite_touches_no_weight(backward):
    maps = {
        "added": lambda a, x: lambda z: torch.tanh(a * z + x),
        "times a weight": lambda a, x: lambda z: torch.tanh((0.2 * z + x) * a),
        "through a matrix": lambda a, x: lambda z: torch.tanh((z + x) @ (0.3 * a.expand(2, 2))),
    }
    good = torch.tensor([[0.5, -0.2]], dtype=D)
    both = torch.tensor([[0.5, -0.2], [0.1, NAN]], dtype=D)
    for make in maps.values():
        found = []
        for x in (good, both):
            a = torch.tensor(0.5, dtype=D, requires_grad=True)
            z = FixedPoint(Picard(**TIGHT), backward, **QUIET)(make(a, x), torch.zeros_like(x)).z
            found.append(torch.autograd.grad(z.nan_to_num().square().sum(), a)[0])
        torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=0)


def test_a_sample_that_is_not_finite_after_fixed_steps_touches_no_weight():
    x = torch.tensor([[0.5], [NAN]], dtype=D)

    def first(a, x):
        layer = FixedPoint(Picard(max_iter=80, rtol=0.0, atol=0.0), Implicit())
        return layer(lambda z: torch.tanh(a * z + x), torch.zeros_like(x)).z[0].sum()

    a = torch.tensor(0.5, dtype=D, requires_grad=True)
    exact = torch.autograd.grad(first(a, x[:1]), a)[0]
    torch.testing.assert_close(torch.autograd.grad(first(a, x), a)[0], exact)
    for derivative in (torch.func.grad, torch.func.jacfwd):
        torch.testing.assert_close(derivative(first)(a.detach(), x), exact)


@pytest.mark.parametrize("backward", [Implicit(), Unrolled(), Unrolled(last=80), Phantom(80)])
def test_a_state_without_batch_axis_that_is_not_finite_has_no_gradient(backward):
    x = torch.tensor([[0.5, -0.2], [0.1, NAN]], dtype=D)
    a = torch.tensor(0.5, dtype=D, requires_grad=True)
    w = torch.eye(2, dtype=D, requires_grad=True)
    layer = FixedPoint(Picard(**TIGHT), backward, **QUIET)
    z = layer(lambda z: torch.tanh(a * z @ w + x), torch.zeros_like(x), batched=False).z
    for found in torch.autograd.grad(z.sum(), (a, w)):
        assert not found.any()


def slopes(backward, solver, **options):
    b = torch.tensor(1.0, dtype=D, requires_grad=True)
    slope = torch.tensor([[0.5], [0.6], [1.0]], dtype=D)
    layer = FixedPoint(solver, backward, **QUIET, **options)
    z = layer(lambda z: slope * z + b, torch.zeros(3, 1, dtype=D)).z
    return torch.autograd.grad(z.mean(), b)[0].item()


@pytest.mark.parametrize("name", ["picard", "anderson", "broyden", "squarem", "auto", "newton"])
def test_a_sample_without_a_fixed_point_contributes_nothing(name):
    assert slopes(Implicit(**QUIET), name) == pytest.approx(1.5, rel=1e-4)


def test_the_policies():
    for failed, expected in (("zero", 1.5), ("phantom", 1.5 + 1 / 3)):
        given = slopes(Implicit(**QUIET), Picard(), failed=failed)
        assert given == pytest.approx(expected, rel=1e-4)
        assert slopes(Implicit(failed=failed, **QUIET), "picard") == given
        assert slopes(Phantom(60, failed=failed), "picard") > 1.49
    assert slopes(Implicit(failed="keep", **QUIET), "picard") > 2
    with pytest.raises(ConvergenceError, match="1 of 3"):
        slopes(Implicit(), "picard", failed="raise")
    for make in (FixedPoint, Implicit, Unrolled, Phantom):
        with pytest.raises(ValueError, match="unknown failed 'none'.*zero, keep, phantom, raise"):
            make(failed="none")


@pytest.mark.parametrize(("failed", "expected"), [("zero", 2.0), ("phantom", 3.0)])
def test_a_sample_whose_adjoint_fails(failed, expected):
    """Of slopes 0.5 and 1 at their fixed point 0 the second has no adjoint: (1 - 1) u = g."""
    b = torch.zeros((), dtype=D, requires_grad=True)
    slope = torch.tensor([[0.5], [1.0]], dtype=D)
    layer = FixedPoint(Anderson(), Implicit(failed=failed, **QUIET))
    z = layer(lambda z: slope * z + b, torch.zeros(2, 1, dtype=D)).z
    assert torch.autograd.grad(z.sum(), b)[0].item() == pytest.approx(expected, rel=1e-4)


def test_unrolled_keeps_the_gradient_of_the_updates():
    b = torch.tensor(1.0, dtype=D, requires_grad=True)
    layer = FixedPoint(Picard(max_iter=3), Unrolled(), **QUIET)
    layer(lambda z: 0.5 * z + b, torch.zeros(1, 1, dtype=D)).z.sum().backward()
    assert b.grad.item() == pytest.approx(1.75)


def test_failures_are_said_once_and_solve_is_silent():
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(4, 4), torch.randn(4, 4)
    torch.nn.init.normal_(linear.weight, std=2.0)
    layer = FixedPoint(Picard())
    phi = lambda z: torch.tanh(linear(z) + x)  # noqa: E731
    with pytest.warns(ConvergenceWarning, match='contribute no gradient .failed="zero"'):
        layer(phi, torch.zeros(4, 4))
    layer(phi, torch.zeros(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solve(phi, torch.zeros(4, 4), Picard())


def test_a_forgotten_batch_axis_is_asked_for():
    with pytest.warns(ConvergenceWarning, match=r"z0 of shape \(8,\).*z0\[None\] or batched=False"):
        FixedPoint(Picard())(lambda z: 2 * z + 1, torch.zeros(8))


def test_raising_under_vmap():
    layer = FixedPoint(Picard(max_iter=30), on_failure="raise")

    def f(x, slope):
        return layer(lambda z: slope * z + x, torch.zeros_like(x)).z

    x = torch.ones(3, 2, 1, dtype=D)
    z = torch.func.vmap(f, (0, None))(x, torch.tensor(0.5, dtype=D))
    torch.testing.assert_close(z, 2 * x, rtol=1e-4, atol=0)
    with pytest.raises(ConvergenceError, match="6 of 6"):
        torch.func.vmap(f, (0, None))(x, torch.tensor(2.0, dtype=D))


def test_the_last_updates_of_a_solver_that_counts():
    """The Neumann sum of n terms: z* = 2 and dz/da = z* (1 + a + ... + a^(n - 1))."""
    for n, expected in ((1, 2.0), (2, 3.0), (5, 3.875), (60, 4.0)):
        a = torch.tensor(0.5, dtype=D, requires_grad=True)
        layer = FixedPoint(SQUAREM(rtol=1e-12, max_iter=200), Unrolled(last=n))
        layer(lambda z: a * z + 1, torch.zeros(1, 1, dtype=D)).z.sum().backward()
        assert a.grad.item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("backward", [Phantom(2), Implicit(), Phantom(2, failed="keep")])
@pytest.mark.parametrize("options", [{"max_iter": 3}, {"max_iter": 30, "stop": 0.5}])
def test_samples_that_only_need_more_updates_cost_no_check_of_each_operation(
    backward, options, monkeypatch
):
    def unexpected(*arguments):
        raise AssertionError("the gradient checks each operation of phi for NaN and inf")

    monkeypatch.setattr(row_guard._RowGuard, "__init__", unexpected)
    a = torch.tensor([[0.999], [0.5], [0.5]], requires_grad=True)
    layer = FixedPoint(Picard(**options), backward, on_failure="ignore")
    solution = layer(lambda z: a * z + 1, torch.zeros(3, 1))
    assert has_failed(solution.result)[0]
    solution.z.sum().backward()
    assert torch.isfinite(a.grad).all()


@pytest.mark.parametrize("stop", ["each", "all", 0.6, 0.3])
def test_a_lost_sample_does_not_end_the_batch_that_is_differentiated(stop):
    x = torch.tensor([[float("nan")], [1.0], [2.0]], dtype=torch.float64)
    a = torch.tensor([[0.5], [0.9], [0.95]], dtype=torch.float64)
    solver = Picard(rtol=1e-8, atol=0.0, max_iter=500, stop=stop)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    expected = solve(lambda z: a * z + x, torch.zeros_like(x), solver)
    layer = FixedPoint(solver, Unrolled(), on_failure="ignore")
    solution = layer(lambda z: a * scale * z + x, torch.zeros_like(x))
    assert torch.equal(solution.z, expected.z)
    assert torch.equal(solution.result, expected.result)
    z = torch.zeros(2, 1, dtype=torch.float64)
    for k in range(int(expected.iterations.max())):
        going = (k < expected.iterations[1:])[:, None]
        z = torch.where(going, a[1:] * scale * z + x[1:], z)
    (gradient,) = torch.autograd.grad(solution.z.sum(), scale)
    assert_close(gradient, torch.autograd.grad(z.sum(), scale)[0])


@pytest.mark.parametrize("derivative", [torch.func.grad, torch.func.jacfwd, torch.func.hessian])
@pytest.mark.parametrize("backward", [Implicit(), Phantom(60)], ids=str)
def test_a_lost_sample_of_an_instance_of_vmap_touches_no_weight(backward, derivative):
    x = torch.tensor([[0.5], [NAN]], dtype=D)
    layer = FixedPoint(Anderson(**TIGHT), backward, **QUIET)

    def of_weight(a):
        return layer(lambda z: torch.tanh(a * z + x), torch.zeros_like(x)).z[0].sum()

    a = torch.tensor([0.5, 0.6], dtype=D)
    expected = torch.stack([derivative(of_weight)(one) for one in a])
    assert expected.isfinite().all()
    assert_close(torch.func.vmap(derivative(of_weight))(a), expected, rtol=1e-8, atol=0.0)


@pytest.mark.parametrize("backward", [Implicit(), Phantom(60)], ids=str)
def test_nor_where_vmap_is_nested(backward):
    x = torch.tensor([[0.5], [NAN]], dtype=D)
    layer = FixedPoint(Anderson(**TIGHT), backward, **QUIET)

    def of_weight(a):
        return layer(lambda z: torch.tanh(a * z + x), torch.zeros_like(x)).z[0].sum()

    def total(a):
        rows = torch.func.vmap(lambda u: torch.func.vmap(lambda v: of_weight(a * u * v))(factors))
        return rows(factors).sum()

    factors, a = torch.tensor([0.5, 1.0, 0.8], dtype=D), torch.tensor(0.5, dtype=D)
    expected = torch.func.grad(
        lambda a: sum(of_weight(a * u * v) for u in factors for v in factors)
    )
    assert_close(torch.func.grad(total)(a), expected(a), rtol=1e-8, atol=0.0)
