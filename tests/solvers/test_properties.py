"""Properties of every solver on maps and inputs that hypothesis makes up."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from fixpoint import SOLVERS, Result, make_solver, solve

NAMES = list(SOLVERS)
OWN = {"inexact-newton": {"eta": 1.0, "learn": False, "rtol": 1e-5, "atol": 1e-6}}
QUICK = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
ANY_FLOAT = st.floats(width=32, allow_nan=True, allow_infinity=True)


def build(name, **options):
    return make_solver(name, **{**OWN.get(name, {}), **options})


@st.composite
def tanh_layers(draw):
    """Slopes of a diagonal-plus-rank-one tanh layer with norm below 0.9, and its input, (B, D)."""
    B, D = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**16))
    norm = draw(st.floats(0.0, 0.9))
    generator = torch.Generator().manual_seed(seed)
    U = torch.randn(D, D, generator=generator, dtype=torch.float64)
    U = norm * U / torch.linalg.matrix_norm(U, 2)
    return U, 2 * torch.randn(B, D, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", NAMES)
@QUICK
@given(layer=tanh_layers())
def test_rows_are_independent_and_permute(name, layer):
    U, x = layer
    solver = build(name, rtol=1e-9, atol=1e-12, max_iter=400)
    whole = solve(lambda z: torch.tanh(z @ U.T + x), torch.zeros_like(x), solver)
    assert whole.converged.all()
    order = torch.arange(len(x)).flip(0)
    turned = solve(lambda z: torch.tanh(z @ U.T + x[order]), torch.zeros_like(x), solver)
    assert torch.allclose(turned.z, whole.z[order], rtol=1e-7, atol=1e-10)
    for row in range(len(x)):
        alone = solve(
            lambda z, row=row: torch.tanh(z @ U.T + x[row : row + 1]),
            torch.zeros_like(x[:1]),
            solver,
        )
        assert torch.allclose(alone.z[0], whole.z[row], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
@QUICK
@given(layer=tanh_layers(), power=st.integers(-12, 12))
def test_a_power_of_two_in_scale_changes_nothing_else(name, layer, power):
    U, x = layer
    s = 2.0**power
    solver = build(name, rtol=1e-7, atol=0.0, max_iter=300)
    one = solve(lambda z: torch.tanh(z @ U.T + x), torch.zeros_like(x), solver)
    other = solve(lambda z: s * torch.tanh(z / s @ U.T + x), torch.zeros_like(x), solver)
    assert torch.equal(one.iterations, other.iterations)
    assert torch.allclose(other.z, s * one.z, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("name", NAMES)
@QUICK
@given(
    values=st.lists(ANY_FLOAT, min_size=0, max_size=6),
    slope=ANY_FLOAT,
    shift=ANY_FLOAT,
    bend=st.sampled_from([torch.tanh, torch.exp, torch.sqrt, torch.reciprocal, torch.ones_like]),
    max_iter=st.integers(0, 12),
    columns=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_no_input_raises_and_the_budget_holds(
    name, values, slope, shift, bend, max_iter, columns, dtype
):
    z0 = torch.tensor(values, dtype=dtype).reshape(-1, 1).expand(-1, columns)
    solution = solve(lambda z: slope * bend(z) + shift, z0, build(name, max_iter=max_iter))
    assert solution.z.shape == z0.shape
    assert solution.z.dtype == dtype
    assert (solution.iterations <= max_iter).all()
    good = solution.converged
    assert solution.z[good].isfinite().all()
    assert (solution.residual[good] <= 1).all()
    started_badly = ~z0.isfinite().all(1)
    assert (solution.result[started_badly] == Result.NONFINITE).all()
    if not math.isfinite(slope) or not math.isfinite(shift):
        assert not good.any()
