"""Clipped and preconditioned adjoints, factors that they share with the solve, and compositions."""

import pytest
import torch

from fixpoint import FixedPoint, Implicit, Newton, Phantom, Picard, Unrolled, solve

D = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
A = torch.randn(3, 3, generator=GENERATOR, dtype=D) / 4
V = torch.randn(4, 3, generator=GENERATOR, dtype=D)


def gradients(backward):
    b = torch.randn(4, 3, generator=GENERATOR, dtype=D, requires_grad=True)
    z = FixedPoint(Picard(max_iter=200), backward)(
        lambda z: z @ A.T + b, torch.zeros(4, 3).double()
    ).z
    return torch.autograd.grad((z * V).sum(), b)[0]


def clipped(v, clip):
    product, size = v @ A, v.norm(dim=1, keepdim=True)
    return product * (clip * size / product.norm(dim=1, keepdim=True)).clamp_max(1.0)


@pytest.mark.parametrize("clip", [0.1, 0.45, 10.0])
def test_a_clipped_one_step_adjoint(clip):
    first = clipped(V, clip)
    torch.testing.assert_close(gradients(Phantom(2, clip=clip)), V + first)
    expected = V + first + clipped(first, clip)
    torch.testing.assert_close(gradients(Phantom(3, clip=clip)), expected)
    limited = (first.norm(dim=1) < (V @ A).norm(dim=1) * (1 - 1e-12)).sum()
    assert limited == {0.1: 4, 10.0: 0}.get(clip, limited)
    with pytest.raises(ValueError, match="clip"):
        Phantom(clip=-1.0)


def test_a_clip_is_differentiable():
    a = torch.tensor(0.9, dtype=D, requires_grad=True)
    layer = FixedPoint(Picard(rtol=1e-13, atol=1e-14, max_iter=500), Phantom(2, clip=0.5))
    z = layer(lambda z: torch.tanh(a * z + V), torch.zeros_like(V)).z
    (first,) = torch.autograd.grad(z.sum(), a, create_graph=True)
    assert torch.isfinite(torch.autograd.grad(first, a)[0])


def test_a_preconditioner_of_a_stiff_adjoint():
    """-u'' + u^3 = f: the inverse of the Laplacian leaves a few products of some hundred."""
    n = 60
    L = (n + 1) ** 2 * (2 * torch.eye(n, dtype=D) - torch.diag(torch.ones(n - 1, dtype=D), 1))
    L = L - (n + 1) ** 2 * torch.diag(torch.ones(n - 1, dtype=D), -1)
    f = torch.linspace(1, 30, n, dtype=D)[None].requires_grad_()
    found, products = [], []
    for preconditioner in (None, lambda z, v: torch.linalg.solve(L, v.T).T):
        options = {"linear": "gmres", "memory": 20, "rtol": 1e-10, "atol": 0.0, "max_iter": 500}
        backward = Implicit(Newton(**options), adjoint_preconditioner=preconditioner)
        layer = FixedPoint(Newton(rtol=1e-9), backward)
        z = layer(lambda z: z - (z @ L + z**3 - f), torch.zeros(1, n, dtype=D)).z
        found.append(torch.autograd.grad(z[0, n // 2], f)[0])
        products.append(backward.adjoint.products)
    exact = torch.linalg.inv(L + 3 * torch.diag(z[0].detach() ** 2))[:, n // 2]
    for gradient in found:
        torch.testing.assert_close(gradient[0], exact, rtol=1e-6, atol=1e-10)
    assert 4 * products[1] < products[0]


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_factors_of_newton_serve_the_adjoint(start):
    """As exact as by a matrix, for second derivatives too, by a few products in place of D."""
    U = torch.randn(24, 24, generator=GENERATOR, dtype=D) / 4
    x = torch.randn(5, 24, generator=GENERATOR, dtype=D)
    found, products = [], []
    for reuse in (False, True):
        W = U.clone().requires_grad_()
        backward = Implicit(reuse_factors=reuse)
        layer = FixedPoint(Newton(rtol=1e-11, atol=0.0), backward)
        z = layer(lambda z, W=W: torch.tanh(z @ W.T + x), torch.full_like(x, start)).z
        (first,) = torch.autograd.grad(z.square().sum(), W, create_graph=True)
        products.append(backward.adjoint.products)
        found.append((first, torch.autograd.grad(first.square().sum(), W)[0]))
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-8)
    assert products[0] >= 24
    assert products[1] <= 4
    with pytest.raises(ValueError, match="leave out solver and adjoint_preconditioner"):
        FixedPoint(Newton(), Implicit("picard", reuse_factors=True))


def test_a_solver_is_the_preconditioner_of_another():
    """Anderson on three damped updates at a time: each counts for three evaluations."""
    b = torch.full((1, 20), 0.1, dtype=D, requires_grad=True)
    rates = torch.linspace(0.0, 0.97, 20, dtype=D)
    inner = FixedPoint(Picard(max_iter=3, rtol=0.0, atol=0.0), Unrolled())

    def phi(z):
        return rates * torch.sin(z) + b

    start, tight = torch.zeros(1, 20, dtype=D), {"rtol": 1e-12, "atol": 1e-13, "max_iter": 300}
    solution = FixedPoint("anderson")(lambda z: inner(phi, z).z, start, **tight).check()
    plain = FixedPoint("anderson")(phi, start, **tight).check()
    torch.testing.assert_close(solution.z, plain.z, rtol=0, atol=1e-10)
    assert solution.evaluations < plain.evaluations
    gradients = [torch.autograd.grad(s.z.sum(), b)[0] for s in (solution, plain)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=0)


def test_bounds_are_a_projection_in_the_map():
    """min |z - x|^2 / 2 over [0, 1]: the gradient is 0 where a bound holds."""
    x = torch.tensor([[-0.5, 0.3, 1.7]], dtype=D, requires_grad=True)

    def phi(z):
        return (z - 0.3 * (z - x)).clamp(0.0, 1.0)

    z = FixedPoint(Picard(rtol=1e-12, max_iter=200))(phi, torch.full((1, 3), 0.5, dtype=D)).z
    torch.testing.assert_close(z, x.detach().clamp(0, 1))
    (found,) = torch.autograd.grad(z.sum(), x)
    torch.testing.assert_close(found, torch.tensor([[0.0, 1.0, 0.0]], dtype=D))
    assert solve(phi, torch.full((1, 3), 0.5, dtype=D), "newton").converged.all()
