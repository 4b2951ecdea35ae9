"""The fused equilibrium scan against the loop over solves: states, counts, results, gradients."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from fixpoint import (
    Anderson,
    Broyden,
    ConvergenceWarning,
    Implicit,
    InexactNewton,
    Newton,
    Phantom,
    Picard,
    Result,
    Unrolled,
)
from fixpoint.failure import NonConvergenceHandler
from fixpoint.models import ERNN, IdentityFeedbackMap, LinearMap, SelfFeedbackMap
from fixpoint.models.ops.common import dispatch
from fixpoint.models.ops.equilibrium.arguments import Inputs, Method
from fixpoint.models.ops.equilibrium.autograd import equilibrium_scan
from fixpoint.models.ops.equilibrium.reference import equilibrium_reference
from fixpoint.models.rnn import ernn
from fixpoint.models.rnn.ernn import ERNNCell
from fixpoint.solution import Stall

pytest.importorskip("numba", reason="needs numba")

MAPS = {
    "tanh": lambda: SelfFeedbackMap(3, 7, bound=0.7),
    "relu": lambda: SelfFeedbackMap(3, 7, bound=0.7, nonlinearity="relu"),
    "sigmoid": lambda: SelfFeedbackMap(3, 7, nonlinearity="sigmoid", bias=False),
    "identity feedback": lambda: IdentityFeedbackMap(3, 7, nonlinearity="sigmoid"),
    "linear": lambda: LinearMap(3, 7, bound=0.6),
    "closed form": lambda: LinearMap(3, 7, bound=0.6, inverse="exact"),
}
SOLVERS = {
    "Picard": lambda **o: Picard(**o),
    "damped Picard": lambda **o: Picard(beta=0.7, **o),
    "Anderson": lambda **o: Anderson(**o),
    "damped Anderson": lambda **o: Anderson(memory=3, beta=0.6, **o),
    "Broyden": lambda **o: Broyden(**o),
    "Broyden, little memory": lambda **o: Broyden(memory=4, **o),
    "fixed eta": lambda **o: InexactNewton(60, eta=0.4, learn=False, **o),
}
pytestmark = pytest.mark.filterwarnings("ignore::fixpoint.ConvergenceWarning")
"""Some rows fail on purpose."""

TIGHT = {"rtol": 1e-11, "atol": 0.0}


@pytest.fixture(autouse=True)
def new_buffers_are_full_of_nan(monkeypatch):
    empty = dispatch.empty
    monkeypatch.setattr(dispatch, "empty", lambda *args: empty(*args).fill_(torch.nan))


def sample(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def pair(phi, solver, adjoint=None, dtype=torch.float64, **options):
    """A cell that takes the fused path, and one with the same weights that does not."""
    torch.manual_seed(0)
    phi = phi().to(dtype)
    if phi.b is not None:
        torch.nn.init.normal_(phi.b, std=0.5)
    return [
        ERNNCell(
            phi.input_size,
            phi.hidden_size,
            map=phi,
            solver=solver,
            backward=Implicit(adjoint, **options),
            implementation=implementation,
        )
        for implementation in ("fused", "reference")
    ]


def outcome(cell, x, h0):
    """The trajectory, and the gradients of x, h0 and all parameters."""
    leaves = [v.detach().clone().requires_grad_() for v in (x, h0)]
    path = cell.trajectory(*leaves)
    weights = sample(*path.output.shape, seed=9).to(x.dtype)
    asked = [*leaves, *cell.parameters()]
    return path, torch.autograd.grad(path.output, asked, weights)


def assert_close(got, expected, rtol):
    for g, e in zip(got, expected, strict=True):
        scale = e.abs().max().item() if e.numel() else 0.0
        torch.testing.assert_close(g, e, rtol=0, atol=rtol * scale)


def looks_once_more(path):
    """Count time steps at which the loop evaluates phi again since solved rows are returned next to
    failed ones, on which they might depend.
    """
    solved = path.result == 0
    return int((solved.any(1) & ~solved.all(1)).sum())


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("phi", MAPS)
@pytest.mark.parametrize("rtol", [1e-3, 1e-10])
def test_equals_the_loop_over_solves(phi, solver, rtol):
    """In float64 no test is decided by rounding: the same updates, to the last one.

    But the differences of Anderson mixing are linearly dependent where relu units are 0, and
    rounding decides which of them are left out.
    """
    fused, reference = pair(
        MAPS[phi], SOLVERS[solver](rtol=rtol, atol=1e-9) if solver == "fixed eta"
        else SOLVERS[solver](rtol=rtol, atol=1e-9, max_iter=200), on_failure="ignore",
    )  # fmt: skip
    x, h0 = sample(6, 41, 3), sample(41, 7, seed=1)
    (got, gradients), (expected, expected_gradients) = (
        outcome(c, x, h0) for c in (fused, reference)
    )
    assert torch.equal(got.result, expected.result)
    if phi == "relu" and "Anderson" in solver:
        differ = got.iterations != expected.iterations
        assert differ.double().mean() < 0.1
        torch.testing.assert_close(got.output, expected.output, rtol=0, atol=4 * rtol)
        assert_close(gradients, expected_gradients, 4 * rtol)
        return
    assert torch.equal(got.iterations, expected.iterations)
    assert got.evaluations == expected.evaluations - looks_once_more(expected)
    torch.testing.assert_close(got.output, expected.output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.residual, expected.residual, rtol=1e-4, atol=1e-4)
    assert_close(gradients, expected_gradients, 1e-11)
    last = fused.fixed_point.backward.adjoint, reference.fixed_point.backward.adjoint
    assert torch.equal(last[0].iterations[0], last[1].iterations)
    assert torch.equal(last[0].result[0], last[1].result)
    if phi != "closed form":  # whose phi does not depend on h
        torch.testing.assert_close(last[0].z, last[1].z)


@pytest.mark.parametrize("scale", [1.5, 3.0])
def test_anderson_takes_back_steps_that_grow(scale):
    """Where phi expands, steps are rejected, mixing is reduced and histories restart."""
    fused, reference = pair(lambda: SelfFeedbackMap(3, 7, bound=scale), Anderson(max_iter=12),
                            on_failure="ignore")  # fmt: skip
    x, h0 = 3 * sample(1, 64, 3), 3 * sample(64, 7, seed=1)
    (got, gradients), (expected, others) = (outcome(c, x, h0) for c in (fused, reference))
    assert torch.equal(got.iterations, expected.iterations)
    assert torch.equal(got.result, expected.result)
    assert (got.result == Result.MAX_ITER).any()
    torch.testing.assert_close(got.output, expected.output, rtol=1e-7, atol=1e-7)
    solved = (got.result == Result.CONVERGED)[0]
    torch.testing.assert_close(gradients[0][:, solved], others[0][:, solved], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [1.5, 3.0])
def test_line_searches_take_back_the_same_steps(scale):
    """Where phi expands, trials are refused and rows end in local minima or out of updates."""
    fused, reference = pair(lambda: SelfFeedbackMap(3, 7, bound=scale), Broyden(max_iter=30),
                            on_failure="ignore")  # fmt: skip
    x, h0 = 3 * sample(1, 64, 3), 3 * sample(64, 7, seed=1)
    (got, _), (expected, _) = (outcome(c, x, h0) for c in (fused, reference))
    assert torch.equal(got.result, expected.result)
    assert torch.equal(got.iterations, expected.iterations)
    torch.testing.assert_close(got.output, expected.output, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("solver", [Picard, Anderson, Broyden])
def test_causes_of_stalls_are_those_of_the_solver(solver):
    """z <- z + 1 runs away, without rounding."""
    fused, reference = pair(translation, solver(max_iter=60, rtol=1e-6), on_failure="ignore")
    for cell in (fused, reference):
        cell.map.b.data.fill_(1.0)
    x, h0 = sample(1, 9, 3), torch.zeros(9, 4).double()
    found = [recorded(cell, x, h0) for cell in (fused, reference)]
    for t, expected in enumerate(found[1]):
        assert (expected.result == Result.STALLED).all()
        assert torch.equal(found[0][0].result[t], expected.result)
        assert torch.equal(found[0][0].stall[t], expected.stall)


@pytest.mark.parametrize("solver", [Picard, Anderson])
def test_a_solve_ends_at_the_rounding_floor(solver):
    fused, _ = pair(MAPS["tanh"], solver(max_iter=400, rtol=1e-17, atol=0), on_failure="ignore")
    (solution,) = recorded(fused, sample(2, 41, 3), sample(41, 7, seed=1))
    stalled = solution.result == Result.STALLED
    assert (stalled | (solution.result == Result.CONVERGED)).all()
    assert (solution.stall[stalled] == Stall.ROUNDING).all()
    assert (solution.iterations < 100).all()


def recorded(cell, x, h0):
    """The solutions that the handler of failures is given."""
    cell.fixed_point.non_convergence = Recorder([])
    cell.trajectory(x, h0)
    return cell.fixed_point.non_convergence.solutions


class Recorder:
    """Takes the place of a `NonConvergenceHandler` and keeps what it is given."""

    def __init__(self, solutions):
        self.solutions = solutions

    silent = True

    def check(self, solution, *, advice=""):
        self.solutions.append(solution)

    report = check


def translation():
    phi = IdentityFeedbackMap(3, 4, nonlinearity="identity")
    with torch.no_grad():
        phi.V.zero_()
        phi.W.zero_()
    return phi


@pytest.mark.parametrize("solver", [Picard, Anderson, Broyden])
def test_float32_differs_only_where_rounding_decides(solver):
    """Where counts differ, the residual lay within rounding of the tolerance."""
    fused, reference = pair(lambda: SelfFeedbackMap(9, 80, bound=0.7), solver(rtol=1e-3, atol=0),
                            Picard(rtol=1e-3, atol=0), dtype=torch.float32)  # fmt: skip
    x, h0 = sample(32, 64, 9).float(), torch.zeros(64, 80)
    (got, gradients), (expected, expected_gradients) = (
        outcome(c, x, h0) for c in (fused, reference)
    )
    differ = got.iterations != expected.iterations
    assert differ.double().mean() < 0.002
    # One update less leaves an error of the size of the tolerance.
    torch.testing.assert_close(got.output, expected.output, rtol=0, atol=5e-3)
    torch.testing.assert_close(got.output[~differ], expected.output[~differ], rtol=0, atol=2e-3)
    assert_close(gradients, expected_gradients, 5e-3)


@pytest.mark.parametrize("phi", MAPS)
def test_gradcheck(phi):
    """Against finite differences, at solutions tight enough for them."""
    solver = Picard(max_iter=500, rtol=1e-13, atol=0)
    fused, _ = pair(MAPS[phi], solver, on_failure="ignore")
    U, V, W, b = fused.map.as_self_feedback()
    tensors = sample(3, 2, 3), W, b, U, V, sample(2, 7, seed=1)
    leaves = [None if v is None else v.detach().clone().requires_grad_() for v in tensors]
    method = Method(fused.nonlinearity, solver, Implicit(on_failure="ignore"))
    given = [i for i, v in enumerate(leaves) if v is not None]

    def scan(*values):
        named = list(leaves)
        for i, v in zip(given, values, strict=True):
            named[i] = v
        return equilibrium_scan(Inputs(*named), method)[0]

    assert gradcheck(scan, [leaves[i] for i in given], fast_mode=True)


def test_second_derivatives():
    solver = Picard(max_iter=500, **TIGHT)
    method = Method("tanh", solver, Implicit(on_failure="ignore"))
    U = 0.3 * sample(4, 4, seed=5)
    tensors = [sample(3, 2, 3), sample(4, 3, seed=2), sample(4, seed=3), U, U.mT, sample(2, 4)]
    leaves = [v.detach().clone().requires_grad_() for v in tensors]
    assert gradgradcheck(lambda *v: equilibrium_scan(Inputs(*v), method)[0], leaves, fast_mode=True)


@pytest.mark.parametrize("steps", [1, 3])
def test_backward_in_chunks_of_time(steps, monkeypatch):
    fused, _ = pair(MAPS["tanh"], Picard(**TIGHT))
    x, h0 = sample(7, 5, 3), sample(5, 7, seed=1)
    expected = outcome(fused, x, h0)[1]
    monkeypatch.setattr(dispatch, "CHUNK_BYTES", steps * 5 * 7 * 8)
    assert_close(outcome(fused, x, h0)[1], expected, 1e-13)


@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_an_eta_of_its_own_at_each_time_step(eta):
    def solver():
        out = InexactNewton(3, timesteps=9, eta=eta, learn=False, rtol=1e-4)
        out.eta += 0.1 * sample(9, 3).float()
        return out

    fused, reference = pair(MAPS["tanh"], solver(), Picard(**TIGHT))
    x, h0 = sample(7, 5, 3), sample(5, 7, seed=1)
    (got, gradients), (expected, others) = (outcome(c, x, h0) for c in (fused, reference))
    assert torch.equal(got.iterations, expected.iterations)
    assert (got.result == Result.MAX_ITER).any()
    torch.testing.assert_close(got.output, expected.output)
    assert_close(gradients, others, 1e-11)


def expanding(scale):
    """A map that has no equilibrium in reach where the input is large: z <- relu(scale z + ..)."""

    def make():
        phi = SelfFeedbackMap(1, 4, nonlinearity="relu")
        with torch.no_grad():
            for weight in (phi.U, phi.V, phi.W):
                weight.zero_()
            phi.U += scale * torch.eye(4)
            phi.W += 1
        return phi

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("scale", "max_iter", "code"),
    [(3.0, 5, Result.MAX_ITER), (1e20, 60, Result.NONFINITE)],
)
def test_rows_without_an_equilibrium(scale, max_iter, code, dtype):
    """Rows with a positive input diverge; negative ones are solved at 0 and unharmed."""
    solver = Picard(max_iter=max_iter, rtol=1e-4, atol=1e-6)
    fused, reference = pair(expanding(scale), solver, dtype=dtype, on_failure="ignore")
    for cell in (fused, reference):
        cell.map.b.data.zero_()
    x = sample(3, 6, 1).abs().to(dtype) + 0.1
    x[:, ::2] *= -1
    h0 = torch.zeros(6, 4, dtype=dtype)
    (got, gradients), (expected, _) = (outcome(c, x, h0) for c in (fused, reference))
    assert (got.result[:, 1::2] == code).any()
    assert (got.result[:, 1::2] != Result.CONVERGED).all()
    assert (got.result[:, ::2] == Result.CONVERGED).all()
    assert torch.equal(got.result, expected.result)
    assert torch.equal(got.iterations, expected.iterations)
    torch.testing.assert_close(got.output, expected.output)
    assert all(g.isfinite().all() for g in gradients)


def test_a_cycle_is_stalled():
    """z <- relu(1 - 2 z) runs 0, 1, 0, 1, ..: the least residual is that of the start."""
    fused, reference = pair(
        lambda: SelfFeedbackMap(1, 4, nonlinearity="relu"), Picard(max_iter=20), on_failure="ignore"
    )
    with torch.no_grad():
        for weight in fused.map.parameters():
            weight.zero_()
        fused.map.U -= 2 * torch.eye(4)
        fused.map.b += 1
    for cell in (fused, reference):
        path = cell.trajectory(torch.zeros(2, 3, 1, dtype=torch.float64))
        assert (path.result == Result.STALLED).all()
        assert (path.iterations == 20).all()
        assert (path.output == 0).all()


def test_batch_mates_do_not_change_a_bit():
    fused, _ = pair(MAPS["tanh"], Picard(max_iter=100, **TIGHT))
    x, h0 = sample(5, 6, 3), sample(6, 7, seed=1)
    clean = fused.trajectory(x, h0)
    for bad in (torch.nan, torch.inf, 1e308):
        spoiled = x.clone()
        spoiled[2, 1] = bad
        got = fused.trajectory(spoiled, h0)
        rest = [0, 2, 3, 4, 5]
        assert torch.equal(got.output[:, rest], clean.output[:, rest])
        assert torch.equal(got.iterations[:, rest], clean.iterations[:, rest])
        assert torch.equal(got.output[:2], clean.output[:2])
        if bad != 1e308:
            assert got.output[2:, 1].isnan().all()
            assert (got.result[2:, 1] == Result.NONFINITE).all()


def test_a_nan_row_takes_no_part_in_gradients():
    fused, reference = pair(MAPS["tanh"], Picard(max_iter=100, **TIGHT))
    x, h0 = sample(5, 6, 3), sample(6, 7, seed=1)
    x[2, 1] = torch.nan
    (_, got), (_, expected) = (outcome(c, x, h0) for c in (fused, reference))
    for g, e in zip(got[2:], expected[2:], strict=True):
        assert g.isnan().all() == e.isnan().all()


def test_tiny_and_huge_states():
    """Squares of such numbers leave float32; the measure does not."""
    for scale in (1e-25, 1e25):
        fused, reference = pair(
            lambda: LinearMap(3, 7, bound=0.5, bias=False),
            Picard(max_iter=60, rtol=1e-4, atol=0),
            dtype=torch.float32,
        )
        x, h0 = scale * sample(3, 5, 3).float(), torch.zeros(5, 7)
        got, expected = (cell.trajectory(x, h0) for cell in (fused, reference))
        assert (got.result == Result.CONVERGED).all()
        assert torch.equal(got.iterations, expected.iterations)
        torch.testing.assert_close(got.output, expected.output, rtol=1e-4, atol=0)


@pytest.mark.parametrize("B", [1, 3, 100])
def test_result_does_not_depend_on_threads(B):
    fused, _ = pair(MAPS["tanh"], Picard(max_iter=100, **TIGHT))
    x, h0, results, threads = sample(4, B, 3), sample(B, 7, seed=1), [], torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(outcome(fused, x, h0))
    finally:
        torch.set_num_threads(threads)
    (one, gradients), (two, others) = results
    torch.testing.assert_close(one.output, two.output, rtol=1e-13, atol=1e-13)
    assert torch.equal(one.iterations, two.iterations)
    assert_close(gradients, others, 1e-12)


def test_nothing_given_is_changed_and_backward_repeats():
    fused, _ = pair(MAPS["tanh"], Picard(**TIGHT))
    x, h0 = sample(4, 3, 3).requires_grad_(), sample(3, 7, seed=1).requires_grad_()
    before = x.detach().clone(), h0.detach().clone()
    output = fused.trajectory(x, h0).output
    first, second = (
        torch.autograd.grad(output.sum(), (x, h0), retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))
    assert all(torch.equal(p, q) for p, q in zip((x, h0), before, strict=True))


def test_an_adjoint_that_fails_is_reported():
    fused, _ = pair(MAPS["tanh"], Picard(**TIGHT), Picard(max_iter=1, **TIGHT), on_failure="warn")
    output = fused.trajectory(sample(4, 3, 3), sample(3, 7, seed=1)).output
    with pytest.warns(ConvergenceWarning, match="adjoint"):
        output.sum().backward()
    assert (fused.fixed_point.backward.adjoint.result == Result.MAX_ITER).all()


def test_a_solve_that_fails_is_reported():
    cell = pair(MAPS["tanh"], Picard(max_iter=1, **TIGHT))[0]
    cell.fixed_point.non_convergence = NonConvergenceHandler("the solve", "raise")
    with pytest.raises(RuntimeError, match="MAX_ITER"):
        cell.trajectory(sample(4, 3, 3))


def test_a_layer_takes_it_and_says_why_not():
    layer = ERNN(3, 7, map="self-feedback", solver=Picard(), backward=Implicit())
    assert "not fused" not in repr(layer)
    output, h_n = layer(torch.randn(6, 4, 3))
    assert type(output.grad_fn).__name__ != "StackBackward0"
    assert torch.equal(h_n[0], output[-1])
    for options, reason in (
        ({"solver": Picard(record="residual")}, "must have record=None"),
        ({"solver": Picard(keep_best=False)}, "must have keep_best=True"),
        ({"solver": Picard(norm=lambda z: z.norm(dim=1))}, "must have norm=None"),
        ({"solver": Anderson(ridge=1e-8)}, "ridge=0"),
        ({"solver": Picard(check_every=2)}, "check_every=1"),
        ({"solver": Picard(min_iter=2)}, "must have min_iter=0"),
        ({"solver": Picard(stop="all")}, "must have stop='each'"),
        ({"solver": Picard(max_iter=3, rtol=0, atol=0)}, "rtol = atol = 0"),
        ({"solver": "barzilai-borwein"}, "must be one of .*Broyden, not BarzilaiBorwein"),
        ({"solver": Newton()}, "must be one of .*Broyden, not Newton"),
        ({"solver": Broyden(), "backward": Implicit(reuse_factors=True)}, "without reuse_factors"),
        ({"backward": Phantom()}, r"differentiates by Implicit\(\) or Unrolled\(\), not Phantom"),
        (
            {"solver": Anderson(), "backward": Unrolled()},
            "updates of Picard and InexactNewton, not",
        ),
        ({"backward": Unrolled(last=2)}, "all updates, not the last 2"),
    ):
        given = {"map": "self-feedback", "solver": Picard(), "backward": Implicit()} | options
        with pytest.raises(ValueError, match=f'"fused" does not apply.*{reason}'):
            ERNN(3, 7, **given, implementation="fused")
        assert ERNN(3, 7, **given)(torch.randn(2, 1, 3))[0].shape == (2, 1, 7)


@pytest.mark.parametrize("backward", [Unrolled(), Unrolled(last=2), Phantom()], ids=repr)
@pytest.mark.parametrize("solver", ["Anderson", "Broyden"])
def test_any_backward_is_fused_where_no_gradient_is_asked_for(solver, backward, monkeypatch):
    _, reference = pair(MAPS["tanh"], SOLVERS[solver](rtol=1e-6, atol=1e-9))
    layer = ERNNCell(3, 7, map=reference.map, solver=reference.fixed_point.solver,
                     backward=backward)  # fmt: skip
    x, h0 = sample(6, 41, 3), sample(41, 7, seed=1)
    assert "Implicit" in layer.no_fused_path() or "unrolls" in layer.no_fused_path()
    with torch.no_grad():
        expected = reference.trajectory(x, h0)
        monkeypatch.setattr(ernn, "scan", None)
        got = layer.trajectory(x, h0)
    assert torch.equal(got.iterations, expected.iterations)
    torch.testing.assert_close(got.output, expected.output, rtol=1e-12, atol=1e-12)
    with pytest.raises(TypeError):  # the loop, with a gradient
        layer.trajectory(x, h0)


def test_a_map_of_its_own_is_another_map():
    class Shifted(SelfFeedbackMap):
        def input_projection(self, x):
            return super().input_projection(x) + 1

    layer = ERNN(3, 7, map=Shifted(3, 7), solver=Picard(), backward=Implicit())
    assert "Shifted is not known to be" in layer.l0.no_fused_path()


def test_the_functional_twin():
    tensors = sample(3, 2, 3), sample(4, 3, seed=2), sample(4, seed=3), None, 0.2 * sample(4, 4)
    inputs = Inputs(*tensors, sample(2, 4))
    method = Method("sigmoid", Picard(max_iter=200, **TIGHT), Implicit())
    states, report = equilibrium_scan(inputs, method)
    torch.testing.assert_close(states, equilibrium_reference(inputs, method), rtol=1e-9, atol=0)
    assert (report.result == Result.CONVERGED).all()
    with warnings.catch_warnings(), pytest.raises(ValueError, match="use equilibrium_reference"):
        equilibrium_scan(inputs, method._replace(activation="gelu"))


STEPS = {
    "Picard to a tolerance": lambda: Picard(rtol=1e-4, atol=1e-9, max_iter=60),
    "damped Picard, too few": lambda: Picard(beta=0.7, max_iter=4, rtol=1e-6),
    "fixed Picard": lambda: Picard(max_iter=3, rtol=0, atol=0),
    "learned eta": lambda: InexactNewton(3, eta=0.3),
    "eta at each time, to a tolerance": lambda: InexactNewton(5, eta=0.9, timesteps=8, rtol=1e-2),
}


def unrolled(phi, solver, dtype=torch.float64):
    """As `pair`, with the gradient of the updates."""
    torch.manual_seed(0)
    phi, solver = phi().to(dtype), solver.to(dtype)
    if phi.b is not None:
        torch.nn.init.normal_(phi.b, std=0.5)
    return [
        ERNNCell(3, 7, map=phi, solver=solver, backward=Unrolled(), implementation=implementation)
        for implementation in ("fused", "reference")
    ]


@pytest.mark.parametrize("solver", STEPS)
@pytest.mark.parametrize("phi", ["tanh", "relu", "sigmoid", "identity feedback", "linear"])
def test_unrolled_equals_the_loop_over_solves(phi, solver):
    fused, reference = unrolled(MAPS[phi], STEPS[solver]())
    x, h0 = sample(6, 41, 3), sample(41, 7, seed=1)
    (got, gradients), (expected, others) = (outcome(c, x, h0) for c in (fused, reference))
    assert torch.equal(got.result, expected.result)
    assert torch.equal(got.iterations, expected.iterations)
    assert got.evaluations == expected.evaluations - looks_once_more(expected)
    assert (got.residual is None) == (expected.residual is None)
    torch.testing.assert_close(got.output, expected.output, rtol=1e-12, atol=1e-12)
    assert_close(gradients, others, 1e-11)


def test_unrolled_takes_the_implicit_gradient_where_no_update_is_made():
    """With the same input again and a loose tolerance many states are within it at once."""
    fused, reference = unrolled(MAPS["tanh"], Picard(rtol=1e-2, atol=1e-9, max_iter=60))
    x, h0 = sample(1, 41, 3).expand(6, -1, -1), sample(41, 7, seed=1)
    (got, gradients), (expected, others) = (outcome(c, x, h0) for c in (fused, reference))
    assert 0.1 < (got.iterations == 0).double().mean() < 0.9
    assert torch.equal(got.iterations, expected.iterations)
    assert_close(gradients, others, 1e-11)


def test_unrolled_keeps_the_best_state_of_rows_without_an_equilibrium():
    fused, reference = unrolled(
        lambda: SelfFeedbackMap(3, 7, bound=2.5), Picard(max_iter=12, rtol=1e-6)
    )
    x, h0 = sample(3, 41, 3), sample(41, 7, seed=1)
    (got, gradients), (expected, others) = (outcome(c, x, h0) for c in (fused, reference))
    assert (got.result == Result.STALLED).any()
    assert torch.equal(got.result, expected.result)
    torch.testing.assert_close(got.output, expected.output, rtol=1e-9, atol=1e-9)
    assert_close(gradients, others, 1e-8)


def test_unrolled_gradient_of_a_wide_U_in_parts():
    """A product of its columns with all rows would be spread over threads."""
    torch.manual_seed(0)
    cell = SelfFeedbackMap(3, 150, bound=0.7).double()
    layers = [
        ERNNCell(3, 150, map=cell, solver=Picard(rtol=1e-4), backward=Unrolled(),
                 implementation=implementation)
        for implementation in ("fused", "reference")
    ]  # fmt: skip
    x, h0 = sample(2, 41, 3), sample(41, 150, seed=1)
    (_, gradients), (_, others) = (outcome(layer, x, h0) for layer in layers)
    assert_close(gradients, others, 1e-11)


ON_TWO_THREADS = """
import torch
from fixpoint import Picard, Unrolled
from fixpoint.models import ERNN, SelfFeedbackMap
torch.set_num_threads(2)
cell = SelfFeedbackMap(9, 80, bound=0.7)
layer = ERNN(9, 80, map=cell, solver=Picard(rtol=1e-4), backward=Unrolled())
layer(torch.randn(2, 64, 9))[0].sum().backward()
"""


def test_no_product_of_unrolled_updates_is_spread_over_threads():
    """OpenBLAS warns of each one that is, within the threads of torch, and it is slow."""
    env = os.environ | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", ON_TWO_THREADS]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "OpenBLAS" not in result.stderr + result.stdout


@pytest.mark.parametrize("solver", ["fixed Picard", "learned eta"])
def test_unrolled_gradcheck(solver):
    """Against finite differences, eta included, and twice."""
    fused, _ = unrolled(MAPS["tanh"], STEPS[solver]())
    names, parameters = zip(*fused.named_parameters(), strict=True)
    values = [p.detach().clone().requires_grad_() for p in parameters]
    x, h0 = sample(3, 2, 3).requires_grad_(), sample(2, 7, seed=1).requires_grad_()

    class Path(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = fused

        def forward(self, x, h0):
            return self.layer.trajectory(x, h0).output

    def states(x, h0, *values):
        given = {f"layer.{name}": v for name, v in zip(names, values, strict=True)}
        return torch.func.functional_call(Path(), given, (x, h0))

    assert gradcheck(states, [x, h0, *values], fast_mode=True)
    assert gradgradcheck(states, [x, h0, *values], fast_mode=True)
