"""Forward mode, torch.func and batched backward passes through all time steps at once."""

import pytest
import torch
from sequence.problems import inputs, loop
from torch.autograd import forward_ad

from fixpoint import ConvergenceWarning
from fixpoint.sequence import solve_equilibrium_sequence, solve_sequence

T, B, n = 7, 2, 3
CHOICES = {
    "leaky": {"decay": 0.7},
    "diagonal": {"jacobian": "diagonal"},
    "dense": {"jacobian": "dense"},
    "windows": {"jacobian": "zero", "window": 3},
}
TRANSFORMS = {
    "jvp": lambda F, A, x, h: torch.func.jvp(F, (A, x, h), (A.cos(), x.sin(), h.cos()))[1],
    "jacrev": lambda F, A, x, h: torch.func.jacrev(F)(A, x, h),
    "jacfwd": lambda F, A, x, h: torch.func.jacfwd(F)(A, x, h),
    "hessian": lambda F, A, x, h: torch.func.hessian(lambda A: F(A, x, h).pow(2).sum())(A),
    "vmap": lambda F, A, x, h: torch.func.vmap(lambda h: F(A, x, h))(torch.stack([h, -h])),
    "gradients of samples": lambda F, A, x, h: torch.func.vmap(
        torch.func.grad(lambda A, x: F(A, x, h).sin().sum()), (None, 0)
    )(A, torch.stack([x, x.sin()])),
    "gradient of instances": lambda F, A, x, h: torch.func.grad(
        lambda a: torch.func.vmap(lambda a: F(A, a * x, h).sin().sum())(a).sum()
    )(x[:2, 0, 0]),
    "Hessian of instances": lambda F, A, x, h: torch.func.hessian(
        lambda a: torch.func.vmap(lambda a: F(A, a * x, a * h).sin().sum())(a).sum()
    )(x[:2, 0, 0]),
    "tangent of instances": lambda F, A, x, h: torch.func.jvp(
        torch.func.vmap(lambda a: F(a * A, x, h)), (x[:2, 0, 0],), (x[2:4, 0, 0],)
    ),
}


def problem():
    x, h0 = inputs(T, B, n)
    return 0.4 * torch.randn(n, n, generator=torch.Generator().manual_seed(2)).double(), x, h0


def step(A):
    return lambda h, x: 0.7 * h + 0.3 * torch.tanh(h @ A.T + x)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("choice", CHOICES)
def test_transforms_are_those_of_the_loop(choice, transform):
    run = TRANSFORMS[transform]
    found = run(lambda A, x, h: solve_sequence(step(A), x, h, **CHOICES[choice]).z, *problem())
    expected = run(lambda A, x, h: loop(step(A), x, h), *problem())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("transform", ["jvp", "jacrev", "vmap"])
def test_transforms_of_joint_equilibria(transform):
    V = torch.linspace(-0.3, 0.3, n * n, dtype=torch.float64).view(n, n)

    def phi(A):
        return lambda h, h_prev, x: torch.tanh(0.5 * h @ A.T + h_prev @ V + x)

    def steps(A, x, h):
        def equilibrium(h_prev, x):
            h = h_prev
            for _ in range(100):
                h = phi(A)(h, h_prev, x)
            return h

        return loop(equilibrium, x, h)

    run = TRANSFORMS[transform]
    found = run(lambda A, x, h: solve_equilibrium_sequence(phi(A), x, h).z, *problem())
    torch.testing.assert_close(found, run(steps, *problem()), rtol=1e-12, atol=1e-12)


def test_a_long_sequence_in_forward_mode():
    """T exceeds max_iter, and the recurrence does not forget."""
    A, _, h0 = problem()
    x = inputs(150, B, n)[0]

    def states(run):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(run(step(forward_ad.make_dual(A, A.sin())), x, h0))[1]

    found = states(lambda f, x, h: solve_sequence(f, x, h, jacobian="dense", max_iter=20).z)
    torch.testing.assert_close(found, states(loop), rtol=1e-10, atol=1e-10)


def test_batched_backward_passes():
    A, x, h0 = problem()
    h0.requires_grad_()
    z, expected = solve_sequence(step(A), x, h0, decay=0.7).z, loop(step(A), x, h0)
    g = torch.randn(4, *z.shape, dtype=z.dtype)
    (found,) = torch.autograd.grad(z, h0, g, is_grads_batched=True)
    (right,) = torch.autograd.grad(expected, h0, g, is_grads_batched=True)
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


def test_a_step_that_does_not_repeat_itself_is_reported():
    A, x, h0 = problem()
    calls = []

    def f(h, x):
        calls.append(len(h))
        return step(A)(h, x) + 1e-3 * (len(calls) > 6)

    x.requires_grad_()
    with pytest.warns(ConvergenceWarning, match="other values"):
        solve_sequence(f, x, h0, decay=0.7, rtol=1e-3)


def test_what_a_step_makes_once_and_keeps_has_its_gradient():
    A, x, h0 = problem()
    A.requires_grad_()
    kept = {}

    def f(h, x):
        return step(kept.setdefault("weight", A.sin()))(h, x)

    solve_sequence(f, x, h0, decay=0.7).z.sum().backward()
    (right,) = torch.autograd.grad(loop(step(A.sin()), x, h0).sum(), A)
    torch.testing.assert_close(A.grad, right, rtol=1e-12, atol=1e-12)
