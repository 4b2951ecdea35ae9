"""RNN, GRU and LSTM against those of torch.nn: values, gradients, layouts.

Specifies: fixpoint.models.rnn.torch_layers.
"""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from fixpoint.models import GRU, LSTM, RNN
from fixpoint.models.ops.common import dispatch

PAIRS = {"rnn": (nn.RNN, RNN), "gru": (nn.GRU, GRU), "lstm": (nn.LSTM, LSTM)}


@pytest.fixture(params=["numba", "torch"])
def kernels(request, monkeypatch):
    """Each kernel module, with new buffers full of NaN, so that a read before a write shows."""
    if request.param == "numba" and not dispatch.has_numba():
        pytest.skip("needs numba")
    module = dispatch.module("gru", f"{request.param}_kernels")  # of all recurrences
    monkeypatch.setattr(dispatch, "backend", lambda name, h: module)
    empty = dispatch.empty
    monkeypatch.setattr(dispatch, "empty", lambda *args: empty(*args).fill_(torch.nan))


def both(kind, *sizes, dtype=torch.float64, **options):
    torch.manual_seed(0)
    theirs, ours = (make(*sizes, dtype=dtype, **options) for make in PAIRS[kind])
    ours.load_state_dict(theirs.state_dict())
    ours.implementation = "fused"
    return theirs, ours


def tensors(x):
    """All tensors of nested tuples and packed sequences."""
    if isinstance(x, torch.Tensor):
        return [x]
    return [x.data] if hasattr(x, "batch_sizes") else [t for part in x for t in tensors(part)]


def outcome(layer, x, hx=None):
    """Outputs, last states and the gradients of everything."""
    outputs = tensors(layer(x) if hx is None else layer(x, hx))
    asked = [*tensors(x), *(tensors(hx) if hx is not None else []), *layer.parameters()]
    asked = [v for v in asked if v.requires_grad]
    loss = sum(((i + 1) * y).sin().sum() for i, y in enumerate(outputs))
    return [*outputs, *torch.autograd.grad(loss, asked, allow_unused=True)]


def assert_same(found, expected, tolerance=1e-12):
    assert len(found) == len(expected)
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=tolerance, atol=tolerance)


def states(kind, *shape):
    draw = torch.Generator().manual_seed(1)
    h = [
        torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()
        for _ in range(1 + (kind == "lstm"))
    ]
    return tuple(h) if kind == "lstm" else h[0]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((5, 3), {"num_layers": 2, "bidirectional": True, "batch_first": True}),
        ((1, 1), {"bias": False}),
        ((7, 41), {"bidirectional": True, "bias": False}),
        ((4, None), {"num_layers": 2}),
    ],
    ids=str,
)
def test_equals_torch(kind, size, options):
    """(T, B), B = None for an unbatched sequence; with and without first states."""
    theirs, ours = both(kind, 3, 17, **options)
    T, B = size
    shape = (T, 3) if B is None else ((B, T, 3) if ours.batch_first else (T, B, 3))
    x = torch.randn(shape, dtype=torch.float64).requires_grad_()
    count = ours.num_layers * (2 if ours.bidirectional else 1)
    hx = states(kind, count, 17) if B is None else states(kind, count, B, 17)
    for start in (None, hx):
        assert_same(outcome(ours, x, start), outcome(theirs, x, start))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", PAIRS)
def test_packed_sequences_equal_torch(kind):
    theirs, ours = both(kind, 3, 5, 2, bidirectional=True)
    x = torch.randn(6, 3, 3, dtype=torch.float64).requires_grad_()
    parts = [x[:2, 0], x[:6, 1], x[:3, 2]]
    packed = pack_sequence(parts, enforce_sorted=False)
    hx = states(kind, 4, 3, 5)
    assert_same(outcome(ours, packed, hx), outcome(theirs, packed, hx))


@pytest.mark.usefixtures("kernels")
def test_relu_equals_torch():
    theirs, ours = both("rnn", 3, 17, 2, nonlinearity="relu", bidirectional=True)
    x = torch.randn(5, 3, 3, dtype=torch.float64).requires_grad_()
    hx = states("rnn", 4, 3, 17)
    assert_same(outcome(ours, x, hx), outcome(theirs, x, hx))
    with pytest.raises(ValueError, match="Unknown nonlinearity 'sigmoid'"):
        RNN(3, 4, nonlinearity="sigmoid")


@pytest.mark.parametrize("kind", PAIRS)
def test_float32_to_1e_6(kind):
    theirs, ours = both(kind, 9, 80, dtype=torch.float32)
    x = torch.randn(40, 8, 9)
    assert_same(tensors(ours(x)), tensors(theirs(x)), 1e-6)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", PAIRS)
def test_derivatives(kind):
    _, ours = both(kind, 2, 3)
    names, weights = zip(*ours.named_parameters(), strict=True)

    def run(x, *values):
        given = dict(zip(names, values, strict=True))
        return tuple(tensors(torch.func.functional_call(ours, given, (x,))))

    x = torch.randn(3, 2, 2, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(run, (x, *weights))
    assert torch.autograd.gradgradcheck(run, (x, *weights), fast_mode=True)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", PAIRS)
def test_chunks_threads_and_inference(kind, monkeypatch):
    theirs, ours = both(kind, 3, 17)
    x = torch.randn(7, 70, 3, dtype=torch.float64)
    expected, threads = outcome(theirs, x), torch.get_num_threads()
    try:
        for count, size in itertools.product((1, 2), (2**21, 2 * 70 * 17 * 8)):
            torch.set_num_threads(count)
            monkeypatch.setattr(dispatch, "CHUNK_BYTES", size)
            assert_same(outcome(ours, x), expected)
    finally:
        torch.set_num_threads(threads)
    with torch.no_grad():
        for f, e in zip(tensors(ours(x)), expected, strict=False):
            torch.testing.assert_close(f, e.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", PAIRS)
def test_a_nan_has_no_part_in_any_gradient(kind):
    theirs, ours = both(kind, 3, 5)
    x = torch.randn(6, 3, 3, dtype=torch.float64)
    clean = x[:, [0, 2]].clone()
    x[2, 1, 0] = torch.nan
    output = ours(x)[0]
    assert output[:2, 1].isfinite().all()
    assert output[2:, 1].isnan().all()
    output[:, [0, 2]].square().sum().backward()
    theirs(clean)[0].square().sum().backward()
    assert_same([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])


@pytest.mark.parametrize("kind", PAIRS)
def test_where_it_is_torchs_own(kind):
    theirs, ours = both(kind, 3, 5, dtype=torch.float32)
    x = torch.randn(4, 2, 3)
    with pytest.raises(ValueError, match="torch.func"):
        torch.func.grad(lambda v: ours(v)[0].sum())(x)
    ours.implementation = "auto"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        try:
            expected = tensors(theirs(x))
        except RuntimeError as error:  # oneDNN has no LSTM in bfloat16 for a CPU without AVX-512
            with pytest.raises(RuntimeError, match=str(error)[:40]):
                ours(x)
        else:
            assert_same(tensors(ours(x)), expected, 0)
    with pytest.raises(ValueError, match="unknown implementation 'fuse'"):
        PAIRS[kind][1](3, 5, implementation="fuse")
    slope = torch.func.grad(lambda v: ours(v)[0].sum())(x)
    torch.testing.assert_close(slope, torch.func.grad(lambda v: theirs(v)[0].sum())(x))


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_a_projection_is_torchs_own():
    layer = LSTM(3, 5, proj_size=2)
    assert layer.plan().reason == "it has a proj_size"
    assert layer(torch.randn(4, 2, 3))[0].shape == (4, 2, 2)


@pytest.mark.parametrize("kind", PAIRS)
def test_what_torch_refuses(kind):
    _, ours = both(kind, 3, 5, dtype=torch.float32)
    ours.implementation = "auto"
    for x in (torch.randn(4, 2, 2), torch.randn(4, 2, 3).double(), torch.randn(0, 2, 3)):
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            ours(x)


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("place", ["x", "h", "c"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_sample_that_is_not_finite_has_no_state_and_no_gradient(kind, place, value):
    if place == "c" and kind != "lstm":
        pytest.skip("it has no c")
    _, ours = both(kind, 3, 4, 2)
    x = torch.randn(5, 3, 3, dtype=torch.float64)
    given = [v.detach() for v in tensors(states(kind, 2, 3, 4))]
    expected = tensors(ours(x, tuple(given) if kind == "lstm" else given[0]))
    {"x": x, "h": given[0], "c": given[-1]}[place][0, 1, 1] = value
    hx = [v.clone().requires_grad_() for v in given]
    x.requires_grad_()
    found = tensors(ours(x, tuple(hx) if kind == "lstm" else hx[0]))
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f[:, ::2], e[:, ::2])
        assert f[:, 1].isnan().all()
    asked = [x, *hx, *ours.parameters()]
    loss = sum(f.nan_to_num().sum() for f in found)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, asked))
    packed = pack_sequence(list(x.detach().unbind(1)))
    again = tensors(ours(packed, tuple(given) if kind == "lstm" else given[0]))
    assert [v.isnan().sum() for v in again] == [v.isnan().sum() for v in found]


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_states_of_another_kind_are_named(implementation):
    x, h = torch.zeros(4, 2, 3), torch.zeros(1, 2, 5)
    lstm, *others = (make(3, 5, implementation=implementation) for make in (LSTM, GRU, RNN))
    pair = r"hx must be a pair of tensors, \(h_0, c_0\); got "
    for hx, given in ((h, "torch.FloatTensor"), ((h,), "tuple"), ((h, h.numpy()), "tuple")):
        with pytest.raises(TypeError, match=pair + given):
            lstm(x, hx)
    for layer, (hx, given) in itertools.product(
        others, [((h, h), "tuple"), (h.numpy(), "numpy.ndarray")]
    ):
        with pytest.raises(TypeError, match=f"hx must be a tensor, h_0; got {given}"):
            layer(x, hx)
    assert lstm(x, [h, h])[0].shape == (4, 2, 5)


@pytest.mark.parametrize("kind", PAIRS)
def test_torchs_own_where_its_kernels_would_be_taken(kind, monkeypatch):
    layer = PAIRS[kind][1]
    wide = layer(3, 257)
    assert "above 256 units" in wide.plan().reason
    wide.implementation = "fused"
    assert wide.plan().fused
    monkeypatch.setattr(dispatch, "has_numba", lambda: False)
    theirs, ours = PAIRS[kind][0](3, 4), layer(3, 4)
    ours.load_state_dict(theirs.state_dict())
    assert "without numba" in ours.plan().reason
    x = torch.randn(5, 2, 3)
    assert torch.equal(ours(input=x)[0], theirs(input=x)[0])


@pytest.mark.parametrize("kind", PAIRS)
def test_input_of_another_kind_or_dtype_is_named(kind):
    layer = PAIRS[kind][1](3, 5)
    x, h = torch.zeros(4, 2, 3), torch.zeros(1, 2, 5).double()
    for given, named in ((x.numpy(), "ndarray"), (x.tolist(), "list"), (None, "NoneType")):
        with pytest.raises(TypeError, match=rf"x must be a tensor \(T, B, d\); got {named}: torch"):
            layer(given)
    with pytest.raises(TypeError, match="x must have the dtype of the layer, torch.float32; got"):
        layer(x.long())
    with pytest.raises(TypeError, match="hx must have the dtype of x, torch.float32; got torch.fl"):
        layer(x, (h, h) if kind == "lstm" else h)
