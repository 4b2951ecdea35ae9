"""fixpoint.solvers.loop.whole: rows of phi that depend on each other."""

import pytest
import torch

from fixpoint import SOLVERS, Auto, Picard, SciPySolver, make_solver, solve

NAMES = [name for name in SOLVERS if name != "inexact-newton"]


@pytest.mark.parametrize("name", NAMES)
def test_two_coupled_rows(name):
    """z_0 = z_1 / 2 + 1, z_1 = 0.3 z_0: row 0 is at rest while row 1 is still 0."""
    z0 = torch.zeros(2, dtype=torch.float64)
    solution = solve(lambda z: torch.stack([0.5 * z[1] + 1, 0.3 * z[0]]), z0, name)
    assert solution.converged.all()
    assert solution.coupled
    assert solution.z.tolist() == pytest.approx([1 / 0.85, 0.3 / 0.85], rel=1e-4)
    assert "depend on each other" in repr(solution)


@pytest.mark.parametrize("name", ["picard", "anderson", "broyden", "newton"])
@pytest.mark.parametrize("record", [None, "iterates"])
def test_nodes_of_a_graph(name, record):
    """Each row takes the mean of its neighbours on a path; the right answer is a linear solve."""
    generator = torch.Generator().manual_seed(0)
    N, D = 12, 3
    A = torch.diag(torch.ones(N - 1), 1) + torch.diag(torch.ones(N - 1), -1)
    A = (A / A.sum(1, keepdim=True)).double()
    W = torch.randn(D, D, generator=generator).double()
    W = 0.8 * W / torch.linalg.matrix_norm(W, 2)
    x = torch.zeros(N, D).double()
    x[0] = 1.0  # all other rows rest until their neighbour has moved
    M = torch.kron(A, W)
    exact = torch.linalg.solve(torch.eye(N * D).double() - M, x.flatten()).view(N, D)
    solver = make_solver(name, rtol=1e-8, max_iter=400, record=record)
    solution = solve(lambda z: A @ z @ W.T + x, torch.zeros_like(x), solver)
    assert solution.converged.all()
    assert torch.allclose(solution.z, exact, atol=1e-7)
    if record:
        assert torch.equal(solution.trace.iterates[-1], solution.z)
        assert solution.trace.residual.shape[1] == N


def two_rows(z):
    return torch.stack([0.5 * z[1] + 1, 0.3 * z[0]])


def true_residual(z):
    """Return the residual of each row in units of the default tolerance."""
    return (two_rows(z) - z).abs() / (1e-6 + 1e-5 * two_rows(z).abs())


@pytest.mark.parametrize("options", [{"stop": "all"}, {"min_iter": 3}, {"min_iter": 60}])
@pytest.mark.parametrize("keep_best", [True, False])
@pytest.mark.parametrize("name", ["picard", "anderson", "broyden", "newton", "squarem", "auto"])
def test_rows_that_move_on_from_their_solutions(name, keep_best, options):
    """A row put back to its solution is none beside the others as they are then."""
    z0 = torch.zeros(2, dtype=torch.float64)
    solution = solve(two_rows, z0, make_solver(name, keep_best=keep_best, **options))
    assert not (solution.converged & (true_residual(solution.z) > 1)).any()
    if name != "anderson":  # which spends its updates row by row
        assert solution.converged.all() or options["min_iter"] == 60


@pytest.mark.parametrize("options", [{"stop": "all"}, {"min_iter": 3}])
@pytest.mark.parametrize("name", ["picard", "anderson"])
def test_rows_that_move_on_in_a_graph(name, options):
    torch.compiler.reset()
    solver = make_solver(name, **options)
    compiled = torch.compile(lambda z: solve(two_rows, z, solver), fullgraph=True, backend="eager")
    solution = compiled(torch.zeros(2, dtype=torch.float64))
    assert not (solution.converged & (true_residual(solution.z) > 1)).any()


def test_a_solution_in_a_graph_is_one_beside_the_best_states_of_others():
    def phi(z):
        step = torch.where(z[0] < 0.5, 0.01, 1.0)
        return torch.stack([z[0] + step, torch.where(z[0] > 10, 0.5 * z[1] + 1, 0.5 - z[1])])

    torch.compiler.reset()
    solver = Picard(max_iter=95)
    compiled = torch.compile(lambda z: solve(phi, z, solver), fullgraph=True, backend="eager")
    solution = compiled(torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    assert solution.z[0] < 1
    assert not solution.converged.any()
    assert solution.coupled
    assert solution.evaluations == 97


def test_independent_rows_that_move_on_remain_solutions():
    """The first row starts within its tolerance, which plain iteration leaves."""
    a = torch.tensor([[2.2], [0.3]], dtype=torch.float64)
    z0 = torch.tensor([[1 + 1e-7], [0.0]], dtype=torch.float64)
    solution = solve(lambda z: z - a * (z - 1), z0, Picard(stop="all", max_iter=60))
    assert solution.converged.all()
    assert not solution.coupled
    assert torch.allclose(solution.z, torch.ones_like(z0), rtol=1e-5)


@pytest.mark.parametrize("check_every", [1, 5])
@pytest.mark.parametrize("stop", ["each", 1.0, "all"])
def test_a_solution_is_one_beside_the_best_states_of_others(stop, check_every):
    """Row 0 is best near 0.5 and ends above 10, where alone row 1 is at rest."""

    def phi(z):
        far = z[0] > 10
        return torch.stack(
            [
                z[0] + torch.where(z[0] < 0.5, 0.01, 1.0),
                torch.where(far, 0.5 * z[1] + 1, 0.5 - z[1]),
            ]
        )

    z0 = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    solution = solve(phi, z0, Picard(max_iter=95, stop=stop, check_every=check_every))
    assert solution.z[0] < 1
    assert not solution.converged.any()
    assert solution.coupled


@pytest.mark.parametrize(
    ("M", "b", "z0", "options"),
    [
        (  # the last stage is no better, and its result belongs to its own state
            [[-0.16, 0.673], [0.685, -0.434]],
            [-0.717, 0.0],
            [0.0, 0.0],
            {"max_iter": 20, "stop": 1.0, "min_iter": 30, "check_every": 2},
        ),
        (  # row 2 is solved by a later stage than row 3, which depends on it
            [
                [0.1515290303648126, 0.0, 0.0, 0.0],
                [-44.07653331756592, 0.2579885774546538, 0.0, 0.0],
                [54.96792197227478, 8.94763559103012, -0.4085336290258777, 0.0],
                [-3.5247599333524704, -3.5214194655418396, -24.907649159431458, -0.5],
            ],
            [-0.20749613642692566, 0.1778092086315155, -0.2486935257911682, -0.09843534976243973],
            [0.25464218854904175, 1.743240237236023, -0.031038954854011536, -0.056332338601350784],
            {"max_iter": 60, "min_iter": 3, "check_every": 7, "keep_best": False},
        ),
    ],
)
def test_stages_of_auto_solve_coupled_rows_beside_each_other(M, b, z0, options):
    M, b, z0 = (torch.tensor(x, dtype=torch.float64) for x in (M, b, z0))

    def phi(z):
        return (M @ z.flatten() + b)[:, None]

    solution = solve(phi, z0[:, None], Auto(rtol=1e-3, **options))
    r = (phi(solution.z) - solution.z).abs() / (1e-6 + 1e-3 * phi(solution.z).abs())
    assert not (solution.converged & (r[:, 0] > 2)).any()


@pytest.mark.parametrize("method", ["hybr", "lm", "broyden1", "krylov"])
@pytest.mark.parametrize("record", [None, "iterates"])
def test_scipy_solves_coupled_rows_as_one(method, record):
    z0 = torch.zeros(2, dtype=torch.float64)
    solution = solve(two_rows, z0, SciPySolver(method, record=record))
    assert solution.converged.all()
    assert solution.coupled
    assert (true_residual(solution.z) <= 1).all()
    if record:
        assert torch.equal(solution.trace.iterates[-1, :, 0], solution.z)


def test_a_row_that_no_longer_converges_is_not_called_converged():
    def phi(z):  # row 0 turns away once row 1 has arrived
        return torch.stack([0.5 * z[0] + 1 + 5 * (z[1] > 0.99) * z[0], 0.8 * z[1] + 0.2])

    solution = solve(phi, torch.zeros(2, 1, dtype=torch.float64), Picard(max_iter=100))
    assert not solution.converged.any()


def test_a_map_that_does_not_repeat_itself_has_not_converged():
    generator = torch.Generator().manual_seed(0)

    def phi(z):
        return 0.5 * z + torch.rand(z.shape, generator=generator)

    solution = solve(phi, torch.zeros(4, 8), Picard(rtol=0.2, max_iter=60))
    assert (phi(solution.z) - solution.z).abs().max() > 0.1
    assert solution.coupled or not solution.converged.any()


def test_independent_rows_are_not_called_coupled():
    x = torch.linspace(-2, 2, 40).view(8, 5)
    for name in NAMES:
        assert not solve(
            lambda z: torch.tanh(0.7 * z.roll(1, 1) + x), torch.zeros(8, 5), name
        ).coupled


def test_each_leaf_of_coupled_rows_reaches_its_tolerance():
    def phi(tree):
        a, b = tree
        return 0.5 * a.flip(0) + 1, 0.3 * b + 1e-3 * a.sum() * torch.ones_like(b)

    z0 = torch.zeros(3, 2).double(), torch.zeros(3, 1).double()
    solution = solve(phi, z0, Picard(rtol=1e-9, atol=0.0, max_iter=200))
    for x, fx in zip(solution.z, phi(solution.z), strict=True):
        assert torch.allclose(x, fx, rtol=1e-7)
