"""Gradients through updates whose length depends on values: rejected, shortened and cut steps."""

import pytest
import torch
from torch.testing import assert_close

from fixpoint import (
    SQUAREM,
    Anderson,
    BarzilaiBorwein,
    Broyden,
    FixedPoint,
    InexactNewton,
    Newton,
    Unrolled,
)

FIXED = {"rtol": 0.0, "atol": 0.0}
SOLVERS = {
    "Anderson": lambda: Anderson(max_iter=8, **FIXED),
    "Anderson to a tolerance": lambda: Anderson(rtol=1e-2, memory=2),
    "Anderson with a ridge": lambda: Anderson(max_iter=5, ridge=1e-2, **FIXED),
    "Broyden": lambda: Broyden(max_iter=6, **FIXED),
    "Broyden whose first step is taken back": lambda: Broyden(max_iter=4, growth=0.1, **FIXED),
    "Broyden to a tolerance": lambda: Broyden(rtol=1e-2),
    "Broyden of one factor": lambda: Broyden(max_iter=7, memory=1, **FIXED),
    "Newton": lambda: Newton(max_iter=5, **FIXED),
    "SQUAREM": lambda: SQUAREM(max_iter=6, **FIXED),
    "Barzilai-Borwein": lambda: BarzilaiBorwein(max_iter=8, **FIXED),
}
STEPS = (1e-5, 1e-6, 1e-7)


def problem(solver, gain, seed, rows=slice(None)):
    """Return a -> the last state of tanh(a z W + x), (B,), where steps go too far."""
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": torch.float64}
    W, x = gain * torch.randn(3, 3, **draw), torch.randn(2, 3, **draw)[rows]
    layer = FixedPoint(solver, Unrolled(), on_failure="ignore")
    return lambda a: layer(lambda z: torch.tanh(a * z @ W + x), torch.zeros_like(x)).z.sum(1)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("gain", [0.7, 2.0, 4.0])
def test_the_gradient_is_that_of_what_was_computed(name, gain):
    compared = 0
    for seed in range(5):
        run, a = problem(SOLVERS[name](), gain, seed), torch.ones((), dtype=torch.float64)
        slopes = [(run(a + h).sum() - run(a - h).sum()).item() / (2 * h) for h in STEPS]
        if max(slopes) - min(slopes) > 1e-4 * (1 + abs(slopes[0])):
            continue  # a step is about to be taken back, or the slope is lost in rounding
        _, tangent = torch.func.jvp(run, (a,), (torch.ones_like(a),))
        (gradient,) = torch.autograd.grad(run(a.requires_grad_()).sum(), a)
        assert_close(tangent.sum(), gradient, rtol=1e-6, atol=1e-6)
        nearest = min(slopes, key=lambda slope: abs(slope - gradient.item()))
        assert_close(gradient.item(), nearest, rtol=1e-5, atol=1e-5)
        compared += 1
    assert compared >= 3


@pytest.mark.parametrize("name", ["Anderson to a tolerance", "Broyden", "Newton"])
def test_the_gradient_of_a_sample_does_not_depend_on_its_batch(name):
    for seed in range(4):
        a = torch.ones((), dtype=torch.float64, requires_grad=True)
        together = problem(SOLVERS[name](), 2.0, seed)(a)
        for i in range(2):
            (alone,) = torch.autograd.grad(problem(SOLVERS[name](), 2.0, seed, [i])(a).sum(), a)
            (beside,) = torch.autograd.grad(together[i], a, retain_graph=True)
            assert_close(alone, beside, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [Broyden, Newton, Anderson])
def test_a_step_to_where_phi_is_not_finite_leaves_the_gradient_finite(kind):
    """The steps of some samples leave the domain of the root, and are taken back."""
    a = torch.full((8, 1), 0.5, dtype=torch.float64, requires_grad=True)
    x = torch.linspace(0.01, 2.0, 8, dtype=torch.float64).unsqueeze(1)
    layer = FixedPoint(kind(rtol=1e-10, atol=0.0), Unrolled(), on_failure="ignore")
    solution = layer(lambda z: z + torch.sqrt(x - a * z) - 0.3, torch.zeros_like(x))
    (gradient,) = torch.autograd.grad(solution.z[solution.converged].sum(), a)
    assert solution.converged.sum() >= 4
    z = (x - 0.09) / a.detach()  # of which the derivative by a is -z / a
    assert_close(
        gradient[solution.converged], (-z / a.detach())[solution.converged], rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("options", [{}, FIXED, {"check_every": 3}])
def test_broyden_with_one_factor(options):
    options = {"rtol": 1e-12, "atol": 0.0, "max_iter": 60} | options
    solution = FixedPoint(Broyden(memory=1, **options))(
        torch.cos, torch.zeros(1, 1, dtype=torch.float64)
    )
    assert_close(solution.z.item(), 0.7390851332151607, rtol=1e-10, atol=0.0)


@pytest.mark.parametrize("timesteps", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_last_updates_give_learned_steps_their_gradient(timesteps, dtype):
    solver = InexactNewton(3, timesteps=timesteps, eta=0.5)
    x, t = torch.tensor([[0.3]], dtype=dtype), None if timesteps is None else 1
    layer = FixedPoint(solver, Unrolled(last=2))
    layer(lambda z: torch.cos(z + x), torch.zeros_like(x), t=t).z.sum().backward()
    eta = torch.full((3,), 0.5, dtype=dtype, requires_grad=True)
    z = 0.5 * torch.cos(x)  # after the first update
    for k in (1, 2):
        z = z + eta[k] * (torch.cos(z + x) - z)
    (expected,) = torch.autograd.grad(z.sum(), eta)
    found = solver.eta.grad if timesteps is None else solver.eta.grad[1]
    assert_close(found, expected.float())
