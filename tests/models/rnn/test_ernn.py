"""ERNN as a layer: the contract of torch.nn.RNN, what it refuses, and its gradients."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fixpoint import (
    Anderson,
    Broyden,
    ConvergenceWarning,
    Implicit,
    InexactNewton,
    Picard,
    Result,
    Unrolled,
)
from fixpoint.models import (
    ERNN,
    MAPS,
    JordanMap,
    LastStateClassifier,
    LinearMap,
    SelfFeedbackMap,
)


def sample(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def twin_of_rnn(nonlinearity, *, bias=True, batch_first=False):
    """torch's RNN, and the ERNN that is the same map: U = 0, one step with eta = 1."""
    torch.manual_seed(0)
    rnn = nn.RNN(3, 5, nonlinearity=nonlinearity, bias=bias, batch_first=batch_first).double()
    layer = ERNN(
        3,
        5,
        nonlinearity=nonlinearity,
        bias=bias,
        batch_first=batch_first,
        solver=InexactNewton(1, eta=1.0),
    ).double()
    with torch.no_grad():
        layer.map.U.zero_()
        layer.map.V.copy_(rnn.weight_hh_l0)
        layer.map.W.copy_(rnn.weight_ih_l0)
        if bias:
            layer.map.b.copy_(rnn.bias_ih_l0 + rnn.bias_hh_l0)
    return rnn, layer


# The contract of torch.nn.RNN.


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("shape", [(4, 6), (1, 6), (4, 1), (1, 1), (7,), (1,)])
@pytest.mark.parametrize("with_start", [True, False])
def test_it_equals_torchs_rnn(nonlinearity, bias, batch_first, shape, with_start):
    """Values, shapes and gradients, batched or not; (B, T) or (T,) is the shape."""
    rnn, layer = twin_of_rnn(nonlinearity, bias=bias, batch_first=batch_first)
    x = sample(*(shape if batch_first else shape[::-1]), 3)
    hx = None
    if with_start:
        hx = sample(1, shape[0], 5, seed=2) if len(shape) == 2 else sample(1, 5, seed=2)
    results = []
    for module in (rnn, layer):
        inputs = [x.clone().requires_grad_()]
        inputs += [] if hx is None else [hx.clone().requires_grad_()]
        output, h_n = module(*inputs)
        (output.square().sum() + h_n.sin().sum()).backward()
        results.append((output, h_n, *(i.grad for i in inputs)))
    for given, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.map.V.grad, rnn.weight_hh_l0.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.map.W.grad, rnn.weight_ih_l0.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MAPS)
def test_it_builds_from_two_sizes_and_a_cell(name):
    layer = ERNN(3, 5, map=name)
    output, h_n = layer(torch.zeros(4, 2, 3))
    assert output.shape == (4, 2, 5)
    assert h_n.shape == (1, 2, 5)
    assert output.dtype == torch.float32


def test_the_start_is_not_modified():
    layer = ERNN(3, 5, max_iter=2).double()
    hx = sample(1, 4, 5).requires_grad_()
    before, version = hx.detach().clone(), hx._version
    layer(sample(6, 4, 3), hx)[0].sum().backward()
    assert torch.equal(hx.detach(), before)
    assert hx._version == version
    assert hx.grad.all()


def test_a_sequence_may_be_cut_and_continued():
    layer = ERNN(3, 5, map="self-feedback", max_iter=2).double()
    x = sample(6, 4, 3)
    whole, h_n = layer(x)
    first, middle = layer(x[:2])
    second, last = layer(x[2:], middle)
    torch.testing.assert_close(torch.cat([first, second]), whole, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(last, h_n, rtol=1e-13, atol=1e-13)


def makers():
    tight = {"rtol": 1e-8, "atol": 0.0}
    return {
        "jordan": lambda: ERNN(3, 5, max_iter=2, timesteps=6, rank=2),
        "anderson": lambda: ERNN(
            3, 5, map="self-feedback", solver=Anderson(**tight), backward=Implicit()
        ),
        "broyden": lambda: ERNN(3, 5, map="self-feedback", solver=Broyden(**tight)),
        "bounded": lambda: ERNN(
            3,
            5,
            map=SelfFeedbackMap(3, 5, bound=0.5),
            solver=Picard(max_iter=100, **tight),
            backward=Implicit(),
        ),
        "exact": lambda: ERNN(
            3, 5, map=LinearMap(3, 5, inverse="exact"), solver=Picard(max_iter=1, rtol=0, atol=0)
        ),
    }


@pytest.fixture(params=makers())
def layer(request):
    torch.manual_seed(0)
    return makers()[request.param]().double().eval()


def test_two_calls_give_equal_results(layer):
    x = sample(6, 4, 3)
    first, first_h = layer(x)
    layer(sample(3, 2, 3, seed=2))
    second, second_h = layer(x)
    assert torch.equal(first, second)
    assert torch.equal(first_h, second_h)


def assert_alike(other, layer):
    x = sample(6, 4, 3)
    assert torch.equal(other(x)[0], layer(x)[0])
    with torch.no_grad():
        next(other.map.parameters()).add_(1.0)
    assert not torch.equal(other(x)[0], layer(x)[0])


def test_state_dict_round_trip(layer, request):
    other = makers()[request.node.callspec.params["layer"]]().double().eval()
    x = sample(6, 4, 3)
    assert not torch.equal(other(x)[0], layer(x)[0])
    state = layer.state_dict()
    assert len(state) == len({id(value) for value in state.values()})
    other.load_state_dict(state)
    assert_alike(other, layer)


def test_deepcopy(layer):
    layer(sample(6, 4, 3))[0].sum().backward()
    assert_alike(copy.deepcopy(layer), layer)


def test_pickle(layer):
    if getattr(layer.map, "bound", None) is not None:
        pytest.skip("torch saves parametrized modules by state_dict only, and says so")
    layer(sample(6, 4, 3))[0].sum().backward()
    assert_alike(pickle.loads(pickle.dumps(layer)), layer)


def test_an_empty_batch(layer):
    output, h_n = layer(torch.zeros(6, 0, 3, dtype=torch.float64))
    assert output.shape == (6, 0, 5)
    assert h_n.shape == (1, 0, 5)


def test_a_row_does_not_depend_on_its_batch_mates(layer):
    x = sample(6, 4, 3)
    whole = layer(x)[0]
    for row in range(4):
        alone = layer(x[:, [row]])[0]
        # Solves stop at the same iterate; kernels may sum in another order.
        torch.testing.assert_close(whole[:, [row]], alone, rtol=1e-11, atol=1e-12)


def test_every_parameter_changes_after_one_optimizer_step(layer):
    model = LastStateClassifier(layer, 5, 2).double().train()
    layer.batch_first = True
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss = nn.functional.cross_entropy(model(sample(8, 6, 3)), torch.arange(8) % 2)
    loss.backward()
    optimizer.step()
    assert "head.weight" in before
    for name, p in model.named_parameters():
        assert (p.detach() != before[name]).any(), name
        if "eta" in name:
            assert (p.detach() != before[name]).all(), name  # a row for each time step


def test_trajectory_says_how_each_step_was_solved():
    layer = ERNN(3, 5, map="self-feedback", solver=Anderson(), backward=Implicit())
    for batch_first, shape in ((False, (6, 4, 3)), (True, (4, 6, 3))):
        layer.batch_first = batch_first
        path = layer.trajectory(torch.randn(shape))
        assert path.output.shape == (*shape[:2], 5)
        assert path.result.shape == path.iterations.shape == path.residual.shape == (6, 4)
        assert (path.result == Result.CONVERGED).all()


# Gradients of equilibria.


@pytest.mark.parametrize("solver", [Picard, Anderson, Broyden])
def test_implicit_gradients_equal_long_unrolling(solver):
    torch.manual_seed(0)
    cell = SelfFeedbackMap(3, 5, bound=0.5).double().eval()
    nn.init.normal_(cell.b)
    x, hx, weight = sample(4, 2, 3), sample(1, 2, 5, seed=2), sample(4, 2, 5, seed=3)
    # 0.5^100 is below the rounding of float64.
    unrolled = ERNN(3, 5, map=cell, solver=Picard(max_iter=100, rtol=0, atol=0))
    implicit = ERNN(
        3, 5, map=cell, solver=solver(max_iter=200, rtol=1e-13, atol=0), backward=Implicit()
    )
    found = []
    for layer in (unrolled, implicit):
        inputs = [x.clone().requires_grad_(), hx.clone().requires_grad_()]
        output, _ = layer(*inputs)
        leaves = [*cell.parameters(), *inputs]
        found.append((output, *torch.autograd.grad((output * weight).sum(), leaves)))
    assert len(found[0]) == 1 + 4 + 2
    for given, expected in zip(found[1], found[0], strict=True):
        scale = expected.abs().max().item()
        # Four steps, each solve and adjoint to 1e-13 / (1 - 0.5).
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-11 * scale)
        assert scale > 1e-3


def test_the_adjoint_is_kept_for_inspection():
    layer = ERNN(3, 5, map="self-feedback", solver=Anderson(), backward=Implicit())
    backward = layer.fixed_point.backward
    layer(torch.randn(6, 4, 3))[0].sum().backward()
    assert backward.adjoint.converged.all()
    assert backward.adjoint.check() is backward.adjoint


def test_a_solve_that_diverges_is_reported():
    """Also where a norm leaves the range of float32 before the state does."""
    cell = SelfFeedbackMap(3, 5, nonlinearity="identity")
    with torch.no_grad():
        cell.U.copy_(3 * torch.eye(5))
    layer = ERNN(3, 5, map=cell, solver=Picard(), backward=Implicit())
    with pytest.warns(ConvergenceWarning, match="64 of 64 samples did not converge"):
        path = layer.trajectory(sample(1, 64, 3, dtype=torch.float32))
    assert (path.result >= Result.MAX_ITER).all()
    assert path.output.isfinite().all()


# What a user can get wrong.


def test_a_sequence_longer_than_timesteps_is_refused():
    layer = ERNN(3, 5, timesteps=4)
    assert layer(torch.randn(4, 2, 3))[0].shape == (4, 2, 5)
    assert layer(torch.randn(2, 2, 3))[0].shape == (2, 2, 5)
    with pytest.raises(
        ValueError,
        match=r"eta has 4 rows \(timesteps=4\) but t=4 was asked for, time step number 5; build "
        r"the layer or its InexactNewton with a larger timesteps, or timesteps=None to share eta",
    ):
        layer(torch.randn(5, 2, 3))
    assert ERNN(3, 5)(torch.randn(500, 2, 3))[0].shape == (500, 2, 5)


def single(dtype=torch.float32):
    return torch.zeros(6, 4, 3, dtype=dtype)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((torch.zeros(6, 4, 2),), ValueError, r"input_size=3 .*\(6, 4, 2\).*transpose x to \(T, B"),
        ((torch.zeros(6, 3, 4),), ValueError, r"build the layer with input_size=4"),
        (
            (torch.zeros(3),),
            ValueError,
            r"x must be \(T, B, d\), or \(T, d\) unbatched; got \(3,\)",
        ),
        ((torch.zeros(1, 6, 4, 3),), ValueError, r"x must be \(T, B, d\)"),
        ((torch.zeros(0, 4, 3),), ValueError, r"at least one time step; got \(0, 4, 3\)"),
        ((torch.zeros(0, 3),), ValueError, r"at least one time step; got \(0, 3\)"),
        ((single(torch.float64),), TypeError, r"torch.float32; got torch.float64: convert x by"),
        ((single(torch.int64),), TypeError, r"torch.float32; got torch.int64: convert x by"),
        ((single(), torch.zeros(4, 5)), ValueError, r"hx must be \(1, 4, 5\); got \(4, 5\)"),
        ((single(), torch.zeros(1, 3, 5)), ValueError, r"hx must be \(1, 4, 5\); got \(1, 3, 5\)"),
        ((single(), torch.zeros(2, 4, 5)), ValueError, r"hx must be \(1, 4, 5\); got \(2, 4, 5\)"),
        ((single()[:, 0], torch.zeros(1, 1, 5)), ValueError, r"hx must be \(1, 5\); got \(1, 1"),
        ((single(), (torch.zeros(1, 4, 5),)), TypeError, r"hx .*tensor \(1, 4, 5\); got tuple"),
        ((single(), torch.zeros(1, 4, 5).double()), TypeError, r"hx .*float32; got .*float64"),
    ],
)
def test_bad_input(arguments, kind, message):
    with pytest.raises(kind, match=message):
        ERNN(3, 5)(*arguments)


def test_bad_input_in_batch_first_layout():
    layer = ERNN(3, 5, batch_first=True)
    with pytest.raises(ValueError, match=r"at least one time step; got \(4, 0, 3\)"):
        layer(torch.zeros(4, 0, 3))
    with pytest.raises(ValueError, match=r"transpose x to \(B, T, d\)"):
        layer(torch.zeros(4, 6, 2))
    with pytest.raises(ValueError, match=r"hx must be \(1, 4, 5\); got \(1, 6, 5\)"):
        layer(torch.zeros(4, 6, 3), torch.zeros(1, 6, 5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"map": "jordon"}, r"unknown map 'jordon': expected one of jordan, .*mean 'jordan'\?"),
        ({"nonlinearity": "rely"}, "unknown nonlinearity 'rely'.*mean 'relu'"),
        ({"solver": "andersen"}, "unknown solver 'andersen'.*mean 'anderson'"),
        ({"map": "self-feedback", "rank": 2}, "the self-feedback map has no rank; leave it out"),
        ({"map": "linear", "nonlinearity": "tanh"}, "the linear map has no nonlinearity"),
        ({"map": JordanMap(4, 5)}, r"the map has sizes 4 and 5, the layer 3 and 5: build both"),
        ({"map": JordanMap(3, 5), "rank": 2}, "nonlinearity and rank configure a named map"),
        (
            {"solver": InexactNewton(2), "timesteps": 4},
            "max_iter and timesteps configure the default solver.*set them on the solver",
        ),
        ({"solver": InexactNewton(2), "max_iter": 2}, "configure the default solver"),
        (
            {"solver": Anderson(), "backward": Implicit()},
            r"JordanMap sees .* Anderson with a tolerance .* the self-feedback map",
        ),
        ({"solver": "picard"}, "JordanMap sees .* Picard with a tolerance"),
        (
            {"solver": InexactNewton(2, learn=False), "backward": Implicit()},
            r"Implicit differentiation would make it forget the past: use InexactNewton\(max_iter",
        ),
        (
            {"max_iter": 2, "backward": Unrolled(last=1)},
            r"Unrolled\(last=1\), which cuts the gradient to the start, would make it forget",
        ),
        (
            {"map": "self-feedback", "backward": Implicit()},
            r"eta receives no gradient under Implicit: use Unrolled\(\), or InexactNewton\(\.\.\., "
            r"learn=False\)",
        ),
        ({"max_iter": 1, "backward": Unrolled(last=2)}, "asks for more updates than max_iter=1"),
    ],
)
def test_refused_when_built(options, message):
    with pytest.raises(ValueError, match=message):
        ERNN(3, 5, **options)


def test_repr():
    text = repr(ERNN(3, 5, timesteps=4, batch_first=True))
    assert "3, 5, batch_first=True" in text
    assert "JordanMap(3, 5, nonlinearity='relu')" in text
    assert "InexactNewton(max_iter=1, timesteps=4, learn=True)" in text


@pytest.mark.parametrize("timesteps", [None, 5])
@pytest.mark.parametrize("map", ["jordan", "self-feedback"])
def test_a_solver_with_fewer_updates_than_steps(map, timesteps):
    torch.manual_seed(0)
    solver = InexactNewton(3, eta=0.4, timesteps=timesteps).with_options(max_iter=2)
    layer, x = ERNN(3, 4, map=map, solver=solver), torch.randn(5, 2, 3)
    whole = layer(x)[0]
    torch.testing.assert_close(layer.step(x[0])[0], whole[0])
    layer.l0.implementation = "reference"
    torch.testing.assert_close(whole, layer(x)[0])
