"""Gradients of a sequence: finite differences, the loop, and what the reversed recurrence is."""

import pytest
import torch
from sequence.problems import gated, inputs, leaky, loop
from torch.autograd import gradcheck, gradgradcheck

from fixpoint import Result
from fixpoint.sequence import (
    DiagonalJacobian,
    SequenceAdjoint,
    solve_equilibrium_sequence,
    solve_sequence,
)

n, B = 2, 2
CHOICES = {
    "leaky": {"jacobian": "leaky", "decay": 0.7},
    "zero": {"jacobian": "zero"},
    "diagonal": {"jacobian": "diagonal"},
    "one probe": {"jacobian": DiagonalJacobian(probes=1)},
    "trust region": {"jacobian": DiagonalJacobian(trust_region=0.1)},
    "dense": {"jacobian": "dense"},
}


def problem(T, dtype=torch.float64):
    x, h0 = inputs(T, B, n, dtype=dtype)
    A = 0.4 * torch.randn(n, n, generator=torch.Generator().manual_seed(2), dtype=dtype)
    return [v.requires_grad_() for v in (x, h0, A)]


def states(x, h0, A, **options):
    def f(h, x):
        return 0.7 * h + 0.3 * torch.tanh(h @ A.T + x)

    return solve_sequence(f, x, h0, **options).z


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("window", [None, 2])
def test_gradcheck_and_gradgradcheck(choice, window):
    """The Jacobian of the forward solve changes nothing in the gradient."""

    def run(*tensors):
        return states(
            *tensors, **CHOICES[choice], window=window, max_iter=30, rtol=1e-13, atol=1e-13
        )

    assert gradcheck(run, problem(3), fast_mode=True)
    if choice in ("leaky", "diagonal", "dense"):
        assert gradgradcheck(run, problem(2 if window is None else 3), fast_mode=True)


@pytest.mark.parametrize("jacobian", ["zero", "diagonal", "dense"])
def test_gradcheck_and_gradgradcheck_of_joint_equilibria(jacobian):
    def run(x, h0, A):
        def phi(h, h_prev, x):
            return torch.tanh(0.5 * h @ A.T + 0.5 * h_prev @ A + x)

        return solve_equilibrium_sequence(phi, x, h0, jacobian=jacobian, rtol=1e-13, atol=1e-13).z

    assert gradcheck(run, problem(4), fast_mode=True)
    assert gradgradcheck(run, problem(2), fast_mode=True)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("choice", CHOICES)
def test_gradients_are_those_of_the_loop(choice, dtype, limit):
    def gradients(run):
        x, h0, A = problem(200, dtype)
        z = run(x, h0, A)
        weights = torch.linspace(-1, 1, z.numel(), dtype=dtype).view_as(z)
        (z * weights).sum().backward()
        return x.grad, h0.grad, A.grad

    found = gradients(lambda *v: states(*v, **CHOICES[choice]))
    expected = gradients(
        lambda x, h0, A: loop(lambda h, x: 0.7 * h + 0.3 * torch.tanh(h @ A.T + x), x, h0)
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= limit * theirs.norm()


def test_a_gradient_at_the_last_state_alone():
    f, V = gated(n)
    x, h0 = inputs(100, B, n)
    loop(f, x, h0)[-1].square().sum().backward()
    expected, V.grad = V.grad, None
    adjoint = SequenceAdjoint()
    solve_sequence(f, x, h0, jacobian="diagonal", adjoint=adjoint).z[-1].square().sum().backward()
    torch.testing.assert_close(V.grad, expected, rtol=1e-10, atol=1e-12)
    assert adjoint.solution.converged.all()
    assert adjoint.solution.z.shape == (100, B, n)


def test_an_adjoint_that_does_not_converge_is_solved_step_by_step():
    """The reversed recurrence of an expanding map, with an A that fits badly."""
    generator = torch.Generator().manual_seed(0)
    V = 1.3 * torch.randn(n, n, generator=generator, dtype=torch.float64)
    V.requires_grad_()
    x, h0 = inputs(60, B, n)

    def f(h, x):
        return torch.tanh(h @ V.T + 0.1 * x)

    loop(f, x, h0).sum().backward()
    expected, V.grad = V.grad, None
    adjoint = SequenceAdjoint(max_iter=5)
    solution = solve_sequence(f, x, h0, jacobian="zero", adjoint=adjoint, max_iter=8)
    assert (solution.result == Result.FALLBACK).all()
    solution.z.sum().backward()
    assert (adjoint.solution.result == Result.FALLBACK).all()
    torch.testing.assert_close(V.grad, expected, rtol=1e-10, atol=1e-10)


def test_derivatives_of_the_steps_taken_one_by_one():
    """With max_iter=1 every adjoint, of the gradient too, falls back."""

    def run(*tensors):
        adjoint = SequenceAdjoint(max_iter=1)
        return states(*tensors, jacobian="zero", adjoint=adjoint)

    assert gradcheck(run, problem(4))
    assert gradgradcheck(run, problem(3))


def test_stopping_at_the_diagonal_would_be_biased():
    """The exact gradient differs from that of the diagonal recurrence: the iteration is needed."""
    f, _ = gated(n)
    x, h0 = inputs(30, B, n)
    adjoint = SequenceAdjoint()
    solve_sequence(f, x, h0, jacobian="diagonal", adjoint=adjoint).z.sum().backward()
    assert adjoint.solution.iterations.min() >= 2


def test_no_graph_without_gradients():
    f, A, decay = leaky(n)
    x, h0 = inputs(10, B, n)
    with torch.no_grad():
        assert not solve_sequence(f, x, h0, decay=decay).z.requires_grad
    assert solve_sequence(f, x, h0, decay=decay).z.requires_grad
    A.requires_grad_(False)
    assert not solve_sequence(f, x, h0, decay=decay).z.requires_grad


def test_tiny_and_huge_cotangents():
    f, A, decay = leaky(n, dtype=torch.float32)
    x, h0 = inputs(10, B, n, dtype=torch.float32)
    z = solve_sequence(f, x, h0, decay=decay).z
    (one,) = torch.autograd.grad(z.sum(), A, retain_graph=True)
    for size in (1e-30, 1e30):
        (grad,) = torch.autograd.grad(z, A, torch.full_like(z, size), retain_graph=True)
        torch.testing.assert_close(grad / size, one, rtol=1e-4, atol=1e-6)


def test_memory_of_a_training_loop_remains_flat():
    import gc
    import weakref

    f, _, decay = leaky(n)
    x, h0 = inputs(10, B, n)
    solution = solve_sequence(f, x, h0, decay=decay)
    alive = weakref.ref(solution.z)
    solution.z.sum().backward()
    gc.disable()
    try:
        del solution
        assert alive() is None
    finally:
        gc.enable()
