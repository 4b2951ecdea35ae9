"""Gradients of solves: against finite differences, closed forms and each other."""

import copy
import gc
import math
import pickle
import weakref

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from fixpoint import (
    Anderson,
    BarzilaiBorwein,
    Broyden,
    ConvergenceError,
    ConvergenceWarning,
    FixedPoint,
    Implicit,
    InexactNewton,
    Newton,
    Phantom,
    Picard,
    Result,
    Unrolled,
    make_solver,
)

TIGHT = {"rtol": 1e-13, "atol": 1e-13, "max_iter": 300}
TOLERANCE_SOLVERS = ["picard", "anderson", "broyden"]


def problem(seed=0, T=3, B=3, D=4):
    """U with ||U||_2 = 0.6, V, x_1 .. x_T and h_0, all asking for gradients, float64."""
    generator = torch.Generator().manual_seed(seed)
    U, V = torch.randn(2, D, D, generator=generator, dtype=torch.float64)
    U = 0.6 * U / torch.linalg.matrix_norm(U, 2)
    x = torch.randn(T, B, D, generator=generator, dtype=torch.float64)
    h0 = torch.randn(B, D, generator=generator, dtype=torch.float64)
    return [part.clone().requires_grad_() for part in (U, 0.5 * V, x, h0)]


def few_inputs():
    """Finite differences take two solves an input and a time step: here 36 inputs, not 80."""
    return problem(T=2, B=2, D=3)


def recurrent(layer):
    """Time steps of h = tanh(U h + V h_prev + x_t), each started at h_prev."""

    def run(U, V, x, h):
        states = []
        for t, x_t in enumerate(x):
            past = h @ V.T + x_t
            h = layer(lambda z, past=past: torch.tanh(z @ U.T + past), h, t=t).z
            states.append(h)
        return torch.stack(states)

    return run


@pytest.mark.parametrize("name", TOLERANCE_SOLVERS)
@pytest.mark.parametrize("backward", [Unrolled, Implicit])
def test_gradcheck_through_time(name, backward):
    layer = FixedPoint(make_solver(name, **TIGHT), backward())
    assert gradcheck(recurrent(layer), few_inputs(), atol=1e-6, rtol=1e-5, fast_mode=True)


@pytest.mark.parametrize("name", TOLERANCE_SOLVERS)
@pytest.mark.parametrize("max_iter", [1, 3, 8])
def test_gradcheck_of_a_fixed_number_of_steps(name, max_iter):
    # Exact for what was computed, far from any equilibrium.
    layer = FixedPoint(make_solver(name, max_iter=max_iter, rtol=0.0, atol=0.0), Unrolled())
    assert gradcheck(recurrent(layer), few_inputs(), fast_mode=max_iter > 1)


@pytest.mark.parametrize("timesteps", [None, 3])
def test_gradcheck_of_learned_steps(timesteps):
    layer = FixedPoint(InexactNewton(max_iter=2, timesteps=timesteps, eta=0.3), Unrolled()).double()

    def run(eta, *inputs):
        return torch.func.functional_call(
            Recurrent(layer), {"layer.solver.eta": eta}, tuple(inputs)
        )

    eta = layer.solver.eta.detach().clone().requires_grad_()
    assert gradcheck(run, (eta, *problem()))


class Recurrent(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *inputs):
        return recurrent(self.layer)(*inputs)


def gradients(layer, seed=0, weight=1.0):
    inputs = problem(seed)
    out = recurrent(layer)(*inputs)
    (weight * (out * torch.cos(torch.arange(out.numel()).reshape(out.shape))).sum()).backward()
    return [part.grad for part in inputs]


@pytest.mark.parametrize("name", [*TOLERANCE_SOLVERS, "inexact-newton"])
def test_implicit_equals_long_unrolling(name):
    own = {"eta": 1.0, "learn": False} if name == "inexact-newton" else {}
    exact = gradients(FixedPoint(make_solver(name, **TIGHT, **own), Implicit()))
    long = gradients(FixedPoint(Picard(max_iter=150, rtol=0.0, atol=0.0), Unrolled()))
    for a, b in zip(exact, long, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-10)


def test_closed_form_of_an_affine_map():
    # z* = (I - A)^-1 x: dL/dx = (I - A)^-T g, dL/dA = (I - A)^-T g z*^T.
    A = 0.4 * torch.tensor([[0.0, 1.0], [-1.0, 0.5]], dtype=torch.float64).requires_grad_()
    A.retain_grad()
    x = torch.tensor([[1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    g = torch.tensor([[0.3, 0.7]], dtype=torch.float64)
    layer = FixedPoint(Anderson(**TIGHT), Implicit())
    z = layer(lambda z: z @ A.T + x, torch.zeros_like(x)).z
    z.backward(g)
    inverse = torch.linalg.inv(torch.eye(2, dtype=torch.float64) - A.detach())
    assert torch.allclose(z.detach(), x.detach() @ inverse.T, rtol=1e-11)
    assert torch.allclose(x.grad, g @ inverse, rtol=1e-11)
    assert torch.allclose(A.grad, (g @ inverse).T @ z.detach(), rtol=1e-11)


def test_the_cubic_of_the_literature():
    a = torch.tensor([[2.0]], dtype=torch.float64, requires_grad=True)
    layer = FixedPoint(Broyden(**TIGHT), Implicit())
    x = layer(lambda x: x - (a * x**3 - x - 2) / 7, torch.ones(1, 1, dtype=torch.float64)).z
    x.backward()
    assert x.item() == pytest.approx(1.165373, abs=1e-6)
    assert a.grad.item() == pytest.approx(-0.221399, abs=1e-6)


@pytest.mark.parametrize("name", ["picard", "anderson", "broyden", "newton", "newton-krylov"])
def test_three_derivatives_of_the_cubic(name):
    # mpmath: derivatives of the real root of a x^3 - x - 2 at a = 2.
    expected = (-0.22139916266115015, 0.15647898646262266, -0.18985201745378236)
    a = torch.tensor([[2.0]], dtype=torch.float64, requires_grad=True)
    layer = FixedPoint(make_solver(name, rtol=1e-14, atol=1e-14), Implicit())
    y = layer(lambda x: x - (a * x**3 - x - 2) / 7, torch.ones(1, 1, dtype=torch.float64)).z
    for order, value in enumerate(expected):
        (y,) = torch.autograd.grad(y, a, create_graph=order < 2)
        assert y.item() == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("name", ["picard", "broyden", "newton", "newton-krylov"])
def test_gradgradcheck_where_what_the_map_closes_over_hangs_together(name):
    layer = FixedPoint(make_solver(name, **TIGHT), Implicit())
    U, _, x, h0 = problem(T=2, B=2, D=2)

    def run(U, x, h):
        for x_t in x:
            p, q = 2 * x_t, h * U.sum()
            h = layer(lambda z, p=p, q=q, x=x_t: torch.tanh(z @ U.T + p * x) + 0.1 * q, h).z
        return h

    assert gradgradcheck(run, (U, x, h0), atol=1e-6, fast_mode=True)


def test_a_nested_solve_has_derivatives():
    layer = FixedPoint(Anderson(**TIGHT), Implicit())
    x = torch.tensor([[0.7], [-0.2]], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros_like(x)

    def run(x):
        return layer(lambda z: 0.3 * layer(lambda y: torch.sin(0.4 * y + z) + x, zero).z, zero).z

    assert gradcheck(run, (x,))
    assert gradgradcheck(run, (x,))


def test_broyden_factors_start_the_adjoint():
    plain, reusing = (
        FixedPoint(Broyden(rtol=1e-9, atol=0.0), Implicit(reuse_factors=flag))
        for flag in (False, True)
    )
    for one, other in zip(gradients(plain), gradients(reusing), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-8)
    counts = [layer.backward.adjoint.evaluations for layer in (plain, reusing)]
    assert counts[1] < counts[0]
    with pytest.raises(
        ValueError, match="reuse_factors needs a forward solve by Broyden or Newton"
    ):
        FixedPoint(Anderson(), Implicit(reuse_factors=True))


def test_newton_solves_the_adjoint_in_one_update():
    layer = FixedPoint(Newton(**TIGHT), Implicit())
    exact = gradients(layer)
    assert layer.backward.adjoint.iterations.max() == 1
    long = gradients(FixedPoint(Picard(max_iter=150, rtol=0.0, atol=0.0), Unrolled()))
    for a, b in zip(exact, long, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-10)


def test_newton_unrolled_takes_the_step_of_newton_where_the_map_closes_over_its_start():
    """J is that of phi alone, not of phi and of what was computed from the start."""
    U, V, x, h = problem()
    past = h @ V.T + x[0]

    def phi(z):
        return torch.tanh(z @ U.T + past)

    J = (1 - phi(h) ** 2).unsqueeze(2) * U
    step = torch.linalg.solve(torch.eye(4, dtype=torch.float64) - J, phi(h) - h)
    z = FixedPoint(Newton(max_iter=1, rtol=0.0, atol=0.0), Unrolled())(phi, h).z
    torch.testing.assert_close(z, h + step, rtol=1e-12, atol=1e-12)


def test_gradcheck_through_the_updates_of_newton():
    for max_iter in (1, 3):
        layer = FixedPoint(Newton(max_iter=max_iter, rtol=0.0, atol=0.0), Unrolled())
        assert gradcheck(recurrent(layer), few_inputs())
    with pytest.raises(ValueError, match=r"use Implicit\(\)"):
        FixedPoint(Newton(linear="gmres"), Unrolled())


def no_fixed_point(z):
    return z + 1


def test_failures_are_ignored_warned_of_once_or_raised():
    z0 = torch.zeros(2, 1)
    FixedPoint(Picard(max_iter=2), on_failure="ignore")(no_fixed_point, z0)
    layer = FixedPoint(Picard(max_iter=2), on_failure="warn")
    with pytest.warns(ConvergenceWarning, match=r"the solve: 2 of 2 samples.*2 MAX_ITER"):
        layer(no_fixed_point, z0)
    layer(no_fixed_point, z0)
    with pytest.raises(ConvergenceError, match="2 of 2"):
        FixedPoint(Picard(max_iter=2), on_failure="raise")(no_fixed_point, z0)
    with pytest.raises(ValueError, match=r"unknown on_failure 'stop'.*ignore, warn, raise"):
        FixedPoint(on_failure="stop")


def test_an_adjoint_that_does_not_converge_warns_unless_told_otherwise():
    x = torch.ones(1, 1, requires_grad=True)

    def gradient(**options):
        layer = FixedPoint(Anderson(), Implicit(Picard(max_iter=1), **options))
        return torch.autograd.grad(layer(lambda z: 0.5 * z + x, torch.zeros(1, 1)).z, x)

    with pytest.warns(ConvergenceWarning, match=r"the adjoint solve: 1 of 1.*raise max_iter"):
        gradient()
    with pytest.raises(ConvergenceError):
        gradient(on_failure="raise")
    gradient(on_failure="ignore")


def test_torch_func_passes_a_fixed_number_of_steps():
    x = torch.tensor([[0.3], [0.4]], dtype=torch.float64)

    def run(layer):
        return lambda x: layer(lambda z: 0.5 * torch.sin(z) + x, torch.zeros_like(x)).z

    steps = {"max_iter": 4, "rtol": 0.0, "atol": 0.0}
    names = ("picard", "anderson", "broyden", "newton", "barzilai-borwein")
    solvers = [make_solver(name, **steps) for name in names]
    for solver in (*solvers, InexactNewton(max_iter=5, eta=0.7)):
        steps = run(FixedPoint(solver.double(), Unrolled()))
        expected = torch.autograd.functional.jacobian(steps, x)
        assert torch.allclose(torch.func.jacrev(steps)(x), expected)
        assert torch.allclose(torch.func.jacfwd(steps)(x), expected)
        assert torch.allclose(torch.func.vmap(steps)(x[None])[0], steps(x))


@pytest.mark.parametrize("name", ["picard", "anderson", "broyden"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_the_dtype_of_the_state_and_gives_close_gradients(name, dtype):
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 8)
    with torch.no_grad():
        linear.weight.mul_(0.5 / torch.linalg.matrix_norm(linear.weight, 2))
    x = torch.randn(4, 8)

    def gradient(enabled):
        layer = FixedPoint(make_solver(name, rtol=1e-2, atol=1e-2), Implicit())
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            solution = layer(lambda z: torch.tanh(linear(z) + x), torch.zeros(4, 8))
            assert solution.z.dtype == torch.float32
            assert solution.converged.all()
            loss = solution.z.square().mean()
        return torch.autograd.grad(loss, linear.weight)[0]

    assert torch.allclose(gradient(True), gradient(False), rtol=0.1, atol=3e-3)


@pytest.mark.parametrize("scale", [1e-6, 1e-8, 1e-12, 1e-30, 1e30])
def test_the_adjoint_tolerance_is_relative_to_the_cotangent(scale):
    layer = FixedPoint(Anderson(rtol=1e-4, atol=1e-4), Implicit(Anderson(rtol=1e-4)))
    for one, scaled in zip(gradients(layer), gradients(layer, weight=scale), strict=True):
        assert torch.allclose(scaled, scale * one, rtol=1e-12, atol=0)


def test_scaled_float32_cotangents_give_scaled_gradients():
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    layer = FixedPoint(Anderson(), Implicit())

    def gradient(weight):
        z = layer(lambda z: 0.5 * torch.tanh(z) + x, torch.zeros(4, 3)).z
        return torch.autograd.grad(weight * z.square().sum(), x)[0]

    for weight in (1e-6, 1e-12, 1e-25):
        assert torch.allclose(gradient(weight) / weight, gradient(1.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("backward", [Unrolled, Implicit])
@pytest.mark.parametrize("name", TOLERANCE_SOLVERS)
def test_a_row_without_fixed_point_does_not_poison_the_others(name, backward):
    w = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    slope = torch.full((10, 1), 0.5, dtype=torch.float64)
    slope[9] = 1.0
    quiet = {"on_failure": "ignore"} if backward is Implicit else {}
    solver = make_solver(name, rtol=0.0, atol=1e-10)
    layer = FixedPoint(solver, backward(**quiet), on_failure="ignore")
    solution = layer(lambda z: slope * z + w, torch.zeros(10, 1, dtype=torch.float64))
    assert solution.converged.tolist() == [True] * 9 + [False]
    (good,) = torch.autograd.grad(solution.z[:9].sum(), w, retain_graph=True)
    assert good.item() == pytest.approx(18.0, rel=1e-8)
    (bad,) = torch.autograd.grad(solution.z[9].sum(), w)
    assert bad.isfinite()


@pytest.mark.parametrize("backward", [Unrolled, Implicit])
def test_a_row_that_overflows_does_not_poison_the_others(backward):
    w = torch.tensor(0.25, requires_grad=True)
    z0 = torch.tensor([[0.0], [3.0]])
    layer = FixedPoint(Picard(), backward(), on_failure="ignore")
    solution = layer(lambda z: w + z**3, z0)
    assert solution.result.tolist() == [Result.CONVERGED, Result.NONFINITE]
    solution.z.sum().backward()
    z = solution.z[0].item()
    if backward is Implicit:
        assert w.grad.item() == pytest.approx(1 / (1 - 3 * z**2), rel=1e-3)
    assert w.grad.isfinite()


@pytest.mark.parametrize("check_every", [1, 3])
@pytest.mark.parametrize("solver", [Picard, Anderson, BarzilaiBorwein, Broyden])
@pytest.mark.parametrize("growth", [1.5, 3.0, 5.0])
def test_unrolling_past_a_row_that_runs_away(solver, growth, check_every):
    w = torch.tensor(1.0, requires_grad=True)
    slope, runaway = torch.tensor([[0.5], [0.5], [0.3]]), torch.tensor([[0.0], [growth], [0.0]])
    layer = FixedPoint(solver(check_every=check_every), Unrolled(), on_failure="ignore")
    solution = layer(lambda z: w * (slope * z + runaway * z.exp()) + 1, torch.full((3, 1), 3.0))
    assert solution.converged.tolist() == [True, False, True]
    solution.z[::2].sum().backward()
    assert w.grad.item() == pytest.approx(0.5 / 0.5**2 + 0.3 / 0.7**2, rel=1e-3)


@pytest.mark.parametrize("check_every", [1, 3])
@pytest.mark.parametrize("solver", [Broyden, Newton])
def test_unrolling_past_steps_that_were_taken_back(solver, check_every):
    w = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    c = torch.tensor([[0.2], [0.4]], dtype=torch.float64)
    outside = []

    def phi(z):
        outside.append(bool((z < 0).any()))
        return z - 5 * (w * torch.sqrt(z) - c)

    solver = solver(check_every=check_every, rtol=1e-10)
    layer = FixedPoint(solver, Unrolled(), on_failure="ignore")
    solution = layer(phi, torch.full((2, 1), 1.5, dtype=torch.float64)).check()
    assert any(outside)
    solution.z.sum().backward()  # z = (c / w)^2
    assert w.grad.item() == pytest.approx(-2 * (0.2**2 + 0.4**2), rel=1e-4)


def test_gradient_follows_grad_mode_not_train_mode():
    layer = FixedPoint(Anderson(), Implicit())
    found = []
    for train in (True, False):
        layer.train(train)
        x = torch.ones(2, 3, requires_grad=True)
        layer(lambda z: 0.5 * torch.sin(z) + x, torch.zeros(2, 3)).z.sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)
    with torch.no_grad():
        z = layer(lambda z: 0.5 * torch.sin(z) + x, torch.zeros(2, 3)).z
    assert not z.requires_grad


def test_maps_of_every_kind():
    layer = FixedPoint(Anderson(**TIGHT), Implicit())
    z0 = torch.zeros(2, 1, dtype=torch.float64)
    x = torch.ones(2, 1, dtype=torch.float64, requires_grad=True)
    layer(lambda z: 3 * x, z0).z.sum().backward()  # J = 0
    assert torch.equal(x.grad, torch.full_like(x, 3.0))
    assert not layer(lambda z: torch.ones_like(z), z0).z.requires_grad  # no dependence at all
    linear = torch.nn.Linear(1, 1).double()
    z = layer(lambda z: torch.tanh(0.3 * linear(z)), z0).z
    z.sum().backward()
    assert all(p.grad is not None for p in linear.parameters())
    tree = layer(lambda z: {"a": 0.5 * z["a"] + x, "b": 0.1 * z["a"]}, {"a": z0, "b": z0}).z
    (g,) = torch.autograd.grad(tree["b"].sum(), x)
    assert torch.allclose(g, torch.full_like(g, 0.2))


def test_the_layer_twice_in_one_graph_and_backward_twice():
    layer = FixedPoint(Anderson(**TIGHT), Implicit())
    x = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    inner = layer(lambda z: 0.5 * z + x, torch.zeros_like(x)).z
    outer = layer(lambda z: 0.25 * z + inner, torch.zeros_like(x)).z
    first = torch.autograd.grad(outer, x, retain_graph=True)[0]
    second = torch.autograd.grad(outer, x)[0]
    assert torch.equal(first, second)
    assert first.item() == pytest.approx(2 * 4 / 3, rel=1e-10)


def test_options_of_the_adjoint_reach_it():
    for max_iter in (2, 7):
        adjoint = Picard(max_iter=max_iter, rtol=1e-15, atol=0.0)
        backward = Implicit(adjoint, failed="keep", on_failure="ignore")
        layer = FixedPoint(Picard(**TIGHT), backward)
        x = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
        layer(lambda z: 0.5 * z + x, torch.zeros_like(x)).z.backward()
        assert backward.adjoint.iterations.item() == max_iter
        assert backward.adjoint.result.item() == Result.MAX_ITER
        assert x.grad.item() == pytest.approx(2 - 0.5**max_iter)


def test_the_result_of_every_adjoint_of_a_backward_pass_is_kept():
    layer = FixedPoint(Picard(**TIGHT), Implicit())
    for T in (3, 2):
        h = torch.zeros(2, 1, dtype=torch.float64)
        w = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        for _ in range(T):
            h = layer(lambda z, h=h: 0.5 * torch.tanh(w * z + h) + 1, h).z
        h.sum().backward()
        results = [adjoint.result for adjoint in layer.backward.adjoints]
        assert len(results) == T
        assert all(
            result.shape == (2,) and (result == Result.CONVERGED).all() for result in results
        )


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_weight_has_a_gradient(layout):
    layer = FixedPoint(Anderson(**TIGHT), Implicit())
    dense = torch.tensor([[0.0, 0.4], [0.3, 0.0]], dtype=torch.float64)
    found = []
    for given in (dense, dense.to_sparse(layout=layout)):
        weight = given.clone().requires_grad_()
        phi = lambda z: torch.tanh((weight @ z.T).T + 1)  # noqa: E731
        layer(phi, torch.zeros(3, 2, dtype=torch.float64)).z.sum().backward()
        found.append(weight.grad.to_dense()[dense != 0])
    assert torch.allclose(*found, rtol=1e-10)


@pytest.mark.parametrize("name", ["picard", "anderson", "broyden", "newton"])
def test_a_start_made_in_inference_mode(name):
    layer = FixedPoint(make_solver(name))
    a, zero = torch.tensor([[0.5]], requires_grad=True), torch.zeros(1, 1)
    with torch.inference_mode():
        z0 = layer(lambda z: a * z + 1, zero).z
    layer(lambda z: a * z + 1, z0).z.sum().backward()
    assert a.grad.item() == pytest.approx(4, rel=1e-4)


def test_pairs_that_make_no_sense_are_refused_when_built():
    for backward in (Implicit(), Phantom()):
        with pytest.raises(ValueError, match=r"use Unrolled\(\), or InexactNewton"):
            FixedPoint(InexactNewton(), backward)
    with pytest.raises(ValueError, match=r"last=3.*max_iter=2.*last=None"):
        FixedPoint(InexactNewton(max_iter=2), Unrolled(last=3))
    with pytest.raises(ValueError, match="solved to a tolerance.*set rtol"):
        Implicit(Picard(rtol=0.0, atol=0.0))
    FixedPoint(InexactNewton(learn=False), Implicit())


def test_unrolling_the_last_updates_of_a_fixed_number():
    x = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    z0 = torch.full((1, 1), 4.0, dtype=torch.float64, requires_grad=True)
    for last, expected in ((1, 1.0), (2, 1.5), (3, 1.75)):
        solver = Picard(max_iter=3, rtol=0.0, atol=0.0)
        z = FixedPoint(solver, Unrolled(last=last))(lambda z: 0.5 * z + x, z0).z
        gx, gz = torch.autograd.grad(z, (x, z0), allow_unused=True)
        assert z.item() == pytest.approx(0.125 * 4 + 1.75)
        assert gx.item() == pytest.approx(expected)
        assert (gz.item() == pytest.approx(0.125)) if last == 3 else gz is None


@pytest.mark.parametrize("backward", [Unrolled(last=4), Phantom(steps=4)])
def test_a_truncated_gradient_is_the_truncated_neumann_series(backward):
    x = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    solution = FixedPoint(Picard(**TIGHT), backward)(lambda z: 0.5 * z + x, torch.zeros_like(x))
    solution.z.backward()
    assert x.grad.item() == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert solution.z.item() == pytest.approx(2, rel=1e-12)


def test_phantom_with_damping():
    x = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    layer = FixedPoint(Anderson(**TIGHT), Phantom(steps=2, beta=0.5))
    layer(lambda z: 0.5 * z + x, torch.zeros_like(x)).z.backward()
    # Two updates z <- 0.75 z + 0.5 x.
    assert x.grad.item() == pytest.approx(0.5 + 0.75 * 0.5)


def test_no_reference_cycle_holds_a_graph():
    gc.collect()
    gc.disable()
    try:
        layer = FixedPoint(Anderson(), Implicit())
        x = torch.ones(2, 3, requires_grad=True)
        alive = []
        for backward in (False, True):
            marker = x * 1.0
            alive.append(weakref.ref(marker))
            z = layer(lambda z, m=marker: 0.5 * torch.sin(z) + m, torch.zeros(2, 3)).z
            if backward:
                z.sum().backward()
            del z, marker
        assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()


def test_copies_and_round_trips():
    x = torch.ones(1, 2, requires_grad=True)

    def run(layer):
        return layer(lambda z: 0.5 * torch.tanh(z) + x, torch.zeros(1, 2), t=1).z

    for layer in (
        FixedPoint(Anderson(), Implicit()),
        FixedPoint(InexactNewton(max_iter=2, timesteps=3), Unrolled()),
    ):
        run(layer).sum().backward()
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(run(other), run(layer))
        fresh = FixedPoint(copy.deepcopy(layer.solver), type(layer.backward)())
        fresh.load_state_dict(layer.state_dict())
        assert torch.equal(run(fresh), run(layer))
        assert layer.double()(torch.cos, torch.zeros(1, 1).double(), t=0).z.dtype == torch.float64


def test_a_nan_cotangent_remains_in_its_row():
    x = torch.ones(2, 1, requires_grad=True)
    layer = FixedPoint(Anderson(), Implicit(on_failure="ignore"))
    z = layer(lambda z: 0.5 * z + x, torch.zeros(2, 1)).z
    z.backward(torch.tensor([[math.nan], [1.0]]))
    assert x.grad[1].item() == pytest.approx(2, rel=1e-4)


def test_the_default_adjoint_of_steps_by_time_needs_no_time():
    steps = {"max_iter": 60, "eta": 0.7, "learn": False, "rtol": 1e-8}
    layer = FixedPoint(InexactNewton(timesteps=3, **steps), Implicit())
    a = torch.tensor([[0.5]], dtype=torch.float64, requires_grad=True)
    layer(lambda z: a * z + 1, torch.zeros(1, 1, dtype=torch.float64), t=1).z.sum().backward()
    assert torch.allclose(a.grad, torch.full_like(a, 4.0), rtol=1e-6)


@pytest.mark.parametrize("steps", [1, 3])
def test_phantom_of_the_last_state_is_that_of_updates_from_the_solution(steps):
    a = torch.tensor([[0.5]], dtype=torch.float64, requires_grad=True)
    phi = lambda z: torch.cos(a * z)  # noqa: E731
    solver, z0 = Picard(max_iter=3, rtol=0, atol=0), torch.zeros(2, 1).double()
    z = FixedPoint(solver, Phantom(steps, beta=0.8, value="last"))(phi, z0).z
    expected = FixedPoint(solver, Phantom(steps))(phi, z0).z.detach()
    start = expected.clone()
    for _ in range(steps):
        expected = expected + 0.8 * (phi(expected) - expected)
    assert torch.allclose(z, expected, rtol=1e-15)
    assert not torch.equal(z, start)
    gradients = [torch.autograd.grad(x.sum(), a)[0] for x in (z, expected)]
    assert torch.allclose(*gradients, rtol=1e-14)
    with torch.no_grad():
        evaluated = FixedPoint(solver, Phantom(steps, beta=0.8, value="last"))(phi, z0).z
    assert torch.equal(evaluated, z)
    with pytest.raises(ValueError, match="equilibrium, last"):
        Phantom(value="first")


@pytest.mark.parametrize("name", ["barzilai-borwein", "broyden", "squarem"])
@pytest.mark.parametrize("by_columns", ["cotangent", "map"])
def test_not_one_bit_of_a_gradient_depends_on_the_layout(name, by_columns):
    """A row of a column-major matrix would be summed in another order than the row alone."""
    x, a, g = torch.randn(3, 3, 101, generator=torch.Generator().manual_seed(0))
    a = a[0] / 2

    def gradient(rows):
        given = x[rows].clone().requires_grad_()
        cotangent = g.t().contiguous().t()[rows] if by_columns == "cotangent" else g[rows]

        def phi(z):
            if by_columns == "map":
                return torch.tanh(a[:, None] * z.t() + given.t() + 0.3 * z.t().roll(1, 0)).t()
            return torch.tanh(a * z + given + 0.3 * z.roll(1, 1))

        solver = make_solver(name, max_iter=300)
        FixedPoint(solver, Implicit())(phi, torch.zeros_like(given)).z.backward(cotangent)
        return given.grad

    whole = gradient(slice(0, 3))
    for i in range(3):
        assert torch.equal(gradient(slice(i, i + 1))[0], whole[i]), i
