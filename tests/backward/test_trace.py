"""fixpoint.tracing: tensors that phi closes over, whatever phi is made of."""

import threading

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.utils import parametrizations, parametrize

from fixpoint import FixedPoint, Implicit, Newton, Phantom, Picard, Reversible, Unrolled
from fixpoint.tracing import closure_convert

D = torch.float64
TIGHT = {"rtol": 1e-12, "atol": 1e-13, "max_iter": 200}
ZERO = torch.zeros(1, 1, dtype=D)


def steps(count=60):
    return Picard(max_iter=count, rtol=0.0, atol=0.0)


def leaf(value):
    return torch.tensor(value, dtype=D, requires_grad=True)


class Affine(torch.autograd.Function):
    """a z + 1, which no function mode sees."""

    @staticmethod
    def forward(ctx, a, z):
        ctx.save_for_backward(a, z)
        return a * z + 1

    @staticmethod
    def backward(ctx, g):
        a, z = ctx.saved_tensors
        return (g * z).sum_to_size(a.shape), g * a


def energy(W):
    return lambda z: (0.25 * z @ W * z + torch.cos(z @ W)).sum()


X = torch.tensor([[1.0, 0.5], [-0.5, 0.2]], dtype=D)
bias = torch.tensor([0.1, -0.2], dtype=D)
linear = nn.Linear(2, 2).double()
NESTED = {
    "grad": lambda W: lambda z: 0.3 * grad(energy(W))(z) + X,
    "grad of a weight": lambda W: lambda z: 0.2 * grad(lambda w: torch.sin(z @ w).sum())(W) + X,
    "vmap": lambda W: lambda z: 0.5 * vmap(lambda row: torch.tanh(W @ row))(z) + X,
    "jvp": lambda W: (
        lambda z: 0.4 * jvp(lambda z: torch.sin(z @ W), (z,), (torch.ones_like(z),))[1] + X
    ),
    "jacrev": lambda W: lambda z: 0.1 * jacrev(lambda z: torch.tanh(z @ W).sum(0))(z).sum(0) + X,
    "functional_call": lambda W: (
        lambda z: torch.tanh(functional_call(linear, {"weight": W, "bias": bias}, (z,))) + X
    ),
    "autograd.grad": lambda W: (
        lambda z: 0.3 * torch.autograd.grad(energy(W)(z), z, create_graph=True)[0] + X
    ),
}


def derivatives(solver, backward, phi_of):
    W = torch.tensor([[0.3, 0.1], [0.1, 0.2]], dtype=D, requires_grad=True)
    z0 = torch.zeros(2, 2, dtype=D, requires_grad=True)
    z = FixedPoint(solver, backward)(phi_of(W), z0).z
    (first,) = torch.autograd.grad(z.square().sum(), W, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), W)
    return z.detach(), first.detach(), second


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit.script, by torch.func
@pytest.mark.parametrize("phi_of", NESTED.values(), ids=NESTED)
def test_torch_func_inside_phi(phi_of):
    exact = derivatives(steps(80), Unrolled(), phi_of)
    for solver, backward in ((Picard(**TIGHT), Implicit()), (steps(80), Reversible())):
        for found, expected in zip(derivatives(solver, backward, phi_of), exact, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


INNER = {name: NESTED[name] for name in NESTED if not name.startswith(("grad of", "autograd"))} | {
    "vjp": lambda W: lambda z: 0.3 * vjp(lambda z: torch.sin(z @ W), z)[1](z)[0] + X,
    "jacrev of rows": lambda W: (
        lambda z: 0.1 * vmap(jacrev(lambda row: torch.tanh(row @ W)))(z).sum(1) + X
    ),
    "gradients of rows": lambda W: (
        lambda z: 0.3 * vmap(grad(lambda row: torch.cos(row @ W).sum()))(z) + X
    ),
}
OUTER = {
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "hessian": lambda f: hessian(lambda W: f(W).square().sum()),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("transform", OUTER.values(), ids=OUTER)
@pytest.mark.parametrize("phi_of", INNER.values(), ids=INNER)
def test_torch_func_inside_phi_and_around_the_solve(phi_of, transform):
    W = torch.tensor([[0.3, 0.1], [0.1, 0.2]], dtype=D)

    def solved(solver, backward):
        return lambda W: FixedPoint(solver, backward)(phi_of(W), torch.zeros_like(X)).z

    implicit, exact = solved(Picard(**TIGHT), Implicit()), solved(steps(80), Unrolled())
    torch.testing.assert_close(transform(implicit)(W), transform(exact)(W), rtol=1e-8, atol=1e-9)


def push(f):
    """The tangent of f along ones, by forward mode outside of torch.func."""

    def pushed(W):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(W, torch.ones_like(W)))).tangent

    return pushed


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("tracking", [True, False])
@pytest.mark.parametrize("name", ["grad", "vjp", "gradients of rows", "functional_call"])
def test_torch_func_inside_phi_and_forward_mode_around_the_solve(name, tracking):
    W, layer = torch.tensor([[0.3, 0.1], [0.1, 0.2]], dtype=D), FixedPoint(Picard(**TIGHT))

    def solved(W):
        return layer(INNER[name](W), torch.zeros_like(X)).z

    exact = jvp(solved, (W,), (torch.ones_like(W),))[1]
    with torch.set_grad_enabled(tracking):
        torch.testing.assert_close(push(solved)(W), exact, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("tracking", [True, False])
@pytest.mark.parametrize("solver", [steps(80), Picard(**TIGHT), Newton(**TIGHT)], ids=repr)
def test_autograd_inside_phi_and_forward_mode_around_the_solve(solver, tracking):
    def solved(name):
        phi_of, layer = NESTED[name], FixedPoint(solver, Unrolled())
        return lambda W: layer(phi_of(W), torch.zeros_like(X)).z

    W = torch.tensor([[0.3, 0.1], [0.1, 0.2]], dtype=D)
    exact = push(solved("grad"))(W)
    with torch.set_grad_enabled(tracking):
        torch.testing.assert_close(push(solved("autograd.grad"))(W), exact, rtol=1e-8, atol=1e-9)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("transform", [*OUTER.values(), push], ids=[*OUTER, "forward mode"])
def test_a_captured_tensor_that_a_transform_inside_phi_wraps_is_refused(transform):
    def solved(W):
        return FixedPoint(Picard(**TIGHT))(NESTED["grad of a weight"](W), torch.zeros_like(X)).z

    with pytest.raises(RuntimeError, match="with respect to a tensor that phi closes over"):
        transform(solved)(torch.tensor([[0.3, 0.1], [0.1, 0.2]], dtype=D))


def test_a_closure_holds_its_tensors_once_and_repeats_phi():
    W, b = leaf([[0.3, 0.1], [0.1, 0.2]]), leaf([0.1, 0.2])
    z = torch.ones(3, 2, dtype=D, requires_grad=True)
    closure = closure_convert(lambda z: torch.tanh(z @ W + b) + z @ W, z)
    assert [id(x) for x in closure.captured] == [id(W), id(b)]
    assert closure.opaque == []
    for function in (closure.function, closure.again):
        assert torch.equal(function(z, W, b), closure.fz)
    opaque = closure_convert(lambda z: Affine.apply(b, z) @ W, z)
    assert any(x is W for x in opaque.captured)
    assert [id(x) for x in opaque.opaque] == [id(b)]


@pytest.mark.parametrize(
    ("solver", "backward"),
    [(Picard(**TIGHT), Implicit()), (steps(100), Reversible()), (steps(100), Unrolled())],
)
def test_an_autograd_function_of_a_tensor_that_operations_made(solver, backward):
    """z* = 1 / (1 - a): the gradient reaches a itself, and not only the leaves it was made of."""

    def squared(a):
        return FixedPoint(solver, backward)(lambda z: Affine.apply(a, z), ZERO).z.square().sum()

    a = leaf(0.5) * 1
    torch.testing.assert_close(torch.autograd.grad(squared(a), a)[0].item(), 16.0)
    for function, exact in (("jacobian", 16.0), ("hessian", 96.0)):
        found = getattr(torch.autograd.functional, function)(squared, a.detach())
        torch.testing.assert_close(found.item(), exact)


BACKWARDS = [
    (Picard(**TIGHT), Implicit()),
    (Picard(**TIGHT), Phantom(80)),
    (steps(80), Reversible()),
    (steps(80), Unrolled()),
]


@pytest.mark.parametrize(("solver", "backward"), BACKWARDS)
def test_tensors_of_a_function_of_its_own(solver, backward):
    """z = a z + 1 with a = a0, a leaf, a product, or both ways at once: dz/da = 1 / (1 - a)^2."""
    layer = FixedPoint(solver, backward)
    for phi_of in (
        lambda a: lambda z: Affine.apply(a, z),
        lambda a, twice=2.0: lambda z, b=a * twice / 2: Affine.apply(b, z),
        lambda a: lambda z: 0.5 * Affine.apply(a, z) + 0.5 * (a * z + 1),
        lambda a: lambda z, b=a * 1.0, c=a * 1.0: 0.5 * (Affine.apply(b, z) + Affine.apply(c, z)),
    ):
        a = leaf(0.5)
        layer(phi_of(a), ZERO).z.sum().backward()
        assert a.grad.item() == pytest.approx(4.0, rel=1e-9)


def test_one_opaque_tensor_computed_from_another():
    """b = a^2 enters beside a: partial derivatives, each once. z = (a + b) z / 2 + 1."""
    for solver, backward in BACKWARDS:
        a = leaf(0.5)
        b = a.square()
        phi = lambda z, a=a, b=b: 0.5 * (Affine.apply(a, z) + Affine.apply(b, z))  # noqa: E731
        FixedPoint(solver, backward)(phi, ZERO).z.sum().backward()
        assert a.grad.item() == pytest.approx(0.5 * 2 / (1 - 0.375) ** 2, rel=1e-9)


class Lazy(nn.Module):
    """w z + 1, w made at the first evaluation and kept."""

    def __init__(self):
        super().__init__()
        self.v, self.w = nn.Parameter(torch.tensor(0.5, dtype=D)), None

    def forward(self, z):
        if self.w is None:
            self.w = self.v * 1.0
        return self.w * z + 1


@pytest.mark.parametrize(("solver", "backward"), BACKWARDS)
def test_what_phi_makes_once_and_keeps_has_its_graph(solver, backward):
    model = Lazy()
    FixedPoint(solver, backward)(model, ZERO).z.sum().backward()
    assert model.v.grad.item() == pytest.approx(4.0, rel=1e-9)
    torch.manual_seed(0)
    layer = parametrizations.weight_norm(nn.Linear(3, 3)).double()
    x = torch.randn(2, 3, dtype=D)
    found = []
    for solve, way in ((solver, backward), (steps(80), Unrolled())):
        layer.zero_grad()
        with parametrize.cached():
            z = FixedPoint(solve, way)(lambda z: torch.tanh(0.3 * layer(z) + x), 0 * x).z
        z.square().sum().backward()
        found.append([p.grad.clone() for p in layer.parameters()])
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("backward", [Implicit(), Phantom(80), Unrolled(), Unrolled(last=60)])
@pytest.mark.parametrize("solver", [Picard(**TIGHT), steps(80)])
def test_what_phi_makes_once_and_keeps_has_its_derivatives_in_torch_func(solver, backward):
    def f(v):
        model = Lazy()
        phi = lambda z: torch.func.functional_call(model, {"v": v}, (z,))  # noqa: E731
        return FixedPoint(solver, backward)(phi, ZERO).z.sum()

    v = torch.tensor(0.5, dtype=D)
    for derivative in (torch.func.grad, torch.func.jacfwd):
        assert derivative(f)(v).item() == pytest.approx(4.0, rel=1e-9)
    if solver.has_tolerance and isinstance(backward, (Implicit, Phantom)):
        both = torch.func.vmap(torch.func.grad(f))(torch.stack((v, 0.5 * v)))
        torch.testing.assert_close(both, torch.tensor([4.0, 0.75**-2], dtype=D))


@pytest.mark.parametrize(("solver", "backward"), [BACKWARDS[0], BACKWARDS[2]])
def test_loop_variables_that_have_changed_before_the_backward_pass(solver, backward):
    found = []
    for solve, way in ((solver, backward), (steps(80), Unrolled())):
        A = leaf([[0.2, 0.1], [-0.1, 0.3]])
        h = torch.zeros(2, 2, dtype=D)
        for _ in range(3):
            h = FixedPoint(solve, way)(lambda z: torch.tanh(z @ A.T + 0.2 * h + 0.1), h).z
        (first,) = torch.autograd.grad(h.sum(), A, create_graph=True)
        found.append((first, torch.autograd.grad(first.square().sum(), A)[0]))
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-10)


def test_a_tensor_that_cannot_be_bound_again_is_refused():
    """phi is seen in part only, and is evaluated again after its loop variable has changed."""
    a, h = leaf(0.5), leaf(1.0)
    z = FixedPoint(Picard(**TIGHT))(lambda z: Affine.apply(a, z) * h, ZERO).z
    h = leaf(2.0)
    with pytest.raises(RuntimeError, match="phi closes over other tensors than in its solve"):
        torch.autograd.grad(z.sum(), a, create_graph=True)


@pytest.mark.parametrize("makes_leaf", [True, False])
@pytest.mark.parametrize(
    "backward", [Implicit(), Phantom(80), Reversible(), Unrolled(), Unrolled(last=80)], ids=str
)
def test_a_map_that_differentiates_itself(backward, makes_leaf):
    a = leaf(0.5)

    def phi(z):  # a step down the slope of a z^2 / 2 - z, whose minimum is 1 / a
        if makes_leaf and not z.requires_grad:
            z = z.detach().requires_grad_()
        slope = torch.autograd.grad((0.5 * a * z**2 - z).sum(), z, create_graph=True)[0]
        return z - 0.5 * slope

    fixed = {"rtol": 0.0, "atol": 0.0, "max_iter": 80}
    steps = fixed if isinstance(backward, Reversible) else TIGHT
    layer = FixedPoint(Picard(**steps), backward)
    layer(phi, ZERO).z.sum().backward()
    assert a.grad.item() == pytest.approx(-4.0, rel=1e-6)
    with torch.no_grad():
        assert layer(phi, ZERO).z.item() == pytest.approx(2.0)


def test_replays_keep_the_autocast_of_the_recorded_evaluation():
    torch.manual_seed(0)
    W, x = (0.3 * torch.randn(4, 4)).requires_grad_(), torch.randn(3, 4)

    def inside(z):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.tanh((z @ W).float() + x)

    def second(z):
        (first,) = torch.autograd.grad(z.sum(), W, create_graph=True)
        return torch.autograd.grad(first.square().sum(), W)[0]

    layer = FixedPoint(Picard(rtol=1e-2, max_iter=100), Implicit())
    opened = second(layer(inside, torch.zeros(3, 4)).z)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        around = layer(lambda z: torch.tanh((z @ W).float() + x), torch.zeros(3, 4)).z
    exact = second(layer(lambda z: torch.tanh(z @ W + x), torch.zeros(3, 4)).z)
    for found in (opened, second(around)):
        assert (found - exact).norm() < 0.05 * exact.norm()
        assert not torch.equal(found, exact)


def test_the_values_under_a_transform_are_those_without_it():
    """phi = a z + 1 up to a mean of 1 and z / 5 + 2 a above: z* = 1.25 and dz/da = 2.5."""
    layer, a = FixedPoint(Picard(**TIGHT), Implicit()), torch.tensor(0.5, dtype=D)

    def f(a):
        return layer(lambda z: a * z + 1 if z.mean() <= 1 else 0.2 * z + 2 * a, ZERO).z.sum()

    assert f(a).item() == pytest.approx(1.25)
    value, slope = jvp(f, (a,), (torch.ones_like(a),))
    assert [value.item(), slope.item()] == pytest.approx([1.25, 2.5])
    for transform in (grad, jacrev, jacfwd):
        assert transform(f)(a).item() == pytest.approx(2.5)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, torch.ones_like(a))
        assert f(dual).item() == pytest.approx(1.25)


def test_opaque_tensors_used_by_several_threads():
    """The hooks that make derivatives partial act in the backward pass that set them alone."""
    a0 = leaf(0.5)
    a = a0 * 1.0
    layer, found = FixedPoint(Picard(**TIGHT), Implicit()), []

    def work():
        for _ in range(10):
            z = layer(lambda z: Affine.apply(a, z), ZERO).z
            found.append(torch.autograd.grad(z.sum(), a0, retain_graph=True)[0].item())
            found.append(torch.autograd.grad(a.sum() * 4, a0, retain_graph=True)[0].item())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 60
    assert found == pytest.approx([4.0] * 60)
