"""The table of problems: answers, kinds and the ways in which phi may be called."""

import math

import pytest
import torch
from scipy.optimize import brentq, least_squares, root
from support.problems import PROBLEMS, PROBLEMS_BY_NAME, ROOTS, SINGULAR, Problem, watson
from torch import Tensor
from torch.func import jacrev, jvp, vmap

EPS = torch.finfo(torch.float64).eps
KINDS = ("contraction", "map", "root", "hard", "none")
SEVERAL_ROOTS_UNLISTED = {"wood", "trigonometric", "hammarling_3", "sample_18"}

# Which method of scipy.optimize.root solves a start, where it is not hybr: (problem, row of z0).
# None: both end at a point that is no root (a local minimum of ||F||, or their budget is spent).
SCIPY = {
    ("log_domain", 1): "lm",
    ("diverging_cubic", 0): None,
    ("generalized_rosenbrock", 0): None,
    ("generalized_rosenbrock", 1): None,
    ("trigonometric", 0): None,
    ("trigonometric", 1): None,
    ("freudenstein_roth", 0): None,
    ("freudenstein_roth", 1): None,
    ("hammarling_2", 0): None,
    ("hammarling_3", 0): None,
}


def over(problems: list[Problem]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("problem", problems, ids=lambda p: p.name)


def of_kind(*kinds: str) -> list[Problem]:
    return [p for p in PROBLEMS if p.kind in kinds]


def answers(problem: Problem) -> Tensor | None:
    """All known roots, one a row."""
    return ROOTS.get(problem.name, None if problem.root is None else problem.root[:1])


def scale(z: Tensor) -> float:
    return max(1.0, z.abs().max().item())


def jacobian(problem: Problem, z: Tensor) -> Tensor:
    """d phi / dz (D, D) at one point (D,)."""
    return jacrev(lambda x: problem.phi(x[None])[0])(z)


def newton_matrix(problem: Problem, z: Tensor) -> Tensor:
    return torch.eye(z.numel(), dtype=z.dtype) - jacobian(problem, z)


def norm(A: Tensor) -> float:
    return A.abs().sum(-1).max().item()


def rounding(problem: Problem, z: Tensor) -> float:
    """How well the residual can be evaluated in float64, from the sizes of z and of J z."""
    return 4 * EPS * scale(z) * (1 + norm(jacobian(problem, z)))


def error_bound(problem: Problem, answer: Tensor, residual: float) -> float:
    """How far from the answer a point with this residual may be."""
    residual += rounding(problem, answer)
    if problem.name in SINGULAR:
        return 10 * residual ** (1 / SINGULAR[problem.name])
    return 2 * norm(torch.linalg.inv(newton_matrix(problem, answer))) * residual


def start_near(problem: Problem) -> Tensor:
    """A point (1, D) close to the first start and off its symmetries."""
    D = problem.z0.shape[1]
    return problem.z0[:1] + 0.01 * torch.cos(torch.arange(1, D + 1, dtype=torch.float64))


def test_table_is_complete_and_well_formed():
    assert len(PROBLEMS) == len(PROBLEMS_BY_NAME) >= 45
    for p in PROBLEMS:
        assert PROBLEMS_BY_NAME[p.name] is p
        assert p.kind in KINDS
        assert p.source
        assert p.z0.dtype == torch.float64
        assert p.z0.ndim == 2
        assert 1 <= len(p.z0) <= 4
        assert p.phi(p.z0).shape == p.z0.shape
        if p.root is not None:
            assert p.root.dtype == torch.float64
            assert p.root.shape == p.z0.shape
            assert p.name not in ROOTS
    assert {p.z0.shape[1] for p in PROBLEMS} >= {1, 2, 5, 100}
    assert {p.kind for p in PROBLEMS} == set(KINDS)
    assert set(SINGULAR) | set(ROOTS) <= set(PROBLEMS_BY_NAME)
    unanswered = {p.name for p in PROBLEMS if answers(p) is None and p.kind != "none"}
    assert unanswered == SEVERAL_ROOTS_UNLISTED


@over([p for p in PROBLEMS if answers(p) is not None])
def test_answers_are_fixed_points_to_twelve_digits(problem):
    for z in answers(problem):
        residual = problem.phi(z[None])[0] - z
        assert residual.abs().max() <= 1e-12 * scale(z)
        if problem.name in SINGULAR:
            continue
        # The Newton correction is the error of the answer, up to the rounding of the residual.
        A = newton_matrix(problem, z)
        noise = norm(torch.linalg.inv(A)) * rounding(problem, z)
        assert torch.linalg.solve(A, residual).abs().max() <= 1e-12 * scale(z) + noise


@over([p for p in PROBLEMS if answers(p) is not None])
def test_singular_problems_are_those_listed(problem):
    smallest = [torch.linalg.svdvals(newton_matrix(problem, z))[-1] for z in answers(problem)]
    assert (min(smallest) < 1e-12) == (problem.name in SINGULAR)


def solved_by_scipy(problem: Problem, z0: Tensor, method: str) -> bool:
    """Whether scipy.optimize.root reaches a known root.

    Judged by the residual: `success` is also False where rounding ends the progress at a root.
    """
    found = root(
        lambda x: (problem.phi(torch.from_numpy(x)[None])[0] - torch.from_numpy(x)).numpy(),
        z0.numpy(),
        method=method,
        tol=1e-14,
    )
    z, residual = torch.from_numpy(found.x), abs(found.fun).max()
    if not residual <= 1e-8 * scale(z):
        return False
    known = answers(problem)
    if known is None:
        return True
    nearest = known[(known - z).abs().amax(-1).argmin()]
    assert (z - nearest).abs().max() <= error_bound(problem, nearest, residual)
    return True


@over(of_kind("contraction", "map", "root", "hard"))
def test_scipy_finds_the_same_root(problem):
    for row, z0 in enumerate(problem.z0):
        solved = (m for m in ("hybr", "lm") if solved_by_scipy(problem, z0, m))
        assert next(solved, None) == SCIPY.get((problem.name, row), "hybr")


@over(of_kind("contraction"))
def test_plain_iteration_converges_on_contractions(problem):
    z, steps = problem.z0, 0
    while (problem.phi(z) - z).abs().max() > 1e-13 * scale(problem.root) and steps < 5000:
        z, steps = problem.phi(z), steps + 1
    assert steps < 5000
    bound = error_bound(problem, problem.root[0], 1e-13 * scale(problem.root))
    assert (z - problem.root).abs().max() <= bound
    assert torch.linalg.eigvals(jacobian(problem, problem.root[0])).abs().max() < 1


@pytest.mark.parametrize(
    "name", ["rotation_1.05", "affine_expanding", "reflection", "logistic", "diverging_cubic"]
)
def test_plain_iteration_fails_where_the_table_says_so(name):
    problem = PROBLEMS_BY_NAME[name]
    z = problem.z0
    for _ in range(500):
        z = problem.phi(z)
    assert not ((problem.phi(z) - z).abs().amax(-1) < 1e-3).any()


def newton_is_easy(problem: Problem, z: Tensor) -> bool:
    """At most 20 undamped Newton steps, each with a Jacobian of condition below 1e7."""
    for _ in range(21):
        residual = problem.phi(z[None])[0] - z
        if residual.abs().max() <= 1e-12 * scale(z):
            return True
        A = newton_matrix(problem, z)
        if not A.isfinite().all() or torch.linalg.cond(A) > 1e7:
            return False
        z = z + torch.linalg.solve(A, residual)
    return False


@over(of_kind("root", "hard"))
def test_newton_tells_root_from_hard(problem):
    easy = all(newton_is_easy(problem, z) for z in problem.z0)
    assert (easy and problem.name not in SINGULAR) == (problem.kind == "root")


@over(PROBLEMS)
def test_rows_do_not_see_each_other(problem):
    z = torch.cat([problem.z0, start_near(problem), torch.full_like(problem.z0[:1], math.nan)])
    whole, single = problem.phi(z), torch.cat([problem.phi(row[None]) for row in z])
    # a sum of D terms, its order left to the kernel
    tolerance = z.shape[1] * 8 * EPS * scale(single.nan_to_num())
    torch.testing.assert_close(whole, single, rtol=0, atol=tolerance, equal_nan=True)
    assert whole[-2].isfinite().all() or problem.name == "nan_row"
    assert problem.phi(z[:0]).shape == (0, z.shape[1])


@over(PROBLEMS)
def test_phi_runs_in_float32(problem):
    z = start_near(problem).float()
    fz = problem.phi(z)
    assert fz.dtype == torch.float32
    if problem.name != "nan_row":
        expected = problem.phi(z.double())
        # rounding of z reaches phi through J, rounding of constants through sums of D terms
        size = scale(expected) + norm(jacobian(problem, z[0].double())) * scale(z)
        bound = 4 * torch.finfo(torch.float32).eps * (1 + z.shape[1] ** 0.5) * size
        assert (fz.double() - expected).abs().max() <= bound


# Forward mode loads torch's own scripted decompositions on its first use.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@over(PROBLEMS)
def test_derivatives(problem):
    z = start_near(problem).requires_grad_()
    assert torch.autograd.gradcheck(problem.phi, z)
    z = z.detach()
    batch = torch.cat([z, z + 0.01])
    J = vmap(jacrev(lambda x: problem.phi(x[None])[0]))(batch)  # (2, D, D)
    v = torch.cos(batch)
    _, Jv = jvp(problem.phi, (batch,), (v,))
    bound = 1e-13 * z.shape[1] * max(1.0, norm(J))
    torch.testing.assert_close((J @ v[..., None])[..., 0], Jv, rtol=0, atol=bound)
    torch.testing.assert_close(J[0], jacobian(problem, z[0]), rtol=0, atol=bound)


@pytest.mark.parametrize(("name", "least"), [("exponential", 1.0), ("parabola", 0.75)])
def test_nothing_to_find(name, least):
    z = torch.linspace(-30, 30, 60001, dtype=torch.float64)[:, None]
    residual = PROBLEMS_BY_NAME[name].phi(z) - z
    assert residual.min() == pytest.approx(least, abs=1e-6)


def test_translation_has_residual_one():
    problem = PROBLEMS_BY_NAME["translation"]
    assert (problem.phi(problem.z0) - problem.z0 == 1).all()


def test_chebyquad_8_has_its_published_least_residual():
    problem = PROBLEMS_BY_NAME["chebyquad_8"]
    found = least_squares(
        lambda x: (problem.phi(torch.from_numpy(x)[None])[0] - torch.from_numpy(x)).numpy(),
        problem.z0[0].numpy(),
        xtol=1e-12,
    )
    assert 2 * found.cost == pytest.approx(3.51687e-3, abs=5e-9)


def test_nan_row_leaves_two_good_rows():
    problem = PROBLEMS_BY_NAME["nan_row"]
    z = problem.z0
    for _ in range(100):
        z = problem.phi(z)
    expected = PROBLEMS_BY_NAME["cosine"].root[0].expand(2, 2)
    torch.testing.assert_close(z[[0, 2]], expected, rtol=0, atol=1e-14)
    assert z[1].isnan().all()


# Facts about single problems that do not come from the code under test.


def test_cubic_root_is_cardanos():
    d = math.sqrt(1 / 4 - 1 / 216)
    expected = (0.5 + d) ** (1 / 3) + (0.5 - d) ** (1 / 3)
    assert PROBLEMS_BY_NAME["cubic"].root[0].item() == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize(
    ("name", "c"),
    [("chandrasekhar", 0.9), ("chandrasekhar_critical", 1.0), ("chandrasekhar_d100", 0.99)],
)
def test_chandrasekhar_integral(name, c):
    """The mean of H is 2 (1 - sqrt(1 - c)) / c, exactly so for the discrete equation."""
    H = PROBLEMS_BY_NAME[name].root[0]
    assert H.mean().item() == pytest.approx(2 * (1 - math.sqrt(1 - c)) / c, abs=1e-13)


@pytest.mark.parametrize(("name", "lam"), [("bratu_1d", 1.0), ("bratu_1d_fold", 3.5)])
def test_bratu_is_near_the_exact_solution(name, lam):
    """u(x) = 2 log(cosh(t / 4) / cosh(t (x - 1/2) / 2)), t = sqrt(2 lam) cosh(t / 4), least t."""
    u = PROBLEMS_BY_NAME[name].root[0]
    n = u.numel()
    # t - sqrt(2 lam) cosh(t / 4) rises from below 0 up to t_top: the least root lies before it
    t_top = 4 * math.asinh(4 / math.sqrt(2 * lam))
    t = brentq(lambda t: t - math.sqrt(2 * lam) * math.cosh(t / 4), 0, t_top)
    x = torch.arange(1, n + 1, dtype=torch.float64) / (n + 1)
    exact = 2 * torch.log(math.cosh(t / 4) / torch.cosh(t * (x - 0.5) / 2))
    # Second order: the truncation h^2 / 12 max |d^4 u / dx^4| times the norm of the inverse
    # operator, which is h^2 / 3 (I - J)^-1 for this phi. The derivative is
    # lam e^u (lam e^u - u'^2), and u'^2 <= 2 lam e^max(u). Half as much again for curvature.
    h2, top = 1 / (n + 1) ** 2, lam * exact.max().exp()
    inverse = h2 / 3 * norm(torch.linalg.inv(newton_matrix(PROBLEMS_BY_NAME[name], u)))
    assert (u - exact).abs().max() <= 1.5 * inverse * h2 / 12 * 2 * top**2


def test_bratu_2d_solves_the_five_point_equations():
    u, n = PROBLEMS_BY_NAME["bratu_2d"].root[0], 7
    ones = torch.ones(n - 1, dtype=torch.float64)
    L = 2 * torch.eye(n, dtype=torch.float64) - torch.diag(ones, 1) - torch.diag(ones, -1)
    eye = torch.eye(n, dtype=torch.float64)
    A = torch.kron(L, eye) + torch.kron(eye, L)
    assert (A @ u - 5.0 * u.exp() / (n + 1) ** 2).abs().max() <= 1e-13


@pytest.mark.parametrize(
    ("name", "factor", "squares"),
    [
        ("generalized_rosenbrock", 1, 24.2),
        ("freudenstein_roth", 1, 400.5),
        ("powell_badly_scaled", 1, 1 + (math.exp(-1) - 1e-4) ** 2),
        ("helical_valley", 1, 2500),
        ("powell_singular", 1, 215),
        ("brown_almost_linear", 1, 9 * 5.5**2 + (1 - 0.5**10) ** 2),
        ("broyden_tridiagonal", 6, 21),
        ("broyden_banded", 8, 360),
        ("scipy_f", 2, 17.3125),
        ("scipy_f3", 2, 54),
        ("scipy_f4", 1, 19999**2 + (math.exp(2) + math.exp(1) - 1.0001) ** 2),
        ("scipy_f5", 1, 8),
        ("scipy_f6", 1, 1.0561748302571710),
    ],
)
def test_sum_of_squares_at_the_standard_start(name, factor, squares):
    problem = PROBLEMS_BY_NAME[name]
    F = factor * (problem.z0 - problem.phi(problem.z0))[0]
    assert F.square().sum().item() == pytest.approx(squares, rel=1e-13)


def watson_squares(z: Tensor) -> Tensor:
    """The 31 residuals of the published problem, squared and summed."""
    x, n = z, z.numel()
    f = [x[0], x[1] - x[0] ** 2 - 1]
    for i in range(1, 30):
        t = i / 29
        slope = sum(j * t ** (j - 1) * x[j] for j in range(1, n))
        f.append(slope - sum(t**j * x[j] for j in range(n)) ** 2 - 1)
    return torch.stack(f).square().sum()


@pytest.mark.parametrize(
    ("name", "least"), [("watson_6", 2.28767005355e-3), ("watson_9", 1.399760138e-6)]
)
def test_watson_is_the_gradient_and_its_root_the_published_minimum(name, least):
    problem = PROBLEMS_BY_NAME[name]
    assert watson_squares(problem.root[0]).item() == pytest.approx(least, rel=1e-8)
    z = start_near(problem)[0].requires_grad_()
    (gradient,) = torch.autograd.grad(watson_squares(z), z)
    torch.testing.assert_close(watson(z.detach()[None])[0], gradient / 2, rtol=1e-12, atol=1e-12)


# Where Newton goes from the standard starts, computed with 40 digits from the equations alone.
WOOD_SADDLE = [
    -0.96797402493759306844,
    0.94713914081784182111,
    -0.96951631033159115149,
    0.95124766579232527786,
]
TRIGONOMETRIC_ROOT = [
    0.017821656110974753299,
    0.017986382226277653816,
    0.018157433958787625246,
    0.018335285059346765434,
    0.018520464481273565749,
    0.018713565371352956768,
    0.018915255985870367633,
    0.019126293052753094591,
    0.019347538274518786766,
    0.17975732607204259759,
]


@pytest.mark.parametrize(
    ("name", "z"),
    [
        ("wood", [1.0, 1.0, 1.0, 1.0]),
        ("wood", WOOD_SADDLE),
        ("trigonometric", [0.0] * 10),
        ("trigonometric", TRIGONOMETRIC_ROOT),
        ("hammarling_3", [0.01, 50.0, 0.0, 0.0, 0.01, 0.0, 0.0, 0.0, -0.01]),
        ("sample_18", [0.0, 7.0]),
        ("sample_18", [-2.0, 0.0]),
    ],
)
def test_known_roots_of_problems_without_a_list(name, z):
    z, problem = torch.tensor([z], dtype=torch.float64), PROBLEMS_BY_NAME[name]
    assert (problem.phi(z) - z).abs().max() <= rounding(problem, z[0])
