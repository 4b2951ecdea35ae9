"""fixpoint.root and fixpoint._roots: roots of F, in units of z, and their gradients."""

import numpy as np
import pytest
import scipy.optimize
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.testing import assert_close

from fixpoint import (
    Anderson,
    FixedPoint,
    Implicit,
    LevenbergMarquardt,
    Newton,
    Phantom,
    Root,
    Unrolled,
    solve,
    solve_root,
)
from fixpoint._roots import RootMap, scale_at

TIGHT = {"rtol": 1e-13, "atol": 1e-14, "max_iter": 100}
generator = torch.Generator().manual_seed(0)
A = torch.randn(3, 3, generator=generator, dtype=torch.float64)
A = A @ A.T / 3 + torch.eye(3, dtype=torch.float64)
X = torch.randn(2, 3, generator=generator, dtype=torch.float64)


def cubic(A, x):
    """F(z) = A z + z^3 - x, with one root, where A is positive definite."""
    return lambda z: z @ A.T + z**3 - x


def root_of(layer):
    return lambda A, x: layer(cubic(A, x), torch.zeros_like(x)).z


exact = root_of(Root(Newton(max_iter=12, rtol=0.0, atol=0.0), Unrolled()))


def test_the_root_is_that_of_scipy():
    found = solve_root(cubic(A, X), torch.zeros_like(X), Newton(**TIGHT)).check()
    for row, x in zip(found.z, X, strict=True):
        expected = scipy.optimize.root(
            lambda z, x=x: A.numpy() @ z + z**3 - x.numpy(), np.zeros(3), tol=1e-14
        ).x
        assert np.allclose(row.numpy(), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3, 1e6])
@pytest.mark.parametrize("name", ["newton", "newton-krylov", "broyden", "anderson"])
def test_units_of_F_change_nothing(name, scale):
    plain = solve_root(cubic(A, X), torch.zeros_like(X), name)
    other = solve_root(lambda z: scale * cubic(A, X)(z), torch.zeros_like(X), name)
    assert plain.converged.all()
    assert other.iterations.tolist() == plain.iterations.tolist()
    assert torch.allclose(other.z, plain.z, rtol=1e-9, atol=1e-12)


def test_units_of_each_tensor_of_a_tree_change_nothing():
    def F(units):
        return lambda z: (
            units[0] * (2 * z[0] + z[1].sin() - 1),
            units[1] * (3 * z[1] - z[0].cos() - 2),
        )

    z0 = (torch.zeros(2, 1).double(), torch.zeros(2, 1).double())
    plain, other = (solve_root(F(units), z0).check() for units in ((1, 1), (1e-6, 1e6)))
    assert other.iterations.tolist() == plain.iterations.tolist()
    for a, b in zip(plain.z, other.z, strict=True):
        assert torch.allclose(a, b, rtol=1e-9)


@pytest.mark.parametrize(
    ("F", "start", "root"),
    [
        pytest.param(lambda z: z**3 - 1, 0.01, 1.0, id="a small slope at the start"),
        pytest.param(lambda z: z.exp() - 2, 10.0, np.log(2), id="a large slope at the start"),
        pytest.param(lambda z: z - 3, 3.0, 3.0, id="solved at the start"),
        pytest.param(lambda z: (z - 1) * (z + 2), -0.5, 1.0, id="no slope at the start"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tolerance_is_a_distance_to_the_root(F, start, root, dtype):
    if start == -0.5:
        start += 1e-3
    solution = solve_root(F, torch.full((1, 1), start, dtype=dtype), Newton(rtol=1e-5)).check()
    assert abs(solution.z.item() - root) <= 3e-5


def test_a_start_without_slope_has_a_scale():
    F = lambda z: (z - 1) ** 2 + 1  # noqa: E731
    c = scale_at(F, torch.ones(1, 1))
    assert c.tolist() == [[1.0]]
    assert scale_at(lambda z: 5 * F(z), torch.ones(1, 1)).item() == pytest.approx(0.2)


def test_samples_have_scales_of_their_own():
    slopes = torch.tensor([[1e-3], [1.0], [1e3]]).double()
    z0 = torch.ones(3, 1).double()
    assert torch.allclose(scale_at(lambda z: slopes * z, z0), 1 / slopes)
    together = solve_root(lambda z: slopes * (z.exp() - 2), z0)
    for i, slope in enumerate(slopes):
        alone = solve_root(lambda z, slope=slope: slope * (z.exp() - 2), z0[i : i + 1])
        assert alone.z.item() == pytest.approx(together.z[i].item(), rel=1e-14)


@pytest.mark.parametrize("solver", [None, "newton-krylov", "broyden", "anderson"])
def test_gradients(solver):
    layer = Root(solver)
    f = root_of(layer)

    def tight(A, x):
        return layer(cubic(A, x), torch.zeros_like(x), **TIGHT).z

    inputs = A.clone().requires_grad_(), X.clone().requires_grad_()
    assert torch.autograd.gradcheck(tight, inputs)
    assert torch.autograd.gradgradcheck(tight, inputs)
    assert torch.allclose(f(A, X), exact(A, X), atol=1e-4)


def loss(f):
    return lambda A, x: f(A, x).square().sum()


TRANSFORMS = {
    "jvp": lambda f: jvp(f, (A, X), (A, X))[1],
    "jacrev": lambda f: jacrev(f, (0, 1))(A, X)[1],
    "jacfwd": lambda f: jacfwd(f)(A, X),
    "vmap": lambda f: vmap(f, (None, 0))(A, torch.stack((X, -X, 2 * X))),
    "hessian": lambda f: hessian(loss(f))(A, X),
    "gradient of each sample": lambda f: vmap(grad(lambda A, x: loss(f)(A, x[None])), (None, 0))(
        A, X
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_torch_func(transform):
    f = root_of(Root(Newton(**TIGHT)))
    assert torch.allclose(transform(f), transform(exact), rtol=1e-9, atol=1e-10)


def test_hypergradient_of_an_energy():
    """dz*/dtheta of argmin E, by the gradient of E from torch.func."""
    layer = Root(Newton(**TIGHT))

    def minimum(A, x):
        def E(z):
            return (0.5 * (z @ A.T * z).sum(1) + 0.25 * (z**4).sum(1) - (z * x).sum(1)).sum()

        return layer(torch.func.grad(E), torch.zeros_like(x)).z

    assert torch.allclose(minimum(A, X), exact(A, X), atol=1e-12)
    theta = A.clone().requires_grad_(), X.clone().requires_grad_()
    symmetric = lambda A, x: minimum(0.5 * (A + A.T), x)  # noqa: E731
    assert torch.autograd.gradcheck(symmetric, theta)
    assert torch.autograd.gradgradcheck(symmetric, theta)


def test_other_ways_to_differentiate():
    slope = torch.tensor([[2.0]], dtype=torch.float64, requires_grad=True)
    F = lambda z: slope * z - 1  # noqa: E731
    for backward, expected in ((Implicit(), -0.25), (Phantom(), -0.25), (Unrolled(), -0.25)):
        z = Root(Newton(), backward)(F, torch.zeros(1, 1).double()).z
        # c = 1 / slope, so that one update of phi has the whole gradient.
        assert torch.autograd.grad(z, slope)[0].item() == pytest.approx(expected, rel=1e-6)


def test_a_sample_without_root_is_said_and_has_no_gradient():
    shift = torch.tensor([[1.0], [-1.0]], dtype=torch.float64, requires_grad=True)
    with pytest.warns(UserWarning, match="1 of 2 samples did not converge"):
        solution = Root()(lambda z: z**2 + shift, torch.ones(2, 1).double() / 2)
    (gradient,) = torch.autograd.grad(solution.z.sum(), shift)
    assert gradient[0] == 0
    assert gradient[1].item() == pytest.approx(-0.5, rel=1e-6)


def test_messages_name_F():
    with pytest.raises(ValueError, match="F must return the shapes of its input"):
        solve_root(lambda z: z[:, :1], torch.zeros(2, 3))
    with pytest.raises(TypeError, match="F must return a pair"):
        Root()(lambda z: z, torch.zeros(2, 3), has_aux=True)


def test_a_root_is_a_fixed_point_of_its_map():
    root = RootMap(cubic(A, X), scale_at(cubic(A, X), torch.zeros_like(X)))
    assert torch.allclose(
        FixedPoint(Anderson(**TIGHT))(root, torch.zeros_like(X)).z, exact(A, X), atol=1e-11
    )


@pytest.mark.parametrize("solver", [Newton(rtol=1e-12), LevenbergMarquardt(rtol=1e-12)])
def test_a_layer_makes_the_updates_of_a_solve(solver):
    """The first evaluation of a layer has its graph, so that its first step has the Jacobian."""

    def F(z):
        return -0.5 * z + 0.1 * torch.cos(z) + 1

    z0 = torch.zeros(1, 2, dtype=torch.float64)
    assert Root(solver)(F, z0).iterations.equal(solve_root(F, z0, solver).iterations)

    def phi(z):
        return 3 * z + torch.sin(z) - 1

    assert FixedPoint(solver)(phi, z0).iterations.equal(solve(phi, z0, solver).iterations)


def test_torch_func_differentiates_under_no_grad():
    """It ignores an outer torch.no_grad, as of any other function; Newton has its Jacobian too."""
    b = torch.tensor([[1.0], [0.4]], dtype=torch.float64)

    def root(w):
        return Root(Newton(rtol=1e-12, atol=0.0))(
            lambda z: z + 4 * torch.sin(z) - w * b, torch.zeros_like(b)
        ).z.sum()

    w = torch.tensor(0.6, dtype=torch.float64)
    expected = grad(root)(w)
    assert expected > 0.2
    with torch.no_grad():
        assert_close(grad(root)(w), expected)
        assert_close(jacrev(root)(w), expected)
        assert_close(jvp(root, (w,), (torch.ones_like(w),))[1], expected)
