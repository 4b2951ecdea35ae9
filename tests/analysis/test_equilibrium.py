"""Phi and Phi' against mpmath, which solves the same equation with hundreds of digits."""

import math

import mpmath
import numpy as np
import pytest
import torch

from fixpoint.analysis import EXPANDING_BAND, tanh_equilibrium, tanh_equilibrium_derivative

# MAPS.md, section 2: alpha, Phi, Phi', from mpmath with 60 digits.
TABLE = [
    (1e-6, 0.01442189571377182259672527, 4806.8985855210357798),
    (1e-3, 0.1436260284342617714585458, 47.476772445412141982),
    (0.01, 0.3047732572086081538987776, 9.7657994908541929716),
    (0.1, 0.6118115548653089456637632, 1.671558263725357873),
    (0.5, 0.8812253607755204730345704, 0.28773359395938842505),
    (1, 0.9611797513715394705963792, 0.082407452118713671018),
    (2, 0.9950052293665156446069761, 0.010064886031550861416),
    (5, 0.9999877113487792399772003, 0.000024577755481789519606),
]


def exact(alpha):
    """Phi, Phi' and Phi'' at a positive alpha, by Newton on u - tanh(u) = alpha."""
    # At alpha = 1e-324 u - tanh(u) cancels 216 digits, at 1000 1 - h needs 870.
    with mpmath.workdps(60 if 1e-9 < alpha < 20 else 950):
        alpha = mpmath.mpf(alpha)
        u = mpmath.cbrt(3 * alpha) if alpha < 1 else alpha + 1
        for _ in range(60):
            step = (u - mpmath.tanh(u) - alpha) / mpmath.tanh(u) ** 2
            u -= step
            if abs(step) < mpmath.mpf(10) ** -40 * u:
                break
        return (
            mpmath.tanh(u),
            mpmath.sinh(u) ** -2,
            -2 * mpmath.cosh(u) ** 3 / mpmath.sinh(u) ** 5,
        )


def error(given, expected):
    return float(abs(mpmath.mpf(given) - expected) / abs(expected))


RNG = np.random.default_rng(0)
ALPHAS = [
    *(5e-324, 1e-310, 1e-300, 1e-100, 1e-30, 1e-12, 9.99e-11, 1e-10, 1.01e-10, 1e-8),
    *(EXPANDING_BAND, 0.999, 1.0, 1.05, 8.0, 18.0, 19.5, 39.9, 40.1, 100.0, 340.0, 1e3),
    *RNG.uniform(0, 3, 60),
    *10 ** RNG.uniform(-12, 2.5, 60),
]


def test_the_table():
    alpha, phi, slope = torch.tensor(TABLE, dtype=torch.float64).unbind(1)
    torch.testing.assert_close(tanh_equilibrium(alpha), phi, rtol=4e-16, atol=0)
    torch.testing.assert_close(tanh_equilibrium_derivative(alpha), slope, rtol=1e-15, atol=0)


def test_every_size_of_alpha_against_mpmath():
    """h to 1.5 roundings, Phi' to 5, over 327 decades."""
    alpha = torch.tensor(ALPHAS, dtype=torch.float64)
    h, slope = tanh_equilibrium(alpha).tolist(), tanh_equilibrium_derivative(alpha).tolist()
    for a, given, given_slope in zip(alpha.tolist(), h, slope, strict=True):
        expected, expected_slope, _ = exact(a)
        assert error(given, expected) < 4e-16, a
        if expected_slope > 1e-300:
            assert error(given_slope, expected_slope) < 1e-15, a
        else:
            assert given_slope < 1e-300


def test_it_is_odd_and_its_derivative_even():
    alpha = torch.tensor(ALPHAS, dtype=torch.float64)
    assert torch.equal(tanh_equilibrium(-alpha), -tanh_equilibrium(alpha))
    assert torch.equal(tanh_equilibrium_derivative(-alpha), tanh_equilibrium_derivative(alpha))


def test_it_increases_and_solves_its_equation():
    alpha = torch.linspace(-4, 4, 4001, dtype=torch.float64)
    h = tanh_equilibrium(alpha)
    assert (h.diff() > 0).all()
    torch.testing.assert_close(torch.tanh(h + alpha), h, rtol=1e-14, atol=1e-15)


def test_the_ends():
    alpha = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e300])
    assert tanh_equilibrium(alpha).tolist()[:4] == [0, 0, 1, -1]
    assert math.copysign(1, tanh_equilibrium(alpha)[1].item()) == -1
    assert tanh_equilibrium(alpha).isnan().tolist() == [False] * 4 + [True, False]
    assert tanh_equilibrium_derivative(alpha).tolist()[:4] == [math.inf, math.inf, 0, 0]
    assert tanh_equilibrium_derivative(alpha)[4].isnan()


def test_the_band_in_which_the_slope_exceeds_one():
    assert pytest.approx(0.174267, abs=5e-7) == EXPANDING_BAND
    ends = torch.tensor([0.999, 1.001], dtype=torch.float64) * EXPANDING_BAND
    inside, outside = tanh_equilibrium_derivative(ends).tolist()
    assert outside < 1 < inside
    middle = torch.tensor(EXPANDING_BAND, dtype=torch.float64)
    assert tanh_equilibrium_derivative(middle).item() == pytest.approx(1, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_the_float64_answer_rounded(dtype):
    alpha = torch.tensor([1e-3, 0.2, -0.7, 3.0]).to(dtype)
    for f in (tanh_equilibrium, tanh_equilibrium_derivative):
        assert f(alpha).dtype == dtype
        assert torch.equal(f(alpha), f(alpha.double()).to(dtype))


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 1, 4)])
def test_any_shape(shape):
    alpha = torch.rand(shape, dtype=torch.float64)
    given = tanh_equilibrium(alpha)
    assert given.shape == shape
    assert torch.equal(given.flatten(), tanh_equilibrium(alpha.flatten()))
    assert torch.equal(
        tanh_equilibrium(alpha.mT if len(shape) > 1 else alpha).flatten().sort()[0],
        given.flatten().sort()[0],
    )


# Derivatives.


def test_first_and_second_derivative_by_autograd_against_mpmath():
    alpha = torch.tensor(ALPHAS[5:], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(tanh_equilibrium(alpha).sum(), alpha, create_graph=True)
    assert torch.equal(slope, tanh_equilibrium_derivative(alpha))
    (curve,) = torch.autograd.grad(slope.sum(), alpha)
    for a, given in zip(alpha.tolist(), curve.tolist(), strict=True):
        expected = exact(a)[2]
        if abs(expected) > 1e-300:
            assert error(given, expected) < 3e-15, a


def test_fourth_derivative_against_mpmath():
    """mpmath differentiates its own solution numerically, with 60 digits."""
    for a in (0.05, -0.6, 1.5):
        with mpmath.workdps(60):
            expected = mpmath.diff(
                lambda x: mpmath.sign(x) * mpmath.tanh(_drive(abs(x))), mpmath.mpf(a), 4
            )
        alpha = torch.tensor(a, dtype=torch.float64, requires_grad=True)
        value = tanh_equilibrium(alpha)
        for _ in range(4):
            (value,) = torch.autograd.grad(value, alpha, create_graph=True)
        assert error(value.item(), expected) < 1e-13


def _drive(alpha):
    return mpmath.findroot(lambda u: u - mpmath.tanh(u) - alpha, mpmath.cbrt(3 * alpha))


def test_gradcheck_in_both_modes():
    alpha = torch.tensor([0.3, -0.2, 1.5], dtype=torch.float64, requires_grad=True)
    for f in (tanh_equilibrium, tanh_equilibrium_derivative):
        assert torch.autograd.gradcheck(f, alpha, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(f, alpha)


def test_transforms():
    alpha = torch.tensor([0.3, -0.2, 1.5], dtype=torch.float64)
    slope = tanh_equilibrium_derivative(alpha)
    assert torch.equal(torch.vmap(tanh_equilibrium)(alpha), tanh_equilibrium(alpha))
    assert torch.equal(torch.func.vmap(torch.func.grad(tanh_equilibrium))(alpha), slope)
    assert torch.equal(torch.func.jacfwd(tanh_equilibrium)(alpha).diagonal(), slope)


def test_a_sample_at_zero_without_part_in_the_loss_leaves_the_gradient_finite():
    alpha = torch.tensor([0.0, 0.5], dtype=torch.float64, requires_grad=True)
    tanh_equilibrium(alpha)[1].backward()
    assert alpha.grad.tolist() == [0, tanh_equilibrium_derivative(alpha)[1].item()]
    (grad,) = torch.autograd.grad(tanh_equilibrium(alpha).sum(), alpha)
    assert grad[0] == math.inf


@pytest.mark.parametrize("alpha", [0.5, torch.tensor(1), "x"])
def test_not_a_floating_point_tensor(alpha):
    with pytest.raises(TypeError, match="alpha must be a floating-point tensor; got"):
        tanh_equilibrium(alpha)
