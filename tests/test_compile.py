"""torch.compile: solves as one graph, the numbers of eager; others remain outside of it."""

import shutil

import pytest
import torch

from fixpoint import (
    SQUAREM,
    Anderson,
    Broyden,
    DampedPicard,
    FixedPoint,
    Implicit,
    InexactNewton,
    Newton,
    Phantom,
    Picard,
    Unrolled,
    make_solver,
    solve,
)
from fixpoint.models import ERNN
from fixpoint.models.ops.common.dispatch import has_numba


def has_cxx():
    return shutil.which("g++") is not None or shutil.which("clang++") is not None


@pytest.mark.parametrize(
    "name",
    [
        "picard",
        "inexact-newton",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("anderson", "broyden")),
    ],
)
def test_a_fixed_number_of_steps_compiles_without_a_break(name):
    if name == "inexact-newton":
        solver = InexactNewton(max_iter=2, timesteps=4, eta=0.6)
    else:
        solver = make_solver(name, max_iter=3, rtol=0.0, atol=0.0)
    layer = FixedPoint(solver, Unrolled())
    U = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)) / 4
    x, z0, bias = (torch.full((3, 4), v, requires_grad=True) for v in (1.0, 0.5, 0.1))
    inputs = [U.requires_grad_(), x, z0, bias, *layer.parameters()]

    def run(x, z0):
        return layer(lambda z: torch.tanh(z @ U.T + x + bias), z0, t=1).z

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    plain, fast = run(x, z0), compiled(x, z0)
    assert torch.allclose(plain, fast, atol=1e-6)
    for a, b in zip(
        torch.autograd.grad(plain.square().sum(), inputs),
        torch.autograd.grad(fast.square().sum(), inputs),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-5)
        assert b.abs().max() > 0


def test_the_phantom_gradient_of_fixed_steps_compiles_without_a_break():
    layer = FixedPoint(Picard(max_iter=3, rtol=0.0, atol=0.0), Phantom(2))
    U = (torch.randn(4, 4, generator=torch.Generator().manual_seed(0)) / 4).requires_grad_()
    x = torch.ones(3, 4)

    def run(x):
        return layer(lambda z: torch.tanh(z @ U.T + x), torch.zeros_like(x)).z

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    found = [torch.autograd.grad(f(x).sum(), U)[0] for f in (run, compiled)]
    assert torch.allclose(*found, atol=1e-6)


SOLVERS = {
    "picard": Picard(),
    "damped Picard": DampedPicard(),
    "inexact Newton": InexactNewton(60, eta=0.8, learn=False, rtol=1e-5),
    "anderson": Anderson(),
    "broyden": Broyden(memory=20),
    "squarem": SQUAREM(),
}
OTHERS = [name for name in SOLVERS if name != "picard"]  # seconds each


def tanh_problem(dtype=torch.float64):
    """U, and a function of x that gives phi, whose injection is computed."""
    generator = torch.Generator().manual_seed(0)
    U = (torch.randn(4, 4, generator=generator, dtype=dtype) / 4).requires_grad_()
    x = torch.randn(3, 4, generator=generator, dtype=dtype, requires_grad=True)
    return U, x, lambda x: lambda z: torch.tanh(z @ U.t() + x.sin())


def compiled(run, backend="aot_eager"):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(run, fullgraph=True, backend=backend)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in OTHERS else []) for n in SOLVERS],
)
def test_a_solve_to_a_tolerance_is_one_graph(name):
    """Value, codes, counts and implicit gradients of eager, for two sizes of the batch."""
    U, x, map_of = tanh_problem()
    layer = FixedPoint(SOLVERS[name], Implicit())

    def run(x):
        s = layer(map_of(x), torch.zeros_like(x))
        return s.z, s.residual, s.iterations, s.result, s.stall

    fast = compiled(run)
    for given in (x, x.detach().repeat(2, 1)[:5].requires_grad_()):
        torch._dynamo.mark_dynamic(given, 0)
        plain, found = run(given), fast(given)
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-9)
        gradients = [torch.autograd.grad(s[0].square().sum(), [U, given]) for s in (found, plain)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_one_graph_serves_any_batch_with_floats_for_constants():
    """With dynamic=True they would be symbols, which are not passed to a loop."""
    U, x, _ = tanh_problem()
    layer = FixedPoint(DampedPicard(beta=0.9))
    graphs = []

    class Map(torch.nn.Module):
        scale = 0.7

        def forward(self, z, x):
            return torch.tanh(self.scale * (z @ U.t()) + x)

    phi = Map()

    def run(x):
        return layer(lambda z: phi(z, x), torch.zeros_like(x)).z

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    fast = torch.compile(run, fullgraph=True, backend=keep, dynamic=True)
    for B in (3, 5, 7):
        given = x.detach()[:1].repeat(B, 1)
        torch.testing.assert_close(fast(given), run(given))
    assert len(graphs) == 1
    loops = [n for n in graphs[0].graph.nodes if "while_loop" in str(n.target)]
    values = [n.meta.get("example_value") for loop in loops for n in loop.all_input_nodes]
    assert loops
    assert not any(isinstance(value, (float, torch.SymFloat)) for value in values)
    assert not torch._dynamo.config.specialize_float


def test_any_view_of_a_weight_is_differentiated_in_the_graph():
    """`W.T` was noted outside of the loop of the adjoint; second derivatives are refused."""
    U, x, _ = tanh_problem()
    torch.manual_seed(0)
    linear = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4)).double()
    layer = FixedPoint(Picard(), Implicit())

    def run(x):
        def phi(z):
            left, right = z @ U.T[:, :2], z @ U[2:].mT
            return torch.tanh(torch.cat([left, right], 1) + 0.2 * linear(z) + x.sin())

        return layer(phi, torch.zeros_like(x)).z

    leaves = [U, x, *linear.parameters()]
    plain, found = run(x), compiled(run)(x)
    expected = torch.autograd.grad(plain.square().sum(), leaves)
    given = torch.autograd.grad(found.square().sum(), leaves, create_graph=True)
    for a, b in zip(given, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        given[0].sum().backward()


@pytest.mark.parametrize(
    "solver",
    [Picard, InexactNewton, pytest.param(Anderson, marks=pytest.mark.slow)],
    ids=["picard", "inexact Newton", "anderson"],
)
def test_several_updates_in_a_pass_end_each_sample_where_it_would_end(solver):
    """Also where a pass would go beyond max_iter, and beyond the steps of InexactNewton."""
    U, x, _ = tanh_problem()
    U, x = U.detach(), x.detach() * torch.tensor([[0.1], [1.0], [30.0]], dtype=x.dtype)
    own = {"rtol": 1e-9, "memory": 2} if solver is Anderson else {"rtol": 1e-4}
    if solver is InexactNewton:
        own |= {"eta": 1.0, "learn": False}

    one, several = (solver(check_every=n, max_iter=8, **own) for n in (1, 3))

    def run(x, solver):
        return solve(lambda z: torch.tanh(z @ U.t() + x), torch.zeros_like(x), solver)

    found, plain = compiled(run, "eager")(x, several), run(x, one)
    torch.testing.assert_close(found.z, plain.z)
    assert found.iterations.tolist() == plain.iterations.tolist()
    assert found.result.tolist() == plain.result.tolist()
    assert plain.iterations.max() == 8
    assert plain.iterations.min() < 8


@pytest.mark.parametrize(
    "backward", [None, Phantom(2), Unrolled(last=2)], ids=["solve", "Phantom", "Unrolled"]
)
def test_other_gradients_of_a_solve_to_a_tolerance_are_in_the_graph(backward):
    U, x, map_of = tanh_problem()
    layer = None if backward is None else FixedPoint(Picard(), backward)

    def run(x):
        phi, z0 = map_of(x), torch.zeros_like(x)
        return solve(phi, z0, "picard").z if layer is None else layer(phi, z0).z

    plain, found = run(x), compiled(run, "eager")(x)
    torch.testing.assert_close(found, plain)
    if backward is not None:
        gradients = [torch.autograd.grad(z.square().sum(), [U, x]) for z in (found, plain)]
        torch.testing.assert_close(*gradients)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch between two graphs
def test_samples_that_settle_before_the_last_updates_leave_the_graph():
    """Their implicit gradient is solved outside; in the graph they would have none."""
    U, x, map_of = tanh_problem()
    backward, solver = Unrolled(last=2), Anderson(max_iter=25, rtol=0.0, atol=0.0)
    assert not backward.compiles(solver)
    layer = FixedPoint(solver, backward)

    def run(x):
        return layer(map_of(x), torch.zeros_like(x)).z

    plain, found = run(x), torch.compile(run, backend="eager")(x)
    gradients = [torch.autograd.grad(z.square().sum(), [U, x]) for z in (found, plain)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("solver", [Anderson, pytest.param(Broyden, marks=pytest.mark.slow)])
def test_samples_at_their_solution_have_the_implicit_gradient_of_fixed_steps(solver):
    """The second one starts elsewhere; the gradient of the others was 0."""
    U, x, _ = tanh_problem()
    with torch.no_grad():
        z0 = solve(lambda z: torch.tanh(z @ U.t() + x), torch.zeros_like(x), Picard(rtol=1e-13)).z
    z0[1] = 0.0
    layer = FixedPoint(solver(max_iter=3, rtol=0.0, atol=0.0), Unrolled())

    def run(x):
        return layer(lambda z: torch.tanh(z @ U.t() + x), z0).z

    plain, found = run(x), compiled(run, "eager")(x)
    torch.testing.assert_close(found, plain)
    gradients = [torch.autograd.grad(z.square().sum(), [U, x]) for z in (found, plain)]
    torch.testing.assert_close(*gradients)
    assert gradients[1][1].abs().sum(1).min() > 0.1


@pytest.mark.parametrize("backward", [Implicit(on_failure="ignore"), Phantom()], ids=str)
def test_a_state_of_fixed_steps_is_kept_where_phi_of_it_is_not_finite(backward):
    """The gradient is carried by phi(z) - phi(z), which is NaN there."""
    layer = FixedPoint(Picard(max_iter=1, rtol=0.0, atol=0.0), backward)
    shift = torch.tensor([[1.5], [0.0]], requires_grad=True)

    def run(shift):
        return layer(lambda z: (z - shift).sqrt(), torch.full((2, 1), 3.0)).z

    found, plain = compiled(run, "eager")(shift), run(shift)
    torch.testing.assert_close(found, plain)
    assert plain.isfinite().all()
    gradients = [torch.autograd.grad(z[1].sum(), shift)[0][1] for z in (found, plain)]
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs() > 0.1


@pytest.mark.parametrize("failed", ["zero", "keep"])
def test_samples_that_fail_have_the_gradient_asked_for(failed):
    """One converges, one has no time to, and one is not finite."""
    a = torch.tensor([[0.5], [0.999], [torch.nan]], dtype=torch.float64, requires_grad=True)
    layer = FixedPoint(Picard(max_iter=60), Implicit(failed=failed), on_failure="ignore")
    layer.backward.non_convergence.silent = True

    def run(a):
        s = layer(lambda z: a * z + 1, torch.zeros_like(a))
        return s.z, s.result

    found, plain = compiled(run, "eager")(a), run(a)
    assert found[1].tolist() == plain[1].tolist() == [0, 2, 4]
    gradients = [torch.autograd.grad(z.sum(), a)[0][:2] for z, _ in (found, plain)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-9)


@pytest.mark.slow  # inductor takes half a minute
@pytest.mark.skipif(not has_cxx(), reason="needs a C++ compiler")
@pytest.mark.parametrize(
    "layer",
    [
        FixedPoint(Anderson(memory=2, check_every=2)),
        FixedPoint(Picard(max_iter=3, rtol=0.0, atol=0.0), Unrolled()),
        FixedPoint(Picard(), Phantom(2)),
    ],
    ids=["Implicit", "Unrolled", "Phantom"],
)
def test_inductor_gives_each_gradient_of_a_layer(layer):
    """Of x alone it was 0 where a loop's carry shared the memory of a captured tensor."""
    torch.manual_seed(0)
    W, x, z0 = torch.nn.Linear(4, 4), *torch.randn(2, 3, 4)
    with torch.no_grad():
        W.weight /= 2
    leaves, found = [x.requires_grad_(), *W.parameters()], []
    if not layer.solver.has_tolerance:
        leaves.append(z0.requires_grad_())

    def run(x):
        return layer(lambda z: torch.tanh(W(z) + x.sin()), z0).z

    for backend in ("aot_eager", "inductor"):
        z = compiled(run, backend)(x)
        found.append([z, *torch.autograd.grad(z.square().sum(), leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert one.abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch, after a break
@pytest.mark.parametrize(
    "layer",
    [
        FixedPoint(Anderson(record="residual")),
        FixedPoint(Newton(max_iter=5, rtol=0.0, atol=0.0), Unrolled()),
        FixedPoint(Picard(), Unrolled()),
        FixedPoint(Broyden()),
    ],
    ids=["record", "Newton", "Unrolled to a tolerance", "Broyden without memory"],
)
def test_what_does_not_compile_is_left_out_of_the_graph(layer):
    U = (torch.randn(4, 4, generator=torch.Generator().manual_seed(0)) / 4).requires_grad_()

    def run(x):
        return 2 * layer(lambda z: torch.tanh(z @ U.T + x), torch.zeros_like(x)).z

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="eager")
    for x in (torch.ones(2, 4), torch.ones(3, 4)):
        plain, fast = (f(x) for f in (run, compiled))
        assert torch.equal(plain, fast)
        gradients = [torch.autograd.grad(z.square().sum(), U)[0] for z in (plain, fast)]
        assert torch.equal(*gradients)


@pytest.mark.parametrize(
    "attempt",
    [
        lambda x: solve(torch.cos, x, Newton()),
        lambda x: solve(torch.cos, x, Picard(noise=0.1)),
        lambda x: solve(torch.cos, x, Picard(), groups=torch.tensor([0, 0])),
    ],
    ids=["Newton", "noise", "groups"],
)
def test_one_graph_of_what_does_not_compile_is_refused_with_what_does(attempt):
    run = compiled(lambda x: attempt(x).z, "eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a graph holds solves by Picard"):
        run(torch.zeros(2, 1))


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({"min_iter": 40}, 1),
        ({"stop": "all"}, 1),
        ({"stop": 0.5}, 2),
        ({"stop": 0.5, "check_every": 7}, 2),
        ({"stop_when": lambda z, fz: (fz - z).abs().amax(1) < 1e-2}, 4),
    ],
    ids=["min_iter", "all", "half", "half, several in a pass", "stop_when"],
)
def test_other_ends_are_those_of_eager(options, ends):
    rates = torch.tensor([[0.5], [0.6], [0.7], [0.8]], dtype=torch.float64)
    b = torch.ones_like(rates, requires_grad=True)
    layer = FixedPoint(Picard(rtol=1e-4, **options), Implicit(Picard(rtol=1e-8, max_iter=200)))
    layer.non_convergence.silent = True

    def run(b, **options):
        s = layer(lambda z: rates * z + b, torch.zeros_like(b), **options)
        return s.z, s.iterations, s.result

    found, plain = compiled(run, "eager")(b), run(b, check_every=1)
    torch.testing.assert_close(found, plain)
    assert plain[1].unique().numel() == ends
    gradients = [torch.autograd.grad(z.sum(), b)[0] for z, *_ in (found, plain)]
    torch.testing.assert_close(*gradients)


def test_atol_decides_where_it_does_without_a_compiler():
    """Of samples that fail at a state that is 0, phi(z) has a size and z has none."""

    def run(z0):
        return solve(lambda z: z * 0.5 + 1, z0, Picard(max_iter=0)).atol_decides

    z0 = torch.zeros(2, 1)
    assert compiled(run, "eager")(z0).tolist() == run(z0).tolist() == [False, False]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch, after a break
@pytest.mark.skipif(not has_numba(), reason="needs numba")
def test_fused_equilibria_leave_the_graph_as_a_whole():
    torch.manual_seed(0)
    backward = Implicit()
    layer = ERNN(3, 6, map="self-feedback", solver=Picard(rtol=1e-4), backward=backward)
    x = torch.randn(5, 4, 3)
    torch._dynamo.reset()
    found = []
    for run in (layer, torch.compile(layer, backend="aot_eager")):
        layer.zero_grad()
        backward.adjoints.clear()
        states, _ = run(x)
        states.square().sum().backward()
        assert [adjoint.iterations.shape for adjoint in backward.adjoints] == [(5, 4)]
        found.append([states, *(p.grad for p in layer.parameters())])
    assert all(map(torch.equal, *found))
