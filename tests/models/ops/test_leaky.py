"""The leaky recurrence alone: recomputation, factors that expand, activations, its own checks."""

import importlib.util

import pytest
import torch
from support.recurrences import assert_same, outcome
from support.recurrences import leaky_problem as problem
from torch import nn

from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.models.ops.recurrence.leaky import fused_scan, scan_reference

HAS_NUMBA = importlib.util.find_spec("numba") is not None
pytestmark = pytest.mark.usefixtures("backend")


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [(1, 3, 17, 2, 4), (7, 5, 1, 3, 0), (10, 70, 16, 1, 0)], ids=str)
def test_recomputation_equals_plain_loop(size, activation, last_only):
    arguments = problem(*size)
    options = {"activation": activation, "last_only": last_only}
    expected = outcome(scan_reference, arguments, **options)
    assert_same(outcome(fused_scan, arguments, recompute=True, **options), expected)


def test_recomputation_of_each_gradient_alone():
    arguments = problem(5, 3, 4, 2, 3)
    options = {"activation": "tanh", "recompute": True}
    all_at_once = outcome(fused_scan, arguments, **options)[1:]
    for name, expected in zip(arguments, all_at_once, strict=True):
        alone = {k: v.detach().requires_grad_(k == name) for k, v in arguments.items()}
        assert_same(outcome(fused_scan, alone, **options)[1:], [expected])


@pytest.mark.parametrize("last_only", [False, True])
def test_gradcheck_of_recomputation(last_only):
    arguments = problem(4, 3, 3, 2, 2, seed=3)

    def scan(*values):
        named = dict(zip(arguments, values, strict=True))
        return fused_scan(**named, activation="tanh", last_only=last_only, recompute=True)

    assert torch.autograd.gradcheck(scan, tuple(arguments.values()))


@pytest.mark.parametrize("nonlinearity", ["relu", "tanh"])
def test_equals_torch_rnn(nonlinearity):
    torch.manual_seed(0)
    rnn = nn.RNN(3, 17, nonlinearity=nonlinearity, dtype=torch.float64)
    x = torch.randn(6, 5, 3, dtype=torch.float64, requires_grad=True)
    h0 = torch.randn(5, 17, dtype=torch.float64, requires_grad=True)
    expected = rnn(x, h0.unsqueeze(0))[0]
    W, A = rnn.weight_ih_l0, rnn.weight_hh_l0
    got = fused_scan(
        x, A, 0.0, 1.0, h0, activation=nonlinearity, W=W, bias=rnn.bias_ih_l0 + rnn.bias_hh_l0
    )
    wanted = [x, h0, *rnn.parameters()]
    gradients = [torch.autograd.grad(y.square().sum(), wanted) for y in (got, expected)]
    assert_same([got.detach(), *gradients[0]], [expected.detach(), *gradients[1]])


@pytest.mark.parametrize("a_shape", [(), (2,), (1, 2), (5, 1), (5, 2)])
def test_a_and_b_expand(a_shape):
    arguments = problem(5, 3, 4, 2)
    arguments["a"] = torch.full(a_shape, 0.7, dtype=torch.float64, requires_grad=True)
    expected = outcome(scan_reference, arguments, activation="tanh")
    got = outcome(fused_scan, arguments, activation="tanh")
    assert got[3].shape == a_shape
    assert_same(got, expected)


@pytest.mark.parametrize(("last_only", "fraction"), [(False, 0.5), (True, 0.2)])
@pytest.mark.parametrize("K", [1, 2])
def test_recompute_stores_less(K, last_only, fraction):
    arguments = problem(64, 2, 4, K, 3)

    def stored(recompute):
        total = 0

        def pack(v):
            nonlocal total
            own = v.untyped_storage().data_ptr() not in pointers
            total += v.numel() if own and v.dim() == 3 else 0
            return v

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
            fused_scan(**arguments, activation="relu", last_only=last_only, recompute=recompute)
        return total

    pointers = {v.untyped_storage().data_ptr() for v in arguments.values()}
    extra = 8  # the start state, (B, n)
    assert 0 < stored(recompute=True) <= fraction * stored(recompute=False) + extra


@pytest.mark.skipif(not HAS_NUMBA, reason="needs numba")
@pytest.mark.parametrize("openmp", [True, False])
def test_error_in_a_thread_is_raised(openmp, monkeypatch):
    from fixpoint.models.ops.common import numba_blocks as _blocks

    if not openmp:
        monkeypatch.setattr(_blocks, "openmp", None)

    def work(first, last):
        if first:
            raise MemoryError("block")

    with pytest.raises(MemoryError, match="block"):
        _blocks.run(work, [(0, 1), (1, 2)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_values(activation, dtype):
    """Over the whole range, to a few units in the last place; NaN and infinity as in torch."""
    u = torch.cat((torch.linspace(-30, 30, 20001), torch.logspace(-30, 0, 500))).to(dtype)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype)
    x = torch.cat((u, special)).view(1, -1, 1)
    zero = torch.zeros(1, 1, dtype=dtype)
    got = fused_scan(x, zero, 0.0, 1.0, x.new_zeros(x.shape[1], 1), activation=activation).flatten()
    expected = ACTIVATIONS[activation](x.double().flatten())
    atol = 4 * torch.finfo(dtype).eps if activation == "sigmoid" else 0
    rtol = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), expected, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"A": torch.zeros(4, 5)}, r"A must be \(4, 4\), not \(4, 5\)"),
        ({"W": torch.zeros(4, 3)}, r"W must be \(4, 2\), not \(4, 3\)"),
        ({"bias": torch.zeros(5)}, r"bias must be \(4,\), not \(5,\)"),
        ({"W": None}, "bias was given without W"),
        ({"a": torch.zeros(7, 1)}, r"expand to \(T, K\), T = 2"),
        ({"a": torch.zeros(2, 0), "b": 1.0}, "K of at least 1"),
    ],
)
@pytest.mark.parametrize("scan", [fused_scan, scan_reference])
def test_bad_arguments(scan, change, message):
    arguments = problem(2, 3, 4, 1, 2, dtype=torch.float32, grad=False)
    with pytest.raises(ValueError, match=message):
        scan(**(arguments | {"activation": "relu"} | change))
