"""SciPySolver: values, budgets, rows that fail, gradients."""

import copy
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from scipy.optimize._root import ROOT_METHODS
from support.problems import PROBLEMS_BY_NAME

from fixpoint import FixedPoint, Implicit, Newton, Result, SciPySolver, Unrolled, solve
from fixpoint.derivatives import batch_jacobian
from fixpoint.solvers.adapters.scipy_adapter import METHODS
from fixpoint.solvers.finite_differences import FiniteDifferences, derivatives_of

EASY = ["cosine", "kepler", "tanh_layer_0.5", "affine_skewed_rho_0.5", "scipy_f3"]
HARDER = [
    "affine_rho_0.99",
    "affine_d100",
    "affine_expanding",
    "rotation_1.05",
    "reflection",
    "golden_section",
    "colebrook",
    "cubic",
    "bratu_2d",
    "chandrasekhar",
    "helical_valley",
    "watson_6",
    "broyden_banded",
    "variably_dimensioned",
]
TIGHT = {"rtol": 1e-12, "atol": 1e-12, "max_iter": 300}


def rms(x):
    return x.square().mean(1).sqrt()


def within_error_bound(problem, solution):
    """Whether each z is as near to its root as ||(I - J)^-1|| |r| says, doubled."""
    residual = (problem.phi(solution.z) - solution.z).norm(dim=1)
    J = batch_jacobian(problem.phi, problem.root)
    inverse = torch.linalg.inv(torch.eye(J.shape[1], dtype=J.dtype) - J)
    floor = torch.finfo(J.dtype).eps * problem.root.norm(dim=1) * (1 + J.norm(dim=(1, 2)))
    bound = 2 * torch.linalg.matrix_norm(inverse, 2) * torch.maximum(residual, floor)
    return (solution.z - problem.root).norm(dim=1) <= bound


def test_the_methods_are_those_of_scipy():
    assert set(METHODS) == set(ROOT_METHODS)


@pytest.mark.parametrize("name", EASY)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_finds_the_root(method, name):
    problem = PROBLEMS_BY_NAME[name]
    solution = solve(problem.phi, problem.z0, SciPySolver(method, **TIGHT))
    assert solution.converged.all(), solution.result
    assert within_error_bound(problem, solution).all()


@pytest.mark.parametrize("name", HARDER)
@pytest.mark.parametrize("method", ["hybr", "lm"])
def test_minpack_solves_what_plain_iteration_does_not(method, name):
    problem = PROBLEMS_BY_NAME[name]
    solution = solve(problem.phi, problem.z0, SciPySolver(method, **TIGHT))
    assert solution.converged.all(), solution.result
    assert within_error_bound(problem, solution).all()


@pytest.mark.parametrize("method", METHODS)
def test_float32_reaches_1e_5_and_remains_float32(method):
    for name in EASY:
        if (method, name) == ("krylov", "kepler"):
            continue  # needs some 200 evaluations in double precision and stalls in single
        problem = PROBLEMS_BY_NAME[name]
        solver = SciPySolver(method, rtol=1e-5, atol=1e-5, max_iter=300)
        solution = solve(problem.phi, problem.z0.float(), solver)
        assert solution.z.dtype == torch.float32
        assert solution.residual.dtype == torch.float32
        assert solution.converged.all(), name
        assert torch.allclose(solution.z.double(), problem.root, rtol=1e-3, atol=1e-3)


def test_half_precision_keeps_its_dtype():
    solver = SciPySolver(rtol=2e-2, atol=0.0)
    solution = solve(torch.cos, torch.zeros(3, 2, dtype=torch.bfloat16), solver)
    assert solution.z.dtype == torch.bfloat16
    assert solution.converged.all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (5, 1), (1, 7), (2, 0)])
def test_any_shape(method, shape):
    solver = SciPySolver(method, record="iterates", max_iter=100)
    solution = solve(lambda z: 0.5 * torch.sin(z) + 1, torch.zeros(shape), solver)
    assert torch.allclose(solution.z, torch.full(shape, 1.4987), atol=1e-4)
    assert solution.converged.all()
    assert solution.result.shape == solution.iterations.shape == shape[:1]
    assert solution.trace.residual.shape[1:] == shape[:1]


def test_states_are_trees():
    def phi(z):
        return {"a": 0.5 * z["a"] + z["b"][:, None], "b": 0.2 * z["b"] + 1}

    solution = solve(phi, {"a": torch.zeros(2, 3), "b": torch.zeros(2)}, SciPySolver())
    assert torch.allclose(solution.z["a"], torch.full((2, 3), 2.5), atol=1e-4)


@pytest.mark.parametrize("max_iter", [0, 1, 2, 7])
@pytest.mark.parametrize("method", METHODS)
def test_the_budget_is_kept_and_counted(method, max_iter, count_calls):
    # Every method is slow at tanh(z) = z: the root is triple.
    phi = count_calls(torch.tanh)
    z0 = torch.tensor([[0.9, 0.1], [2.0, 1.0]], dtype=torch.float64)
    solution = solve(phi, z0, SciPySolver(method, max_iter=max_iter, rtol=1e-14, atol=0.0))
    assert solution.evaluations == phi.calls
    assert (solution.iterations == max_iter).all()
    assert (solution.result == Result.MAX_ITER).all()
    residual = rms(torch.tanh(solution.z) - solution.z) / rms(torch.tanh(solution.z)) / 1e-14
    assert torch.allclose(solution.residual, residual, rtol=1e-9)
    if method not in ("hybr", "lm") or max_iter == 0:
        assert solution.evaluations == 1 + 2 * max_iter


def test_converging_at_the_last_allowed_evaluation_counts(tanh_layer):
    phi, z0 = tanh_layer
    needed = int(solve(phi, z0, SciPySolver(rtol=1e-8)).iterations.max())
    assert solve(phi, z0, SciPySolver(rtol=1e-8, max_iter=needed)).converged.all()
    assert not solve(phi, z0, SciPySolver(rtol=1e-8, max_iter=needed - 1)).converged.all()


def test_it_stops_at_our_tolerance(tanh_layer):
    phi, z0 = tanh_layer
    counts = [
        solve(phi, z0, SciPySolver(rtol=rtol, atol=0.0, record="residual"))
        for rtol in (1e-2, 1e-6, 1e-12)
    ]
    assert all(solution.converged.all() for solution in counts)
    sums = [int(solution.iterations.sum()) for solution in counts]
    assert sums[0] < sums[1] < sums[2]
    for solution in counts:
        before = solution.trace.residual.T
        for row, stop in enumerate(solution.iterations.tolist()):
            assert (before[row, :stop] > 1).all()
            assert (before[row, stop:] == solution.residual[row]).all()


def test_minpack_is_given_the_exact_jacobian(tanh_layer):
    # FiniteDifferences would take D evaluations of phi each time.
    phi, z0 = tanh_layer
    solution = solve(phi, z0, SciPySolver(rtol=1e-10))
    assert solution.products % 5 == 0
    assert solution.products >= 5 * 6
    assert solution.iterations.max() <= 12


def test_the_trace_holds_every_state_evaluated(tanh_layer):
    phi, z0 = tanh_layer
    solution = solve(phi, z0, SciPySolver("krylov", rtol=1e-7, atol=0.0, record="iterates"))
    residual, iterates = solution.trace
    updates = int(solution.iterations.max())
    assert residual.shape == (updates + 1, 6)
    assert iterates.shape == (updates + 1, 6, 5)
    assert torch.equal(iterates[0], z0)
    assert torch.equal(iterates[-1], solution.z)
    for k, z in enumerate(iterates):
        assert torch.allclose(residual[k], rms(phi(z) - z) / (1e-7 * rms(phi(z))), rtol=1e-6)


def test_a_batch_gives_the_answers_of_its_rows(tanh_layer):
    phi, z0 = tanh_layer
    solver = SciPySolver(rtol=1e-9, atol=0.0)
    batch = solve(phi, z0, solver)
    for row in range(len(z0)):
        alone = solve(lambda z, row=row: phi(z.expand(6, 5))[row : row + 1], z0[:1], solver)
        assert alone.iterations.item() == batch.iterations[row].item()
        assert torch.allclose(alone.z[0], batch.z[row], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("method", METHODS)
def test_a_nan_row_is_frozen_and_the_others_converge_as_alone(method):
    shift = torch.tensor([[1.0], [math.nan], [2.0]], dtype=torch.float64)
    z0 = torch.zeros(3, 1, dtype=torch.float64)
    solver = SciPySolver(method, rtol=1e-10, max_iter=100)  # atol is 1e-11
    solution = solve(lambda z: 0.5 * torch.sin(z) + shift, z0, solver)
    assert solution.result.tolist() == [0, Result.NONFINITE, 0]
    assert solution.z[1].item() == 0
    assert solution.residual[1].item() == math.inf
    assert solution.iterations[1].item() == 0
    good = solve(lambda z: 0.5 * torch.sin(z) + shift[::2], z0[::2], solver)
    assert torch.equal(good.z, solution.z[::2])
    assert torch.equal(good.iterations, solution.iterations[::2])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_non_finite_start_stops_at_once(value):
    solution = solve(torch.cos, torch.full((2, 3), value), SciPySolver())
    assert (solution.result == Result.NONFINITE).all()
    assert solution.evaluations == 1


@pytest.mark.parametrize("method", METHODS)
def test_a_map_that_turns_nan_gives_the_best_finite_state(method):
    calls = 0

    def phi(z):
        nonlocal calls
        calls += 1
        return 0.9 * torch.sin(z) + 1 if calls <= 4 else torch.full_like(z, math.nan)

    solution = solve(phi, torch.zeros(1, 1), SciPySolver(method, rtol=1e-9, atol=0.0))
    assert solution.result.item() == Result.NONFINITE
    assert solution.z.isfinite().all()
    assert solution.residual.isfinite().all()


@pytest.mark.parametrize("method", METHODS)
def test_rows_that_scipy_gives_up_do_not_spoil_the_others(method):
    # z + 1 has no fixed point and a singular I - J; z^2 + 1 has none and a residual >= 3 / 4.
    def phi(z):
        return torch.cat([z[:1] ** 2 + 1, 0.5 * torch.sin(z[1:3]) + 1, z[3:4] + 1])

    z0 = torch.tensor([[0.3], [0.0], [1.0], [0.5]], dtype=torch.float64)
    solution = solve(phi, z0, SciPySolver(method, rtol=0.0, atol=1e-12, max_iter=60))
    assert solution.converged.tolist() == [False, True, True, False]
    assert torch.allclose(solution.z[1:3], torch.full((2, 1), 1.49870113).double(), atol=1e-8)
    assert solution.z.isfinite().all()
    assert (solution.result[::3] > Result.FIXED_STEPS).all()


def test_giving_up_is_stalled_and_raises_nothing():
    # broyden1 divides by the zero it computes; hybr sees no progress.
    for method in ("hybr", "lm", "krylov"):
        solution = solve(lambda z: z + 1, torch.zeros(1, 2), SciPySolver(method, max_iter=500))
        assert solution.result.item() == Result.STALLED, method
        assert solution.iterations.item() < 500


@pytest.mark.parametrize("method", ["hybr", "lm", "broyden1", "krylov", "df-sane"])
def test_an_error_of_phi_is_raised(method):
    calls = 0

    def phi(z):
        nonlocal calls
        calls += 1
        if calls > 4:
            raise ValueError("an error of the user's")
        return 0.5 * torch.sin(z) + 1

    with pytest.raises(ValueError, match="an error of the user's"):
        solve(phi, torch.zeros(1, 3), SciPySolver(method, rtol=1e-12))


def test_warnings_of_scipy_are_silent_and_those_of_phi_are_not():
    diverging = {"method": "linearmixing", "max_iter": 400}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        solve(lambda z: -3 * z + 1, torch.zeros(1, 2), SciPySolver(**diverging))
        solve(lambda z: z**2 + 1, torch.zeros(1, 2), SciPySolver("broyden1", max_iter=400))
    assert [str(w.message) for w in seen] == []

    def phi(z):
        warnings.warn("mine", UserWarning, stacklevel=1)
        return torch.cos(z)

    with pytest.warns(UserWarning, match="mine") as seen:
        solution = solve(phi, torch.zeros(1, 1), SciPySolver("broyden1"))
    assert len(seen) == solution.evaluations


def test_keep_best_chooses_between_the_best_and_the_last_state():
    z0 = torch.zeros(1, 1, dtype=torch.float64)
    phi = PROBLEMS_BY_NAME["parabola"].phi
    course = {"method": "broyden1", "max_iter": 12, "record": "iterates"}
    best = solve(phi, z0, SciPySolver(**course))
    last = solve(phi, z0, SciPySolver(**course, keep_best=False))
    assert torch.equal(last.z, last.trace.iterates[-1])
    assert best.residual == best.trace.residual.amin(0)
    assert best.residual < last.residual
    # Its residual has not fallen over the last half of the evaluations.
    assert best.trace.residual.argmin() <= 6
    assert best.result.item() == last.result.item() == Result.STALLED
    assert (best.iterations == 12).all()


def test_a_norm_of_the_user_decides():
    calls = []

    def largest(x):
        calls.append(x)
        return x.abs().amax(1)

    solution = solve(torch.cos, torch.zeros(1, 3).double(), SciPySolver(norm=largest, rtol=1e-9))
    assert len(calls) >= 2 * (solution.iterations.item() + 1)
    fz = torch.cos(solution.z)
    assert solution.residual.item() == pytest.approx(
        ((fz - solution.z).abs().amax() / (1e-10 + 1e-9 * fz.abs().amax())).item()
    )


def test_unknown_names_and_options_are_refused():
    with pytest.raises(ValueError, match=r"'hyber'.*expected one of hybr, lm.*did you mean 'hybr'"):
        SciPySolver("hyber")
    with pytest.raises(TypeError, match=r"max_itr.*expected one of method.*'max_iter'"):
        SciPySolver(max_itr=3)
    with pytest.raises(TypeError, match="unknown SciPySolver option 'check_every'"):
        SciPySolver(check_every=2)
    with pytest.raises(ValueError, match="set rtol or atol"):
        SciPySolver(rtol=0.0, atol=0.0)
    with pytest.raises(ValueError, match=r"SciPySolver\(method='lm'.*use Implicit"):
        FixedPoint(SciPySolver("lm"), Unrolled())


@pytest.mark.parametrize("method", ["hybr", "lm", "krylov", "broyden1"])
def test_implicit_gradients_agree_with_our_own(method, tanh_layer):
    phi, z0 = tanh_layer
    x = torch.linspace(-1, 1, 30, dtype=torch.float64).reshape(6, 5).requires_grad_()
    w = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    found = []
    for solver in (SciPySolver(method, **TIGHT), Newton(rtol=1e-13, atol=1e-13)):
        backward = Implicit()
        z = FixedPoint(solver, backward)(lambda z: w * phi(z) + x, z0).z
        gradients = torch.autograd.grad(z.pow(3).sum(), (x, w))
        assert backward.adjoint.converged.all()
        found.append((z.detach(), *gradients))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9)


def test_implicit_gradient_of_the_cubic():
    # a z^3 - z - 2 = 0 at a = 2: dz/da = -z^3 / (3 a z^2 - 1)
    a = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    z0 = torch.ones(1, 1, dtype=torch.float64)
    layer = FixedPoint(SciPySolver(**TIGHT))
    z = layer(lambda z: z - (a * z**3 - z - 2), z0).z
    z.sum().backward()
    assert z.item() == pytest.approx(1.165373043062414717, rel=1e-12)
    assert a.grad.item() == pytest.approx(-0.221399, abs=1e-6)


def test_gradcheck():
    layer = FixedPoint(SciPySolver(rtol=1e-13, atol=1e-13))
    z0 = torch.zeros(2, 3, dtype=torch.float64)
    w = 0.3 * torch.cos(torch.arange(9, dtype=torch.float64)).reshape(3, 3)
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3)

    def run(w, x):
        return layer(lambda z: torch.tanh(z @ w.T + x), z0).z

    assert torch.autograd.gradcheck(run, (w.requires_grad_(), x.requires_grad_()), atol=1e-6)


@pytest.mark.parametrize("method", ["hybr", "broyden1"])
def test_no_graph_is_built(method):
    w = torch.tensor(0.5, requires_grad=True)
    tracked = []

    def phi(z):
        tracked.append(torch.is_grad_enabled())
        return w * torch.sin(z) + 1

    solution = SciPySolver(method).run(phi, torch.zeros(1, 2, requires_grad=True))
    assert not solution.z.requires_grad
    # The Jacobian needs a graph of its own.
    assert tracked.count(True) == (1 + solution.products // 2 if method == "hybr" else 0)


def test_copies_and_pickles():
    solver = SciPySolver("lm", rtol=1e-9)
    for other in (copy.deepcopy(solver), pickle.loads(pickle.dumps(solver))):
        assert repr(other) == repr(solver)
        assert solve(torch.cos, torch.zeros(1, 1), other).converged.all()


def outside_autograd(z):
    """phi(z) = A z + 1 with eigenvalues -3 and 1.5, computed by NumPy."""
    A = np.array([[-0.75, 2.25], [2.25, -0.75]], dtype=z.detach().numpy().dtype)
    return torch.from_numpy(z.detach().numpy() @ A + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_map_that_autograd_cannot_see_is_differenced(dtype, count_calls):
    phi = count_calls(outside_autograd)
    z0 = torch.tensor([[0.0, 1.0], [5.0, -3.0]], dtype=dtype)
    solution = solve(phi, z0, SciPySolver(rtol=1e-5, atol=0.0))
    assert solution.converged.all()
    assert torch.allclose(solution.z, torch.full((2, 2), -2.0, dtype=dtype), atol=1e-3)
    # One Newton step, and in single precision another to mend its rounding.
    assert (solution.iterations <= 2).all()
    assert solution.evaluations == phi.calls


def test_differences_are_the_derivatives():
    phi = PROBLEMS_BY_NAME["scipy_f6"].phi
    z = torch.tensor([[0.5, 2.0], [-3.0, 0.0]], dtype=torch.float64)
    v = torch.tensor([[1e-3, 2e-3], [0.0, 0.0]], dtype=torch.float64)
    J = batch_jacobian(phi, z)
    differences = FiniteDifferences(phi)
    # eps^(2/3) = 4e-11 times third derivatives and sizes of some hundreds
    assert torch.allclose(differences.jacobian(z), J, rtol=1e-7, atol=1e-7)
    assert differences.evaluations == 5
    assert torch.allclose(differences.jvp(z, v), (J @ v[..., None])[..., 0], rtol=1e-7, atol=1e-10)
    assert type(derivatives_of(phi, z)) is not FiniteDifferences
    assert type(derivatives_of(outside_autograd, z)) is FiniteDifferences
    w = torch.ones(1, requires_grad=True, dtype=torch.float64)
    assert type(derivatives_of(lambda z: w * outside_autograd(z), z)) is FiniteDifferences
