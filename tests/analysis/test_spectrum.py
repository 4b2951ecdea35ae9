"""The spectral radius, against NumPy's eigenvalues."""

import math

import numpy as np
import pytest
import torch

from fixpoint import Picard, solve
from fixpoint.analysis import eigenvalues, spectral_radius

KRYLOV = {"memory": 64, "power_steps": 64}


def rotation(scale, degrees):
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return scale * np.array([[c, -s], [s, c]])


def linear(J):
    """phi(z) = z J^T of the state's dtype."""
    weight = torch.from_numpy(np.asarray(J, dtype=float))
    return lambda z: z @ weight.T.to(z.dtype)


def zeros(B, D):
    return torch.zeros(B, D, dtype=torch.float64)


def radius(J, **options):
    generator = torch.Generator().manual_seed(0)
    return spectral_radius(linear(J), zeros(1, len(J)), generator=generator, **options).item()


def embedded(J, D, rest):
    """J and a random matrix of spectral radius `rest`, mixed by an ill-conditioned basis."""
    rng = np.random.default_rng(0)
    other = rng.normal(size=(D - len(J), D - len(J)))
    other *= rest / np.abs(np.linalg.eigvals(other)).max()
    whole = np.zeros((D, D))
    whole[: len(J), : len(J)], whole[len(J) :, len(J) :] = J, other
    whole[: len(J), len(J) :] = rng.normal(size=(len(J), D - len(J)))  # non-normal
    basis = np.linalg.qr(rng.normal(size=(D, D)))[0]
    return basis @ whole @ basis.T


# Known answers.

KNOWN = [
    ("a complex pair whose Rayleigh quotient is 0.149", rotation(0.95, 81), 0.95),
    ("a quarter turn", rotation(0.7, 90), 0.7),
    ("half a turn", -0.8 * np.eye(3), 0.8),
    ("zero", np.zeros((4, 4)), 0.0),
    ("nilpotent", np.diag(np.ones(4), 1), 0.0),
    ("nilpotent of a large norm", 100 * np.diag(np.ones(4), 1), 0.0),
    ("identity", np.eye(5), 1.0),
    ("both signs", np.diag([0.9, -0.9, 0.1]), 0.9),
    ("one unit", np.array([[-1.5]]), 1.5),
]


@pytest.mark.parametrize(("what", "J", "expected"), KNOWN, ids=[name for name, *_ in KNOWN])
def test_known_answers_by_eigenvalues(what, J, expected):
    assert radius(J) == pytest.approx(expected, rel=1e-14, abs=1e-14)


@pytest.mark.parametrize(
    ("J", "expected"),
    [
        (embedded(rotation(0.95, 81), 100, 0.6), 0.95),
        (embedded(np.diag([-0.9]), 100, 0.6), 0.9),
        (embedded(np.diag([0.9, -0.9]), 100, 0.6), 0.9),
        (embedded(np.eye(1), 100, 0.6), 1.0),
        # Five eigenvalues on one circle.
        (embedded(0.9 * np.roll(np.eye(5), 1, 0), 100, 0.6), 0.9),
    ],
)
def test_arnoldi_on_known_answers(J, expected):
    """The rest falls by 0.63 a product, by 1e-13 over 64: what remains is rounding times the
    condition of the eigenvalue."""
    assert radius(J, memory=20) == pytest.approx(expected, rel=1e-9)


def test_two_vectors_after_many_power_steps_find_a_complex_pair():
    """(0.6 / 0.95)^100 = 1e-20."""
    J = embedded(rotation(0.95, 81), 100, 0.6)
    assert radius(J, memory=2, power_steps=100) == pytest.approx(0.95, rel=1e-9)


@pytest.mark.parametrize("power_steps", [0, 5, 64])
def test_zero_and_nilpotent_maps_by_arnoldi(power_steps):
    assert radius(np.zeros((90, 90)), memory=20, power_steps=power_steps) == 0
    shift = np.zeros((90, 90))
    shift[0, 1] = shift[1, 2] = 3.0  # shift^3 = 0
    # A nilpotent H of index 3 is known to (eps ||J||)^(1/3).
    limit = 3 * (3 * 2e-16) ** (1 / 3)
    assert radius(shift, memory=20, power_steps=power_steps) < limit


# Random matrices.


@pytest.mark.parametrize("D", [1, 2, 5, 40])
def test_all_eigenvalues_of_random_non_normal_matrices(D):
    rng = np.random.default_rng(D)
    J = np.triu(rng.normal(size=(D, D)), -1)
    expected = np.abs(np.linalg.eigvals(J)).max()
    assert radius(J) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("D", "accuracy", "matrices"), [(200, 1e-6, 3), (1000, 6e-3, 1)])
def test_arnoldi_on_random_matrices(D, accuracy, matrices):
    """Dense Gaussian matrices, eigenvalues filling a disc: the stated accuracy holds."""
    for seed in range(matrices):
        rng = np.random.default_rng(seed)
        J = rng.uniform(0, 1, size=(D, 1)) * rng.normal(size=(D, D)) / D**0.5
        expected = np.abs(np.linalg.eigvals(J)).max()
        assert radius(J, **KRYLOV) == pytest.approx(expected, rel=accuracy)


def test_a_batch_has_a_krylov_space_for_each_sample():
    """A curved map: each row's J is its own, and the rows of a batch do not mix."""
    rng = np.random.default_rng(3)
    A, z = rng.normal(size=(80, 80)) / 8, rng.normal(size=(4, 80))
    weight = torch.from_numpy(A)

    def phi(z):
        return torch.tanh(z @ weight.T)

    slope = 1 - np.tanh(z @ A.T) ** 2
    expected = [np.abs(np.linalg.eigvals(row[:, None] * A)).max() for row in slope]
    assert max(expected) - min(expected) > 0.01
    generator = torch.Generator().manual_seed(0)
    for memory, rel in ((80, 1e-10), (50, 1e-4)):
        given = spectral_radius(phi, torch.from_numpy(z), memory=memory, generator=generator)
        np.testing.assert_allclose(given.numpy(), expected, rtol=rel)


def test_samples_that_are_spent_do_not_disturb_the_others():
    """J = 0, a multiple of the identity, and a full matrix in one batch, by Arnoldi."""
    full = embedded(rotation(0.95, 81), 90, 0.6)
    J = torch.from_numpy(np.stack([np.zeros((90, 90)), 0.5 * np.eye(90), full]))
    given = spectral_radius(lambda z: torch.einsum("bij,bj->bi", J, z), zeros(3, 90), memory=20)
    np.testing.assert_allclose(given.numpy(), [0, 0.5, 0.95], rtol=1e-9)


@pytest.mark.parametrize("memory", [8, 2])
def test_a_sample_with_nan_spoils_no_other(memory, capfd):
    x = torch.tensor([[1.0], [torch.nan], [1.0]])
    given = spectral_radius(lambda z: 0.5 * x * z, torch.zeros(3, 4), memory=memory)
    assert given.isnan().tolist() == [False, True, False]
    torch.testing.assert_close(given[[0, 2]], torch.tensor([0.5, 0.5]))
    assert "".join(capfd.readouterr()) == ""  # LAPACK has nothing to complain about


# Everything else.


def test_phi_is_evaluated_once_and_no_gradient_is_left():
    A = torch.randn(90, 90, requires_grad=True)
    calls = []
    given = spectral_radius(lambda z: calls.append(1) or torch.tanh(z @ A), torch.zeros(2, 90))
    assert len(calls) == 1
    assert not given.requires_grad
    assert A.grad is None


@pytest.mark.parametrize("memory", [2, 64])
def test_maps_that_do_not_depend_on_z(memory):
    weight = torch.ones(9, requires_grad=True)
    for phi in (torch.ones_like, lambda z: weight.expand(2, 9)):
        assert spectral_radius(phi, torch.zeros(2, 9), memory=memory).tolist() == [0, 0]


def test_tree_and_unbatched():
    z = (torch.zeros(2, 3), {"x": torch.zeros(2, 1, 2)})
    given = spectral_radius(lambda z: (0.3 * z[0], {"x": -0.6 * z[1]["x"]}), z)
    torch.testing.assert_close(given, torch.tensor([0.6, 0.6]))
    one = spectral_radius(lambda z: 0.3 * z, torch.zeros(3, 2), batched=False)
    torch.testing.assert_close(one, torch.tensor([0.3]))


def test_empty_batch():
    assert spectral_radius(torch.tanh, torch.zeros(0, 3)).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype):
    """Products in the dtype: the error is a few of its roundings."""
    z = torch.zeros(2, 90, dtype=dtype)
    given = spectral_radius(lambda z: -0.75 * z, z, memory=4)
    assert given.dtype == dtype
    np.testing.assert_allclose(given.float(), 0.75, rtol=4 * torch.finfo(dtype).eps)


def test_it_is_the_rate_of_plain_iteration():
    """log of the residual falls by log rho an update: mean over updates 100 .. 200."""
    J = embedded(np.diag([0.9]), 30, 0.5)
    phi = linear(J)
    solver = Picard(max_iter=200, rtol=0.0, atol=0.0, record="iterates")
    start = torch.ones(1, 30, dtype=torch.float64)
    path = solve(phi, start, solver).trace.iterates
    rate = (path[200].norm() / path[100].norm()) ** 0.01
    assert radius(J) == pytest.approx(rate.item(), rel=1e-9)


def test_bad_values():
    with pytest.raises(ValueError, match="memory must be at least 1; got 0"):
        spectral_radius(torch.tanh, torch.zeros(1, 1), memory=0)
    with pytest.raises(ValueError, match="power_steps must be at least 0; got -1"):
        spectral_radius(torch.tanh, torch.zeros(1, 1), power_steps=-1)


def test_all_eigenvalues_of_each_sample():
    J = torch.from_numpy(np.stack([rotation(0.95, 81), np.diag([0.2, -3.0])]))
    given = eigenvalues(lambda z: torch.einsum("bij,bj->bi", J, z), zeros(2, 2))
    c, s = 0.95 * math.cos(math.radians(81)), 0.95 * math.sin(math.radians(81))
    np.testing.assert_allclose(
        sorted(given[0].tolist(), key=lambda v: v.imag), [c - 1j * s, c + 1j * s]
    )
    np.testing.assert_allclose(given[1].numpy(), [-3, 0.2])
    x = torch.tensor([[1.0], [torch.nan]])
    given = eigenvalues(lambda z: 0.5 * x * z, torch.zeros(2, 3))
    assert given[0].tolist() == [0.5] * 3
    assert given[1].isnan().all()
