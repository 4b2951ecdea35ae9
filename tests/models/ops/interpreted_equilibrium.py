"""The Triton kernels of an equilibrium through time, run by Triton's interpreter on the CPU.

`test_interpreted.py` runs this file with TRITON_INTERPRET=1, set before the import. Each
case is compared with the kernels compiled by numba, and with the loop over generic solves.
"""

import pytest
import torch

from fixpoint import Anderson, Implicit, InexactNewton, Picard, Result, Stall
from fixpoint.models.ops.common import dispatch
from fixpoint.models.ops.equilibrium import numba_kernels, triton_kernels
from fixpoint.models.ops.equilibrium.arguments import Inputs, Method
from fixpoint.models.ops.equilibrium.autograd import equilibrium_scan
from fixpoint.models.ops.equilibrium.reference import equilibrium_reference

OVERFLOW = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def new_buffers_are_full_of_nan(monkeypatch):
    empty = dispatch.empty
    monkeypatch.setattr(dispatch, "empty", lambda *args: empty(*args).fill_(torch.nan))


def problem(T, B, n, d=2, scale=0.6, identity=False):
    """Random inputs in float32, ||U||_2 = scale."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    U = random(n, n)
    U *= scale / torch.linalg.matrix_norm(U, 2)
    V = 0.5 * random(n, n) / n**0.5
    return Inputs(
        random(T, B, d), random(n, d), random(n), None if identity else U, V, random(B, n)
    )


def outcome(kernels, inputs, method, monkeypatch):
    """States, the report of each pass, and the gradients of all inputs."""
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "backend", lambda name, h: kernels)
        leaves = [None if v is None else v.detach().clone().requires_grad_() for v in inputs]
        states, report = equilibrium_scan(Inputs(*leaves), method)
        gradients = _gradients(states, leaves)
    return states.detach(), report, method.backward.adjoint, gradients


def _gradients(states, leaves):
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(9))
    asked = [v for v in leaves if v is not None]
    return torch.autograd.grad(states, asked, weights.to(states))


def assert_same(inputs, method, monkeypatch, rtol=2e-6):
    """As the compiled kernels of the CPU, to rounding; returns the report of the forward pass."""
    got, expected = (
        outcome(kernels, inputs, method, monkeypatch) for kernels in (triton_kernels, numba_kernels)
    )
    for g, e in ((got[1], expected[1]), (got[2], expected[2])):
        assert torch.equal(g.iterations, e.iterations)
        assert torch.equal(g.result, e.result)
        torch.testing.assert_close(g.residual, e.residual, rtol=1e-2, atol=1e-2)
    pairs = [
        (got[0], expected[0]),
        (got[2].z, expected[2].z),
        *zip(got[3], expected[3], strict=True),
    ]
    for g, e in pairs:
        torch.testing.assert_close(g, e, rtol=0, atol=rtol * max(1.0, e.abs().max().item()))
    return got[1]


@pytest.mark.parametrize(
    ("activation", "identity", "solver"),
    [
        ("tanh", False, Picard(rtol=1e-4, atol=1e-6)),
        ("sigmoid", True, Picard(beta=0.7, rtol=1e-4, atol=0)),
        ("identity", False, Picard(max_iter=3, rtol=1e-6)),
    ],
    ids=["tanh", "identity feedback, damped", "linear, too few updates"],
)
def test_picard(activation, identity, solver, monkeypatch):
    inputs = problem(2, 3, 7, identity=identity)
    assert_same(inputs, Method(activation, solver, Implicit(on_failure="ignore")), monkeypatch)


@pytest.mark.parametrize(
    ("solver", "scale"),
    [
        (Anderson(rtol=1e-4, atol=0, memory=2), 0.6),
        (Anderson(rtol=1e-4, atol=0, memory=3, beta=0.6, max_iter=7), 4.0),
    ],
    ids=["converges", "takes steps back"],
)
def test_anderson(solver, scale, monkeypatch):
    """Where phi expands steps are rejected, and differences of rounding size steer the rest."""
    method = Method("tanh", solver, Implicit(Picard(rtol=1e-4, max_iter=2), on_failure="ignore"))
    assert_same(
        problem(1, 2, 5, scale=scale), method, monkeypatch, rtol=2e-6 if scale < 1 else 1e-3
    )


def test_adjoint_by_anderson(monkeypatch):
    method = Method("tanh", Picard(rtol=1e-5, atol=0), Implicit(Anderson(rtol=1e-4, atol=0)))
    assert_same(problem(1, 1, 5), method, monkeypatch)


def test_equals_the_loop_over_generic_solves(monkeypatch):
    """In float64, to what the tolerance leaves."""
    inputs = problem(2, 2, 5)
    method = Method("tanh", Picard(rtol=1e-6, atol=0), Implicit())
    states, _, _, gradients = outcome(triton_kernels, inputs, method, monkeypatch)
    leaves = [v.double().requires_grad_() for v in inputs]
    expected = equilibrium_reference(
        Inputs(*leaves), method._replace(solver=Picard(rtol=1e-12, max_iter=200))
    )
    for g, e in zip((states, *gradients), (expected, *_gradients(expected, leaves)), strict=True):
        torch.testing.assert_close(g.double(), e, rtol=0, atol=1e-5 * max(1.0, e.abs().max()))


def test_an_eta_of_its_own_at_each_time_step(monkeypatch):
    solver = InexactNewton(3, timesteps=4, eta=0.6, learn=False, rtol=1e-4)
    solver.eta += 0.1 * torch.arange(12).view(4, 3) / 12
    method = Method("tanh", solver, Implicit(Picard(rtol=1e-4)))
    assert_same(problem(2, 2, 5), method, monkeypatch)


@OVERFLOW
def test_how_rows_end(monkeypatch):
    """A row converges, one cycles, one overflows, and one is still on its way."""
    U = torch.diag(torch.tensor([0.1, -2.0, 1e20, 0.9]))
    x = torch.eye(4).unsqueeze(0)
    none = torch.zeros(4, 4)
    inputs = Inputs(x, torch.eye(4), torch.zeros(4), U, none, none)
    method = Method("relu", Picard(rtol=1e-4, max_iter=12), Implicit(on_failure="ignore"))
    report = assert_same(inputs._replace(x=x.repeat(2, 1, 1)), method, monkeypatch)
    first = [Result(code).name for code in report.result[0].tolist()]
    assert first[:3] == ["CONVERGED", "STALLED", "NONFINITE"]
    assert report.iterations[0].tolist()[1] == 12


@pytest.mark.parametrize("solver", [Picard, Anderson])
def test_a_state_that_runs_away_is_not_converged(solver, monkeypatch):
    """h = relu(h + 1) has no solution, and a residual that falls beside the growing state."""
    none = torch.zeros(3, 3)
    inputs = Inputs(torch.ones(1, 1, 3), torch.eye(3), torch.zeros(3), None, none, none[:1])
    solver = solver(rtol=1e-2, atol=0, max_iter=200)
    method = Method("relu", solver, Implicit(on_failure="ignore"))
    report = assert_same(inputs, method, monkeypatch)
    assert report.result.tolist() == [[Result.STALLED]]
    assert report.stall.tolist() == [[Stall.RUNAWAY]]


def test_a_residual_at_rounding_ends_its_row(monkeypatch):
    """No residual of float32 is below this tolerance; when noise ends a row is up to rounding."""
    method = Method("tanh", Picard(rtol=1e-9, atol=0, max_iter=200), Implicit(on_failure="ignore"))
    for kernels in (triton_kernels, numba_kernels):
        _, report, *_ = outcome(kernels, problem(1, 2, 5), method, monkeypatch)
        assert (report.iterations < 50).all()


@OVERFLOW
@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_states_whose_squares_leave_float32(scale, monkeypatch):
    inputs = problem(1, 2, 5)
    inputs = inputs._replace(x=scale * inputs.x, bias=None, h0=torch.zeros_like(inputs.h0))
    method = Method("identity", Picard(rtol=1e-4, atol=0, max_iter=60), Implicit())
    got, expected = (
        outcome(kernels, inputs, method, monkeypatch) for kernels in (triton_kernels, numba_kernels)
    )
    assert (got[1].result == Result.CONVERGED).all()
    assert torch.equal(got[1].iterations, expected[1].iterations)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=0)


@OVERFLOW
def test_a_nan_remains_in_its_row(monkeypatch):
    inputs = problem(2, 2, 5)
    method = Method("tanh", Picard(rtol=1e-4), Implicit(on_failure="ignore"))
    clean, *_ = outcome(triton_kernels, inputs, method, monkeypatch)
    inputs.x[1, 0] = torch.nan
    states, report, *_ = outcome(triton_kernels, inputs, method, monkeypatch)
    assert report.result.tolist() == [[0, 0], [Result.NONFINITE, 0]]
    assert torch.equal(states[:, 1], clean[:, 1])


@pytest.mark.parametrize(("T", "B"), [(0, 2), (2, 0)])
def test_nothing_to_do(T, B, monkeypatch):
    method = Method("tanh", Picard(rtol=1e-4), Implicit())
    states, _, _, gradients = outcome(triton_kernels, problem(T, B, 3), method, monkeypatch)
    assert states.shape == (T, B, 3)
    assert all(not g.any() for g in gradients[:5])
