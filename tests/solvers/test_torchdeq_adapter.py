"""The exchange with torchdeq, in both directions."""

import copy
import math
import pickle

import pytest
import torch
import torchdeq
from support.problems import PROBLEMS_BY_NAME
from torchdeq.solver import get_solver
from torchdeq.solver.stat import SolverStat

from fixpoint import (
    SOLVERS,
    Anderson,
    FixedPoint,
    Implicit,
    Newton,
    Result,
    TorchDEQSolver,
    Unrolled,
    make_solver,
    register_torchdeq,
    solve,
)

THEIRS = ["fixed_point_iter", "simple_fixed_point_iter", "anderson", "broyden"]
STOPPING = ["fixed_point_iter", "anderson", "broyden"]
OURS = [name for name in SOLVERS if name != "inexact-newton"]
ANSWERS = ["affine_rho_0.5", "cosine", "tanh_layer_0.5", "kepler", "pagerank", "scipy_f3"]


def rms(x):
    return x.square().mean(1).sqrt()


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """What a test registers in torchdeq is forgotten after it."""
    monkeypatch.setattr("torchdeq.solver._solvers", dict(torchdeq.solver._solvers))


@pytest.fixture
def layer_inputs():
    """U with ||U||_2 = 0.8 and x, both asking for gradients, float64."""
    generator = torch.Generator().manual_seed(0)
    U = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    x = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    U = 0.8 * U / torch.linalg.matrix_norm(U, 2)
    return U.requires_grad_(), x.requires_grad_()


# Theirs as ours


@pytest.mark.parametrize("problem", ANSWERS)
@pytest.mark.parametrize("name", THEIRS)
def test_their_solvers_find_the_root(name, problem):
    problem = PROBLEMS_BY_NAME[problem]
    # Their absolute ridge slows Anderson down once residuals are below it.
    solver = TorchDEQSolver(name, rtol=1e-9, atol=0.0, max_iter=600)
    solution = solve(problem.phi, problem.z0, solver)
    assert solution.converged.all(), solution.result
    fz = problem.phi(solution.z)
    assert torch.allclose(solution.residual, rms(fz - solution.z) / (1e-9 * rms(fz)))
    assert torch.allclose(solution.z, problem.root, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("options", [{"rtol": 1e-6, "atol": 0.0}, {"rtol": 0.0, "atol": 1e-6}])
@pytest.mark.parametrize("name", THEIRS)
def test_the_result_is_what_torchdeq_returns(name, options, tanh_layer, count_calls):
    phi, z0 = tanh_layer
    solution = solve(phi, z0, TorchDEQSolver(name, max_iter=60, **options))
    counted = count_calls(lambda z, tau=1.0: phi(z))
    rel = options["rtol"] > 0
    tol = 1e-6 if rel else 1e-6 * math.sqrt(5)
    z, _, _ = get_solver(name)(
        counted_with_tau(counted), z0, max_iter=60, tol=tol, stop_mode="rel" if rel else "abs"
    )
    assert torch.equal(solution.z, z)
    assert solution.evaluations == counted.calls + 2
    assert (solution.iterations == min(counted.calls, 60)).all()
    assert solution.converged.all()
    if name in STOPPING:
        assert counted.calls < 60


def counted_with_tau(phi):
    return lambda z, tau=1.0: phi(z)


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("fixed_point_iter", {"beta": 0.5}, {"tau": 0.5}),
        (
            "anderson",
            {"memory": 3, "ridge": 1e-8, "beta": 0.7},
            {"m": 3, "lam": 1e-8, "tau": 0.7},
        ),
        ("broyden", {"memory": 4, "line_search": True}, {"LBFGS_thres": 4, "ls": True}),
    ],
)
def test_options_reach_torchdeq(name, ours, theirs, tanh_layer):
    phi, z0 = tanh_layer
    solution = solve(phi, z0, TorchDEQSolver(name, rtol=1e-3, atol=0.0, max_iter=12, **ours))
    expected = get_solver(name)(phi, z0, max_iter=12, tol=1e-3, stop_mode="rel", **theirs)[0]
    plain = get_solver(name)(phi, z0, max_iter=12, tol=1e-3, stop_mode="rel")[0]
    assert torch.equal(solution.z, expected)
    assert not torch.equal(solution.z, plain)


def test_their_damping_without_statistics():
    solver = TorchDEQSolver("simple_fixed_point_iter", beta=0.25, max_iter=3, rtol=0.0, atol=0.0)
    z = torch.tensor([[0.3]], dtype=torch.float64)
    expected = z
    for _ in range(3):
        expected = expected + 0.25 * (torch.cos(expected) - expected)
    assert torch.allclose(solve(torch.cos, z, solver).z, expected, rtol=1e-15)


def test_a_solver_registered_by_the_user_is_found():
    def knowing(func, x0, max_iter, tol, stop_mode):
        return torch.full_like(x0, 2.0), [], SolverStat()

    torchdeq.solver.register_solver("knowing", knowing)
    solution = solve(lambda z: 0.5 * z + 1, torch.zeros(2, 1), TorchDEQSolver("knowing"))
    assert (solution.z == 2).all()
    assert solution.converged.tolist() == [True, True]
    with pytest.raises(TypeError, match="unknown option of torchdeq's knowing 'beta'"):
        TorchDEQSolver("knowing", beta=0.5)


def test_a_solver_without_statistics_that_spends_its_budget_is_max_iter():
    def wandering(func, x0, max_iter, tol, stop_mode):
        for _ in range(max_iter):
            func(x0)
        return x0, [], SolverStat()

    torchdeq.solver.register_solver("wandering", wandering)
    solver = TorchDEQSolver("wandering", max_iter=12)
    solution = solve(lambda z: 0.5 * z + 1, torch.zeros(2, 1), solver)
    assert solution.result.tolist() == [Result.MAX_ITER, Result.MAX_ITER]


@pytest.mark.parametrize("name", THEIRS)
def test_float32_and_any_shape(name):
    for shape in ((0, 3), (1, 1), (5, 1), (1, 7), (2, 0)):
        solver = TorchDEQSolver(name, max_iter=100)
        solution = solve(lambda z: 0.5 * torch.sin(z) + 1, torch.zeros(shape), solver)
        assert solution.z.dtype == torch.float32
        assert torch.allclose(solution.z, torch.full(shape, 1.4987), atol=1e-4)
        assert solution.converged.all()
        assert solution.result.shape == solution.iterations.shape == shape[:1]


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("max_iter", [0, 1, 2, 7])
def test_the_budget_is_kept(name, max_iter, count_calls):
    phi = count_calls(torch.tanh)  # a triple root: every solver is slow
    z0 = torch.tensor([[0.9, 0.1], [2.0, 1.0]], dtype=torch.float64)
    solution = solve(phi, z0, TorchDEQSolver(name, max_iter=max_iter, rtol=1e-14, atol=0.0))
    assert phi.calls == solution.evaluations
    extra = name == "broyden" or (name == "anderson" and max_iter == 1)
    assert solution.evaluations == (1 if max_iter == 0 else 2 + max_iter + extra)
    assert (solution.iterations == max_iter).all()
    assert (solution.result == Result.MAX_ITER).all()
    residual = rms(torch.tanh(solution.z) - solution.z) / rms(torch.tanh(solution.z)) / 1e-14
    assert torch.allclose(solution.residual, residual, rtol=1e-9)


@pytest.mark.parametrize("name", ["fixed_point_iter", "simple_fixed_point_iter"])
def test_without_tolerance_the_last_of_all_steps_is_returned(name, count_calls):
    phi = count_calls(lambda z: -2 * z + 1)
    solver = TorchDEQSolver(name, max_iter=3, rtol=0.0, atol=0.0)
    solution = solve(phi, torch.zeros(1, 1), solver)
    assert solution.z.item() == 3
    assert phi.calls == solution.evaluations == 3
    assert solution.residual is None
    assert solution.result.item() == Result.FIXED_STEPS


@pytest.mark.parametrize("name", THEIRS)
def test_nothing_to_do_without_tolerance(name):
    for shape, max_iter in (((2, 3), 0), ((0, 3), 5), ((2, 0), 5)):
        solver = TorchDEQSolver(name, max_iter=max_iter, rtol=0.0, atol=0.0)
        solution = solve(torch.cos, torch.ones(shape), solver)
        assert torch.equal(solution.z, torch.ones(shape))
        assert solution.evaluations == 0
        assert (solution.result == Result.FIXED_STEPS).all()


@pytest.mark.parametrize("name", THEIRS)
def test_a_start_that_is_solved_is_unchanged(name):
    solution = solve(lambda z: z.clone(), torch.zeros(3, 2), TorchDEQSolver(name))
    assert solution.converged.all()
    assert (solution.iterations == 0).all()
    assert solution.evaluations == 1


@pytest.mark.parametrize("name", THEIRS)
def test_a_nan_row_neither_raises_nor_keeps_the_others_from_stopping(name):
    shift = torch.tensor([[1.0], [math.nan], [2.0]], dtype=torch.float64)
    z0 = torch.zeros(3, 1, dtype=torch.float64)
    solver = TorchDEQSolver(name, rtol=1e-6, atol=0.0, max_iter=300)
    solution = solve(lambda z: 0.5 * torch.sin(z) + shift, z0, solver)
    assert solution.result.tolist() == [0, Result.NONFINITE, 0]
    assert solution.z[1].item() == 0
    assert solution.residual[1].item() == math.inf
    good = solve(lambda z: 0.5 * torch.sin(z) + shift[::2], z0[::2], solver)
    assert torch.allclose(good.z, solution.z[::2], rtol=1e-12)
    assert torch.equal(good.iterations, solution.iterations[::2])


@pytest.mark.parametrize("name", THEIRS)
def test_a_non_finite_start_stops_at_once(name):
    solution = solve(torch.cos, torch.full((2, 3), math.inf), TorchDEQSolver(name))
    assert (solution.result == Result.NONFINITE).all()
    assert solution.evaluations == 1


@pytest.mark.parametrize("tolerance", [{"rtol": 1e-9}, {"rtol": 0.0, "atol": 0.0}])
@pytest.mark.parametrize("name", THEIRS)
def test_a_map_that_turns_nan_gives_the_best_finite_state(name, tolerance):
    states = []

    def phi(z):
        states.append(z.item())
        return 0.9 * torch.sin(z) + 1 if len(states) <= 4 else torch.full_like(z, math.nan)

    solution = solve(phi, torch.zeros(1, 1), TorchDEQSolver(name, **tolerance))
    assert solution.result.item() == Result.NONFINITE

    def residual(z):
        return abs(0.9 * math.sin(z) + 1 - z)

    z = solution.z.item()
    assert z == min(states[:4], key=residual)
    if solution.residual is not None:
        scale = 1e-10 + 1e-9 * (0.9 * math.sin(z) + 1)
        assert solution.residual.item() == pytest.approx(residual(z) / scale, rel=1e-3)


@pytest.mark.parametrize("name", THEIRS)
def test_a_row_without_fixed_point_is_reported_and_the_others_converge(name):
    def phi(z):
        return torch.cat([z[:1] ** 2 + 1, 0.5 * torch.sin(z[1:]) + 1])

    z0 = torch.tensor([[0.3], [0.0], [1.0]], dtype=torch.float64)
    solution = solve(phi, z0, TorchDEQSolver(name, rtol=0.0, atol=1e-4, max_iter=40))
    assert solution.converged.tolist() == [False, True, True]
    assert solution.result[0] > Result.FIXED_STEPS
    assert solution.z.isfinite().all()
    assert solution.residual.isfinite().all()


def test_a_singular_system_of_one_row_raises_nothing():
    # FiniteDifferences of exactly 2^27 lose the ridge: the Gram matrix of a line is singular.
    def phi(z):
        return torch.cat([z[:1] + 2.0**27, 0.5 * torch.sin(z[1:]) + 1])

    z0 = torch.zeros(2, 1)
    with pytest.raises(torch.linalg.LinAlgError):
        get_solver("anderson")(phi, z0)
    solution = solve(phi, z0, TorchDEQSolver("anderson", rtol=0.0, atol=0.5))
    assert solution.result.tolist() == [Result.STALLED, Result.CONVERGED]


def test_a_row_that_torchdeq_left_before_its_tolerance_is_stalled():
    # Residuals of z0, phi(z0), phi(phi(z0)): 1, 0.1, 1. It stops at the second with the third.
    def phi(z):
        return torch.stack([10 * z[:, 1], 0.1 * z[:, 2], 0 * z[:, 2]], 1)

    z0 = torch.tensor([[1.0, 0.1, 1.0], [0.0, 0.0, 0.0]])
    solver = TorchDEQSolver("fixed_point_iter", rtol=0.0, atol=0.2 / math.sqrt(3), max_iter=9)
    solution = solve(phi, z0, solver)
    assert solution.z[0].tolist() == pytest.approx([1, 0, 0])
    assert solution.result.tolist() == [Result.STALLED, Result.CONVERGED]
    assert solution.residual[0].item() == pytest.approx(1 / 0.2)


def test_a_residual_that_has_not_fallen_is_stalled():
    for max_iter, expected in ((9, Result.MAX_ITER), (12, Result.STALLED)):
        solver = TorchDEQSolver("fixed_point_iter", max_iter=max_iter)
        solution = solve(lambda z: -2 * z + 1, torch.zeros(1, 1), solver)
        assert solution.result.item() == expected


def test_unknown_names_and_options_are_refused():
    with pytest.raises(ValueError, match=r"unknown solver of torchdeq 'andersn'.*fixed_point_iter"):
        TorchDEQSolver("andersn")
    with pytest.raises(TypeError, match=r"torchdeq's broyden 'beta': .*one of memory, line_search"):
        TorchDEQSolver("broyden", beta=0.5)
    with pytest.raises(TypeError, match="torchdeq's fixed_point_iter 'memory'"):
        TorchDEQSolver("fixed_point_iter", memory=3)
    with pytest.raises(TypeError, match=r"max_itr.*did you mean 'max_iter'"):
        TorchDEQSolver("anderson", max_itr=3)
    for option in ("check_every", "keep_best", "record"):
        with pytest.raises(TypeError, match=f"unknown TorchDEQSolver option '{option}'"):
            TorchDEQSolver("anderson", **{option: None})
    with pytest.raises(ValueError, match="memory must be at least 2"):
        TorchDEQSolver("anderson", memory=1)
    with pytest.raises(ValueError, match=r"TorchDEQSolver\('anderson'.*use Implicit"):
        FixedPoint(TorchDEQSolver("anderson"), Unrolled())


@pytest.mark.parametrize("name", THEIRS)
def test_implicit_gradients_through_their_solvers(name, layer_inputs):
    U, x = layer_inputs
    backward = Implicit()
    layer = FixedPoint(TorchDEQSolver(name, rtol=1e-10, atol=0.0, max_iter=200), backward)
    exact = FixedPoint(Newton(rtol=1e-13, atol=1e-13))
    found = []
    for each in (layer, exact):
        z = each(lambda z: torch.tanh(z @ U.T + x), torch.zeros(6, 5, dtype=torch.float64)).z
        found.append((z.detach(), *torch.autograd.grad(z.square().sum(), (U, x))))
    assert backward.adjoint.converged.all()
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-8, atol=1e-8)


def test_copies_and_pickles():
    solver = TorchDEQSolver("anderson", memory=4)
    assert "'anderson', m=4, max_iter=50" in repr(solver)
    for other in (copy.deepcopy(solver), pickle.loads(pickle.dumps(solver))):
        assert repr(other) == repr(solver)
        assert solve(torch.cos, torch.zeros(1, 1), other).converged.all()


# Ours as theirs


def test_the_registered_names():
    assert register_torchdeq() == [f"fixpoint-{name}" for name in OURS]
    assert register_torchdeq("f/") == [f"f/{name}" for name in OURS]
    assert {"fixpoint-broyden", "f/picard", "anderson"} <= set(torchdeq.solver._solvers)


# Each two of the three with each other.
@pytest.mark.parametrize(
    ("core", "stop_mode", "hook_ift"),
    [
        ("indexing", "abs", False),
        ("indexing", "rel", True),
        ("sliced", "abs", True),
        ("sliced", "rel", False),
    ],
)
@pytest.mark.parametrize("name", OURS)
def test_values_and_gradients_inside_torchdeq(name, core, stop_mode, hook_ift, layer_inputs):
    register_torchdeq()
    U, x = layer_inputs
    z0 = torch.zeros(6, 5, dtype=torch.float64)

    def phi(z):
        return torch.tanh(z @ U.T + x)

    z = FixedPoint(make_solver(name, rtol=1e-13, atol=1e-13, max_iter=300))(phi, z0).z
    expected = torch.autograd.grad(z.square().sum(), (U, x))
    deq = torchdeq.get_deq(
        core=core,
        f_solver=f"fixpoint-{name}",
        b_solver=f"fixpoint-{name}",
        ift=True,
        hook_ift=hook_ift,
        f_max_iter=200,
        b_max_iter=200,
        f_tol=1e-12,
        b_tol=1e-12,
        f_stop_mode=stop_mode,
        b_stop_mode=stop_mode,
    )
    backward_info = []
    (trained,), info = deq(phi, z0, backward_writer=backward_info.append)
    found = torch.autograd.grad(trained.square().sum(), (U, x))
    assert torch.allclose(trained, z, rtol=0, atol=1e-11)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-10)
    for each in (info, *backward_info):
        assert (each[f"{stop_mode}_lowest"] <= 1e-12).all()
    (evaluated,), info = deq.eval()(phi, z0, sradius_mode=True)
    assert torch.allclose(evaluated, z, rtol=0, atol=1e-11)
    assert (info[f"{stop_mode}_lowest"] <= 1e-12).all()


def test_newton_needs_its_jacobian_in_their_backward(layer_inputs):
    # torchdeq's adjoint map is no function to autograd; without a Jacobian Newton were Picard.
    register_torchdeq()
    U, x = layer_inputs
    for name in ("fixpoint-newton", "fixpoint-newton-krylov"):
        deq = torchdeq.get_deq(f_solver=name, b_solver=name, ift=True, b_tol=1e-9)
        steps = []
        z0 = torch.zeros(6, 5, dtype=torch.float64)
        z = deq(lambda z: torch.tanh(z @ U.T + x), z0, backward_writer=steps.append)[0][-1]
        z.sum().backward()
        assert (steps[0]["nstep"] <= 6).all()


@pytest.mark.parametrize("stop_mode", ["abs", "rel"])
def test_the_info_is_torchdeqs(stop_mode, tanh_layer):
    register_torchdeq()
    phi, z0 = tanh_layer
    given = {"max_iter": 30, "tol": 1e-3, "stop_mode": stop_mode}
    z, _, info = get_solver("fixpoint-picard")(phi, z0, **given)
    theirs = get_solver("fixed_point_iter")(phi, z0, **given)[2]
    assert isinstance(info, SolverStat)
    assert set(info) == set(theirs)
    for key, value in theirs.items():
        assert info[key].shape == value.shape, key
    states = [z0]
    for _ in range(30):
        states.append(phi(states[-1]))
    for row in range(6):
        residual = {"abs": [], "rel": []}
        for state in states:
            size = (phi(state) - state)[row].norm()
            residual["abs"].append(size.item())
            residual["rel"].append((size / phi(state)[row].norm()).item())
        stop = next(k for k, r in enumerate(residual[stop_mode]) if r <= 1e-3)
        assert info["nstep"][row] == stop
        assert torch.equal(z[row], states[stop][row])
        for mode in ("abs", "rel"):
            trace = info[f"{mode}_trace"][row]
            assert trace[: stop + 1].tolist() == pytest.approx(residual[mode][: stop + 1], rel=1e-6)
            assert (trace[stop:] == trace[stop]).all()
            assert info[f"{mode}_lowest"][row] == min(trace)


def test_the_step_reported_is_that_of_the_stop_mode():
    # From 0 the residual grows and its ratio to phi(z) falls.
    register_torchdeq()
    for stop_mode, step in (("abs", 0), ("rel", 4)):
        _, _, info = get_solver("fixpoint-picard")(
            lambda z: 1.5 * z + 1, torch.zeros(1, 1), max_iter=4, stop_mode=stop_mode
        )
        assert info["nstep"].item() == step


def test_their_states_carry_no_graph():
    register_torchdeq()
    w = torch.tensor(0.5, requires_grad=True)
    z, states, _ = get_solver("fixpoint-picard")(
        lambda z: w * z + 1, torch.zeros(1, 1), indexing=[1, 50]
    )
    assert not any(state.requires_grad for state in (z, *states))


def test_sampled_states_are_the_best_so_far():
    register_torchdeq()

    def phi(z):  # from 0: 1, then away from 1 / 3 and back
        return torch.where(z < 2, -2 * z + 1, 0.5 * z + 0.0)

    solver = get_solver("fixpoint-picard")
    z0 = torch.zeros(1, 1, dtype=torch.float64)
    _, states, _ = solver(phi, z0, max_iter=4, tol=1e-9, indexing=[1, 2, 4])
    # residuals of 0, 1, -1, 3, 1.5 are 1, 2, 4, 1.5, 3.5
    assert [z.item() for z in states] == [0, 0, 0]
    _, states, info = solver(torch.cos, z0, max_iter=40, tol=1e-3, indexing=[1, 2, 30, 40])
    z = [z0]
    for _ in range(40):
        z.append(torch.cos(z[-1]))
    stop = int(info["nstep"].item())
    assert 2 < stop < 30
    assert [s.item() for s in states] == [z[1].item(), z[2].item(), z[stop].item(), z[stop].item()]


@pytest.mark.parametrize("core", ["indexing", "sliced"])
def test_several_states_in_training(core, layer_inputs):
    register_torchdeq()
    U, x = layer_inputs
    deq = torchdeq.get_deq(
        core=core, f_solver="fixpoint-anderson", ift=True, n_states=3, f_max_iter=60, f_tol=1e-6
    )
    z0 = torch.zeros(6, 5, dtype=torch.float64)
    states, _ = deq(lambda z: torch.tanh(z @ U.T + x), z0)
    assert len(states) == 3
    root = solve(lambda z: torch.tanh(z @ U.T + x), z0, Anderson(rtol=1e-12)).z
    assert torch.allclose(states[-1], root, atol=1e-5)


def test_options_are_translated_and_unknown_ones_refused(tanh_layer):
    register_torchdeq()
    phi, z0 = tanh_layer
    anderson = get_solver("fixpoint-anderson")
    z = anderson(phi, z0, max_iter=6, tol=0.0, m=2, tau=0.6)[0]
    assert torch.equal(z, anderson(phi, z0, max_iter=6, tol=0.0, memory=2, beta=0.6)[0])
    ours = solve(phi, z0, Anderson(memory=2, beta=0.6, max_iter=6, rtol=0.0, atol=1e-12)).z
    assert torch.equal(z, ours)
    assert not torch.equal(z, anderson(phi, z0, max_iter=6, tol=0.0)[0])
    assert get_solver("fixpoint-broyden")(phi, z0, LBFGS_thres=None)[2]["abs_lowest"].max() < 1e-3
    for name, options, text in (
        ("anderson", {"max_itr": 3}, "unknown Anderson option 'max_itr'"),
        ("anderson", {"lam": 1e-4}, "unknown Anderson option 'lam'.*ridge"),
        ("broyden", {"ls": True}, "unknown Broyden option 'ls'"),
        ("broyden", {"tau": 1.0}, "unknown Broyden option 'tau'"),
        ("anderson", {"m": 2, "memory": 2}, "memory was given twice"),
    ):
        with pytest.raises(TypeError, match=text):
            get_solver(f"fixpoint-{name}")(phi, z0, **options)
    with pytest.raises(ValueError, match="unknown stop_mode 'relative': expected one of abs, rel"):
        anderson(phi, z0, stop_mode="relative")
    deq = torchdeq.get_deq(f_solver="fixpoint-anderson")
    with pytest.raises(TypeError, match="unknown Anderson option 'toll'"):
        deq(phi, z0, solver_kwargs={"toll": 1})


@pytest.mark.parametrize("name", OURS)
def test_tolerance_zero_runs_all_steps_and_return_final_gives_the_last(name, count_calls):
    register_torchdeq()
    solver = get_solver(f"fixpoint-{name}")
    z0 = torch.tensor([[2.0, 0.5]], dtype=torch.float64)
    for return_final in (False, True):
        phi = count_calls(lambda z: torch.tanh(1.2 * z))
        _, _, info = solver(phi, z0, max_iter=4, tol=0.0, return_final=return_final)
        assert info["abs_trace"].shape == (1, 5)
        assert info["abs_lowest"].isfinite().all()
    phi = count_calls(lambda z: -2 * z + 1)
    z, _, info = get_solver("fixpoint-picard")(
        phi, torch.zeros(1, 1), max_iter=3, return_final=True
    )
    assert z.item() == 3
    assert info["nstep"].item() == 3
    assert info["abs_lowest"].item() == 8
    picard = get_solver("fixpoint-picard")
    z, _, info = picard(torch.cos, torch.zeros(1, 1), max_iter=9, tol=0.5, return_final=True)
    assert info["nstep"].item() == 9
    z, _, info = get_solver("fixpoint-picard")(phi, torch.zeros(1, 1), max_iter=3, tol=0.0)
    assert z.item() == 0
    assert info["nstep"].item() == 0
    assert info["abs_lowest"].item() == 1


@pytest.mark.parametrize("name", OURS)
def test_shapes_that_torchdeq_takes(name):
    register_torchdeq()
    solver = get_solver(f"fixpoint-{name}")
    for shape in ((), (4,), (1, 1), (0, 3), (2, 3, 2)):
        z, states, info = solver(torch.cos, torch.zeros(shape), tol=1e-5, max_iter=60.0)
        assert z.shape == shape
        assert states == []
        assert info["abs_lowest"].shape == (shape[:1] or (1,))
        assert torch.allclose(z, torch.full(shape, 0.7390851), atol=1e-4)


def test_states_are_lists():
    register_torchdeq()
    z0 = [torch.zeros(2, 3), torch.zeros(2, 1)]

    def phi(a, b):
        return [0.5 * a + b, 0.2 * b + 1]

    for options in ({}, {"no_stat": True}):
        deq = torchdeq.get_deq(f_solver="fixpoint-anderson", f_tol=1e-5)
        deq.no_stat = options.get("no_stat", False)
        (state,), _ = deq.eval()(phi, z0)
        assert torch.allclose(state[0], torch.full((2, 3), 2.5), atol=1e-3)
        assert torch.allclose(state[1], torch.full((2, 1), 1.25), atol=1e-3)


@pytest.mark.parametrize("name", OURS)
def test_a_nan_row_inside_torchdeq_remains_alone(name):
    register_torchdeq()
    shift = torch.tensor([[1.0], [math.nan], [2.0]], dtype=torch.float64, requires_grad=True)
    deq = torchdeq.get_deq(
        f_solver=f"fixpoint-{name}", b_solver=f"fixpoint-{name}", ift=True, f_tol=1e-9, b_tol=1e-9
    )
    (z,), info = deq(lambda z: 0.5 * torch.sin(z) + shift, torch.zeros(3, 1).double())
    assert (info["abs_lowest"][::2] <= 1e-9).all()
    assert info["abs_lowest"][1] == math.inf
    (gradient,) = torch.autograd.grad(z[::2].sum(), shift)
    expected = 1 / (1 - 0.5 * torch.cos(z[::2]))
    assert torch.allclose(gradient[::2], expected, rtol=1e-7)


def test_copies_and_pickles_of_a_deq():
    register_torchdeq()
    deq = torchdeq.get_deq(f_solver="fixpoint-broyden").eval()
    assert pickle.loads(pickle.dumps(deq.f_solver))(torch.cos, torch.zeros(1, 1))[0].item() > 0.7
    (z,), _ = copy.deepcopy(deq)(torch.cos, torch.zeros(1, 1))
    assert torch.equal(z, deq(torch.cos, torch.zeros(1, 1))[0][0])
