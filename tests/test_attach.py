"""fixpoint.attach: the gradient of solutions found elsewhere."""

import pytest
import scipy.optimize
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from fixpoint import ConvergenceWarning, Implicit, Phantom, Unrolled, attach_gradient

generator = torch.Generator().manual_seed(0)
A = torch.randn(3, 3, generator=generator, dtype=torch.float64)
A = A @ A.T / 3 + torch.eye(3, dtype=torch.float64)
X = torch.randn(2, 3, generator=generator, dtype=torch.float64)


def by_scipy(A, x):
    """Roots of A z + z^3 - x by SciPy, without gradient."""
    rows = [
        scipy.optimize.root(lambda z, x=x: A.numpy() @ z + z**3 - x, 0 * x, tol=1e-14).x
        for x in x.numpy()
    ]
    return torch.stack([torch.from_numpy(row) for row in rows])


ROOTS = by_scipy(A, X)


def newton(A, x):
    """The same root with all its derivatives, by unrolled Newton steps without gradient of J."""
    z = ROOTS.clone()
    for _ in range(3):
        J = A.expand(*z.shape, z.shape[-1]) + torch.diag_embed(3 * z**2)
        z = z - torch.linalg.solve(J, (z @ A.mT + z**3 - x).unsqueeze(-1)).squeeze(-1)
    return z


def attached(scale=1.0, **options):
    def f(A, x):
        F = lambda z: scale * (z @ A.mT + z**3 - x)  # noqa: E731
        return attach_gradient(F, ROOTS, form="root", **options)

    return f


def loss(f):
    return lambda A, x: f(A, x).square().sum()


TRANSFORMS = {
    "jvp": lambda f: jvp(f, (A, X), (A, X))[1],
    "jacrev": lambda f: jacrev(f, (0, 1))(A, X)[1],
    "jacfwd": lambda f: jacfwd(f)(A, X),
    "hessian": lambda f: hessian(loss(f))(A, X),
    "gradients of several losses": lambda f: vmap(lambda v: grad(lambda A: (f(A, X) * v).sum())(A))(
        torch.stack((X, 2 * X))
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_derivatives_are_those_of_unrolled_newton(transform):
    assert torch.allclose(transform(attached()), transform(newton), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("krylov", [False, True])
def test_gradients_by_finite_differences_of_scipy(scale, krylov, monkeypatch):
    if krylov:
        monkeypatch.setattr("fixpoint.attach.DIRECT_SIZE", 0)
    inputs = A.clone().requires_grad_(), X.clone().requires_grad_()
    z = attached(scale)(*inputs)
    assert torch.equal(z.detach(), ROOTS)
    found = torch.autograd.grad(z.sum(), inputs)
    h = 1e-5
    for x, gradient in zip(inputs, found, strict=True):
        v = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        ends = []
        for sign in (1, -1):
            moved = [y.detach() + sign * h * v if y is x else y.detach() for y in inputs]
            ends.append(by_scipy(*moved).sum().item())
        assert (gradient * v).sum().item() == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-8)


def test_second_derivatives():
    weights = torch.randn(2, 3, generator=generator, dtype=torch.float64)

    def gradient(f):
        inputs = A.clone().requires_grad_(), X.clone().requires_grad_()
        first = torch.autograd.grad((f(*inputs) * weights).sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), inputs)

    for a, b in zip(gradient(attached()), gradient(newton), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-10)


def test_trees_without_batch_axis():
    a = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    z = {"p": torch.tensor(2.0).double(), "q": torch.ones(2).double()}
    found = attach_gradient(
        lambda z: {"p": a * z["p"] + 1, "q": 0 * z["q"] + a * z["p"]}, z, batched=False
    )
    assert torch.autograd.grad(found["p"], a, retain_graph=True)[0] == pytest.approx(4.0)
    # q = a p, p = 1 / (1 - a): d q = p + a / (1 - a)^2
    assert torch.autograd.grad(found["q"].sum(), a)[0] == pytest.approx(2 * 4.0)


def test_samples_that_do_not_solve_it_are_said():
    a = torch.tensor([[0.5]], dtype=torch.float64, requires_grad=True)
    z = torch.tensor([[2.0], [2.2]]).double()
    with pytest.warns(ConvergenceWarning, match=r"1 of 2 samples of z do not solve z = phi\(z\)"):
        found = attach_gradient(lambda z: a * z + 1, z)
    assert torch.autograd.grad(found.sum(), a)[0] == pytest.approx(2 * (2.0 + 2.2))
    attach_gradient(lambda z: a * z + 1, z, rtol=0.1)
    with pytest.warns(ConvergenceWarning, match=r"phi\(z\) = 0"):
        attach_gradient(lambda z: z - 1 + 0 * a, z, form="root")


def test_the_gradient_of_samples_that_do_not_solve_it_follows_the_backward():
    a = torch.tensor([[0.5]], dtype=torch.float64, requires_grad=True)
    z = torch.tensor([[2.0], [2.2]]).double()
    with pytest.warns(ConvergenceWarning):
        found = attach_gradient(lambda z: a * z + 1, z, backward=Implicit())
    assert torch.autograd.grad(found.sum(), a)[0] == pytest.approx(4.0)
    found = attach_gradient(lambda z: a * z + 1, z[:1], backward=Phantom())
    assert torch.autograd.grad(found.sum(), a)[0] == pytest.approx(2.0)


def test_what_is_refused():
    z = torch.ones(1, 1)
    with pytest.raises(ValueError, match="fixed-point, root"):
        attach_gradient(lambda z: z, z, form="roots")
    with pytest.raises(TypeError, match="take Implicit"):
        attach_gradient(lambda z: z, z, backward=Unrolled())
