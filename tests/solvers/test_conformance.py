"""What every registered solver promises."""

import math

import numpy as np
import pytest
import scipy.optimize
import torch
from support.problems import PROBLEMS, PROBLEMS_BY_NAME, SINGULAR

from fixpoint import ConvergenceError, Result, solve

CONTRACTIONS = [p for p in PROBLEMS if p.kind == "contraction"]
BUDGET = 4000  # plain iteration at contraction 0.99 needs some 2800 updates to 1e-12


def rms(x):
    return x.square().mean(1).sqrt()


def error_bound(problem, residual):
    """How far from the root a state of that residual can be: ||(I - J)^-1|| |r|, doubled.

    phi itself is rounded, so |r| counts as at least eps |root|.
    """
    root = problem.root[0]
    J = torch.autograd.functional.jacobian(lambda z: problem.phi(z[None])[0], root)
    inverse = torch.linalg.inv(torch.eye(len(J), dtype=J.dtype) - J)
    rounding = torch.finfo(root.dtype).eps * root.norm()
    return 2 * torch.linalg.matrix_norm(inverse, 2) * residual.clamp_min(rounding)


@pytest.mark.parametrize("problem", CONTRACTIONS, ids=lambda p: p.name)
def test_a_contraction_is_solved_to_1e_12(build, problem):
    solution = solve(problem.phi, problem.z0, build(max_iter=BUDGET, rtol=1e-12, atol=1e-12))
    assert solution.converged.all(), solution.result
    residual = problem.phi(solution.z) - solution.z
    assert torch.allclose(
        solution.residual, rms(residual) / (1e-12 + 1e-12 * rms(problem.phi(solution.z)))
    )
    if problem.root is not None and problem.name not in SINGULAR:
        distance = (solution.z - problem.root).norm(dim=1)
        assert (distance <= error_bound(problem, residual.norm(dim=1))).all()


@pytest.mark.parametrize("problem", CONTRACTIONS, ids=lambda p: p.name)
def test_float32_reaches_1e_5_and_remains_float32(build, problem):
    z0 = problem.z0.float()
    solution = solve(problem.phi, z0, build(max_iter=BUDGET, rtol=1e-5, atol=1e-5))
    assert solution.z.dtype == torch.float32
    assert solution.converged.all(), solution.result


@pytest.mark.parametrize(
    "name", ["cosine", "kepler", "tanh_layer_0.9", "affine_skewed_rho_0.5", "scipy_f3"]
)
def test_agrees_with_scipy(build, name):
    problem = PROBLEMS_BY_NAME[name]
    solution = solve(problem.phi, problem.z0, build(max_iter=BUDGET, rtol=1e-12, atol=1e-12))
    for row, start in enumerate(problem.z0):
        # Rows may differ in the map, so SciPy moves one row and keeps the others.
        def g(z, row=row):
            batch = problem.z0.clone()
            batch[row] = torch.from_numpy(z)
            return (problem.phi(batch) - batch)[row].numpy()

        answer = scipy.optimize.root(g, start.numpy(), tol=1e-13).x
        assert np.abs(answer - solution.z[row].numpy()).max() < 1e-9


@pytest.mark.parametrize("name", ["translation", "exponential", "parabola", "chebyquad_8"])
def test_where_no_fixed_point_exists_none_is_claimed(build, name):
    problem = PROBLEMS_BY_NAME[name]
    solution = solve(problem.phi, problem.z0, build(max_iter=60, rtol=0.0, atol=1e-8))
    assert not solution.converged.any()
    assert solution.z.isfinite().all()
    with pytest.raises(ConvergenceError, match=f"{len(problem.z0)} of {len(problem.z0)} samples"):
        solution.check()


def test_a_batch_gives_the_answers_of_its_rows(build, tanh_layer):
    phi, z0 = tanh_layer
    solver = build(rtol=1e-9, atol=0.0, max_iter=200)
    batch = solve(phi, z0, solver)
    assert len(set(batch.iterations.tolist())) > 1
    for row in range(len(z0)):
        alone = solve(lambda z, row=row: phi(z.expand(6, 5))[row : row + 1], z0[:1], solver)
        assert alone.iterations.item() == batch.iterations[row].item()
        assert torch.allclose(alone.z[0], batch.z[row], rtol=1e-13, atol=1e-13)


def test_permuting_the_rows_permutes_the_answer(build):
    scale = torch.tensor([[0.1], [0.9], [-0.6], [0.5]], dtype=torch.float64)
    z0 = torch.arange(8, dtype=torch.float64).reshape(4, 2)
    order = torch.tensor([2, 0, 3, 1])
    solver = build(rtol=1e-8, max_iter=500)
    straight = solve(lambda z: scale * torch.sin(z) + 1, z0, solver)
    permuted = solve(lambda z: scale[order] * torch.sin(z) + 1, z0[order], solver)
    assert torch.equal(permuted.z, straight.z[order])
    assert torch.equal(permuted.iterations, straight.iterations[order])


@pytest.mark.parametrize("max_iter", [0, 1, 2, 7])
def test_the_budget_is_kept_and_counted(build, tanh_layer, count_calls, max_iter):
    # Every solver is slow at tanh(z) = z: the root is triple.
    phi, z0 = count_calls(torch.tanh), tanh_layer[0](tanh_layer[1])
    solution = solve(phi, z0, build(max_iter=max_iter, rtol=1e-14, atol=0.0))
    assert (solution.iterations == max_iter).all()
    assert solution.evaluations == max_iter + 1
    assert phi.calls == solution.evaluations
    assert (solution.result == Result.MAX_ITER).all()
    assert torch.allclose(
        solution.residual, rms(phi(solution.z) - solution.z) / rms(phi(solution.z)) / 1e-14
    )


@pytest.mark.parametrize("max_iter", [0, 1, 2])
def test_without_tolerance_exactly_that_many_updates_are_made(
    build, tanh_layer, count_calls, max_iter
):
    phi, z0 = tanh_layer
    phi = count_calls(phi)
    solution = solve(phi, z0, build(max_iter=max_iter, rtol=0.0, atol=0.0))
    assert solution.evaluations == max_iter
    assert phi.calls == solution.evaluations
    assert solution.residual is None
    assert (solution.result == Result.FIXED_STEPS).all()
    assert solution.check() is solution
    if max_iter == 0:
        assert torch.equal(solution.z, z0)


def test_converging_at_the_last_allowed_update_counts(build, tanh_layer):
    phi, z0 = tanh_layer
    needed = int(solve(phi, z0, build(rtol=1e-8, max_iter=300)).iterations.max())
    assert solve(phi, z0, build(rtol=1e-8, max_iter=needed)).converged.all()
    assert not solve(phi, z0, build(rtol=1e-8, max_iter=needed - 1)).converged.all()


def test_a_start_that_is_solved_is_unchanged(build):
    solution = solve(lambda z: z.clone(), torch.zeros(3, 2), build(rtol=1e-6, atol=0.0))
    assert solution.converged.all()
    assert (solution.iterations == 0).all()
    assert solution.evaluations == 1
    assert (solution.residual == 0).all()


def test_a_nan_row_is_frozen_and_the_others_converge_as_alone(build):
    shift = torch.tensor([[1.0], [math.nan], [2.0]], dtype=torch.float64)
    z0 = torch.zeros(3, 1, dtype=torch.float64)
    solver = build(rtol=1e-10, max_iter=300)
    solution = solve(lambda z: 0.5 * torch.sin(z) + shift, z0, solver)
    assert solution.result.tolist() == [0, Result.NONFINITE, 0]
    assert solution.z[1].item() == 0
    assert solution.residual[1].item() == math.inf
    good = solve(lambda z: 0.5 * torch.sin(z) + shift[::2], z0[::2], solver)
    assert torch.equal(good.z, solution.z[::2])
    assert torch.equal(good.iterations, solution.iterations[::2])


@pytest.mark.parametrize("mate", [0.5, 0.99, math.nan])
def test_a_row_without_fixed_point_ends_as_alone(build, mate):
    slope = torch.tensor([[1.0], [mate]], dtype=torch.float64)
    z0 = torch.tensor([[0.2, 0.7], [-2.0, 3.0]], dtype=torch.float64)
    solver = build(record="residual")
    alone = solve(lambda z: slope[:1] * z + 1, z0[:1], solver)
    both = solve(lambda z: slope * z + 1, z0, solver)
    for field in ("z", "residual", "iterations", "result"):
        assert torch.equal(getattr(both, field)[:1], getattr(alone, field)), field
    assert alone.residual == alone.trace.residual.min()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_non_finite_start_stops_at_once(build, value):
    solution = solve(torch.cos, torch.full((2, 3), value), build())
    assert (solution.result == Result.NONFINITE).all()
    assert solution.evaluations == 1


def test_a_map_that_turns_nan_gives_the_best_finite_state(build):
    calls = 0

    def phi(z):
        nonlocal calls
        calls += 1
        return 0.9 * torch.sin(z) + 1 if calls <= 3 else torch.full_like(z, math.nan)

    solution = solve(phi, torch.zeros(1, 1), build(rtol=1e-9, atol=0.0))
    assert solution.result.item() == Result.NONFINITE
    assert solution.z.isfinite().all()
    assert solution.residual.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (5, 1), (1, 7)])
def test_any_shape(build, shape):
    solution = solve(lambda z: 0.5 * z + 1, torch.zeros(shape), build(max_iter=100))
    assert torch.allclose(solution.z, torch.full(shape, 2.0), atol=1e-4)
    assert solution.converged.all()


def test_a_non_contiguous_start(build):
    z0 = torch.zeros(4, 6, dtype=torch.float64).T[::2]
    assert not z0.is_contiguous()
    solution = solve(torch.cos, z0, build(max_iter=200))
    assert torch.allclose(solution.z, torch.full_like(z0, 0.7390851332151607), atol=1e-4)


@pytest.mark.parametrize("n", [1, 4])
def test_the_host_looks_at_each_nth_update_only(build, tanh_layer, sync_count, n):
    phi, z0 = tanh_layer
    if build.name == "newton-krylov":
        pytest.skip("each Krylov product looks whether it was the last")
    solver = build(rtol=1e-9, atol=0.0, max_iter=200, check_every=n)
    with sync_count:
        solution = solve(phi, z0, solver)
    assert solution.converged.all()
    assert (solution.iterations % n == 0).all()
    residual = rms(phi(solution.z) - solution.z) / rms(phi(solution.z))
    assert (residual <= 2e-9).all()
    # One look at the start, then one for each n updates begun.
    looks = 1 + math.ceil(int(solution.iterations.max()) / n)
    # Some read whether a sample needs their careful path.
    if build.name == "auto" or (n == 1 and (build().backtracks or build.name == "anderson")):
        assert sync_count.count >= looks
    else:
        assert sync_count.count == looks


def test_samples_that_are_looked_at_rarely_end_as_others(build, tanh_layer):
    phi, z0 = tanh_layer
    every = solve(phi, z0, build(rtol=1e-9, atol=0.0, max_iter=200))
    rare = solve(phi, z0, build(rtol=1e-9, atol=0.0, max_iter=200, check_every=4))
    assert torch.equal(rare.result, every.result)
    assert torch.allclose(rare.z, every.z, rtol=0.0, atol=1e-8)
    assert (rare.iterations - every.iterations).max() <= 6


@pytest.mark.parametrize("record", [None, "residual", "iterates"])
def test_a_fixed_number_of_steps_never_waits_for_the_device(build, tanh_layer, sync_count, record):
    phi, z0 = tanh_layer
    if build.name == "newton-krylov":
        pytest.skip("each Krylov product looks whether it was the last")
    solver = build(max_iter=6, rtol=0.0, atol=0.0, record=record, check_every=7)
    with sync_count:
        solve(phi, z0, solver)
    assert sync_count.count == 0


def test_the_trace_holds_the_course_of_each_sample(build, tanh_layer):
    phi, z0 = tanh_layer
    solution = solve(phi, z0, build(rtol=1e-7, atol=0.0, max_iter=100, record="iterates"))
    updates = int(solution.iterations.max())
    residual, iterates = solution.trace
    assert residual.shape == (updates + 1, 6)
    assert iterates.shape == (updates + 1, 6, 5)
    for k, z in enumerate(iterates):
        expected = rms(phi(z) - z) / (1e-7 * rms(phi(z)))
        assert torch.allclose(residual[k], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(iterates[-1], solution.z)
    stop = solution.iterations[0]
    assert (residual[stop:, 0] == residual[stop, 0]).all()


def test_recording_without_tolerance_makes_exactly_max_iter_updates(build):
    solver = build(max_iter=3, rtol=0.0, atol=0.0, record="residual")
    solution = solve(lambda z: 0.5 * z + 1, torch.full((2, 1), 2.0), solver)
    assert (solution.result == Result.FIXED_STEPS).all()
    assert (solution.iterations == 3).all()
    assert solution.trace.residual.shape == (4, 2)
    assert (solution.residual == 0).all()


def test_scale_does_not_matter(build, tanh_layer):
    phi, z0 = tanh_layer
    solver = build(rtol=1e-8, atol=0.0, max_iter=300)
    counts = {
        solve(lambda z, s=s: s * phi(z / s), s * z0, solver).evaluations
        for s in (1.0, 2.0**-7, 2.0**-14, 2.0**40)
    }
    assert len(counts) == 1


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e30])
def test_sizes_whose_squares_leave_float32(build, size):
    solver = build(rtol=1e-3, atol=0.0, max_iter=60)
    solution = solve(lambda z: 0.25 * z + 0.75 * size, torch.full((1, 3), 4 * size), solver)
    # The inner products of other solvers leave float32 too; they may stall, and must not claim.
    assert solution.converged.all() or build.name not in ("picard", "inexact-newton")
    if solution.converged.all():
        assert torch.allclose(solution.z / size, torch.ones(1, 3), rtol=3e-3)


@pytest.mark.parametrize(
    "mate",
    [
        pytest.param(lambda z: 1e-25 * torch.cos(1e25 * z), id="tiny"),
        pytest.param(lambda z: 1e25 * torch.cos(1e-25 * z), id="huge"),
        pytest.param(lambda z: z + 1, id="without a fixed point"),
        pytest.param(lambda z: (z - 0.3).sqrt() - 0.2, id="not finite"),
        pytest.param(lambda z: 3 - 2 * z**3, id="unstable"),
        pytest.param(lambda z: 0.999 * z.cos(), id="slow"),
        pytest.param(torch.zeros_like, id="done at once"),
    ],
)
def test_not_one_bit_depends_on_batch_mates(build, mate):
    """What is left out while all samples go on alike must change nothing when it is not."""
    solver = build(rtol=1e-5, atol=0.0, max_iter=40, record="residual")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, generator=generator)

    def phi(z, mate):
        return torch.cat((torch.tanh(0.8 * z[:4].roll(1, 1) + x), mate(z[4:])))

    z0 = torch.full((5, 3), 0.5)
    calm, other = (solve(lambda z, m=m: phi(z, m), z0, solver) for m in (torch.cos, mate))
    assert calm.converged[:4].all()
    for name in ("z", "residual", "iterations", "result"):
        assert torch.equal(getattr(calm, name)[:4], getattr(other, name)[:4]), name
    common = min(len(calm.trace.residual), len(other.trace.residual))
    assert torch.equal(calm.trace.residual[:common, :4], other.trace.residual[:common, :4])


def by_columns(x):
    return x.t().contiguous().t()


@pytest.mark.parametrize(
    ("start", "layout"),
    [(by_columns, torch.clone), (torch.clone, by_columns)],
    ids=["of the start", "of the map"],
)
def test_not_one_bit_depends_on_the_layout(build, start, layout):
    """A row of a column-major matrix would be summed in another order than the row alone."""
    if build.name == "newton-krylov":
        pytest.skip("the projections of GMRES are batched products")
    x, z0, a = torch.randn(3, 3, 33, generator=torch.Generator().manual_seed(0))

    def found(rows):
        def phi(z):
            return layout(torch.tanh(a[0] / 2 * z + 0.3 * z.roll(1, 1) + x[rows]))

        return solve(phi, start(z0)[rows], build(rtol=1e-4, atol=0.0, max_iter=6)).z

    whole = found(slice(0, 3))
    for i in range(3):
        assert torch.equal(found(slice(i, i + 1))[0], whole[i]), i


def last_states(solver, W, b):
    return solve(lambda z: torch.tanh((W * z[:, None]).sum(2) + b), torch.zeros_like(b), solver).z


@pytest.mark.parametrize("width", [3, 6, 17, 38])
def test_not_one_bit_depends_on_the_place_in_a_batch(build, width):
    """Vectors of a processor take some rows of a batch together, others by themselves."""
    if build.name == "newton-krylov":
        pytest.skip("the projections of GMRES are batched products")
    draw = {"generator": torch.Generator().manual_seed(width), "dtype": torch.float64}
    W, b = 1.2 / width**0.5 * torch.randn(58, width, width, **draw), torch.randn(58, width, **draw)
    order = torch.randperm(58, generator=draw["generator"])
    solvers = [build(rtol=1e-6, max_iter=60)]
    if build.name == "anderson":
        solvers.append(build(rtol=1e-6, max_iter=60, memory=10))
    for solver in solvers:
        whole = last_states(solver, W, b)
        for rows in (order, order[:29], order[29:42]):
            assert torch.equal(last_states(solver, W[rows], b[rows]), whole[rows])


def test_a_relative_tolerance_at_zero_is_never_reached_by_a_state_that_moves(build):
    solution = solve(
        torch.zeros_like, torch.full((1, 2), 10.0), build(rtol=1e-3, max_iter=0, atol=0)
    )
    assert solution.result.item() == Result.MAX_ITER
    assert 1e37 < solution.residual.item() < math.inf


def test_states_are_trees(build):
    z0 = {"a": torch.zeros(2, 3), "b": [torch.zeros(2), (torch.zeros(2, 2, 2),)]}

    def phi(z):
        a, (b, (c,)) = z["a"], z["b"]
        return {"a": 0.5 * a + b[:, None], "b": [0.2 * b + 1, (c / 4 + a.sum(1)[:, None, None],)]}

    solution = solve(phi, z0, build(rtol=1e-7, atol=1e-7, max_iter=200))
    assert solution.converged.all()
    assert torch.allclose(solution.z["b"][0], torch.full((2,), 1.25), atol=1e-4)
    assert torch.allclose(solution.z["a"], torch.full((2, 3), 2.5), atol=1e-4)
    assert torch.allclose(solution.z["b"][1][0], torch.full((2, 2, 2), 10.0), atol=1e-4)


def test_unbatched_states(build):
    solution = solve(torch.cos, torch.tensor(0.0, dtype=torch.float64), build(), batched=False)
    assert solution.z.shape == ()
    assert solution.result.shape == (1,)
    assert abs(solution.z.item() - 0.7390851332151607) < 1e-4


def test_an_unknown_option_is_an_error_that_lists_the_known(build):
    with pytest.raises(TypeError, match=r"max_itr.*expected one of.*rtol.*did you mean 'max_iter'"):
        build(max_itr=3)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_iter": -1}, ValueError, "max_iter must be at least 0; got -1"),
        ({"max_iter": 2.5}, TypeError, "max_iter must be an integer; got 2.5"),
        ({"rtol": -1e-3}, ValueError, "rtol must be a finite number >= 0"),
        ({"atol": math.nan}, ValueError, "atol must be a finite number >= 0"),
        ({"check_every": 0}, ValueError, "check_every must be at least 1"),
        ({"record": "all"}, ValueError, "record must be None"),
    ],
)
def test_wrong_values_are_refused_when_built(build, options, error, text):
    with pytest.raises(error, match=text):
        build(**options)


@pytest.mark.parametrize("kind", ["writes into its input", "returns one buffer"])
def test_a_map_that_works_in_place_is_refused(build, kind):
    if kind == "returns one buffer" and build().needs_derivatives:
        pytest.skip("torch itself refuses derivatives of it")
    buffer = torch.zeros(2, 3)

    def phi(z):
        if kind == "returns one buffer":
            return torch.add(0.5 * z, 1, out=buffer)
        return z.mul_(0.5).add_(1)

    with pytest.raises(RuntimeError, match="changed in place: use out-of-place operations in phi"):
        solve(phi, torch.ones(2, 3), build())
    with torch.inference_mode():
        assert solve(torch.cos, torch.ones(2, 3), build()).converged.all()


def test_states_without_numbers(build):
    """In solves to a tolerance and of fixed steps; with a transform, see test_compile."""
    for shape in ((0, 3), (2, 0)):
        for options in ({}, {"rtol": 0.0, "atol": 0.0, "max_iter": 3}):
            assert solve(torch.cos, torch.zeros(shape), build(**options)).z.shape == shape
