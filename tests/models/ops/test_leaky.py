"""The fused scan against the plain loop: outputs and all gradients, numba and torch sweeps."""

import importlib.util

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradgradcheck

from fixpoint.models.maps import ACTIVATIONS
from fixpoint.models.ops.common import buffers as _buffers
from fixpoint.models.ops.common import dispatch as _operation
from fixpoint.models.ops.leaky import torch as _fused_torch
from fixpoint.models.ops.leaky.autograd import fused_scan, scan_reference, unsupported

HAS_NUMBA = importlib.util.find_spec("numba") is not None
NAMES = "x", "A", "a", "b", "h0", "W", "bias"
# T, B, n, K, d; d = 0: x is u itself
SIZES = [
    (1, 1, 1, 1, 0),
    (1, 3, 17, 2, 4),
    (5, 1, 17, 1, 1),
    (7, 5, 1, 3, 0),
    (6, 41, 17, 2, 3),
    (10, 70, 16, 1, 0),
]


@pytest.fixture(params=["numba", "torch"], autouse=True)
def sweeps(request, monkeypatch):
    """Both implementations, with new buffers full of NaN, so that a read before a write shows."""
    if request.param == "numba" and not HAS_NUMBA:
        pytest.skip("needs numba")
    module = _operation.compiled("leaky") if request.param == "numba" else _fused_torch
    monkeypatch.setattr(_operation, "sweeps", lambda name, n: module)
    empty = _operation.empty
    monkeypatch.setattr(_operation, "empty", lambda *args: empty(*args).fill_(torch.nan))
    return module


def problem(T, B, n, K, d=0, dtype=torch.float64, seed=0, grad=True):
    """Arguments by name; |A| < 1 keeps the states of any length moderate."""
    g = torch.Generator().manual_seed(seed)
    shapes = {"x": (T, B, d or n), "A": (n, n), "a": (T, K), "b": (T, K), "h0": (B, n)}
    if d:
        shapes |= {"W": (n, d), "bias": (n,)}
    out = {k: torch.randn(s, generator=g, dtype=torch.float64) for k, s in shapes.items()}
    out["A"] *= 0.5 / n**0.5
    return {k: v.to(dtype).requires_grad_(grad) for k, v in out.items()}


def outcome(scan, arguments, **options):
    """The output and the gradient of each argument, for a fixed random gradient of the output."""
    y = scan(**arguments, **options)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    wanted = [v for v in arguments.values() if v.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, wanted, weights.to(y.dtype))]


def assert_same(got, expected, eps_factor=1e3):
    """Equal up to rounding: sums of some hundred terms, relative to the largest."""
    for g, e in zip(got, expected, strict=True):
        scale = e.abs().max().item() if e.numel() else 0.0
        torch.testing.assert_close(g, e, rtol=0, atol=eps_factor * torch.finfo(e.dtype).eps * scale)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_plain_loop(size, activation, last_only, recompute):
    arguments = problem(*size)
    options = {"activation": activation, "last_only": last_only}
    expected = outcome(scan_reference, arguments, **options)
    assert_same(outcome(fused_scan, arguments, recompute=recompute, **options), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_float32_is_as_exact_as_the_plain_loop(size, activation):
    exact = outcome(scan_reference, problem(*size), activation=activation)
    single = problem(*size, dtype=torch.float32)
    plain = outcome(scan_reference, single, activation=activation)
    for e, p, g in zip(
        exact, plain, outcome(fused_scan, single, activation=activation), strict=True
    ):
        assert g.dtype == torch.float32
        rounding = (p - e).abs().max() + 16 * torch.finfo(torch.float32).eps * e.abs().max()
        assert (g - e).abs().max() <= 4 * rounding


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("d", [0, 2])
@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("steps", [1, 3])
def test_backward_in_segments_of_time(steps, K, d, last_only, monkeypatch):
    arguments = problem(7, 3, 4, K, d)
    options = {"activation": "tanh", "last_only": last_only}
    expected = outcome(scan_reference, arguments, **options)
    monkeypatch.setattr(_operation, "SEGMENT", steps * K * 3 * 4 * 8)
    assert_same(outcome(fused_scan, arguments, **options), expected)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation, last_only, recompute):
    arguments = problem(4, 3, 3, 2, 2, seed=3)
    if activation == "relu":  # the state moves by less than 1e-3 in a finite difference of 1e-6
        u = nn.functional.linear(arguments["x"], arguments["W"], arguments["bias"])
        assert (arguments["h0"] @ arguments["A"].t() + u[0]).abs().min() > 1e-3
    options = {"activation": activation, "last_only": last_only, "recompute": recompute}

    def scan(*values):
        return fused_scan(**dict(zip(arguments, values, strict=True)), **options)

    assert torch.autograd.gradcheck(scan, tuple(arguments.values()))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_each_gradient_alone(name, recompute):
    arguments = problem(5, 3, 4, 2, 3)
    options = {"activation": "tanh", "recompute": recompute}
    together = dict(zip(NAMES, outcome(fused_scan, arguments, **options)[1:], strict=True))
    alone = {k: v.detach().requires_grad_(k == name) for k, v in arguments.items()}
    assert_same(outcome(fused_scan, alone, **options)[1:], [together[name]])


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


def test_inputs_that_are_not_contiguous():
    arguments = problem(6, 5, 7, 2, 3)
    expected = outcome(scan_reference, arguments, activation="tanh")
    strided = {
        k: v.detach().mT.contiguous().mT if v.dim() > 1 else v.detach()
        for k, v in arguments.items()
    }
    assert not any(v.is_contiguous() for v in strided.values() if v.dim() > 1)
    strided = {k: v.requires_grad_() for k, v in strided.items()}
    assert_same(outcome(fused_scan, strided, activation="tanh"), expected)


@pytest.mark.parametrize("last_only", [False, True])
def test_gradient_that_is_not_contiguous(last_only):
    arguments = problem(6, 5, 7, 2, 3)
    options = {"activation": "tanh", "last_only": last_only}
    pair = [scan(**arguments, **options).sum() for scan in (fused_scan, scan_reference)]
    got, expected = (torch.autograd.grad(y, list(arguments.values())) for y in pair)
    assert_same(got, expected)


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("K", [1, 3])
def test_inference_equals_training(K, last_only):
    arguments = problem(6, 5, 17, K, 3)
    options = {"activation": "relu", "last_only": last_only}
    trained = fused_scan(**arguments, **options)
    with torch.no_grad():
        inferred = fused_scan(**arguments, **options)
    assert not inferred.requires_grad
    assert inferred.is_contiguous()
    torch.testing.assert_close(inferred, trained.detach(), rtol=0, atol=0)


@pytest.mark.parametrize(("last_only", "share"), [(False, 0.5), (True, 0.2)])
@pytest.mark.parametrize("K", [1, 2])
def test_recompute_stores_less(K, last_only, share):
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
    assert 0 < stored(recompute=True) <= share * stored(recompute=False) + extra


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_nothing_given_is_changed_and_backward_repeats(last_only, recompute):
    arguments = problem(6, 5, 7, 2, 3)
    before = {k: v.detach().clone() for k, v in arguments.items()}
    y = fused_scan(**arguments, activation="relu", last_only=last_only, recompute=recompute)
    value, weights = y.detach().clone(), torch.ones_like(y)
    wanted = list(arguments.values())
    first = torch.autograd.grad(y, wanted, weights, retain_graph=True)
    second = torch.autograd.grad(y, wanted, weights)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))
    assert torch.equal(y, value)
    assert torch.equal(weights, torch.ones_like(y))
    assert all(torch.equal(v, before[k]) for k, v in arguments.items())


@pytest.mark.parametrize("K", [1, 2])
def test_change_of_output_in_place_is_refused(K):
    y = fused_scan(**problem(4, 3, 2, K), activation="relu")
    with pytest.raises(RuntimeError, match="cloning the output"):
        y += 1


@pytest.mark.parametrize("last_only", [True, False])
def test_second_derivatives(last_only):
    """Also where one argument is computed from another: b = 1 - a."""
    arguments = {**problem(3, 2, 2, 2, 2), "activation": "tanh", "last_only": last_only}
    names = [name for name, v in arguments.items() if isinstance(v, Tensor) and name != "b"]

    def run(*values):
        given = dict(zip(names, values, strict=True))
        return fused_scan(**{**arguments, **given, "b": 1 - given["a"]})

    leaves = [arguments[name].detach().requires_grad_() for name in names]
    gradgradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("openmp", [True, False])
@pytest.mark.parametrize("B", [1, 2, 7, 100])
def test_result_does_not_depend_on_threads(B, openmp, sweeps, monkeypatch):
    if not openmp:
        if sweeps is _fused_torch:
            pytest.skip("only the compiled sweeps start threads")
        monkeypatch.setattr("fixpoint.models.ops.common.numba_blocks.openmp", None)
    arguments = problem(6, B, 17, 2, 3)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(outcome(fused_scan, arguments, activation="tanh"))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    expected = outcome(scan_reference, arguments, activation="tanh")
    for result in results:
        assert_same(result, expected)


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


def test_nan_stays_in_its_row():
    arguments = problem(5, 4, 7, 2, 3, grad=False)
    clean = fused_scan(**arguments, activation="relu")
    arguments["x"][2, 1] = torch.nan
    got = fused_scan(**arguments, activation="relu")
    assert got[2:, 1].isnan().all()
    assert torch.equal(got[:, [0, 2, 3]], clean[:, [0, 2, 3]])
    assert torch.equal(got[:2], clean[:2])


@pytest.mark.parametrize(("T", "B"), [(0, 3), (3, 0)])
@pytest.mark.parametrize("last_only", [False, True])
def test_nothing_to_do(T, B, last_only):
    arguments = problem(T, B, 4, 2, 3)
    options = {"activation": "relu", "last_only": last_only}
    got, expected = (
        outcome(scan, arguments, **options) for scan in (fused_scan, scan_reference_or_zero)
    )
    assert_same(got, expected)


def scan_reference_or_zero(**arguments):
    """The plain loop, connected to every argument even without a step."""
    return scan_reference(**arguments) + 0 * sum(
        v.sum() for v in arguments.values() if isinstance(v, torch.Tensor)
    )


def test_wide_input_and_no_bias():
    arguments = problem(3, 5, 17, 2, 2000)
    del arguments["bias"]
    expected = outcome(scan_reference, arguments, activation="tanh")
    assert_same(outcome(fused_scan, arguments, activation="tanh"), expected)


def test_no_input_features():
    arguments = problem(3, 5, 17, 2)
    arguments["x"] = torch.zeros(3, 5, 0, dtype=torch.float64)
    arguments["W"] = torch.zeros(17, 0, dtype=torch.float64)
    expected = outcome(scan_reference, arguments, activation="tanh")
    assert_same(outcome(fused_scan, arguments, activation="tanh"), expected)


def test_in_buffers_that_are_used_again(monkeypatch):
    monkeypatch.setattr(_buffers, "SMALL", 0)
    expected = outcome(scan_reference, problem(5, 3, 4, 2), activation="relu")
    assert_same(outcome(fused_scan, problem(5, 3, 4, 2), activation="relu"), expected)


def test_choice_of_sweeps(monkeypatch):
    monkeypatch.undo()
    compiled = _operation.compiled("leaky")
    assert (compiled is not None) == HAS_NUMBA
    if compiled:
        assert _operation.sweeps("leaky", torch.empty(1, _operation.MAX_SIZE)) is compiled
        assert _operation.sweeps("leaky", torch.empty(1, _operation.MAX_SIZE + 1)) is _fused_torch
    monkeypatch.setattr(_operation, "compiled", lambda name: None)
    assert _operation.sweeps("leaky", torch.empty(1, 4)) is _fused_torch


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"A": torch.float32}, "one dtype.*A is torch.float32"),
        (dict.fromkeys(NAMES, torch.bfloat16), "float32 or float64.*x is torch.bfloat16"),
        ({"h0": "meta"}, "on the CPU or on one CUDA device and h0 is on meta"),
    ],
)
def test_unsupported_says_why(change, reason):
    arguments = problem(2, 3, 4, 1, 2, grad=False)
    assert unsupported(**arguments, activation="relu") is None
    arguments |= {k: arguments[k].to(how) for k, how in change.items()}
    with pytest.raises(ValueError, match=f"{reason}.*use scan_reference"):
        fused_scan(**arguments, activation="relu")


def test_unsupported_modes(monkeypatch):
    arguments = problem(2, 3, 4, 1, grad=False)
    x = arguments.pop("x")

    def loss(x):
        return fused_scan(x, **arguments, activation="relu").sum()

    with pytest.raises(ValueError, match="torch.func"):
        torch.func.grad(loss)(x)
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(ValueError, match="forward-mode"),
    ):
        loss(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
    with torch.autocast("cpu"), pytest.raises(ValueError, match="autocast is on"):
        loss(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match="compiled"):
        loss(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "gelu"}, "unknown activation 'gelu'"),
        ({"x": torch.zeros(3, 2)}, r"x must be \(T, B, n or d\)"),
        ({"x": torch.zeros(2, 5, 2)}, r"x must be \(2, 3, 2\), not \(2, 5, 2\)"),
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
