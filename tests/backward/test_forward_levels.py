"""All compositions of forward and reverse mode up to order three, against a plain loop."""

import functools
from itertools import product

import pytest
import torch
from torch.func import grad, jacfwd, jvp, vmap

from fixpoint import (
    Anderson,
    FixedPoint,
    Implicit,
    Newton,
    Phantom,
    Picard,
    Unrolled,
    attach_gradient,
)
from fixpoint.analysis import tanh_equilibrium
from fixpoint.models import ERNN
from fixpoint.sequence import solve_sequence

TIGHT = {"rtol": 1e-13, "atol": 0.0, "max_iter": 200}
POINT = torch.tensor(0.9, dtype=torch.float64)
X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 1, 3)
ORDERS = ["".join(modes) for order in (1, 2, 3) for modes in product("DR", repeat=order)]


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.float64)


def phi(a):
    return lambda z: torch.sin(0.5 * a * z) + a * a


def equilibrium(a):
    z = zeros(1, 1)
    for _ in range(40):
        z = phi(a)(z)
    return z.sum()


def solved(solver, backward):
    return lambda a: FixedPoint(solver, backward)(phi(a), zeros(1, 1)).z.sum()


def beside_a_lost_row(a):
    lost = torch.tensor([[True], [False]])

    def map_of_both(z):
        return torch.where(lost, z * float("nan"), phi(a)(z))

    layer = FixedPoint(Anderson(**TIGHT), Phantom(steps=40), on_failure="ignore")
    return layer(map_of_both, zeros(2, 1)).z[1].sum()


def attached(a):
    z = equilibrium(POINT).reshape(1, 1)
    return attach_gradient(phi(a), z).sum()


def step(a):
    return lambda h, x: torch.tanh(a * h.roll(1, 1) + a * x)


def sequence(a):
    return solve_sequence(step(a), X, zeros(1, 3)).z.sum()


def loop(a):
    h, total = zeros(1, 3), 0.0
    for x in X:
        h = step(a)(h, x)
        total = total + h.sum()
    return total


def recurrent(**options):
    torch.manual_seed(0)
    layer = ERNN(3, 5, map="self-feedback", **options).double().requires_grad_(False)
    return lambda a: layer(a * X)[0].square().sum()


def scalar(a):
    h = POINT
    for _ in range(40):
        h = torch.tanh(h + a)
    return h


STEPS = Picard(max_iter=40, rtol=0.0, atol=0.0)
ernn = recurrent(solver=STEPS, backward=Unrolled(), implementation="reference")
PROBLEMS = {
    "Anderson": (solved(Anderson(**TIGHT), Implicit()), equilibrium),
    "Newton": (solved(Newton(**TIGHT), Implicit()), equilibrium),
    "Unrolled": (solved(STEPS, Unrolled()), equilibrium),
    "Phantom": (solved(Anderson(**TIGHT), Phantom(steps=40)), equilibrium),
    "attach_gradient": (attached, equilibrium),
    "solve_sequence": (sequence, loop),
    "fused layer": (recurrent(solver=Picard(**TIGHT), backward=Implicit()), ernn),
    "tanh_equilibrium": (tanh_equilibrium, scalar),
}


def derivative(f, modes):
    """Return the derivative of f, the outermost mode first: D forward, R reverse."""
    for mode in reversed(modes):
        f = grad(f) if mode == "R" else forward(f)
    return f


def forward(f):
    return lambda a: jvp(f, (a,), (torch.ones_like(a),))[1]


@functools.cache
def expected(name, order):
    return derivative(PROBLEMS[name][1], "R" * order)(POINT)


@pytest.mark.parametrize("modes", ORDERS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_composition_of_modes(name, modes):
    found = derivative(PROBLEMS[name][0], modes)(POINT)
    torch.testing.assert_close(found, expected(name, len(modes)), rtol=1e-9, atol=0)


@pytest.mark.parametrize("modes", ["D", "DD", "DDD"])
def test_forward_levels_beside_a_lost_row(modes):
    found = derivative(beside_a_lost_row, modes)(POINT)
    torch.testing.assert_close(found, expected("Phantom", len(modes)), rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["Anderson", "solve_sequence", "fused layer"])
def test_nested_jacfwd(name):
    found = jacfwd(jacfwd(jacfwd(PROBLEMS[name][0])))(POINT)
    torch.testing.assert_close(found, expected(name, 3), rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["Anderson", "Phantom", "tanh_equilibrium"])
def test_vmap_between_within_and_around_forward_levels(name):
    points = torch.stack((POINT, 0.5 * POINT))
    f, reference = PROBLEMS[name]
    second = torch.stack([derivative(reference, "RR")(a) for a in points])
    for found in (
        vmap(derivative(f, "DD"))(points),
        forward(vmap(forward(f)))(points),
        derivative(vmap(f), "DD")(points),
    ):
        torch.testing.assert_close(found, second, rtol=1e-9, atol=0)


def test_levels_of_different_tensors():
    """The inner level does not touch what the outer one differentiates, or both do."""

    def f(a, b):
        layer = FixedPoint(Anderson(**TIGHT), Implicit())
        return layer(lambda z: torch.sin(0.5 * a * z) + b * b, zeros(1, 1)).z.sum()

    def exact(a, b):
        z = zeros(1, 1)
        for _ in range(40):
            z = torch.sin(0.5 * a * z) + b * b
        return z.sum()

    b = torch.tensor(0.7, dtype=torch.float64)
    mixed = jacfwd(jacfwd(f, 0), 1)(POINT, b)
    torch.testing.assert_close(mixed, grad(grad(exact, 0), 1)(POINT, b), rtol=1e-9, atol=0)
    beside = forward(lambda b: b * forward(lambda a: f(a, POINT))(POINT))(b)
    alone = grad(lambda a: exact(a, POINT))(POINT)
    torch.testing.assert_close(beside, alone, rtol=1e-9, atol=0)
