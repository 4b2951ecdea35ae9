"""`scan` against a plain loop in NumPy, its gradients, and what it says about each solve."""

import numpy as np
import pytest
import torch
from support import numpy_reference as reference

from fixpoint import (
    Anderson,
    FixedPoint,
    Implicit,
    InexactNewton,
    Phantom,
    Picard,
    Result,
    Unrolled,
)
from fixpoint.models import JordanMap, SelfFeedbackMap, check_compatible, scan

EPS = 2.0**-52


def sample(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def newton(T, K, *, learn=True):
    """InexactNewton with a step of its own at each (t, k), of either sign."""
    solver = InexactNewton(K, timesteps=T, learn=learn).double()
    with torch.no_grad():
        solver.eta.copy_(0.3 + 0.3 * sample(T, K, seed=7))
    return solver


@pytest.mark.parametrize("K", [1, 2, 3])
def test_scan_is_the_plain_loop(named_cell, K):
    name, cell = named_cell
    T, B = 4, 3
    solver = newton(T, K)
    x, h0 = sample(T, B, 3), sample(B, 5, seed=2)
    path = scan(cell, FixedPoint(solver, Unrolled()), x, h0)
    expected = reference.recurrence(
        name,
        cell.nonlinearity,
        reference.weights(cell),
        x.numpy(),
        h0.numpy(),
        solver.eta.detach().numpy(),
    )
    # Rounding of a few dozen operations, carried on by maps of norm near 1.
    torch.testing.assert_close(
        path.output.detach(), torch.from_numpy(expected), rtol=200 * EPS, atol=200 * EPS
    )
    assert torch.equal(path.h_n, path.output[-1])
    assert path.residual is None
    assert path.iterations.tolist() == [[K] * B] * T
    assert (path.result == Result.FIXED_STEPS).all()
    assert path.evaluations == K * T


def test_start_is_zero_where_none_is_given(named_cell):
    _, cell = named_cell
    layer = FixedPoint(newton(4, 2), Unrolled())
    x = sample(4, 3, 3)
    zeros = torch.zeros(3, 5, dtype=torch.float64)
    assert torch.equal(scan(cell, layer, x).output, scan(cell, layer, x, zeros).output)
    assert not torch.equal(scan(cell, layer, x).output, scan(cell, layer, x, zeros + 1).output)


def test_a_tolerance_solver_reports_each_step():
    torch.manual_seed(0)
    cell = SelfFeedbackMap(3, 5, bound=0.5).double().eval()
    x = sample(4, 3, 3)
    x[2] = x[1]  # the state of a step may solve the next one, but need not
    path = scan(cell, FixedPoint(Picard(rtol=1e-8, atol=0, max_iter=40), Implicit()), x)
    assert path.residual.shape == path.iterations.shape == path.result.shape == (4, 3)
    assert path.result.dtype == torch.int8
    assert (path.result == Result.CONVERGED).all()
    past = torch.cat([torch.zeros(1, 3, 5, dtype=torch.float64), path.output[:-1]])
    for t in range(4):
        h = path.output[t]
        residual = cell(h, past[t], x[t]) - h
        # |z - z*| <= |residual| / (1 - 0.5) with rms(residual) <= 1e-8 rms(phi)
        assert (residual.norm(dim=1) <= 1.001e-8 * h.norm(dim=1)).all()
    assert path.evaluations == (path.iterations.amax(1) + 1).sum()
    assert 0 < path.iterations.min() <= path.iterations.max() < 40
    short = Picard(rtol=1e-8, atol=0, max_iter=2)
    few = scan(cell, FixedPoint(short, Implicit(), on_failure="ignore"), x)
    assert (few.result == Result.MAX_ITER).all()
    assert (few.residual > 1).all()


# Gradients.


def gradcheck(cell, fixed_point, x, h0):
    """Of the outputs with respect to every parameter, x and h0."""
    inputs = [*cell.parameters(), *fixed_point.parameters(), x, h0]
    for tensor in inputs:
        tensor.requires_grad_()
    # The numeric derivative changes the tensors in place, so the closure sees it.
    assert torch.autograd.gradcheck(lambda *_: scan(cell, fixed_point, x, h0).output, inputs)


def test_gradients_of_smooth_cells(named_cell):
    name, cell = named_cell
    if name == "jordan":
        cell.nonlinearity = "tanh"
    gradcheck(cell, FixedPoint(newton(3, 2), Unrolled()), sample(3, 2, 3), sample(2, 5, seed=2))


@pytest.mark.parametrize("rank", [None, 2])
def test_gradients_of_relu_away_from_its_kink(rank):
    torch.manual_seed(0)
    cell = JordanMap(3, 5, rank=rank).double()
    x, h0 = sample(3, 2, 3), sample(2, 5, seed=2)
    layer = FixedPoint(newton(3, 2), Unrolled())
    # gradcheck moves each number by 1e-6: no preactivation may come near 0.
    A, W, b = (part.detach() for part in cell.as_leaky_step())
    u = x @ W.mT + b
    h, nearest = h0, torch.inf
    for t in range(3):
        for k in range(2):
            a = h @ A.mT + u[t]
            nearest = min(nearest, a.abs().min().item())
            h = torch.lerp(h, torch.relu(a), layer.solver.eta[t, k].detach())
    assert nearest > 1e-3
    gradcheck(cell, layer, x, h0)


def test_implicit_gradients():
    torch.manual_seed(0)
    cell = SelfFeedbackMap(3, 4, bound=0.5).double().eval()
    layer = FixedPoint(Anderson(rtol=1e-12, atol=0), Implicit())
    gradcheck(cell, layer, sample(3, 2, 3), sample(2, 4, seed=2))


def test_the_gradient_with_respect_to_the_input_reaches_every_earlier_step(named_cell):
    _, cell = named_cell
    x = sample(4, 2, 3).requires_grad_()
    scan(cell, FixedPoint(newton(4, 2), Unrolled()), x).h_n.sum().backward()
    assert (x.grad.abs().amax(2) > 0).all()


# Pairs that make no sense.


REFUSED = [
    (Anderson(), Implicit(), "Anderson with a tolerance"),
    (Picard(), Unrolled(), "Picard with a tolerance"),
    (InexactNewton(2, rtol=1e-3), Unrolled(), "InexactNewton with a tolerance"),
    (InexactNewton(2, learn=False), Implicit(), "Implicit differentiation"),
    (InexactNewton(2, learn=False), Phantom(), "Phantom differentiation"),
    (InexactNewton(2), Unrolled(last=1), r"Unrolled\(last=1\), which cuts the gradient"),
]


@pytest.mark.parametrize(("solver", "backward", "given"), REFUSED)
def test_jordan_refuses_to_forget_the_past(solver, backward, given):
    layer = FixedPoint(solver, backward)
    cell = JordanMap(3, 5)
    remedy = r"use InexactNewton\(max_iter=1 or 2\) with Unrolled\(\), or the self-feedback map"
    with pytest.raises(ValueError, match=f"JordanMap sees h_{{t-1}} only.*{given}.*{remedy}"):
        check_compatible(cell, layer)
    with pytest.raises(ValueError, match=given):
        scan(cell, layer, torch.zeros(2, 1, 3))
    check_compatible(SelfFeedbackMap(3, 5), layer)


@pytest.mark.parametrize(
    ("solver", "backward"),
    [
        (InexactNewton(1), Unrolled()),
        (InexactNewton(2), Unrolled(last=2)),
        (Picard(max_iter=2, rtol=0, atol=0), Unrolled()),
    ],
)
def test_jordan_takes_a_fixed_number_of_unrolled_steps(solver, backward):
    check_compatible(JordanMap(3, 5), FixedPoint(solver, backward))


# Windows that are not finite.


@pytest.fixture(params=["jordan unrolled", "picard unrolled", "anderson implicit"])
def solved(request):
    """A cell with a way to solve it to (nearly) float64 accuracy, T = 4."""
    torch.manual_seed(0)
    if request.param == "jordan unrolled":
        return JordanMap(3, 5).double(), FixedPoint(newton(4, 2), Unrolled())
    cell = SelfFeedbackMap(3, 5, bound=0.5).double().eval()
    if request.param == "picard unrolled":
        return cell, FixedPoint(Picard(rtol=1e-10, atol=0), Unrolled())
    return cell, FixedPoint(Anderson(rtol=1e-10, atol=0), Implicit())


BAD, GOOD = 1, [0, 2, 3]


def spoil(x, h0, where, value):
    """Copies of x (4, 4, 3) and h0 (4, 5) with one bad number, and the first step it spoils."""
    x, h0 = x.clone(), h0.clone()
    if where == "x":
        x[2, BAD, 1] = value
        return x, h0, 2
    h0[BAD, 3] = value
    return x, h0, 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["x", "h0"])
def test_a_bad_window_does_not_touch_its_batch_mates(solved, where, value):
    cell, layer = solved
    x, h0 = sample(4, 4, 3), sample(4, 5, seed=2)
    clean = scan(cell, layer, x, h0)
    bad_x, bad_h0, first = spoil(x, h0, where, value)
    path = scan(cell, layer, bad_x, bad_h0)

    assert torch.equal(path.output[:, GOOD], clean.output[:, GOOD])
    assert torch.equal(path.result[:, GOOD], clean.result[:, GOOD])
    assert torch.equal(path.iterations[:, GOOD], clean.iterations[:, GOOD])
    assert torch.equal(path.output[:first, BAD], clean.output[:first, BAD])
    assert torch.equal(path.result[:first, BAD], clean.result[:first, BAD])
    assert path.output[first:, BAD].isnan().all()
    assert path.h_n[BAD].isnan().all()
    assert (path.result[first:, BAD] == Result.NONFINITE).all()

    without = scan(cell, layer, x[:, GOOD], h0[GOOD])
    # Kernels may sum in another order for another batch size.
    torch.testing.assert_close(path.output[:, GOOD], without.output, rtol=1e-9, atol=1e-12)


def gradients(cell, layer, x, h0, rows):
    """Of a loss over the outputs of some rows, with respect to every parameter, x and h0."""
    x, h0 = x.clone().requires_grad_(), h0.clone().requires_grad_()
    output = scan(cell, layer, x, h0).output[:, rows]
    (output * torch.arange(1, output.numel() + 1).reshape(output.shape)).sum().backward()
    named = {**dict(cell.named_parameters()), **dict(layer.named_parameters())}
    found = {name: p.grad.clone() for name, p in named.items()}
    for p in named.values():
        p.grad = None
    return found, x.grad, h0.grad


@pytest.mark.parametrize("where", ["x", "h0"])
def test_a_bad_window_has_no_part_in_any_gradient(solved, where):
    cell, layer = solved
    x, h0 = sample(4, 4, 3), sample(4, 5, seed=2)
    expected, expected_x, expected_h0 = gradients(cell, layer, x[:, GOOD], h0[GOOD], [0, 1, 2])
    bad_x, bad_h0, _ = spoil(x, h0, where, np.nan)
    found, found_x, found_h0 = gradients(cell, layer, bad_x, bad_h0, GOOD)
    assert set(found) >= {"V", "W", "b"}
    # Each solve is right to 1e-10, each adjoint too.
    for name, gradient in found.items():
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-8 * scale)
        assert scale > 0
    torch.testing.assert_close(found_x[:, GOOD], expected_x, rtol=0, atol=1e-7)
    assert not found_x[:, BAD].any()
    if where == "x":
        torch.testing.assert_close(found_h0[GOOD], expected_h0, rtol=0, atol=1e-7)
    assert not found_h0[BAD].any()


def test_the_finite_part_of_a_bad_window_still_teaches(solved):
    cell, layer = solved
    x, h0, first = spoil(sample(4, 4, 3), sample(4, 5, seed=2), "x", np.nan)
    x.requires_grad_()
    scan(cell, layer, x, h0).output[:first].sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad[:first, BAD].any()
    assert all(p.grad.isfinite().all() for p in cell.parameters())


def test_a_batch_of_bad_windows_only():
    cell, layer = SelfFeedbackMap(3, 5), FixedPoint(Anderson(), Implicit())
    path = scan(cell, layer, torch.full((2, 3, 3), torch.nan))
    assert path.output.isnan().all()
    assert (path.result == Result.NONFINITE).all()
