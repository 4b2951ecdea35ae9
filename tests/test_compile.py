"""torch.compile: one graph of a fixed number of steps; other solves remain outside of it."""

import pytest
import torch

from fixpoint import (
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


@pytest.mark.parametrize("name", ["picard", "inexact-newton", "anderson", "broyden"])
def test_a_fixed_number_of_steps_compiles_without_a_break(name):
    if name == "inexact-newton":
        solver = InexactNewton(max_iter=2, timesteps=4, eta=0.6)
    else:
        solver = make_solver(name, max_iter=3, rtol=0.0, atol=0.0)
    layer = FixedPoint(solver, Unrolled())
    U = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)) / 4
    inputs = [U.requires_grad_(), torch.ones(3, 4, requires_grad=True), *layer.parameters()]

    def run(x):
        return layer(lambda z: torch.tanh(z @ U.T + x), torch.zeros_like(x), t=1).z

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    plain, fast = run(inputs[1]), compiled(inputs[1])
    assert torch.allclose(plain, fast, atol=1e-6)
    for a, b in zip(
        torch.autograd.grad(plain.square().sum(), inputs),
        torch.autograd.grad(fast.square().sum(), inputs),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-5)


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


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch, after a break
@pytest.mark.parametrize(
    "layer",
    [
        FixedPoint(),
        FixedPoint(Newton(max_iter=5, rtol=0.0, atol=0.0), Unrolled()),
        FixedPoint(Picard(), Phantom(2)),
    ],
    ids=["to a tolerance", "Newton", "Phantom"],
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


def test_one_graph_of_a_solve_to_a_tolerance_is_refused_with_the_reason():
    torch._dynamo.reset()
    run = torch.compile(lambda x: solve(torch.cos, x).z, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a fixed number of steps"):
        run(torch.zeros(2, 1))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch, after a break
@pytest.mark.skipif(not has_numba(), reason="needs numba")
def test_fused_equilibria_leave_the_graph_as_a_whole():
    torch.manual_seed(0)
    backward = Implicit()
    layer = ERNN(3, 6, cell="self-feedback", solver=Picard(rtol=1e-4), backward=backward)
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
