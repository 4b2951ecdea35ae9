"""The shortcut of the loop while all samples are finite, against the plain masked path."""

import math

import pytest
import torch

from fixpoint import solve
from fixpoint.solvers import monitor
from fixpoint.solvers._fast_path import Masks, summarize
from fixpoint.solvers.residual import ResidualNorm, Tolerance

INF, NAN = math.inf, math.nan


def measured(z, fz, rtol=1e-3):
    norm = ResidualNorm(z, Tolerance(rtol, 0.0))
    return norm.measure(z, fz), norm.safe_size


@pytest.mark.parametrize("seed", range(20))
def test_the_summary_is_that_of_each_sample(seed):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(6, 3, generator=generator)
    fz = z + torch.randn(6, 1, generator=generator).exp() * 2e-3
    residuals, safe_size = measured(z, fz)
    best_r = torch.randn(6, generator=generator).exp()
    active = torch.rand(6, generator=generator) < 0.7
    r = residuals.r.tolist()
    for masks in (None, Masks(active, active, torch.full((6,), INF))):
        counted = range(6) if masks is None else [i for i in range(6) if active[i]]
        summary = summarize(residuals, best_r, masks, safe_size)
        assert summary.improved == all(r[i] < best_r[i].item() for i in counted)
        assert summary.least_r == min((r[i] for i in counted), default=INF)
        assert summary.sizes == (residuals.size.min().item(), residuals.size.max().item())
        assert summary.done == all(r[i] <= 1 for i in counted)


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e30, 1e-30])
@pytest.mark.parametrize("where", ["z", "fz"])
def test_there_is_none_where_a_sample_needs_the_plain_path(value, where):
    z, fz = torch.ones(4, 2), torch.full((4, 2), 1.5)
    best_r = torch.full((4,), INF)
    assert summarize(*measured(z, fz)[:1], best_r, None, 0.0) is not None
    if abs(value) < 1:
        z[2], fz[2] = value, 2 * value
    else:
        (z if where == "z" else fz)[2, 0] = value
    residuals, safe_size = measured(z, fz)
    assert summarize(residuals, best_r, None, safe_size) is None


@pytest.mark.parametrize(("rtol", "atol"), [(1e-3, 0.0), (1e-3, 1e-25), (0.0, 1e-6), (0.0, 1e-30)])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1 + 1e-7, 1 + 1e-4, 3.0])
def test_a_size_it_takes_is_one_that_the_plain_path_takes(rtol, atol, factor):
    z = torch.zeros(1, 3)
    norm = ResidualNorm(z, Tolerance(rtol, atol))
    safe = max(norm.smallest_safe / rtol, 1e-20) if rtol else 1.0
    fz = torch.full((1, 3), factor * safe / 3**0.5)
    residuals = norm.measure(z, fz)
    exact = bool(residuals.scale >= norm.smallest_safe)
    quick = summarize(residuals, torch.full((1,), INF), None, norm.safe_size)
    assert (quick is None) or exact
    assert (quick is not None) or not exact or 1 <= factor < 1 + 1e-5


@pytest.mark.parametrize("mate", [torch.cos, lambda z: z + 1, lambda z: 3 - 2 * z**3])
def test_without_it_not_one_bit_of_a_solve_changes(build, mate, monkeypatch):
    solver = build(rtol=1e-5, atol=0.0, max_iter=40, record="residual")
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))

    def phi(z):
        return torch.cat((torch.tanh(0.8 * z[:4].roll(1, 1) + x), mate(z[4:])))

    z0 = torch.full((5, 3), 0.5)
    quick = solve(phi, z0, solver)
    monkeypatch.setattr(monitor, "summarize", lambda *args: None)
    plain = solve(phi, z0, solver)
    for name in ("z", "residual", "iterations", "result", "stall"):
        assert torch.equal(getattr(quick, name), getattr(plain, name)), name
    assert torch.equal(quick.trace.residual, plain.trace.residual)
    assert quick.evaluations == plain.evaluations
