"""The Jacobian penalty: its value, that the estimate is unbiased, and its derivatives."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from fixpoint.regularization import jac_reg


def problem(B=3, D=4, seed=0):
    """phi(z) = tanh(z A^T + c), A non-normal, and z, all asking for gradients, float64."""
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(D, D, generator=generator, dtype=torch.float64).triu() / D**0.5
    c, z = torch.randn(2, B, D, generator=generator, dtype=torch.float64)
    return [part.clone().requires_grad_() for part in (A, c, z)]


def layer(A, c):
    return lambda z: torch.tanh(z @ A.T + c)


def exact(A, c, z):
    """||diag(sigma') A||_F^2 / D of each sample, by hand."""
    slope = 1 - torch.tanh(z @ A.T + c) ** 2
    return (slope.unsqueeze(2) * A).square().sum((1, 2)) / z.shape[1]


@pytest.mark.parametrize(("B", "D"), [(3, 4), (1, 1), (2, 7)])
def test_all_unit_vectors_give_the_exact_value(B, D):
    A, c, z = problem(B, D)
    given = jac_reg(layer(A, c), z, samples=None)
    torch.testing.assert_close(given, exact(A, c, z), rtol=1e-13, atol=0)


def test_the_estimate_is_unbiased():
    """Mean of n = 4000 estimates: within five standard errors, and those are small."""
    A, c, z = (part.detach() for part in problem())
    generator = torch.Generator().manual_seed(1)
    draws = torch.stack([jac_reg(layer(A, c), z, generator=generator) for _ in range(4000)])
    error = draws.std(0) / math.sqrt(len(draws))
    assert (error < 0.02 * exact(A, c, z)).all()
    assert ((draws.mean(0) - exact(A, c, z)).abs() < 5 * error).all()


def test_more_samples_lower_the_variance():
    """By their number: the ratio of two variances from 1000 draws is within 30 % of it."""
    A, c, z = (part.detach() for part in problem(B=1))
    generator = torch.Generator().manual_seed(2)

    def variance(samples):
        one = [jac_reg(layer(A, c), z, samples=samples, generator=generator) for _ in range(1000)]
        return torch.stack(one).var().item()

    assert variance(1) / variance(8) == pytest.approx(8, rel=0.3)


def test_samples_of_a_batch_have_their_own_value():
    a = torch.tensor([[0.5], [2.0], [0.0]])
    assert jac_reg(lambda z: a * z, torch.zeros(3, 4)).tolist() == [0.25, 4.0, 0.0]


@pytest.mark.parametrize("samples", [1, 3, None])
def test_gradients(samples):
    """With respect to what phi closes over and to z, first and second order."""

    def penalty(A, c, z):
        generator = torch.Generator().manual_seed(3)
        return jac_reg(layer(A, c), z, samples=samples, generator=generator)

    inputs = problem(B=2, D=3)
    assert gradcheck(penalty, inputs)
    assert gradgradcheck(penalty, inputs)


def test_gradient_of_the_exact_value():
    inputs = problem()
    expected = torch.autograd.grad(exact(*inputs).sum(), inputs)
    A, c, z = inputs
    given = torch.autograd.grad(jac_reg(layer(A, c), z, samples=None).sum(), inputs)
    torch.testing.assert_close(given, expected, rtol=1e-12, atol=1e-14)


def test_a_detached_z_penalises_the_map_alone():
    A, c, z = problem()
    jac_reg(layer(A, c), z.detach()).sum().backward()
    assert A.grad.any()
    assert z.grad is None


def test_without_grad_mode():
    A, c, z = problem()
    with torch.no_grad():
        penalty = jac_reg(layer(A, c), z, samples=None)
    assert not penalty.requires_grad
    torch.testing.assert_close(penalty, exact(A, c, z).detach(), rtol=1e-13, atol=0)


@pytest.mark.parametrize("samples", [1, 5, None])
def test_phi_is_evaluated_once(samples):
    A, c, z = problem()
    calls = []
    jac_reg(lambda z: calls.append(1) or layer(A, c)(z), z, samples=samples).sum().backward()
    assert len(calls) == 1


@pytest.mark.parametrize("samples", [1, 2, None])
@pytest.mark.parametrize("weight", [None, torch.ones(4, requires_grad=True)])
def test_a_map_that_does_not_depend_on_z(samples, weight):
    out = torch.ones(3, 4)
    penalty = jac_reg(lambda z: out if weight is None else out * weight, out, samples=samples)
    assert penalty.tolist() == [0.0, 0.0, 0.0]


def test_a_tree_counts_all_its_numbers():
    """J is 2 on the 6 numbers of a, 0.5 on the 2 of b, diagonal: exact with one sample."""
    z = {"a": torch.zeros(3, 2, 3), "b": [torch.zeros(3, 2)]}
    penalty = jac_reg(lambda z: {"a": 2 * z["a"], "b": [0.5 * z["b"][0]]}, z)
    torch.testing.assert_close(penalty, torch.full((3,), (6 * 4 + 2 * 0.25) / 8))


def test_unbatched():
    assert jac_reg(lambda z: 3 * z, torch.zeros(2, 2), batched=False).tolist() == [9.0]


def test_half_precision_sums_in_float32():
    """300^2 D overflows float16."""
    penalty = jac_reg(lambda z: 300 * z, torch.zeros(2, 64, dtype=torch.float16))
    assert penalty.dtype == torch.float32
    assert penalty.tolist() == [90000.0, 90000.0]


def test_no_samples_is_an_error():
    with pytest.raises(ValueError, match="samples must be at least 1; got 0"):
        jac_reg(torch.tanh, torch.zeros(1, 1), samples=0)
