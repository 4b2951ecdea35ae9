"""The convergence condition and its feasible interval, against NumPy and SciPy."""

import numpy as np
import pytest
import scipy.linalg
import torch

from fixpoint import Picard, solve
from fixpoint.analysis import contraction, feasible_eta, infeasible_reason


def matrix(seed, n=4, *, shift=0.0):
    """A random n x n matrix of norm about 1, plus a multiple of the identity."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, n)) / np.sqrt(n) + shift * np.eye(n)


def affine(J):
    """phi(z) = z J^T + 1, whose Jacobian is J everywhere."""
    weight = torch.from_numpy(J)
    return lambda z: z @ weight.T.to(z.dtype) + 1


def norm(F, eta):
    return np.linalg.svd(np.eye(len(F)) + eta * F, compute_uv=False)[0]


@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("eta", [-0.7, 0.0, 0.01, 1.0, 3.0])
def test_contraction_of_an_affine_map(n, eta):
    J = matrix(0, n)
    given = contraction(affine(J), torch.zeros(3, n, dtype=torch.float64), eta)
    expected = norm(J - np.eye(n), eta)
    np.testing.assert_allclose(given.numpy(), [expected] * 3, rtol=1e-13)


def test_contraction_of_a_curved_map_at_each_sample():
    A, rng = matrix(1, 5), np.random.default_rng(2)
    z, c, eta = rng.normal(size=(3, 5)), rng.normal(size=5), np.array([0.3, -0.4, 1.7])
    weight, offset = torch.from_numpy(A), torch.from_numpy(c)
    given = contraction(
        lambda z: torch.tanh(z @ weight.T + offset), torch.from_numpy(z), torch.from_numpy(eta)
    )
    for row in range(3):
        slope = 1 - np.tanh(A @ z[row] + c) ** 2
        F = np.diag(slope) @ A - np.eye(5)
        assert given[row].item() == pytest.approx(norm(F, eta[row]), rel=1e-13)


def test_contraction_is_the_rate_of_the_worst_direction():
    """||phi_eta(a) - phi_eta(b)|| <= ||I + eta F|| ||a - b||, and some direction attains it."""
    J, eta = matrix(3), 0.6
    phi = affine(J)
    value = contraction(phi, torch.zeros(1, 4, dtype=torch.float64), eta).item()
    v = torch.from_numpy(np.linalg.svd(np.eye(4) + eta * (J - np.eye(4)))[2][:1].copy())
    zero = torch.zeros(1, 4, dtype=torch.float64)

    def step(z):
        return z + eta * (phi(z) - z)

    assert (step(v) - step(zero)).norm().item() == pytest.approx(value, rel=1e-13)


def test_contraction_keeps_the_dtype_and_computes_in_float64():
    """At a norm of 1 + 1e-9 float32 arithmetic would not see the difference from 1."""
    z = torch.zeros(2, 3)
    value = contraction(lambda z: 0.5 * z, z, 1.0)
    assert value.dtype == torch.float32
    assert value.tolist() == [0.5, 0.5]
    assert not value.requires_grad


def test_a_map_that_is_constant():
    z = torch.zeros(2, 3, dtype=torch.float64)
    assert contraction(torch.ones_like, z, 0.25).tolist() == [0.75, 0.75]
    interval = feasible_eta(torch.ones_like, z)
    assert interval.lower.tolist() == [0, 0]
    np.testing.assert_allclose(interval.upper.numpy(), 2, rtol=1e-14)


# The feasible interval. J = F + I.

CASES = {
    "positive": [matrix(seed, shift=-2.5) for seed in range(5)],  # F + F^T < 0: eta > 0
    "negative": [matrix(seed, shift=2.5) for seed in range(5)],
    "indefinite": [matrix(seed) for seed in range(5)],
}
EVERY = [(kind, F) for kind, matrices in CASES.items() for F in matrices]


@pytest.mark.parametrize(("kind", "F"), EVERY)
def test_feasible_eta_against_a_scan(kind, F):
    """Every eta on a fine grid satisfies the condition iff it lies in the interval."""
    phi, z = affine(F + np.eye(4)), torch.zeros(1, 4, dtype=torch.float64)
    lower, upper, feasible = (part[0].item() for part in feasible_eta(phi, z))
    reach = 3.0 if kind == "indefinite" else 1.5 * max(abs(lower), abs(upper))
    grid = np.linspace(-reach, reach, 6001)
    holds = np.array([norm(F, eta) < 1 for eta in grid])
    assert feasible == (kind != "indefinite")
    if not feasible:
        assert np.isnan(lower)
        assert np.isnan(upper)
        assert not holds.any()
        return
    assert (lower == 0) if kind == "positive" else (upper == 0)
    inside = (lower < grid) & (grid < upper)
    # At the ends the norm is 1 and rounding decides.
    ends = np.minimum(abs(grid - lower), abs(grid - upper)) < 1e-9
    np.testing.assert_array_equal(holds[~ends], inside[~ends])
    assert holds.sum() > 1000


@pytest.mark.parametrize(("kind", "F"), [case for case in EVERY if case[0] != "indefinite"])
def test_the_end_of_the_interval(kind, F):
    """The norm is 1 there, and it is SciPy's smallest generalised eigenvalue."""
    interval = feasible_eta(affine(F + np.eye(4)), torch.zeros(1, 4, dtype=torch.float64))
    end = (interval.upper if kind == "positive" else interval.lower).item()
    assert norm(F, end) == pytest.approx(1, abs=1e-12)
    S = -(F + F.T) if kind == "positive" else F + F.T
    smallest = scipy.linalg.eigh(S, F.T @ F, eigvals_only=True)[0]
    assert abs(end) == pytest.approx(smallest, rel=1e-11)


def test_samples_of_all_kinds_in_one_batch():
    """phi(z) = sum over j of weights that differ by row: each row has its own interval."""
    F = np.stack([CASES[kind][0] for kind in ("positive", "indefinite", "negative")])
    J = torch.from_numpy(F + np.eye(4))
    together = feasible_eta(
        lambda z: torch.einsum("bij,bj->bi", J, z), torch.zeros(3, 4, dtype=torch.float64)
    )
    assert together.feasible.tolist() == [True, False, True]
    for row in range(3):
        alone = feasible_eta(affine(J[row].numpy()), torch.zeros(1, 4, dtype=torch.float64))
        for given, expected in zip(together[:2], alone[:2], strict=True):
            torch.testing.assert_close(given[row], expected[0], rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize("slope", [-3.0, 0.5, 0.999, 1.5])
def test_one_unit(slope):
    """|1 + eta (slope - 1)| < 1 between 0 and 2 / (1 - slope)."""
    interval = feasible_eta(lambda z: slope * z, torch.zeros(1, 1, dtype=torch.float64))
    ends = sorted([0.0, 2 / (1 - slope)])
    assert [interval.lower.item(), interval.upper.item()] == pytest.approx(ends, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_step_is_feasible_where_a_direction_does_not_move(dtype):
    """I - J singular up to rounding: some eigenvalue of J is 1."""
    generator = torch.Generator().manual_seed(0)
    for D in range(2, 30):
        Q = torch.linalg.qr(torch.randn(D, D, generator=generator, dtype=torch.float64))[0]
        slopes = 2 * torch.rand(D, generator=generator, dtype=torch.float64) - 1
        slopes[-1] = 1
        J = ((Q * slopes) @ Q.mT).to(dtype)
        assert not feasible_eta(
            lambda z, J=J: z @ J, torch.zeros(1, D, dtype=dtype)
        ).feasible.item()


def test_no_step_is_feasible_for_the_identity_map():
    interval = feasible_eta(lambda z: z, torch.zeros(1, 3))
    assert not interval.feasible.item()
    assert interval.lower.isnan().all()
    assert interval.upper.dtype == torch.float32


@pytest.mark.parametrize(("fraction", "converges"), [(0.9, True), (1.1, False)])
def test_the_interval_predicts_a_damped_iteration(fraction, converges):
    """For a symmetric F the 2-norm is the spectral radius, so the prediction is sharp."""
    J = matrix(5)
    J = (J + J.T) / 4
    phi, z = affine(J), torch.zeros(1, 4, dtype=torch.float64)
    eta = fraction * feasible_eta(phi, z).upper.item()
    solution = solve(phi, z, Picard(beta=eta, max_iter=400, rtol=1e-10, atol=0))
    assert solution.converged.item() == converges


# Large D, by products alone.


def wide(D, seed=0, *, gap=True):
    """A D x D matrix: non-normal, one singular value standing out or a dense spectrum."""
    rng = np.random.default_rng(seed)
    J = rng.normal(size=(D, D)) / np.sqrt(D)
    if gap:
        J += 3 * np.outer(rng.normal(size=D), rng.normal(size=D)) / D
    return J


def products(phi, z, eta, **options):
    generator = torch.Generator().manual_seed(0)
    return contraction(phi, z, eta, dense=0, generator=generator, **options)


@pytest.mark.parametrize("eta", [-0.7, 0.0, 0.01, 1.0])
def test_lanczos_where_a_singular_value_stands_out(eta):
    J = wide(200)
    given = products(affine(J), torch.zeros(2, 200, dtype=torch.float64), eta)
    np.testing.assert_allclose(given.numpy(), norm(J - np.eye(200), eta), rtol=1e-9)


@pytest.mark.parametrize("memory", [16, 64])
def test_lanczos_is_within_its_bound_from_below(memory):
    """No gap at all: the expected error of the square is bounded; no start of ten exceeds it."""
    D = 300
    J = wide(D, gap=False)
    exact = norm(J - np.eye(D), 0.9) ** 2
    bound = 0.103 * (np.log(D * (memory - 1) ** 4) / (memory - 1)) ** 2
    given = products(affine(J), torch.zeros(10, D, dtype=torch.float64), 0.9, memory=memory).numpy()
    error = 1 - given**2 / exact
    assert (error > -1e-12).all()
    assert error.max() < bound
    assert error.max() > 1e-15  # not the dense path in disguise


def test_lanczos_with_a_whole_basis_is_exact_at_each_sample():
    """A curved map, eta of each row its own, and rows that do not mix."""
    A, rng = matrix(1, 12), np.random.default_rng(2)
    z, eta = torch.from_numpy(rng.normal(size=(3, 12))), torch.tensor([0.3, -0.4, 1.7])
    weight = torch.from_numpy(A)

    def phi(z):
        return torch.tanh(z @ weight.T)

    torch.testing.assert_close(products(phi, z, eta), contraction(phi, z, eta), rtol=1e-12, atol=0)


def test_lanczos_of_a_constant_map_and_of_a_sample_that_is_not_finite():
    z = torch.zeros(2, 30, dtype=torch.float64)
    for constant in (torch.ones_like, lambda z: 0 * z + 1):
        np.testing.assert_allclose(products(constant, z, 0.25).numpy(), 0.75, rtol=1e-14)
    x = torch.tensor([[1.0], [torch.nan]])
    given = products(lambda z: 0.5 * x * z, torch.zeros(2, 30), 1.0)
    assert given[0].item() == pytest.approx(0.5, rel=1e-6)
    assert given[1].isnan()
    assert given.dtype == torch.float32


def test_the_default_switches_above_512():
    z = torch.zeros(1, 513, dtype=torch.float64)
    calls = []

    def phi(z):
        calls.append(len(z))
        return 0.5 * z

    generator = torch.Generator().manual_seed(0)
    assert contraction(phi, z, 1.0, generator=generator).item() == pytest.approx(0.5, rel=1e-12)
    assert len(calls) == 1 + 64


def test_bad_values():
    with pytest.raises(ValueError, match="memory must be at least 2; got 1"):
        contraction(torch.tanh, torch.zeros(1, 1), 1.0, memory=1)


# Why no eta is feasible.


@pytest.mark.parametrize(
    ("F", "words"),
    [
        (np.diag([-1.0, -2.0]), ""),
        (np.diag([-1.0, 2.0]), "/ 2 span -1 .. 2; no other norm helps"),
        # Eigenvalues -1, -1, but strongly non-normal: S is indefinite.
        (
            np.array([[-1.0, 8.0], [0.0, -1.0]]),
            "span -5 .. 3; in another norm a small positive eta",
        ),
        (np.array([[1.0, 8.0], [0.0, 1.0]]), "span -3 .. 5; in another norm a small negative eta"),
        (np.diag([-1.0, 0.0]), "span -1 .. 0; no other norm helps"),
        (np.diag([-1.0, np.nan]), "the Jacobian is not finite"),
    ],
)
def test_the_reason_where_no_eta_is_feasible(F, words):
    phi, z = affine(F + np.eye(2)), torch.zeros(1, 2, dtype=torch.float64)
    (reason,) = infeasible_reason(phi, z)
    assert words in reason
    assert (reason == "") == (words == "") == feasible_eta(phi, z).feasible.item()


def test_another_norm_does_what_the_reason_says():
    """rho(I + eta F) < 1 for a small positive eta although no 2-norm is below 1."""
    F = np.array([[-1.0, 8.0], [0.0, -1.0]])
    assert all(norm(F, eta) > 1 for eta in np.linspace(0.01, 2, 50))
    assert np.abs(np.linalg.eigvals(np.eye(2) + 0.1 * F)).max() < 1
