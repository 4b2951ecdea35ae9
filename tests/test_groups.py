"""Samples of several rows, `groups=`: each group as if it were solved alone."""

import pytest
import torch
from torch.func import jacrev

from fixpoint import (
    SOLVERS,
    Anderson,
    Broyden,
    ConvergenceWarning,
    FixedPoint,
    Implicit,
    LevenbergMarquardt,
    Newton,
    Phantom,
    Picard,
    Result,
    Root,
    Unrolled,
    attach_gradient,
    check_rows,
    make_solver,
    solve,
    solve_root,
)
from fixpoint.models import DEQ
from fixpoint.regularization import jac_reg

D = torch.float64
SIZES = [4, 1, 7, 2]
TIGHT = {"rtol": 1e-12, "atol": 1e-13, "max_iter": 300}
GENERATOR = torch.Generator().manual_seed(0)
GRAPHS = [torch.randn(n, n, generator=GENERATOR, dtype=D) / (2 * n**0.5) for n in SIZES]
X = torch.randn(sum(SIZES), 3, generator=GENERATOR, dtype=D)
W = 0.5 * torch.randn(3, 3, generator=GENERATOR, dtype=D)
COTANGENT = torch.randn(X.shape, generator=GENERATOR, dtype=D)
ORDER = torch.randperm(len(X), generator=GENERATOR)
GROUPS = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))[ORDER]
BATCH = torch.block_diag(*GRAPHS)[ORDER][:, ORDER]


def graph(A, W, x):
    return lambda z: torch.tanh(A @ z @ W + x)


def alone(layer, W, x, **options):
    """The solutions of each graph as a problem of its own."""
    return [
        layer(graph(A, W, part), torch.zeros_like(part), batched=False, **options)
        for A, part in zip(GRAPHS, x.split(SIZES), strict=True)
    ]


def joined(solutions, name):
    """An attribute of all of them, with the graphs in order."""
    return torch.cat([getattr(solution, name) for solution in solutions])


@pytest.mark.parametrize("name", [name for name in SOLVERS if name != "inexact-newton"])
def test_each_graph_is_solved_as_if_alone(name):
    # No more differences than the smallest group has numbers.
    solver = Anderson(memory=3) if name == "anderson" else make_solver(name)
    layer = FixedPoint(solver.with_options(**TIGHT), Implicit(Anderson(rtol=1e-13, atol=0.0)))
    inputs = W.clone().requires_grad_(), X.clone().requires_grad_()
    batch = layer(graph(BATCH, inputs[0], inputs[1][ORDER]), torch.zeros_like(X), groups=GROUPS)
    single = alone(layer, *inputs)
    torch.testing.assert_close(batch.z, joined(single, "z")[ORDER], rtol=0, atol=1e-11)
    assert torch.equal(batch.result, joined(single, "result"))
    if name not in ("levenberg-marquardt", "auto"):  # whose damping and choice see the largest size
        assert torch.equal(batch.iterations, joined(single, "iterations"))
        torch.testing.assert_close(batch.residual, joined(single, "residual"), rtol=0, atol=1e-3)
    found = torch.autograd.grad((batch.z * COTANGENT[ORDER]).sum(), inputs)
    expected = torch.autograd.grad((joined(single, "z") * COTANGENT).sum(), inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_a_loose_tolerance_is_measured_by_the_numbers_of_each_group():
    """atol decides here; divided by the padded size small groups would end early."""
    options = {"rtol": 0.0, "atol": 1e-3}
    batch = solve(graph(BATCH, W, X[ORDER]), torch.zeros_like(X), Picard(**options), groups=GROUPS)
    single = alone(FixedPoint(Picard(**options)), W, X)
    assert torch.equal(batch.iterations, joined(single, "iterations"))
    torch.testing.assert_close(batch.residual, joined(single, "residual"))
    small = SIZES.index(1)
    rms = (graph(BATCH, W, X[ORDER])(batch.z) - batch.z)[small == GROUPS].square().mean().sqrt()
    torch.testing.assert_close(batch.residual[small], rms / 1e-3)


def test_trees_of_leaves_with_tolerances_of_their_own():
    def phi(A, x):
        return lambda z: (
            torch.tanh(A @ z[0] @ W + x + z[1].real[:, None] / 1000),
            100 * torch.polar(1 + (A @ z[0]).sum(1) / 9, z[1].real / 300),
        )

    def start(x):
        return torch.zeros_like(x), torch.zeros(len(x), dtype=torch.complex128)

    solver = Picard(**TIGHT, leaf_atol=(1e-10, 1e-3))
    batch = solve(phi(BATCH, X[ORDER]), start(X), solver, groups=GROUPS)
    sorted_z = [leaf[ORDER.argsort()].split(SIZES) for leaf in batch.z]
    for g, (A, x) in enumerate(zip(GRAPHS, X.split(SIZES), strict=True)):
        single = solve(phi(A, x), start(x), solver, batched=False)
        assert int(batch.iterations[g]) == int(single.iterations)
        for found, expected in zip(sorted_z, single.z, strict=True):
            torch.testing.assert_close(found[g], expected)


@pytest.mark.parametrize("backward", [Implicit(), Phantom(60), Unrolled()])
def test_gradients_of_any_order(backward):
    layer = FixedPoint(Picard(**TIGHT), backward)

    def z_of(W, x):
        return layer(graph(BATCH, W, x), torch.zeros_like(x), groups=GROUPS).z[::3]

    inputs = (0.6 * W).requires_grad_(), X.clone().requires_grad_()
    assert torch.autograd.gradcheck(z_of, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(z_of, inputs, fast_mode=True)
    if isinstance(backward, Implicit):
        x = inputs[1].detach()
        by_func = jacrev(z_of)(inputs[0].detach(), x)
        torch.testing.assert_close(by_func, jacrev(lambda W: z_of(W, x))(inputs[0].detach()))
        reverse = torch.autograd.functional.jacobian(lambda W: z_of(W, x), inputs[0].detach())
        torch.testing.assert_close(by_func, reverse)


@pytest.mark.parametrize(
    "solver", [Newton(**TIGHT), Newton(linear="gmres", **TIGHT), Anderson(**TIGHT)]
)
def test_roots(solver):
    W_ = W.clone().requires_grad_()

    def F(A, x):
        return lambda z: 1e3 * (z - torch.tanh(A @ z @ W_ + x))

    batch = Root(solver)(F(BATCH, X[ORDER]), torch.zeros_like(X), groups=GROUPS).check()
    with torch.no_grad():
        again = solve_root(F(BATCH, X[ORDER]), torch.zeros_like(X), solver, groups=GROUPS)
    torch.testing.assert_close(again.z, batch.z, rtol=0, atol=1e-11)
    parts = [
        Root(solver)(F(A, x), torch.zeros_like(x), batched=False).z
        for A, x in zip(GRAPHS, X.split(SIZES), strict=True)
    ]
    torch.testing.assert_close(batch.z, torch.cat(parts)[ORDER], rtol=0, atol=1e-11)
    found = torch.autograd.grad((batch.z * COTANGENT[ORDER]).sum(), W_)
    expected = torch.autograd.grad((torch.cat(parts) * COTANGENT).sum(), W_)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("backward", [Implicit(), Unrolled(), Phantom(80)])
def test_a_group_that_is_not_finite_touches_no_weight(backward):
    layer = FixedPoint(Picard(**TIGHT), backward, on_failure="ignore")
    bad = X.clone()
    bad[2] = float("nan")  # a row of the first graph
    found = []
    for x in (bad, X):
        W_ = W.clone().requires_grad_()
        z = layer(graph(BATCH, W_, x[ORDER]), torch.zeros_like(X), groups=GROUPS).z
        others = torch.where((GROUPS > 0)[:, None], z, 0.0)
        found.append(torch.autograd.grad((others * COTANGENT).sum(), W_)[0])
    torch.testing.assert_close(*found, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    "solver", [Newton(), Newton(linear="gmres"), LevenbergMarquardt(max_iter=60)], ids=str
)
def test_a_group_that_is_not_finite_leaves_the_derivatives_of_others(solver):
    """A matrix of all graphs multiplies its rows by 0, and 0 * NaN is NaN."""
    bad = X.clone()
    bad[2] = float("nan")
    ends = [
        solve(graph(BATCH, W, x[ORDER]), torch.zeros_like(X), solver, groups=GROUPS)
        for x in (bad, X)
    ]
    assert ends[0].result.tolist() == [Result.NONFINITE, 0, 0, 0]
    assert torch.equal(ends[0].iterations[1:], ends[1].iterations[1:])
    others = GROUPS > 0
    torch.testing.assert_close(ends[0].z[others], ends[1].z[others], rtol=1e-10, atol=1e-12)


def test_deq_states_penalty_and_record():
    class Layer(torch.nn.Module):
        def forward(self, z, x, groups):
            size = torch.bincount(groups)[groups][:, None]
            return torch.tanh(BATCH @ z @ W / size.sqrt() + x)

    deq = DEQ(Layer(), Anderson(**TIGHT))
    z = deq(X[ORDER], groups=GROUPS)
    assert deq.solution.converged.shape == (len(SIZES),)
    states = deq.states(X[ORDER], at=(2,), groups=GROUPS, record="iterates")
    torch.testing.assert_close(states[-1], z)
    assert torch.equal(deq.solution.trace.iterates[2], states[0])
    _, penalty = deq.regularized(X[ORDER], groups=GROUPS, samples=None)
    one = X.split(SIZES)[1]
    A, x = GRAPHS[1], one
    alone = solve(graph(A, W, x), torch.zeros_like(x), Anderson(**TIGHT), batched=False)
    exact = jac_reg(graph(A, W, x), alone.z, samples=None, batched=False)
    torch.testing.assert_close(penalty[1:2], exact)
    estimate = alone.error_estimate(graph(A, W, x), batched=False)
    batch = solve(graph(BATCH, W, X[ORDER]), torch.zeros_like(X), Anderson(**TIGHT), groups=GROUPS)
    both = batch.error_estimate(graph(BATCH, W, X[ORDER]), groups=GROUPS)
    torch.testing.assert_close(both.rate[1:2], estimate.rate)


def test_wrong_groups_get_one_clear_error():
    z0 = torch.zeros(3, 2)

    def attempt(groups, **options):
        solve(torch.cos, z0, groups=groups, **options)

    for groups, kind, text in (
        ([0, 0, 1], TypeError, "tensor of integers"),
        (torch.tensor([0.0, 0.0, 1.0]), TypeError, "torch.float32"),
        (torch.tensor([0, 1]), ValueError, r"shape \(3,\); got \(2,\)"),
        (torch.tensor([0, -1, 1]), ValueError, "got -1 to 1"),
        (torch.tensor([0, 7, 1]), ValueError, "from 0 to 2; got 0 to 7"),
        (torch.tensor([0, 2, 2]), ValueError, "none has 1"),
    ):
        with pytest.raises(kind, match=text):
            attempt(groups)
    with pytest.raises(ValueError, match="leave one of them out"):
        attempt(torch.tensor([0, 0, 1]), batched=False)
    with pytest.raises(ValueError, match=r"torch\.func\.vmap"):
        torch.func.vmap(
            lambda x: solve(lambda z: torch.cos(z + x), z0, groups=torch.tensor([0, 0, 1])).z
        )(torch.zeros(2, 1))


def test_no_rows_and_rows_of_one_number():
    empty = solve(torch.cos, torch.zeros(0, 2), groups=torch.zeros(0, dtype=torch.int64))
    assert empty.z.shape == (0, 2)
    assert empty.result.shape == (0,)
    single = solve(torch.cos, torch.zeros(3), groups=torch.tensor([2, 0, 1]))
    torch.testing.assert_close(single.z, torch.full((3,), 0.739085), rtol=0, atol=1e-5)


def test_groups_that_depend_on_each_other_are_solved_as_one():
    """The first group waits for the second."""

    def phi(z):
        return torch.stack((0.5 * z[0] + z[2] - 1, 0.5 * z[1] + z[2] - 1, 0.9 * z[2] + 0.1))

    solution = solve(
        phi,
        torch.tensor([[0.0], [0.0], [0.0]]).double() - 2,
        Picard(**TIGHT),
        groups=torch.tensor([0, 0, 1]),
    )
    assert solution.converged.all()
    torch.testing.assert_close(solution.z[2:], torch.ones(1, 1, dtype=D))
    torch.testing.assert_close(solution.z[:2], torch.zeros(2, 1, dtype=D), rtol=0, atol=1e-9)


def test_broyden_factors_serve_the_adjoint():
    layer = FixedPoint(Broyden(**TIGHT), Implicit(reuse_factors=True))
    W_ = W.clone().requires_grad_()
    z = layer(graph(BATCH, W_, X[ORDER]), torch.zeros_like(X), groups=GROUPS).z
    found = torch.autograd.grad((z * COTANGENT).sum(), W_)[0]
    newton = FixedPoint(Newton(**TIGHT))
    z = newton(graph(BATCH, W_, X[ORDER]), torch.zeros_like(X), batched=False).z
    expected = torch.autograd.grad((z * COTANGENT).sum(), W_)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", ["fixed-point", "root"])
def test_a_gradient_is_attached_to_each_graph(form):
    W_, X_ = W.clone().requires_grad_(), X.clone().requires_grad_()
    solver = Anderson(**TIGHT)
    z = FixedPoint(solver, Implicit(solver))(
        graph(BATCH, W_, X_), torch.zeros_like(X_), groups=GROUPS
    ).z
    expected = torch.autograd.grad(z, (W_, X_), COTANGENT)
    phi = graph(BATCH, W_, X_)
    equation = phi if form == "fixed-point" else lambda z: 1e3 * (phi(z) - z)
    attached = attach_gradient(equation, z.detach(), form=form, groups=GROUPS)
    found = torch.autograd.grad(attached, (W_, X_), COTANGENT)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    worse = z.detach() + (GROUPS == 2)[:, None]
    with pytest.warns(ConvergenceWarning, match="1 of 4 samples"):
        attach_gradient(equation, worse, form=form, groups=GROUPS)


def test_graphs_are_told_from_what_joins_them():
    phi, z = graph(BATCH, W, X), torch.zeros_like(X)
    assert check_rows(phi, z, groups=GROUPS).independent
    first = (GROUPS == 0)[:, None]
    leak = check_rows(lambda z: phi(z) + 0.1 * first * z.sum(), z, groups=GROUPS)
    assert leak.coupled.tolist() == [True, False, False, False]
