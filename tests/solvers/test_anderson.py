"""What is particular to Anderson mixing."""

import math

import numpy as np
import pytest
import torch
from support.hard_problems import HARD, STIFF

from fixpoint import Anderson, FixedPoint, Implicit, Newton, Unrolled, solve
from fixpoint.solvers import _weights as weights
from fixpoint.solvers._numbers import ARRAYS

BY_NAME = {p.name: p for p in HARD + STIFF}
TIGHT = {"max_iter": 299, "rtol": 1e-10, "atol": 0.0}


def evaluations(problem, **options):
    solution = solve(problem.phi, problem.z0, Anderson(**TIGHT, **options))
    return solution.evaluations if solution.converged.all() else math.inf


def test_collinear_differences_keep_their_weights():
    # numpy.linalg.lstsq in place of the weights takes 25; normal equations alone end at 2e-3.
    assert evaluations(BY_NAME["slow_modes"], memory=20) <= 25


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_weights_are_those_of_a_dense_least_squares_solve(dtype):
    """Against numpy.linalg.lstsq, with differences that are nearly collinear."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(3, 30, generator=generator, dtype=dtype)
    small = 100 * torch.finfo(dtype).eps ** 0.5
    dG = [base + small * torch.randn(3, 30, generator=generator, dtype=dtype) for _ in range(4)]
    g = torch.randn(3, 30, generator=generator, dtype=dtype)
    none = torch.zeros(3, dtype=dtype)
    gamma, _ = weights.orthogonalize(dG, g, none, 0.0, none + 4)
    for row in range(3):
        columns = torch.stack([x[row] for x in dG], 1)
        best = torch.linalg.lstsq(columns.double(), g[row].double()[:, None], driver="gelsd")
        least = (g[row].double() - columns.double() @ best.solution[:, 0]).norm()
        reached = (g[row].double() - columns.double() @ gamma[:, row].double()).norm()
        assert reached <= (1 + 1e-3) * least


NEAR_SINGULAR = ["near_singular_1e-9", "near_singular_1e-6", "double_root", "triangular_5"]


@pytest.mark.parametrize("name", [*NEAR_SINGULAR, "shift_0.999", "rotations_0.999", "saddle"])
def test_full_memory_solves_what_gmres_solves(name):
    """At most 43 evaluations, those of a QR Anderson on z - z^2, and D + 2 if phi is affine."""
    bound = 50 if name == "double_root" else 23
    assert evaluations(BY_NAME[name], memory=20) <= bound


@pytest.mark.parametrize("problem", HARD + STIFF, ids=lambda p: p.name)
def test_a_larger_memory_is_never_much_worse(problem):
    # Random tanh layers of gain 2 and above have no contraction near their fixed points.
    if problem.name.startswith("tanh_gain") and problem.name[-1] in "236":
        pytest.skip("chaotic: the count depends on rounding")
    counts = [evaluations(problem, memory=m) for m in (5, 10, 20)]
    assert counts[1] <= 1.3 * counts[0]
    assert counts[2] <= 1.3 * counts[1]


@pytest.mark.parametrize(("largest", "bound"), [(30, 80), (100, 170), (300, 300)])
def test_large_negative_eigenvalues_reduce_the_mixing(largest, bound):
    assert evaluations(BY_NAME[f"sloshing_{largest}"]) <= bound


def test_charge_sloshing_at_the_default_tolerance():
    """scipy.optimize.anderson(M=5) needs 71 evaluations."""
    generator = torch.Generator().manual_seed(0)
    Q, _ = torch.linalg.qr(torch.randn(60, 60, generator=generator, dtype=torch.float64))
    K = Q @ torch.diag(torch.logspace(-1, 1.4771, 60, dtype=torch.float64)) @ Q.T
    b = torch.randn(1, 60, generator=generator, dtype=torch.float64)
    solution = solve(lambda z: b - z @ K, torch.zeros_like(b), Anderson(max_iter=3000))
    assert solution.converged.all()
    assert solution.evaluations <= 71


def test_the_careful_path_changes_no_bit_of_a_sample_that_does_not_need_it():
    slow = BY_NAME["slow_modes"]
    easy = 0.5 * torch.linspace(-1, 1, 20, dtype=torch.float64)
    stiff = torch.linspace(-30, 0, 20, dtype=torch.float64)
    options = {"memory": 20, **TIGHT}

    def phi(z, *, mates):
        rows = [easy.expand(len(z), -1)[:1] * z[:1] + 1]
        return torch.cat(rows + ([slow.phi(z[1:2]), stiff * z[2:] + 1] if mates else []))

    z0 = torch.zeros(3, 20, dtype=torch.float64)
    for check_every in (1, 3):
        solver = Anderson(**options, check_every=check_every)
        alone = solve(lambda z: phi(z, mates=False), z0[:1], solver)
        among = solve(lambda z: phi(z, mates=True), z0, solver)
        assert among.converged.all()
        assert torch.equal(among.z[:1], alone.z)
        assert torch.equal(among.iterations[:1], alone.iterations)


def test_gradients_through_collinear_and_rejected_steps():
    """Finite differences of fixed steps of a stiff map with slow modes."""
    spectrum = torch.cat((1 - torch.logspace(-4, -1, 4), torch.tensor([-20.0]))).double()
    layer = FixedPoint(Anderson(max_iter=7, rtol=0.0, atol=0.0, memory=4), Unrolled())

    def run(c):
        z0 = torch.zeros(1, 5, dtype=torch.float64)
        return layer(lambda z: spectrum * z + c * torch.cos(z), z0).z

    c = torch.full((1, 5), 0.1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (c,), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("seed", [1, 12, 19, 21, 35, 38])
def test_collinear_histories_leave_the_gradient_of_unrolled_solves_right(seed):
    """Samples in fewer dimensions than D: their differences are collinear to rounding."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(4, 4, dtype=torch.float64, generator=generator)
    W = (0.4 * W / torch.linalg.matrix_norm(W, 2)).requires_grad_()
    mask = 2.0 * (torch.rand(3, 4, dtype=torch.float64, generator=generator) < 0.5)
    x = torch.randn(3, 4, dtype=torch.float64, generator=generator)

    def gradient(layer):
        z = layer(lambda z: torch.tanh((z @ W.T) * mask + x), torch.zeros_like(x)).check().z
        return torch.autograd.grad(z.sin().sum(), W)[0]

    exact = gradient(FixedPoint(Newton(rtol=1e-13, atol=0.0), Implicit()))
    unrolled = gradient(FixedPoint(Anderson(rtol=1e-12, atol=1e-12, max_iter=200), Unrolled()))
    assert (unrolled - exact).norm() <= 1e-7 * exact.norm()


@pytest.mark.parametrize("ridge", [0.0, 1e-3])
@pytest.mark.parametrize("m", [1, 2, 5, 7])
def test_weights_of_a_batch_have_the_bits_of_its_samples(m, ridge):
    random = np.random.default_rng(m)
    dG = random.standard_normal((40, m, 9)) * 10.0 ** random.integers(-9, 9, (40, m, 1))
    dG[0, 0], dG[1, -1], dG[2], dG[3] = 0, 2 * dG[1, 0], np.inf, np.nan
    with np.errstate(all="ignore"):
        gram = np.einsum("bid,bjd->ijb", dG, dG)
        right = list(np.einsum("bid,bd->ib", dG, random.standard_normal((40, 9))))
        given = [gram[i, i:] for i in range(m)], right, np.full(40, 1e-7), ridge, 0.1
        one_by_one, sound = weights.eliminate(ARRAYS, *given)
        together, also_sound = weights.eliminate_arrays(*given)
    assert np.array_equal(sound, also_sound)
    assert 0 < sound.sum() < 40
    assert np.array_equal(np.array(one_by_one)[:, sound], together[:, sound])
