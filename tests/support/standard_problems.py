"""The 24 standard systems F(z) = 0 as fixed points of z - F(z) and of z + F(z): `STANDARD`.

The 23 of Burkardt's TEST_NONLIN, on which peers are compared, at their sizes and starts there, and
SciPy's F4. The sign decides which eigenvalues of J lie beyond 1: a solver that needs plain steps to
contract finds one of both easy, one that does not should solve both alike.
"""

from torch import Tensor

from support import problems
from support.problems import BOUNDARY_VALUE_START, Map, Numbers, Problem, indices, vector


def chebyquad_on_two_sides(z: Tensor) -> Tensor:
    """Problem 35 of Moré, Garbow and Hillstrom for z in [-1, 1]."""
    return problems.chebyquad((z + 1) / 2)


def chandrasekhar(z: Tensor) -> Tensor:
    """H(mu) = 1 / (1 - c/2 int_0^1 mu H(nu) / (mu + nu) d nu) at mu = 1/n, ..., 1, c = 0.9."""
    n = z.shape[-1]
    mu = indices(n, z) / n
    return z - 1 / (1 - 0.45 / n * z @ (mu[:, None] / (mu[:, None] + mu)).mT)


SYSTEMS: list[tuple[Map, Numbers]] = [
    (problems.generalized_rosenbrock, [-1.2] + [1.0] * 9),
    (problems.powell_singular, [3.0, -1.0, 0.0, 1.0]),
    (problems.powell_badly_scaled, [0.0, 1.0]),
    (problems.wood, [-3.0, -1.0, -3.0, -1.0]),
    (problems.helical_valley, [-1.0, 0.0, 0.0]),
    (problems.watson, [0.0, 0.0]),
    (chebyquad_on_two_sides, [0.0, 2 / 3]),
    (problems.brown_almost_linear, [0.5] * 10),
    (problems.discrete_boundary_value, BOUNDARY_VALUE_START),
    (problems.discrete_integral_equation, BOUNDARY_VALUE_START),
    (problems.trigonometric, [0.1] * 10),
    (problems.variably_dimensioned, [1 - i / 10 for i in range(1, 11)]),
    (problems.broyden_tridiagonal, [-1.0] * 10),
    (problems.broyden_banded, [-1.0] * 10),
    (problems.hammarling_2, [1.0, 0.0, 0.0, 1.0]),
    (problems.hammarling_3, [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]),
    (problems.dennis_schnabel, [1.0, 5.0]),
    (problems.sample_18, [2.0, 2.0]),
    (problems.sample_19, [3.0, 3.0]),
    (problems.scalar_double_root, [1.0]),
    (problems.freudenstein_roth, [0.5, -2.0]),
    (problems.boggs, [1.0, 0.0]),
    (chandrasekhar, [1.0] * 10),
    (problems.scipy_f4, [-1.0, -2.0]),
]
"""F and its start."""


def fixed_points(F: Map, start: Numbers) -> list[Problem]:
    """Both maps of one system, each with one start; answers are judged by |F|."""
    name, z0 = F.__name__, vector(start)[None]
    return [
        Problem(f"{name} -", lambda z: z - F(z), z0, None, "hard", "z - F(z)"),
        Problem(f"{name} +", lambda z: z + F(z), z0, None, "hard", "z + F(z)"),
    ]


STANDARD = [problem for F, start in SYSTEMS for problem in fixed_points(F, start)]
