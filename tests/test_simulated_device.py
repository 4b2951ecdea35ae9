"""Waits and operations of a solve on a simulated device: what a GPU would be kept waiting by."""

import pytest
import torch
from support.simulated_device import (
    CUDA,
    OnDevice,
    module_to_device,
    simulated_device,
    to_device,
    to_host,
)
from torch.func import functional_call

from fixpoint import FixedPoint, Implicit, Picard, Unrolled, solve
from fixpoint.analysis import contraction_profile, iteration_profile, least_squares_line
from fixpoint.models import ERNN, UGRNN, FastGRNN, FastRNN
from fixpoint.models.deq.spectral_norm import _NormByProducts
from fixpoint.models.ops.common import dispatch
from fixpoint.models.ops.equilibrium.arguments import Ending
from fixpoint.models.ops.equilibrium.results import as_solution
from fixpoint.sequence import LeakyJacobian, solve_sequence
from fixpoint.solvers import SOLVERS


def problem():
    generator = torch.Generator().manual_seed(0)
    U = torch.randn(8, 8, generator=generator)
    U = 0.7 * U / torch.linalg.matrix_norm(U, 2)
    return to_device(U).requires_grad_(), to_device(torch.randn(6, 8, generator=generator))


def test_the_device_counts_reads_copies_and_operations():
    with simulated_device() as counts:
        x = torch.ones(3, device=CUDA)
        y = x + 1
        assert isinstance(y, OnDevice)
        assert y.device == CUDA
        assert y.is_cuda
        assert counts.reads.total() == 0
        assert bool((y > 1).all())
        assert y.tolist() == [2.0, 2.0, 2.0]
        assert counts.reads.total() == 2
        x[[0, 2]]
        assert counts.copies["an index of the host"] == 1
        torch.testing.assert_close(to_host(y), torch.full((3,), 2.0))
        with pytest.raises(RuntimeError, match="mixes"):
            y + torch.ones(3)
        assert counts.operations["add"] == 2


UNROLLED = [name for name in SOLVERS if SOLVERS[name]().unrollable and name != "newton-krylov"]


@pytest.mark.parametrize("name", UNROLLED)
def test_fixed_steps_can_be_captured(name):
    """No value is read, and nothing is copied: neither the steps nor their gradients wait."""
    U, x = problem()
    options = {"eta": 0.7} if name == "inexact-newton" else {}
    solver = SOLVERS[name](max_iter=6, rtol=0, atol=0, **options)
    layer = FixedPoint(solver, Unrolled(), on_failure="ignore")
    with simulated_device(capturing=True) as counts:
        z = layer(lambda z: torch.tanh(z @ U.mT + x), torch.zeros(6, 8, device=CUDA)).z
        torch.autograd.grad(z, U, torch.ones(6, 8, device=CUDA))
        assert counts.operations["tanh"] > 5
        assert not counts.reads
        assert not counts.copies


WAITS = {
    "picard": (1, 15),
    "inexact-newton": (1, 16),
    "anderson": (1, 175),
    "broyden": (1, 180),
    "barzilai-borwein": (1, 36),
    "newton": (1, 145),
    "newton-krylov": (2.4, 1500),
    "levenberg-marquardt": (1, 135),
    "squarem": (1, 28),
    "damped-picard": (1, 60),
    "auto": (1, 220),
}
"""How often the host waits in an update at most, and operations in it: no solver may get worse.

One read of all that it needs, beside `WHOLE` of the whole solve; a Krylov solve of an update reads
once for each few products.
"""
WHOLE = 4


@pytest.mark.parametrize("check_every", [1, 4])
@pytest.mark.parametrize("name", SOLVERS)
def test_waits_and_operations_of_an_update(name, check_every):
    U, x = problem()
    U, options = U.detach(), {"max_iter": 60, "rtol": 1e-5, "atol": 0.0, "check_every": check_every}
    if name == "inexact-newton":
        options |= {"eta": 0.7, "learn": False}
    with simulated_device() as counts:
        z0 = torch.zeros(6, 8, device=CUDA)
        solution = solve(lambda z: torch.tanh(z @ U.mT + x), z0, SOLVERS[name](**options))
        waits = counts.reads.total() + counts.copies["to the host"]
        operations = counts.launches
        updates = to_host(solution.iterations).max().item()
    most_waits, most_operations = WAITS[name]
    assert waits <= most_waits * updates + WHOLE
    assert operations <= most_operations * updates


@pytest.mark.parametrize("name", ["picard", "anderson", "broyden", "newton", "newton-krylov"])
def test_waits_of_an_adjoint(name):
    U, x = problem()
    backward = Implicit(SOLVERS[name](rtol=1e-5))
    layer = FixedPoint(Picard(rtol=1e-5), backward)
    with simulated_device() as counts:
        z = layer(lambda z: torch.tanh(z @ U.mT + x), torch.zeros(6, 8, device=CUDA)).z
        before = counts.reads.total() + counts.copies["to the host"]
        torch.autograd.grad(z, U, torch.ones(6, 8, device=CUDA))
        waits = counts.reads.total() + counts.copies["to the host"] - before
        updates = to_host(backward.adjoint.iterations).max().item()
    assert waits <= WAITS[name][0] * updates + WHOLE


@pytest.mark.parametrize("name", ["newton", "newton-krylov", "auto"])
def test_a_choice_on_the_device_equals_one_of_the_host(name):
    """Where I - J is singular the guessed step is made again, and refused steps are shortened."""

    def phi(z):
        return z - z**3 + z  # I - J = 3 z^2 - 1

    z0 = torch.tensor([[1 / 3**0.5, 2.0], [0.5, 0.4], [0.9, -3.0], [0.57, 0.6]])
    solver = SOLVERS[name](rtol=1e-5, max_iter=40)
    expected = solve(phi, z0, solver)
    with simulated_device():
        got = solve(phi, to_device(z0), solver)
        pairs = [(got.z, expected.z), (got.iterations, expected.iterations)]
        for g, e in [*pairs, (got.result, expected.result)]:
            torch.testing.assert_close(to_host(g), e, rtol=1e-6, atol=1e-6)
    assert expected.iterations.max() > 4


def test_evaluations_are_counted_when_they_are_asked_for():
    iterations = torch.tensor([[3, 4], [2, 5]])
    ends = [iterations, torch.rand(2, 2), torch.zeros(2, 2, dtype=torch.int8)]
    with simulated_device() as counts:
        end = Ending(*(to_device(v) for v in ends), None)
        solution = as_solution(to_device(torch.rand(2, 2, 3)), end)
        total = solution.evaluations + solution.evaluations
        assert not counts.reads
        assert solution.evaluations == 11
        assert counts.reads
        assert f"{sum([total, 3]):d}" == "25"
        assert solution.evaluations < 12


@pytest.mark.parametrize("shape", [(5, 5), (7, 4), (3, 9)])
def test_the_norm_by_products_equals_that_by_singular_values(shape):
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    expected = torch.linalg.matrix_norm(W, 2)
    norm = _NormByProducts.apply(W)
    torch.testing.assert_close(norm, expected, rtol=1e-7, atol=0)
    for g, e in zip(torch.autograd.grad(norm, W), torch.autograd.grad(expected, W), strict=True):
        torch.testing.assert_close(g, e, rtol=0, atol=1e-6)
    assert torch.autograd.gradgradcheck(_NormByProducts.apply, (W,), atol=1e-4)


def test_the_norm_by_products_of_equal_singular_values():
    Q = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)))[0]
    torch.testing.assert_close(_NormByProducts.apply(3 * Q), torch.tensor(3.0), rtol=1e-6, atol=0)


def test_the_host_does_not_wait_for_the_norm_by_products():
    with simulated_device() as counts:
        _NormByProducts.apply(to_device(torch.eye(4)))
        assert not counts.reads
        assert not counts.copies


class Silent:
    """Kernels that only return tensors of the right shapes: what is around them remains."""

    @staticmethod
    def forward(arguments):
        pass

    @staticmethod
    def backward(arguments):
        if hasattr(arguments, "p"):
            return (
                torch.zeros_like(arguments.p),
                torch.zeros_like(arguments.q),
                arguments.g.new_zeros(2, arguments.g.shape[1]),
            )
        return torch.zeros_like(arguments.a), torch.zeros_like(arguments.b)


@pytest.mark.parametrize(
    "layer",
    [
        *(ERNN(3, 8, rank=2), ERNN(3, 8, timesteps=6, max_iter=2)),
        *(FastRNN(3, 8), FastGRNN(3, 8), UGRNN(3, 8)),
    ],
    ids=["ERNN", "ERNN, eta of each step", "FastRNN", "FastGRNN", "UGRNN"],
)
def test_a_training_step_of_a_fused_layer_can_be_captured(layer, monkeypatch):
    """Around its kernels no value is read, and nothing is copied from or to the host."""
    monkeypatch.setattr(dispatch, "backend", lambda name, h: Silent)
    weights = {k: to_device(v) for k, v in layer.named_parameters()}
    x = to_device(torch.randn(6, 4, 3))
    with simulated_device(capturing=True) as counts:
        output, _ = functional_call(layer, weights, (x,))
        torch.autograd.grad(output, list(weights.values()), torch.ones_like(output))
        assert not counts.reads
        assert not counts.copies


def test_an_analysis_of_a_layer_remains_on_its_device():
    """A plot compares its numbers, and they come from one place."""
    solver = Picard(max_iter=2, rtol=0, atol=0, record="iterates")
    layer = module_to_device(ERNN(3, 8, solver=Picard(max_iter=2, rtol=0, atol=0)))
    U, x = problem()
    U = U.detach()
    with simulated_device():
        profile = contraction_profile(layer, to_device(torch.randn(6, 4, 3)))
        trace = solve(
            lambda z: torch.tanh(z @ U.mT + x), torch.zeros(6, 8, device=CUDA), solver
        ).trace
        of_updates = iteration_profile(lambda z: torch.tanh(z @ U.mT + x), trace, 0.5)
        for found in (profile, of_updates):
            tensors = found.eta, found.norm, found.lower, found.upper
            assert {v.device for v in tensors} == {CUDA}
        assert least_squares_line(to_device(torch.rand(5, 2))).device == CUDA


def test_a_jacobian_serves_on_one_device_after_another():
    jacobian, x = LeakyJacobian(0.9), torch.randn(6, 4, 3)
    for there in (x, to_device(x), x):
        with simulated_device():
            solution = solve_sequence(
                lambda h, x: 0.9 * h + 0.1 * torch.tanh(h + x), there, there[0], jacobian=jacobian
            )
            assert solution.z.device == there.device
