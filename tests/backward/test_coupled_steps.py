"""Gradients of a fixed number of updates of samples that depend on each other."""

import pytest
import torch
from torch.testing import assert_close

from fixpoint import Anderson, BarzilaiBorwein, Broyden, FixedPoint, Implicit, Newton, Unrolled
from fixpoint.backward._linear import couples_rows

FIXED = {"rtol": 0.0, "atol": 0.0}
KINDS = [Anderson, Broyden, BarzilaiBorwein, Newton]


def coupled_map(seed, both_ways):
    """Return phi(z, w), three samples of which each is moved by some of the others, and z0."""
    draw = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
    own, others = 0.4 * torch.randn(3, 2, 2, **draw), 0.2 * torch.randn(3, 3, **draw)
    others = others - torch.diag(others.diag())
    others = others if both_ways else others.tril()
    b, z0 = torch.randn(3, 2, **draw), torch.randn(3, 2, **draw)

    def phi(z, w):
        return torch.sin(torch.einsum("bij,bj->bi", own, z) + others @ z) + w * b

    return phi, z0


def all_derivatives(run, w):
    """Return the differences of run(w), in reverse mode and in forward mode."""
    h = 1e-5
    differences = (run(w + h) - run(w - h)) / (2 * h)
    _, forward = torch.func.jvp(run, (w,), (torch.ones_like(w),))
    reverse = torch.autograd.functional.jacobian(run, w)
    return differences, reverse, forward


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("count", [4, 7, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_what_was_computed(kind, count, both_ways):
    compared = 0
    for seed in range(6):
        phi, z0 = coupled_map(seed, both_ways)
        layer = FixedPoint(kind(max_iter=count, **FIXED), Unrolled(), on_failure="ignore")
        w = torch.tensor(0.7, dtype=torch.float64)

        def run(w, layer=layer, phi=phi, z0=z0):
            return layer(lambda z: phi(z, w), z0).z

        with torch.enable_grad():
            differences, reverse, forward = all_derivatives(run, w)
        assert_close(forward, reverse, rtol=1e-6, atol=1e-6)
        again = (run(w + 2e-5) - run(w - 2e-5)) / 4e-5
        if kind is not Newton and (again - differences).abs().max() < 1e-5:
            assert_close(reverse, differences, rtol=1e-4, atol=1e-4)
            compared += 1
    assert compared >= 1 or kind is Newton


@pytest.mark.parametrize("kind", [Anderson, Broyden, BarzilaiBorwein])
def test_one_that_starts_at_its_solution_is_moved_by_another(kind):
    def run(w):
        def phi(z):
            return torch.stack((0.5 * z[0] + z[1], 0.5 * z[1] + w + 0 * z[0]))

        start = torch.zeros(2, 1, dtype=torch.float64)
        start[0] = 1e-3
        start[1] = 0.5e-3  # phi(start)[0] is start[0]
        return FixedPoint(kind(max_iter=9, **FIXED), Unrolled())(phi, start).z.flatten()

    w = torch.tensor(0.7, dtype=torch.float64)
    differences, reverse, forward = all_derivatives(run, w)
    assert_close(reverse, differences, rtol=1e-6, atol=1e-6)
    assert_close(forward, reverse)


@pytest.mark.filterwarnings("ignore::fixpoint.ConvergenceWarning")
def test_a_settled_sample_without_a_finite_derivative_spoils_no_weight():
    w = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    a = torch.tensor([[0.0], [1.0]], dtype=torch.float64)

    def phi(z):  # of the first sample 0 * sqrt(z), whose derivative at its solution 0 is NaN
        return 0.5 * torch.cos(w * z + a) * a + (a * z).abs().sqrt() * 0.1

    start = torch.tensor([[0.0], [0.5]], dtype=torch.float64)
    z = FixedPoint(Anderson(max_iter=6, **FIXED), Unrolled())(phi, start).z
    z[1].sum().backward()
    assert w.grad.isfinite()


@pytest.mark.parametrize("rows", [2, 3, 5, 8])
def test_each_pair_of_rows_is_seen_to_be_coupled(rows):
    class Pair:
        def __init__(self, i, j):
            self.i, self.j = i, j

        def jvp(self, v):
            out = 0.5 * v
            out[self.i] = out[self.i] + v[self.j]
            return out

    like = torch.zeros(rows, 2, dtype=torch.float64)
    for i in range(rows):
        for j in range(rows):
            assert couples_rows(Pair(i, j), like) == (i != j)


def test_an_adjoint_that_is_not_solved_by_rows_is_solved_as_one():
    # The second row depends on the first and third, of which Anderson takes too little.
    J = torch.tensor([[-0.5014, 0.0025, 0.0408], [0.0, 0.0841, 0.0], [0.0, -0.3194, 0.0122]])
    J, b = J.double(), torch.tensor([[0.2], [0.5], [0.3]], dtype=torch.float64)
    w = torch.ones(3, 1, dtype=torch.float64, requires_grad=True)
    adjoint = Anderson(max_iter=100, rtol=1e-12, atol=0.0)
    layer = FixedPoint(Broyden(rtol=1e-13, atol=0.0), Implicit(adjoint))
    layer(lambda z: J @ z + w * b, torch.zeros_like(b)).z[0].sum().backward()
    expected = torch.linalg.inv(torch.eye(3, dtype=torch.float64) - J)[0][:, None] * b
    assert_close(w.grad, expected)


@pytest.mark.parametrize("kind", [Anderson, Broyden, BarzilaiBorwein])
@pytest.mark.parametrize("last", [None, 4])
def test_one_that_settles_early_has_its_implicit_derivative_for_others(kind, last):
    draw = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
    own = 0.5 * torch.randn(4, 4, **draw)
    solution = torch.zeros(4, dtype=torch.float64)
    for _ in range(100):
        solution = 0.5 * torch.sin(solution) + 0.7

    def run(w, count, start):
        def phi(z):
            return torch.stack((0.5 * torch.sin(z[0]) + w, 1.2 * torch.tanh(z[1] @ own + z[0])))

        layer = FixedPoint(kind(max_iter=count, **FIXED), Unrolled(last), on_failure="ignore")
        return layer(phi, start).z.sum(1)

    w, start = torch.tensor(0.7, dtype=torch.float64), torch.stack((solution, 0 * solution))
    expected = (run(w + 1e-5, 30, start) - run(w - 1e-5, 30, start)) / 2e-5
    reverse = torch.autograd.functional.jacobian(lambda w: run(w, 7, start), w)
    _, forward = torch.func.jvp(lambda w: run(w, 7, start), (w,), (torch.ones_like(w),))
    assert_close(reverse, expected, rtol=1e-2, atol=0.0)
    assert_close(forward, reverse)


@pytest.mark.parametrize("kind", [Anderson, Broyden, BarzilaiBorwein])
def test_samples_that_leave_one_after_another_cost_few_passes(kind):
    calls = []

    def phi(z):
        calls.append(z)
        before = torch.cat((torch.ones(1, 1, dtype=torch.float64), z[:-1]))
        return 0.5 * torch.sin(z) + 0.4 * before

    start = torch.zeros(16, 1, dtype=torch.float64)  # all but the first are at rest
    with torch.no_grad():
        layer = FixedPoint(kind(max_iter=20, **FIXED), Unrolled(), on_failure="ignore")
        solution = layer(phi, start)
    assert len(calls) == solution.evaluations <= 80


@pytest.mark.parametrize("backward", [Implicit(), Unrolled(), Unrolled(last=3)])
@pytest.mark.parametrize("options", [FIXED, {"rtol": 1e-12, "atol": 0.0}])
def test_transforms_pass_no_grad(backward, options):
    b = torch.tensor([[1.0, 0.2], [0.5, 0.1]], dtype=torch.float64)
    layer = FixedPoint(Anderson(max_iter=30, **options), backward)

    def run(w):
        return layer(lambda z: 0.5 * torch.sin(z) + w * b, torch.zeros_like(b)).z

    w = torch.tensor(0.7, dtype=torch.float64)
    with torch.no_grad():
        z, tangent = torch.func.jvp(run, (w,), (torch.ones_like(w),))
        gradient = torch.func.grad(lambda w: run(w).sum())(w)
    # Three plain updates from the solution are the Neumann series to that order.
    tolerance = 0.1 if getattr(backward, "last", None) and layer.solver.has_tolerance else 1e-6
    assert_close(tangent, b / (1 - 0.5 * z.cos()), rtol=tolerance, atol=tolerance)
    assert_close(gradient, tangent.sum(), rtol=1e-6, atol=1e-6)
