"""The linear problem of the adjoint: coupled samples, preconditioners, what its solver is told."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fixpoint import (
    Anderson,
    Broyden,
    ConvergenceWarning,
    FixedPoint,
    Implicit,
    InexactNewton,
    Newton,
    Picard,
)

D = torch.float64
TIGHT = {"rtol": 1e-12, "atol": 1e-13, "max_iter": 200}


def coupled_problem():
    """A map with batch normalization, its fixed point, and dL/dW by long unrolling."""
    torch.manual_seed(0)
    norm, linear = nn.BatchNorm1d(4, affine=False).double(), nn.Linear(4, 4).double()
    x = torch.randn(5, 4, dtype=D)
    # Cotangents of different sizes, which a scale for each sample does not commute with.
    c = torch.randn(5, 4, dtype=D) * torch.logspace(-2, 2, 5, dtype=D)[:, None]
    phi = lambda z: torch.tanh(0.2 * norm(z + 0.3 * linear(z)) + x)  # noqa: E731
    z = torch.zeros(5, 4, dtype=D)
    for _ in range(150):
        z = phi(z)
    (expected,) = torch.autograd.grad((c * z).sum(), linear.weight)
    return phi, z.detach(), c, linear.weight, expected


@pytest.mark.parametrize("adjoint", [Anderson, Picard, Newton, Broyden])
def test_the_gradient_of_coupled_samples_is_that_of_the_batch(adjoint):
    phi, z, c, weight, expected = coupled_problem()
    layer = FixedPoint(Picard(max_iter=0, rtol=1e-6), Implicit(adjoint(**TIGHT)))
    found = torch.autograd.grad((c * layer(phi, z).z).sum(), weight)[0]
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-10)
    one = FixedPoint(Anderson(**TIGHT))(phi, 0 * z, batched=False).z
    found = torch.autograd.grad((c * one).sum(), weight)[0]
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-10)


def test_a_map_that_does_not_repeat_itself_is_reported():
    w = torch.tensor(0.1, requires_grad=True)

    def phi(z):
        return w * z + (2.0 if z.requires_grad else 1.0)

    layer = FixedPoint(Picard())
    with pytest.warns(ConvergenceWarning, match=r"phi gave other values.*2 of 2.*batched=False"):
        layer(phi, torch.zeros(2, 1))
    layer(phi, torch.zeros(2, 1))
    FixedPoint(Picard(), Implicit(on_failure="ignore"))(phi, torch.zeros(2, 1))


class Told(Picard):
    """Keeps the derivatives it was given."""

    def run(self, phi, z, t=None, **options):
        self.given = options["derivatives"]
        return super().run(phi, z, t, **options)


def test_the_adjoint_solver_is_told_what_it_solves():
    W = torch.tensor([[0.2, 0.4], [0.0, 0.3]], dtype=D)
    told = Told(**TIGHT)
    layer = FixedPoint(Picard(**TIGHT), Implicit(told))

    def f(b):
        return layer(lambda z: z @ W.T + b, torch.zeros(1, 2, dtype=D)).z

    b = torch.ones(2, dtype=D, requires_grad=True)
    z = f(b)
    z.sum().backward()
    assert told.given.transposed
    torch.testing.assert_close(told.given.jacobian(z)[0], W.T)
    torch.testing.assert_close(told.given.at, z.detach())
    torch.func.jvp(f, (b.detach(),), (b.detach(),))
    assert not told.given.transposed
    torch.testing.assert_close(told.given.jacobian(z)[0], W)


@pytest.mark.parametrize("adjoint", [None, "own", "given"])
def test_preconditioners_are_given_the_solution_and_estimate_what_is_solved(adjoint):
    generator = torch.Generator().manual_seed(0)
    W = 0.3 * torch.randn(6, 6, generator=generator, dtype=D)
    x = torch.linspace(-1, 1, 12, dtype=D).view(2, 6)
    eye, at = torch.eye(6, dtype=D), []

    def jacobian(z):
        at.append(z)
        return (1 - torch.tanh(z @ W.T + x) ** 2).unsqueeze(2) * W

    def forward(z, v):
        return torch.linalg.solve(eye - jacobian(z), v)

    def transposed(z, v):
        return torch.linalg.solve((eye - jacobian(z)).mT, v)

    options = {"linear": "gmres", **TIGHT}
    backward = {
        None: lambda: Implicit(),
        "own": lambda: Implicit(Newton(preconditioner=transposed, **options)),
        "given": lambda: Implicit(adjoint_preconditioner=transposed),
    }[adjoint]()
    found = []
    for layer in (
        FixedPoint(Newton(preconditioner=forward, **options), backward),
        FixedPoint(Newton(**TIGHT)),
    ):
        w = W.clone().requires_grad_()
        z = layer(lambda z, w=w: torch.tanh(z @ w.T + x), torch.zeros(2, 6, dtype=D)).z
        del at[:]
        (first,) = torch.autograd.grad(z.square().sum(), w, create_graph=True)
        assert all(torch.allclose(point, z) for point in at)
        assert bool(at) == (adjoint is not None and layer.backward is backward)
        found.append((first, torch.autograd.grad(first.square().sum(), w)[0]))
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-9)
    if adjoint is not None:
        assert backward.adjoint.products <= 8


def test_the_adjoint_is_given_the_time_index():
    a = torch.tensor(0.5, dtype=D, requires_grad=True)
    solver = InexactNewton(max_iter=100, timesteps=3, learn=False, rtol=1e-8, eta=0.5).double()
    FixedPoint(solver, Implicit())(
        lambda z: a * z + 1, torch.zeros(1, 1, dtype=D), t=1
    ).z.backward()
    assert a.grad.item() == pytest.approx(4.0, rel=1e-6)


def test_operations_of_a_backward_pass_are_counted():
    a = (0.3 * torch.eye(3)).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        FixedPoint(Anderson())(lambda z: z @ a + 1, torch.zeros(2, 3)).z.sum().backward()
    assert counter.get_total_flops() > 0


def test_hooks_of_parameters_fire_once_a_backward_pass():
    """Distributed wrappers reduce gradients in such hooks."""
    linear, counts = nn.Linear(2, 2), []
    for p in linear.parameters():
        p.register_post_accumulate_grad_hook(lambda p: counts.append(p.shape))
    z = FixedPoint(Anderson())(lambda z: torch.tanh(0.3 * linear(z)), torch.zeros(3, 2)).z
    z.sum().backward()
    assert sorted(counts) == [torch.Size([2]), torch.Size([2, 2])]
