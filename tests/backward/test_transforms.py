"""torch.func, forward mode and batched gradients through `Implicit`, against long unrolling."""

import threading
import warnings

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fixpoint import (
    Anderson,
    Broyden,
    FixedPoint,
    Implicit,
    Newton,
    Phantom,
    Picard,
    Reversible,
    Unrolled,
    make_solver,
)

TIGHT = {"rtol": 1e-13, "atol": 1e-13, "max_iter": 200}
generator = torch.Generator().manual_seed(0)
W = 0.2 * torch.randn(3, 3, generator=generator, dtype=torch.float64)
X = torch.randn(2, 3, generator=generator, dtype=torch.float64)
V = torch.randn(3, 3, generator=generator, dtype=torch.float64)


def equilibrium(layer):
    return lambda W, x: layer(lambda z: torch.tanh(z @ W.T + x), torch.zeros_like(x)).z


def loss(f):
    return lambda W, x: f(W, x).square().sum()


def loss_of_one(f):
    return lambda W, x: f(W, x[None]).square().sum()


exact = equilibrium(FixedPoint(Picard(max_iter=100, rtol=0.0, atol=0.0), Unrolled()))
TRANSFORMS = {
    "jvp": lambda f: jvp(f, (W, X), (V, X))[1],
    "jvp of what asks for gradients": lambda f: jvp(f, (W.clone().requires_grad_(), X), (V, X))[1],
    "vjp": lambda f: vjp(f, W, X)[1](X)[0],
    "vjp of vjp": lambda f: vjp(lambda W: vjp(f, W, X)[1](X)[0], W)[1](V)[0],
    "grad of vjp": lambda f: grad(lambda W: (V * vjp(f, W, X)[1](X)[0]).sum())(W),
    "jacrev": lambda f: jacrev(f, (0, 1))(W, X)[1],
    "jacfwd": lambda f: jacfwd(f)(W, X),
    "vmap over inputs": lambda f: vmap(f, (None, 0))(W, torch.stack((X, -X, 2 * X))),
    "vmap over weights": lambda f: vmap(f, (2, None), 1)(torch.stack((W, -W), 2), X),
    "hessian": lambda f: hessian(loss(f))(W, X),
    "jacrev twice": lambda f: jacrev(jacrev(loss(f)))(W, X),
    "gradient of each sample": lambda f: vmap(grad(loss_of_one(f)), (None, 0))(W, X),
    "Hessian of each sample": lambda f: vmap(hessian(loss_of_one(f)), (None, 0))(W, X),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("name", ["anderson", "newton", "newton-krylov"])
def test_torch_func_through_implicit(name, transform):
    f = equilibrium(FixedPoint(make_solver(name, **TIGHT), Implicit()))
    assert torch.allclose(transform(f), transform(exact), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_vectorized_jacobians_and_batched_gradients(strategy):
    f = equilibrium(FixedPoint(Anderson(**TIGHT), Implicit()))
    J = torch.autograd.functional.jacobian(lambda W: f(W, X), W, vectorize=True, strategy=strategy)
    assert torch.allclose(J, jacrev(exact)(W, X), rtol=1e-9, atol=1e-10)
    H = torch.autograd.functional.hessian(lambda W: loss(f)(W, X), W, vectorize=True)
    assert torch.allclose(H, hessian(loss(exact))(W, X), rtol=1e-9, atol=1e-10)
    weight = W.clone().requires_grad_()
    units = torch.eye(6, dtype=torch.float64).reshape(6, 2, 3)
    (rows,) = torch.autograd.grad(f(weight, X), weight, units, is_grads_batched=True)
    assert torch.allclose(rows.reshape(2, 3, 3, 3), jacrev(exact)(W, X), rtol=1e-9, atol=1e-10)


def test_forward_mode_and_then_reverse_mode():
    f = equilibrium(FixedPoint(Anderson(**TIGHT), Implicit()))

    def tangent(f, W):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(W, V), X)).tangent

    expected = jvp(exact, (W, X), (V, torch.zeros_like(X)))[1]
    assert torch.allclose(tangent(f, W), expected, rtol=1e-9, atol=1e-10)
    weight = W.clone().requires_grad_()
    second = [torch.autograd.grad(tangent(g, weight).sum(), weight)[0] for g in (f, exact)]
    assert torch.allclose(*second, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("inner", ["anderson", "newton"])
@pytest.mark.parametrize("outer", ["anderson", "newton", "newton-krylov"])
def test_a_nested_fixed_point_under_every_solver(outer, inner):
    within, around = (FixedPoint(make_solver(name, **TIGHT)) for name in (inner, outer))
    zero = torch.zeros_like(X)

    def nested(W, x):
        def phi(z):
            return torch.tanh(within(lambda y: torch.tanh(y @ W) + z, zero).z + x)

        return around(phi, zero).z

    def reference(W, x):
        y = z = zero
        for _ in range(80):
            y = torch.tanh(y @ W) + z
            z = torch.tanh(y + x)
        return z

    small = 0.5 * W
    assert torch.allclose(nested(small, X), reference(small, X), rtol=1e-9)
    both = []
    for f in (nested, reference):
        weight = small.clone().requires_grad_()
        (first,) = torch.autograd.grad(f(weight, X).sin().sum(), weight, create_graph=True)
        both.append((first, torch.autograd.grad(first.square().sum(), weight)[0]))
    for a, b in zip(*both, strict=True):
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-10)
    for transform in (lambda f: jacrev(f)(small, X), lambda f: jvp(f, (small, X), (V, X))[1]):
        assert torch.allclose(transform(nested), transform(reference), rtol=1e-8, atol=1e-10)


def test_functional_call_of_a_module_whose_weights_are_swapped_only_within_it():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3).double()
            self.solve = FixedPoint(Anderson(**TIGHT), Implicit())

        def forward(self, x):
            phi = lambda z: torch.tanh(0.3 * self.linear(z) + x)  # noqa: E731
            return self.solve(phi, torch.zeros_like(x)).z

    model = Layer()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def objective(parameters, x):
        return torch.func.functional_call(model, parameters, (x[None],)).square().sum()

    found = vmap(grad(objective), (None, 0))(parameters, X)
    for i, x in enumerate(X):
        model.zero_grad()
        model(x[None]).square().sum().backward()
        for name, p in model.named_parameters():
            assert torch.allclose(found[name][i], p.grad, rtol=1e-9, atol=1e-11)
    given = {name: (2 * p).requires_grad_() for name, p in parameters.items()}
    (first,) = torch.autograd.grad(
        objective(given, X[0]), given["linear.weight"], create_graph=True
    )
    (second,) = torch.autograd.grad(first.sum(), given["linear.weight"])

    def plain(weight):
        swapped = {**{k: v.detach() for k, v in given.items()}, "linear.weight": weight}
        return grad(lambda w: objective({**swapped, "linear.weight": w}, X[0]))(weight).sum()

    assert torch.allclose(second, grad(plain)(given["linear.weight"].detach()), rtol=1e-8)


class Scale(torch.autograd.Function):
    """w * z by an operation of its own, of the form that torch.func cannot take."""

    @staticmethod
    def forward(ctx, z, w):
        ctx.save_for_backward(z, w)
        return z * w

    @staticmethod
    def backward(ctx, g):
        z, w = ctx.saved_tensors
        return g * w, (g * z).sum()


def test_an_operation_that_cannot_be_seen_is_differentiated_or_refused():
    # z* = w z* + v x with v = w^2: z* = w^2 x / (1 - w).
    layer = FixedPoint(Anderson(**TIGHT), Implicit())
    one = torch.ones(1, 1, dtype=torch.float64)

    def run(w):
        v = w.square()
        return layer(lambda z: Scale.apply(z, w) + v * one, torch.zeros_like(one)).z.sum()

    w = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(run(w), w, create_graph=True)
    (second,) = torch.autograd.grad(first, w)
    assert first.item() == pytest.approx(3.0, rel=1e-10)  # (2 w - w^2) / (1 - w)^2
    assert second.item() == pytest.approx(16.0, rel=1e-9)  # 2 / (1 - w)^3
    with pytest.raises(RuntimeError):
        grad(run)(w.detach())


def test_threads_share_nothing():
    shared = (1.0 * W).requires_grad_() * 1.0  # a shared tensor that is no leaf
    f = equilibrium(FixedPoint(Anderson(**TIGHT), Implicit()))
    krylov = equilibrium(FixedPoint(Newton(linear="gmres", **TIGHT), Implicit()))
    found, errors = [], []

    def work():
        try:
            for i in range(15):
                layer = krylov if i % 5 == 0 else f
                (first,) = torch.autograd.grad(loss(layer)(shared, X), shared, create_graph=True)
                (second,) = torch.autograd.grad(first.square().sum(), shared, retain_graph=True)
                found.append((i % 5 == 0, second))
        except Exception as error:  # threads drop what they raise
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for kind in (False, True):
        results = [second for k, second in found if k is kind]
        assert all(torch.equal(results[0], other) for other in results)


class _Product(torch.autograd.Function):
    """z W, which the recorder of operations cannot see."""

    @staticmethod
    def forward(ctx, z, W):
        ctx.save_for_backward(z, W)
        return z @ W

    @staticmethod
    def backward(ctx, g):
        z, W = ctx.saved_tensors
        return g @ W.T, z.T @ g


def test_second_derivatives_of_a_nonlinear_map_with_an_operation_that_cannot_be_seen():
    torch.manual_seed(0)
    W = (0.25 * torch.randn(4, 4, dtype=torch.float64)).requires_grad_()
    x, z0 = torch.randn(3, 4, dtype=torch.float64), torch.zeros(3, 4, dtype=torch.float64)
    layer = FixedPoint(Anderson(rtol=1e-12, atol=0))
    found = []
    for product in (torch.matmul, _Product.apply):
        z = layer(lambda z, product=product: torch.tanh(product(z, W) + x), z0).z
        (g,) = torch.autograd.grad(z.sum(), W, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), W)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=0)


def test_a_product_by_vjp_asks_for_no_gradient():
    """torch.func.vjp has its own graph made, also where none of its tensors asks for one."""
    (product,) = vjp(lambda x: equilibrium(FixedPoint())(W, x), X)[1](X)
    assert not product.requires_grad


@pytest.mark.parametrize(
    ("solver", "backward"),
    [(Picard(), Implicit()), (Picard(max_iter=2, rtol=0, atol=0), Reversible())],
    ids=("implicit", "reversible"),
)
def test_a_map_that_returns_a_captured_leaf_itself(solver, backward):
    h = torch.tensor([[1.0, 2.0]], requires_grad=True)
    FixedPoint(solver, backward)(lambda z: h, torch.zeros(1, 2)).z.sum().backward()
    assert h.grad.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("backward", ["unrolled", "phantom"])
def test_make_fx_and_linearize_of_a_fixed_number_of_updates(backward):
    f = equilibrium(FixedPoint(Picard(max_iter=6, rtol=0.0, atol=0.0), backward))
    torch.testing.assert_close(make_fx(f)(W, X)(V, -X), f(V, -X))
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch's own
        value, push = linearize(f, W, X)
    expected, tangent = jvp(f, (W, X), (V, -X))
    torch.testing.assert_close((value, push(V, -X)), (expected, tangent))


@pytest.mark.parametrize("kind", [Anderson, Broyden])
def test_make_fx_of_fixed_steps_by_differences(kind):
    """Torch's own linearize cannot trace torch.addcmul, of which these are made."""
    f = equilibrium(FixedPoint(kind(max_iter=6, rtol=0.0, atol=0.0), "unrolled"))
    torch.testing.assert_close(make_fx(f)(W, X)(V, -X), f(V, -X))


@pytest.mark.parametrize("mode", ["real", "fake"])
@pytest.mark.parametrize("backward", ["unrolled", "implicit", "phantom"])
def test_make_fx_and_linearize_refuse_a_solve_to_a_tolerance(backward, mode):
    f = equilibrium(FixedPoint(Anderson(**TIGHT), backward))
    with pytest.raises(RuntimeError, match="torch.func.linearize by it, cannot trace"):
        make_fx(f, tracing_mode=mode)(W, X)
    with pytest.raises(RuntimeError, match="use torch.func.jvp"):
        linearize(f, W, X)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backward", [Implicit(), Phantom(80)])
def test_an_instance_of_vmap_without_a_solution(backward):
    """a z + 1 with a = 1 has none; the gradient of the other instance is 1 / (1 - a)^2."""
    layer = FixedPoint("anderson", backward, on_failure="ignore")

    def solved(a):
        return layer(lambda z: a * z + 1, torch.zeros(1, 1, dtype=torch.float64)).z.sum()

    slopes = torch.tensor([0.5, 1.0], dtype=torch.float64)
    found = vmap(grad(solved))(slopes)
    torch.testing.assert_close(found.tolist(), [4.0, 0.0], rtol=1e-4, atol=0.0)
