"""Scalar equilibria of any map, and step counts against the published table."""

import math

import pytest
import torch

from fixpoint import Picard, solve
from fixpoint.analysis import (
    scalar_equilibrium,
    tanh_equilibrium,
    tanh_newton_steps,
    tanh_plain_steps,
)

# MAPS.md, section 2: plain iteration from 0 to 1e-6 and to 1e-10, Newton steps.
ALPHA = [1e-6, 1e-3, 0.01, 0.1, 0.5, 1, 2, 5]
TO_6 = [53_039, 640, 145, 32, 10, 6, 4, 2]
TO_10 = [97_317, 1_082, 239, 52, 17, 10, 6, 3]
NEWTON = [4, 5, 5, 5, 5, 4, 3, 2]


def numbers(values):
    return torch.tensor(values, dtype=torch.float64)


def test_plain_iteration_takes_the_steps_of_the_table():
    assert tanh_plain_steps(numbers(ALPHA[1:])).tolist() == TO_6[1:]
    assert tanh_plain_steps(numbers(ALPHA[1:]), atol=1e-10).tolist() == TO_10[1:]


def test_plain_iteration_near_zero_takes_the_steps_of_the_table():
    assert tanh_plain_steps(numbers(ALPHA[:1])).tolist() == TO_6[:1]
    assert tanh_plain_steps(numbers(ALPHA[:1]), atol=1e-10).tolist() == TO_10[:1]


def test_newton_takes_the_steps_of_the_table():
    assert tanh_newton_steps(numbers(ALPHA)).tolist() == NEWTON
    assert tanh_newton_steps(-numbers(ALPHA)).tolist() == NEWTON
    assert tanh_newton_steps(numbers([0.0])).tolist() == [0]
    assert tanh_newton_steps(numbers([0.5]), max_iter=2).tolist() == [-1]


@pytest.mark.parametrize("eta", [0.5, 1.0, 1.5])
def test_damped_steps_are_those_of_picard(eta):
    """The state before the counted update is farther than atol, the state after it is not."""
    alpha = numbers([[0.05, -0.3], [1.0, 2.0]])
    steps = tanh_plain_steps(alpha, eta=eta, atol=1e-8)
    for a, n in zip(alpha.flatten(), steps.flatten().tolist(), strict=True):
        path = solve(
            lambda h: torch.tanh(h + a),
            torch.zeros(1, 1, dtype=torch.float64),
            Picard(beta=eta, max_iter=n, rtol=0, atol=0, record="iterates"),
        ).trace.iterates.flatten()
        far = (path - tanh_equilibrium(a)).abs() > 1e-8
        assert far.tolist() == [True] * n + [False]


def test_the_largest_step_that_converges():
    """The local rate 1 - eta h^2 is -1 at eta = 2 / h^2."""
    alpha = numbers([0.2])
    edge = 2 / tanh_equilibrium(alpha).item() ** 2
    assert tanh_plain_steps(alpha, eta=0.98 * edge, max_iter=3000).item() > 0
    assert tanh_plain_steps(alpha, eta=1.02 * edge, max_iter=3000).item() == -1


def test_budget_and_a_start_that_is_near_enough():
    assert tanh_plain_steps(numbers([1e-3]), max_iter=639).tolist() == [-1]
    assert tanh_plain_steps(numbers([1e-3]), max_iter=640).tolist() == [640]
    assert tanh_plain_steps(numbers([0.0, 1e-30])).tolist() == [0, 0]
    assert tanh_plain_steps(numbers([])).shape == (0,)


# A user's own map.


def test_tanh_is_phi():
    alpha = numbers([[-3.0, -0.3, 0.01], [0.2, 1.0, 30.0]])
    given = scalar_equilibrium(lambda h, alpha: torch.tanh(h + alpha), alpha)
    torch.testing.assert_close(given, tanh_equilibrium(alpha), rtol=1e-13, atol=0)


def test_maps_with_known_answers():
    one = numbers([1.0])
    for phi, lower, upper, expected in (
        (lambda h, a: torch.cos(a * h), 0, 1, 0.7390851332151607),
        (lambda h, a: torch.exp(-a * h), 0, 1, 0.5671432904097838),
        (lambda h, a: 1 + a / h, 1, 2, (1 + math.sqrt(5)) / 2),
        (lambda h, a: 0 * h + a / 4, -1, 1, 0.25),
        (lambda h, a: a + 0 * h, -1, 1, 1.0),  # at the end of the bracket
    ):
        given = scalar_equilibrium(phi, one, lower=lower, upper=upper)
        assert given.item() == pytest.approx(expected, rel=4e-16)


def test_newton_alone_would_leave_the_bracket_or_cycle():
    """Steep sigmoids: from the middle Newton overshoots; bisection brings it home."""
    alpha = numbers([-40.0, -5.0, 0.3, 7.0])
    given = scalar_equilibrium(lambda h, a: torch.tanh(-200 * h + a), alpha)
    torch.testing.assert_close(torch.tanh(-200 * given + alpha), given, rtol=1e-12, atol=1e-12)


def test_newton_steps_that_cycle_inside_the_bracket():
    """On a square root of both signs Newton goes from one side to its mirror image, for ever."""
    alpha = numbers([0.3, -0.7, 0.05])

    def phi(h, a):
        return h - (h - a).sign() * (h - a).abs().sqrt()

    torch.testing.assert_close(scalar_equilibrium(phi, alpha), alpha, rtol=1e-12, atol=0)


def test_no_equilibrium_in_the_bracket():
    alpha = numbers([0.5, 5.0, math.nan])
    given = scalar_equilibrium(lambda h, a: 0.5 * h + a, alpha, lower=-2, upper=2)
    assert given[0].item() == pytest.approx(1.0, rel=1e-15)
    assert given[1:].isnan().all()


def test_derivatives_of_any_order():
    def phi(h, alpha):
        return torch.tanh(h + alpha)

    alpha = numbers([0.3, -0.7, 1.2]).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: scalar_equilibrium(phi, a), alpha)
    assert torch.autograd.gradgradcheck(lambda a: scalar_equilibrium(phi, a), alpha)
    for f in (tanh_equilibrium, lambda a: scalar_equilibrium(phi, a)):
        value, found = f(alpha).sum(), []
        for _ in range(3):
            (grad,) = torch.autograd.grad(value, alpha, create_graph=True)
            found.append(grad.detach())
            value = grad.sum()
        if f is tanh_equilibrium:
            expected = found
    for given, right in zip(found, expected, strict=True):
        torch.testing.assert_close(given, right, rtol=1e-9, atol=0)


def test_gradient_of_a_tensor_that_the_map_closes_over():
    """h = w h + alpha: dh/dw = alpha / (1 - w)^2."""
    w = numbers(0.5).requires_grad_()
    alpha = numbers([0.1, 0.2])
    scalar_equilibrium(lambda h, a: w * h + a, alpha).sum().backward()
    assert w.grad.item() == pytest.approx(0.3 / 0.25, rel=1e-12)


def test_float32():
    alpha = torch.tensor([0.3, -2.0])
    given = scalar_equilibrium(lambda h, a: torch.tanh(h + a), alpha)
    assert given.dtype == torch.float32
    torch.testing.assert_close(given, tanh_equilibrium(alpha), rtol=3e-7, atol=0)


def test_bad_values():
    with pytest.raises(ValueError, match="lower must be below upper; got 1 and 0"):
        scalar_equilibrium(lambda h, a: a, numbers([0.0]), lower=1, upper=0)
    with pytest.raises(ValueError, match="eta must be"):
        tanh_plain_steps(numbers([0.1]), eta=-1.0)
