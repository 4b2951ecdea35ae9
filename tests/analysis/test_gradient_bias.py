"""fixpoint.analysis.gradient_bias and its plot, by the Neumann series of an affine map."""

import pytest
import torch

from fixpoint import Anderson, FixedPoint, Phantom, Root
from fixpoint.analysis import gradient_bias, plots

A = torch.tensor([[0.5, 0.0], [0.8, 0.9]], dtype=torch.float64)
TIGHT = {"rtol": 1e-13, "atol": 1e-13, "max_iter": 100}
Z0 = torch.zeros(1, 2, dtype=torch.float64)


def neumann(steps, g):
    """sum of (A^T)^i g for i < steps."""
    return sum(torch.linalg.matrix_power(A.T, i) @ g for i in range(steps))


def test_cosine_and_size_are_those_of_the_series():
    b = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    g = torch.tensor([1.0, -2.0], dtype=torch.float64)
    ways = {str(n): Phantom(n) for n in (1, 3, 20)}
    bias = gradient_bias(
        FixedPoint(Anderson(**TIGHT)),
        lambda z: z @ A.T + b + 1,
        Z0,
        lambda z: (z @ g).sum(),
        [b],
        backwards=ways,
    )
    exact = torch.linalg.solve(torch.eye(2).double() - A.T, g)
    for i, steps in enumerate((1, 3, 20)):
        cheap = neumann(steps, g)
        assert bias.size[i] == pytest.approx(float(cheap.norm() / exact.norm()), rel=1e-9)
        cosine = float(cheap @ exact / cheap.norm() / exact.norm())
        assert bias.cosine[i] == pytest.approx(cosine, rel=1e-9)
    assert bias.names == ("1", "3", "20")
    assert bias.converged == 1
    assert b.grad is None


def test_the_sentence_and_the_figure():
    a = A.clone().requires_grad_()
    bias = gradient_bias(FixedPoint(), lambda z: z @ a.T + 1, Z0, torch.sum, [a])
    assert bias.describe().startswith("relative to the exact gradient: one step: cosine")
    none = bias._replace(cosine=bias.cosine * 0, converged=0.5)
    assert "none has a cosine of 0.9: take Implicit()" in none.describe()
    assert "50% of the samples converged" in none.describe()
    assert len(plots.plot_gradient_bias(bias).get_xticks()) == 3


def test_one_step_of_a_root_and_bad_input():
    a = torch.tensor([[2.0]], dtype=torch.float64, requires_grad=True)
    F = lambda z: a * z - 1  # noqa: E731
    ways = {"one step": Phantom()}
    bias = gradient_bias(Root(), F, Z0[:, :1], torch.sum, [a], backwards=ways)
    assert bias.cosine.item() == pytest.approx(1)
    with pytest.raises(ValueError, match="no parameter asks for a gradient"):
        gradient_bias(FixedPoint(), torch.cos, Z0, torch.sum, [A])
