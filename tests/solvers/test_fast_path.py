"""fixpoint.solvers.loop.course: the shortcut of a solve against the rules asked at each update."""

import math

import pytest
import torch

from fixpoint import Picard, solve
from fixpoint.solvers.loop.course import Course


@pytest.mark.parametrize("widths", [[3], [1, 2]])  # one leaf, two
@pytest.mark.parametrize("mate", [torch.cos, lambda z: z + 1, lambda z: 3 - 2 * z**3])
def test_without_it_not_one_bit_of_a_solve_changes(build, mate, widths, monkeypatch):
    solver = build(rtol=1e-5, atol=0.0, max_iter=40, record="residual")
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))

    def phi(leaves):
        z = torch.cat(leaves, 1)
        z = torch.cat((torch.tanh(0.8 * z[:4].roll(1, 1) + x), mate(z[4:])))
        return z.split(widths, 1)

    z0 = torch.full((5, 3), 0.5).split(widths, 1)
    quick = solve(phi, z0, solver)
    monkeypatch.setattr(Course, "_is_quiet", lambda *args: False)
    calm = solve(phi, z0, solver)
    monkeypatch.setattr(Course, "_calm", lambda *args: None)
    plain = solve(phi, z0, solver)
    for other in (quick, calm):
        assert all(torch.equal(a, b) for a, b in zip(other.z, plain.z, strict=True))
        for name in ("residual", "iterations", "result", "stall"):
            assert torch.equal(getattr(other, name), getattr(plain, name)), name
        assert torch.equal(other.trace.residual, plain.trace.residual)
        assert other.evaluations == plain.evaluations


@pytest.mark.parametrize(
    "phi",
    [
        lambda z: torch.tanh(0.8 * z.roll(1, 1) + 0.5),
        lambda z: 0 * z,
        lambda z: z + 1,
        lambda z: z * math.nan,
        lambda z: 1e30 * torch.cos(1e-30 * z),
        lambda z: 1e-30 * torch.cos(1e30 * z),
    ],
)
def test_nor_of_one_sample_alone(build, phi, monkeypatch):
    solver = build(rtol=1e-5, atol=0.0, max_iter=30, record="residual")
    quick = solve(phi, torch.full((1, 3), 0.5), solver)
    monkeypatch.setattr(Course, "_is_quiet", lambda *args: False)
    monkeypatch.setattr(Course, "_calm", lambda *args: None)
    plain = solve(phi, torch.full((1, 3), 0.5), solver)
    for name in ("z", "residual", "iterations", "result", "stall"):
        found, expected = getattr(quick, name), getattr(plain, name)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(quick.trace.residual, plain.trace.residual)


@pytest.mark.parametrize("shortcut", ["_is_quiet", "_calm"])
def test_a_sample_at_its_solution_has_the_residual_that_its_mates_leave_it(shortcut, monkeypatch):
    """Its residual moves within the tolerance with the rows that phi couples it to."""
    rates = torch.tensor([[0.1], [0.5], [0.9]], dtype=torch.float64)

    def phi(z):
        return rates * z + 1 + 1e-4 * z.mean(0, keepdim=True)

    if shortcut == "_calm":
        monkeypatch.setattr(Course, "_is_quiet", lambda *args: False)
    solution = solve(phi, torch.full_like(rates, 5.0), Picard(rtol=1e-2, atol=0.0))
    z = solution.z
    assert solution.iterations.unique().numel() == 3
    assert not solution.coupled
    expected = ((phi(z) - z).abs() / (1e-2 * phi(z).abs())).squeeze(1)
    torch.testing.assert_close(solution.residual, expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30, 1e-30])
def test_a_sample_out_of_range_changes_no_bit_of_its_mates(build, value):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    solver = build(rtol=1e-4, atol=0.0, max_iter=60)

    def phi(z):
        return torch.tanh(0.5 * z.roll(1, 1) + x[: len(z)])

    alone = solve(phi, torch.zeros(2, 4), solver)
    x[2] = value
    among = solve(phi, torch.zeros(3, 4), solver)
    for name in ("z", "residual", "iterations", "result"):
        assert torch.equal(getattr(among, name)[:2], getattr(alone, name)), name
