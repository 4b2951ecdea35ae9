"""Gradients of solves whose rows of phi depend on each other, and of updates past convergence."""

import pytest
import torch

from fixpoint import (
    Anderson,
    BarzilaiBorwein,
    Broyden,
    ConvergenceWarning,
    FixedPoint,
    Implicit,
    Newton,
    Picard,
    Unrolled,
    make_solver,
)
from fixpoint.models import DEQ


@pytest.mark.parametrize(
    ("solver", "unrolled"),
    [(Picard, False), (Broyden, False), (Broyden, True), (BarzilaiBorwein, True)],
)
def test_a_graph_whose_nodes_are_rows(solver, unrolled):
    generator = torch.Generator().manual_seed(0)
    N, D = 9, 3
    A = torch.rand(N, N, generator=generator).double()
    A = A / A.sum(1, keepdim=True)
    W = torch.randn(D, D, generator=generator).double()
    W = (0.6 * W / torch.linalg.matrix_norm(W, 2)).requires_grad_()
    x = torch.randn(N, D, generator=generator).double().requires_grad_()

    def phi(z):
        return torch.tanh(A @ z @ W.T + x)

    z = torch.zeros(N, D, dtype=torch.float64)
    for _ in range(200):
        z = phi(z)
    weight = torch.randn(N, D, generator=generator).double()
    exact = torch.autograd.grad((z * weight).sum(), (W, x))
    options = {"rtol": 1e-10, "atol": 0.0, "max_iter": 300}
    backward = Unrolled() if unrolled else Implicit(solver(**options))
    layer = FixedPoint(solver(**options), backward, on_failure="ignore")
    solution = layer(phi, torch.zeros(N, D, dtype=torch.float64))
    assert solution.converged.all()
    found = torch.autograd.grad((solution.z * weight).sum(), (W, x))
    for a, b in zip(found, exact, strict=True):
        assert torch.allclose(a, b, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["picard", "broyden", "squarem", "barzilai-borwein"])
def test_updates_of_a_row_see_one_that_has_ended(name):
    """z_0 = 0.1 z_0 + w ends long before z_1 = 0.9 z_1 + 0.1 z_0: dz_1/dw = 1 / 0.9."""
    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    layer = FixedPoint(make_solver(name, rtol=1e-9, max_iter=400), Unrolled())
    z0 = torch.tensor([[0.5], [0.2]], dtype=torch.float64)
    solution = layer(lambda z: torch.stack([0.1 * z[0] + w, 0.9 * z[1] + 0.1 * z[0]]), z0)
    assert solution.iterations[0] < solution.iterations[1]
    (gradient,) = torch.autograd.grad(solution.z[1], w)
    assert gradient.item() == pytest.approx(1 / 0.9, rel=1e-7)


def test_a_failure_of_coupled_rows_names_the_remedy():
    A = torch.ones(4, 4).double() / 4
    layer = FixedPoint(Anderson(max_iter=3, rtol=1e-12))
    x = torch.linspace(0, 1, 8).view(4, 2).double()
    with pytest.warns(ConvergenceWarning, match=r"4 of 4 samples depend on others.*batched=False"):
        layer(lambda z: torch.cos(A @ z + x), torch.zeros(4, 2).double())
    with pytest.warns(ConvergenceWarning) as caught:
        FixedPoint(Anderson(max_iter=1))(lambda z: torch.cos(z + x), torch.zeros(4, 2).double())
    assert "batched" not in str(caught[0].message)


@pytest.mark.parametrize("solver", [Picard, Anderson, Broyden])
def test_batch_normalization_in_training(solver):
    torch.manual_seed(0)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm = torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6)

        def forward(self, z, x):
            return torch.tanh(0.3 * self.norm(self.inner(z) + x))

    layer = Layer().double()
    x = torch.randn(8, 6, dtype=torch.float64)
    z = torch.zeros_like(x)
    for _ in range(300):
        z = layer(z, x)
    weight = torch.randn_like(x)
    exact = torch.autograd.grad((z * weight).sum(), list(layer.parameters()))
    options = {"rtol": 1e-10, "atol": 0.0, "max_iter": 400}
    deq = DEQ(layer, solver(**options), Implicit(solver(**options)))
    found = torch.autograd.grad((deq(x) * weight).sum(), list(layer.parameters()))
    assert deq.solution.converged.all()
    for a, b in zip(found, exact, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-8)


# Past convergence the differences that these solvers take are rounding noise.
@pytest.mark.parametrize("last", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", [Broyden, Anderson, BarzilaiBorwein])
def test_updates_past_convergence_spoil_no_gradient(solver, dtype, last):
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(8, 8, generator=generator).to(dtype)
    W = (0.7 * W / torch.linalg.matrix_norm(W, 2)).requires_grad_()
    x = torch.randn(16, 8, generator=generator).to(dtype)

    def phi(z):
        return torch.tanh(z @ W.T + x)

    z0 = torch.zeros_like(x)
    exact = FixedPoint(Newton(rtol=1e-6, atol=0.0), Implicit())(phi, z0).z
    (expected,) = torch.autograd.grad(exact.square().sum(), W)
    for updates in (30, 60):
        layer = FixedPoint(solver(max_iter=updates, rtol=0.0, atol=0.0), Unrolled(last))
        (gradient,) = torch.autograd.grad(layer(phi, z0).z.square().sum(), W)
        assert (gradient - expected).norm() <= 2e-3 * expected.norm()
