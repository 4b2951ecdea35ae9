"""Affine scans against the loop that defines them, forward and transposed."""

import pytest
import torch

from fixpoint.sequence.affine_scan import (
    DenseScan,
    DiagonalScan,
    ScalarScan,
    ZeroScan,
    diagonal_scan,
    doubling_scan,
)

LENGTHS = (1, 2, 3, 31, 32, 33, 64, 65, 1000, 1025)
B, n = 2, 3


def dense_form(a, r):
    """A of any form as matrices, (T, B, n, n)."""
    one = torch.eye(n, dtype=torch.float64)
    return {1: lambda: a[:, None, None, None] * one, 3: lambda: a.diag_embed(), 4: lambda: a}[
        a.dim()
    ]().expand(len(r), B, n, n)


def reference(a, r):
    states, state = [], torch.zeros(B, n, dtype=torch.float64)
    for a_t, r_t in zip(dense_form(a, r), r, strict=True):
        state = (a_t @ state.unsqueeze(-1)).squeeze(-1) + r_t
        states.append(state)
    return torch.stack(states)


def factors(kind, T):
    shape = {"scalar": (T,), "diagonal": (T, B, n), "dense": (T, B, n, n)}[kind]
    a = torch.rand(shape, dtype=torch.float64) * 2.4 - 1.2  # also negative and above 1
    a[T // 2] = 0.0
    return a / (1 if kind != "dense" else 2)


SCANS = {"scalar": ScalarScan, "diagonal": DiagonalScan, "dense": DenseScan}


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("kind", SCANS)
def test_a_scan_equals_the_loop(kind, T):
    a, r = factors(kind, T), torch.randn(T, B, n, dtype=torch.float64)
    torch.testing.assert_close(
        SCANS[kind](a).forward(r.clone()), reference(a, r), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("kind", SCANS)
def test_transposed_is_the_transpose(kind, T):
    a = factors(kind, T)
    v, w = torch.randn(2, T, B, n, dtype=torch.float64)
    scan = SCANS[kind](a)
    left = (w * scan.forward(v.clone())).sum()
    right = (scan.transposed(w.clone()) * v).sum()
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["diagonal", "dense"])
def test_transposed_with_a_scale(kind):
    a, scale = factors(kind, 7), factors(kind, 7)
    v, w = torch.randn(2, 7, B, n, dtype=torch.float64)
    scan = SCANS[kind](a, scale)
    left = (w * scan.forward(v.clone())).sum()
    torch.testing.assert_close(left, (scan.transposed(w.clone()) * v).sum())
    matrices = dense_form(scale, v)
    scaled = (matrices @ v.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(scan.forward(v.clone()), reference(a, scaled))


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("kind", ["diagonal", "dense"])
def test_the_scan_by_doubling_equals_the_loop(kind, T):
    a, r = factors(kind, T), torch.randn(T, B, n, dtype=torch.float64)
    torch.testing.assert_close(doubling_scan(a, r), reference(a, r), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", SCANS)
def test_selected_samples(kind):
    a, r = factors(kind, 9), torch.randn(9, B, n, dtype=torch.float64)
    chosen = torch.tensor([1])
    whole = SCANS[kind](a).forward(r.clone())
    part = SCANS[kind](a).select(chosen).forward(r[:, chosen].clone())
    torch.testing.assert_close(part, whole[:, chosen])


def test_zero_scan():
    r = torch.randn(4, B, n)
    assert torch.equal(ZeroScan().forward(r), r)
    assert torch.equal(ZeroScan().transposed(r), r)


def test_scalar_scan_of_extreme_factors():
    """No quotient of cumulative products: they would be 0 / 0 here."""
    a = torch.full((2000,), 1e-30)
    r = torch.ones(2000, 1, 1)
    assert torch.equal(ScalarScan(a).forward(r.clone()), r)
    a[::3] = 0.0
    assert ScalarScan(a).forward(r.clone()).isfinite().all()


def test_diagonal_scan_reversed():
    a, r = factors("diagonal", 5), torch.randn(5, B, n, dtype=torch.float64)
    expected = [r[4]]
    for t in (3, 2, 1, 0):
        expected.insert(0, a[t + 1] * expected[0] + r[t])
    torch.testing.assert_close(diagonal_scan(a, r, reverse=True), torch.stack(expected))
