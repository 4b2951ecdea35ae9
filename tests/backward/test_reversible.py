"""`Reversible` has the gradient of `Unrolled` and the memory of few updates."""

import weakref

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from fixpoint import (
    Anderson,
    FixedPoint,
    Implicit,
    InexactNewton,
    Newton,
    Phantom,
    Picard,
    Reversible,
    Unrolled,
)


def inputs():
    generator = torch.Generator().manual_seed(0)
    W = 0.3 * torch.randn(4, 4, generator=generator, dtype=torch.float64)
    x, z0 = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    return [part.clone().requires_grad_() for part in (W, x, z0)]


@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize("K", [1, 2, 7, 100])
@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_the_gradient_is_that_of_unrolling(beta, K, slots):
    found = []
    for backward in (Reversible(slots), Unrolled()):
        W, x, z0 = inputs()
        layer = FixedPoint(Picard(max_iter=K, beta=beta, rtol=0.0, atol=0.0), backward)
        h = x.sin()
        z = layer(lambda z: torch.tanh(z @ W.T + h), z0).z
        found.append(torch.autograd.grad(z.square().sum(), (W, x, z0)))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


def test_learned_steps_and_gradcheck():
    layer = FixedPoint(InexactNewton(max_iter=5, eta=0.3), Reversible(2)).double()
    plain = FixedPoint(layer.solver, Unrolled())

    def run(W, x, z0, layer=layer):
        return layer(lambda z: torch.tanh(z @ W.T + x), z0).z

    assert gradcheck(run, inputs())
    grads = [
        torch.autograd.grad(run(*inputs(), layer=other).sum(), layer.solver.eta)[0]
        for other in (layer, plain)
    ]
    assert torch.allclose(*grads, rtol=1e-12)


def test_the_number_of_states_alive_does_not_grow_with_the_number_of_updates():
    most = {}
    for K in (10, 100):
        W, x, z0 = inputs()
        alive, count = [], [0]

        def phi(z):
            alive[:] = [ref for ref in alive if ref() is not None]
            alive.append(weakref.ref(z))
            count[0] = max(count[0], len(alive))
            return torch.tanh(z @ W.T + x)

        layer = FixedPoint(Picard(max_iter=K, rtol=0.0, atol=0.0), Reversible())
        layer(phi, z0).z.sum().backward()
        most[K] = count[0]
    assert most[100] <= 1.1 * max(most[10], 8 + 2)


def test_solvers_with_a_history_or_a_tolerance_are_refused():
    for solver in (Picard(), Anderson(rtol=0.0, atol=0.0)):
        with pytest.raises(ValueError, match="use Picard or InexactNewton with rtol = atol = 0"):
            FixedPoint(solver, Reversible())


def test_a_change_in_place_between_the_passes_is_refused():
    W = (0.3 * torch.randn(4, 4)).requires_grad_()
    layer = FixedPoint(Picard(max_iter=6, rtol=0, atol=0), Reversible(2))
    z = layer(lambda z: torch.tanh(z @ W + 1), torch.zeros(3, 4)).z
    with torch.no_grad():
        W.mul_(1.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_a_random_map_is_refused():
    W = (0.3 * torch.randn(4, 4)).requires_grad_()
    layer = FixedPoint(Picard(max_iter=6, rtol=0, atol=0), Reversible(2))
    z = layer(lambda z: torch.tanh(torch.dropout(z, 0.5, True) @ W + 1), torch.zeros(3, 4)).z
    with pytest.raises(RuntimeError, match="other values when Reversible repeated"):
        z.sum().backward()


def test_updates_are_repeated_under_the_autocast_of_the_forward_pass():
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(6, 6), torch.randn(3, 6)
    solver = Picard(max_iter=8, rtol=0, atol=0)
    gradients = []
    for backward in (Unrolled(), Reversible(2)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = FixedPoint(solver, backward)(
                lambda z: torch.tanh(linear(z.bfloat16()).float() + x), torch.zeros(3, 6)
            ).z
        gradients.append(torch.autograd.grad(z.sum(), linear.weight)[0])
    torch.testing.assert_close(*gradients, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("slots", [1, 8])
def test_a_backward_pass_that_is_differentiated_again(slots):
    """z* = 1 / (1 - a): dz/da = 4, d2z/da2 = 16 at a = 1/2, whatever the loss."""
    layer = FixedPoint(Picard(max_iter=100, rtol=0.0, atol=0.0), Reversible(slots))

    def solution(a):
        return layer(lambda z: a * z + 1, torch.zeros(1, 1, dtype=torch.float64)).z

    a = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    z = solution(a)
    (g,) = torch.autograd.grad(z.sum(), a, create_graph=True)
    (found,) = torch.autograd.grad((z + g**2).sum(), a)
    assert found.item() == pytest.approx(4 + 2 * 4 * 16)
    for loss, expected in ((torch.sum, 16.0), (lambda z: z.square().sum(), 2 * 16 + 2 * 2 * 16)):
        H = torch.autograd.functional.hessian(lambda a, loss=loss: loss(solution(a)), a.detach())
        assert H.item() == pytest.approx(expected)
    deep = FixedPoint(InexactNewton(max_iter=4, eta=0.3), Reversible(2)).double()

    def run(W, x, z0):
        return deep(lambda z: torch.tanh(z @ W.T + x), z0).z

    assert gradgradcheck(run, inputs(), fast_mode=True)


def test_a_map_that_branches_is_evaluated_again():
    found = []
    for backward in (Reversible(2), Unrolled()):
        a = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        layer = FixedPoint(Picard(max_iter=40, rtol=0.0, atol=0.0), backward)
        phi = lambda z, a=a: a * z + 1 if z.mean() <= 1 else 0.2 * z + 2 * a  # noqa: E731
        z = layer(phi, torch.zeros(1, 1, dtype=torch.float64)).z
        found.append(torch.autograd.grad(z.sum(), a)[0])
    torch.testing.assert_close(*found)


def test_a_tensor_without_a_gradient_at_some_updates():
    """b multiplies a constant at every other update: what has no gradient there adds nothing."""
    found = []
    for backward in (Reversible(2), Unrolled()):
        b = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        layer = FixedPoint(Picard(max_iter=7, rtol=0.0, atol=0.0), backward)
        phi = lambda z, b=b: b * z + 1 if z.mean() < 1.9 else 0.5 * z + b.detach()  # noqa: E731
        z = layer(phi, torch.zeros(1, 1, dtype=torch.float64)).z
        found.append(torch.autograd.grad(z.sum(), b)[0])
    torch.testing.assert_close(*found)


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),)),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).square().sum())(x),
    "gradients of samples": lambda f, x: torch.func.vmap(
        torch.func.grad(lambda x: f(x[None]).square().sum())
    )(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_torch_func_and_forward_mode_are_those_of_unrolling(transform):
    W, x, _ = (part.detach() for part in inputs())
    found = []
    for backward in (Reversible(), Unrolled()):
        layer = FixedPoint(Picard(max_iter=20, beta=0.5, rtol=0.0, atol=0.0), backward)

        def f(x, layer=layer):
            return layer(lambda z: torch.tanh(z @ W.T + x), torch.zeros_like(x)).z

        found.append(TRANSFORMS[transform](f, x))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("inner", [Implicit(), Phantom(2), Unrolled()])
def test_the_map_may_solve_an_equation_itself(inner):
    torch.manual_seed(0)
    W, x = torch.randn(2, 2, dtype=torch.float64) / 5, torch.randn(3, 2, dtype=torch.float64)
    W.requires_grad_()
    layer = FixedPoint(Newton(rtol=1e-12, atol=0.0), inner)

    def phi(z):
        y = layer(lambda y: 0.3 * torch.tanh(y @ W) + z, torch.zeros_like(z)).z
        return torch.tanh(0.3 * y + x)

    solver = Picard(max_iter=5, rtol=0.0, atol=0.0)
    found, expected = (
        torch.autograd.grad(FixedPoint(solver, backward)(phi, torch.zeros_like(x)).z.sum(), W)
        for backward in (Reversible(2), Unrolled())
    )
    assert_close(found, expected)
