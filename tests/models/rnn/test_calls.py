"""The calls of Python functions in one call of a layer, and the plan that it makes once.

Specifies: fixpoint.models.ops.common.plan, fixpoint.models.rnn.base_cell.
"""

import copy
import pickle
import sys
import threading

import pytest
import torch
from torch.nn.utils import parametrize, prune

import fixpoint
from fixpoint import Anderson, Implicit
from fixpoint.models import ERNN, GRU, LSTM, RNN, UGRNN, FastGRNN, FastRNN, ManifoldMap
from fixpoint.models.ops.common.dispatch import has_numba

PACKAGE = fixpoint.__path__[0]


def equilibrium(*sizes):
    solver = Anderson(rtol=1e-6, atol=0.0)
    return ERNN(*sizes, map="self-feedback", solver=solver, backward=Implicit())


FORWARD = {
    FastRNN: 37,
    FastGRNN: 39,
    UGRNN: 37,
    ERNN: 45,
    equilibrium: 59,
    RNN: 45,
    GRU: 48,
    LSTM: 52,
}
STEP = {FastRNN: 11, FastGRNN: 10, UGRNN: 8, ERNN: 15}
LAYERS = pytest.mark.parametrize("make", [FastRNN, FastGRNN, UGRNN, ERNN, equilibrium])


def count(f):
    """Count calls of functions of the package, comprehensions among them, after the first call."""
    f()
    seen = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            seen.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        f()
    finally:
        sys.setprofile(before)
    return len(seen)


@pytest.mark.skipif(not has_numba(), reason="counts the kernels of numba")
@pytest.mark.parametrize("make", FORWARD)
def test_a_forward_pass_makes_few_calls(make):
    layer, x = make(3, 5), torch.randn(4, 2, 3)
    assert count(lambda: layer(x)) <= FORWARD[make]


@pytest.mark.parametrize("make", STEP)
def test_a_step_makes_few_calls(make):
    layer, x = make(3, 5), torch.randn(1, 3)
    _, state = layer.step(x)
    assert count(lambda: layer.step(x, state)) <= STEP[make]


@LAYERS
def test_a_plan_is_made_once(make, monkeypatch):
    layer, x, made = make(3, 5), torch.randn(4, 2, 3), []
    real = type(layer.l0).make_plan
    monkeypatch.setattr(
        type(layer.l0), "make_plan", lambda cell, device: made.append(device) or real(cell, device)
    )
    layer.l0._plans = {}
    for _ in range(3):
        layer(x)
    assert len(made) == 1


def changed(layer, how):
    """Return a layer after a change that a plan must not outlive, and the dtype of its input."""
    cell, dtype = layer.l0, torch.float32
    owner = next(m for m in layer.modules() if "V" in m._parameters or "full" in m._parameters)
    name = "V" if "V" in owner._parameters else "full"
    if how == "replaced":
        setattr(owner, name, torch.nn.Parameter(0.5 * getattr(owner, name).detach()))
    elif how == "cast":
        layer, dtype = layer.double(), torch.float64
    elif how == "parametrized":
        parametrize.register_parametrization(owner, name, Half())
    elif how == "pruned":
        prune.l1_unstructured(owner, name, 0.5)
    elif how == "frozen":
        cell.requires_grad_(False)
    elif how == "copied":
        layer = copy.deepcopy(layer)
    elif how == "pickled":
        layer = pickle.loads(pickle.dumps(layer))
    return layer, dtype


class Half(torch.nn.Module):
    def forward(self, weight):
        return weight / 2


@LAYERS
@pytest.mark.parametrize(
    "how", ["replaced", "cast", "parametrized", "pruned", "frozen", "copied", "pickled"]
)
def test_no_plan_outlives_its_layer(how, make):
    torch.manual_seed(0)
    layer, x = make(3, 5), torch.randn(4, 2, 3)
    layer(x)  # which makes the plan
    layer, dtype = changed(layer, how)
    x = x.to(dtype).requires_grad_()
    results = []
    for implementation in ("fused", "reference"):
        layer.l0.implementation = implementation
        output = layer(x)[0]
        given = [x, *[p for p in layer.parameters() if p.requires_grad]]
        results.append([output, *torch.autograd.grad(output.square().sum(), given)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_plan_is_that_of_another_solver_or_map_that_was_set():
    layer, x = equilibrium(3, 5), torch.randn(4, 2, 3)
    layer(x)
    layer.l0.fixed_point.solver = Anderson(rtol=1e-5, atol=0.0)
    assert layer.l0.plan().method.solver is layer.l0.fixed_point.solver
    layer.l0.map.nonlinearity = "sigmoid"
    expected = copy.deepcopy(layer)
    expected.l0.implementation = "reference"
    torch.testing.assert_close(layer(x), expected(x), rtol=1e-3, atol=1e-3)
    layer.l0.map = ManifoldMap(3, 5)
    assert layer.l0.plan().path == "manifold"
    assert layer(x)[0].isfinite().all()


@LAYERS
def test_two_threads_share_a_layer(make):
    layer, inputs = make(3, 5), torch.randn(2, 4, 2, 3)
    expected = [layer(x)[0] for x in inputs]
    layer.l0._plans, equal = {}, []

    def work(x, output):
        for _ in range(20):
            equal.append(torch.equal(layer(x)[0], output))

    pairs = zip(inputs, expected, strict=True)
    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 40
