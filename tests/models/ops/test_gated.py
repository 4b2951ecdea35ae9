"""The gated scan against the plain loop and NumPy: outputs, gradients, numba and torch sweeps."""

import importlib.util

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradgradcheck

from fixpoint.models.maps import ACTIVATIONS
from fixpoint.models.ops.common import dispatch as _operation
from fixpoint.models.ops.gated import torch as _gated_torch
from fixpoint.models.ops.gated.autograd import gated_scan, gated_scan_reference, unsupported

HAS_NUMBA = importlib.util.find_spec("numba") is not None
NAMES = "x", "V", "p", "q", "h0", "W", "bias"
# T, B, n, d; d = 0: x is u itself
SIZES = [
    (1, 1, 1, 0),
    (1, 3, 17, 4),
    (5, 1, 17, 1),
    (5, 3, 7, 2),
    (7, 5, 1, 0),
    (6, 41, 17, 3),
    (10, 70, 16, 0),
]


@pytest.fixture(params=["numba", "torch"], autouse=True)
def sweeps(request, monkeypatch):
    """Both implementations, with new buffers full of NaN, so that a read before a write shows."""
    if request.param == "numba" and not HAS_NUMBA:
        pytest.skip("needs numba")
    module = _operation.compiled("gated") if request.param == "numba" else _gated_torch
    monkeypatch.setattr(_operation, "sweeps", lambda name, n: module)
    empty = _operation.empty
    monkeypatch.setattr(_operation, "empty", lambda *args: empty(*args).fill_(torch.nan))
    return module


@pytest.fixture(params=[1, 2], ids=["shared product", "two products"])
def products(request):
    return request.param


def problem(products, T, B, n, d=0, dtype=torch.float64, seed=0, grad=True):
    """Arguments by name."""
    g = torch.Generator().manual_seed(seed)
    rows = products * n
    shapes = {"x": (T, B, d or rows), "V": (rows, n), "p": (), "q": (), "h0": (B, n)}
    if d:
        shapes |= {"W": (rows, d), "bias": (2 * n,)}
    out = {k: torch.randn(s, generator=g, dtype=torch.float64) for k, s in shapes.items()}
    out["V"] *= 0.5 / n**0.5
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
        assert g.shape == e.shape
        scale = e.abs().max().item() if e.numel() else 0.0
        torch.testing.assert_close(g, e, rtol=0, atol=eps_factor * torch.finfo(e.dtype).eps * scale)


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_plain_loop(products, size, activation, last_only):
    arguments = problem(products, *size)
    options = {"activation": activation, "last_only": last_only}
    expected = outcome(gated_scan_reference, arguments, **options)
    assert_same(outcome(gated_scan, arguments, **options), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_float32_is_as_exact_as_the_plain_loop(products, size, activation):
    exact = outcome(gated_scan_reference, problem(products, *size), activation=activation)
    single = problem(products, *size, dtype=torch.float32)
    plain = outcome(gated_scan_reference, single, activation=activation)
    got = outcome(gated_scan, single, activation=activation)
    for e, p, g in zip(exact, plain, got, strict=True):
        assert g.dtype == torch.float32
        rounding = (p - e).abs().max() + 16 * torch.finfo(torch.float32).eps * e.abs().max()
        assert (g - e).abs().max() <= 4 * rounding


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("d", [0, 2])
@pytest.mark.parametrize("steps", [1, 3])
def test_backward_in_segments_of_time(products, steps, d, last_only, monkeypatch):
    arguments = problem(products, 7, 3, 4, d)
    options = {"activation": "tanh", "last_only": last_only}
    expected = outcome(gated_scan_reference, arguments, **options)
    monkeypatch.setattr(_operation, "SEGMENT", steps * products * 3 * 4 * 8)
    assert_same(outcome(gated_scan, arguments, **options), expected)


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(products, activation, last_only):
    arguments = problem(products, 4, 3, 3, 2, seed=3)

    def scan(*values):
        named = dict(zip(arguments, values, strict=True))
        return gated_scan(**named, activation=activation, last_only=last_only)

    assert torch.autograd.gradcheck(scan, tuple(arguments.values()))


@pytest.mark.parametrize("name", NAMES)
def test_each_gradient_alone(products, name):
    arguments = problem(products, 5, 3, 4, 3)
    together = dict(zip(NAMES, outcome(gated_scan, arguments, activation="tanh")[1:], strict=True))
    alone = {k: v.detach().requires_grad_(k == name) for k, v in arguments.items()}
    assert_same(outcome(gated_scan, alone, activation="tanh")[1:], [together[name]])


def logistic(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cell", ["FastGRNN", "UGRNN"])
def test_equals_the_published_cells_in_numpy(cell, dtype):
    """Their update equations, written out step by step in float64."""
    rng = np.random.default_rng(0)
    T, B, n, d, zeta, nu = 9, 3, 7, 2, 1.0, -4.0
    x, h = rng.normal(size=(T, B, d)), rng.normal(size=(B, n))
    W1, W2 = rng.normal(size=(2, n, d))
    V1, V2 = 0.3 * rng.normal(size=(2, n, n))
    b_z, b_c = rng.normal(size=(2, n))
    if cell == "FastGRNN":
        V, W, p, q = V1, W1, logistic(zeta), logistic(nu)
    else:
        V, W, p, q = np.concatenate([V1, V2]), np.concatenate([W1, W2]), 1.0, 0.0
    arrays = {"V": V, "W": W, "h0": h, "bias": np.concatenate([b_z, b_c]), "p": p, "q": q}
    tensors = {k: torch.tensor(v, dtype=dtype) for k, v in arrays.items()}
    got = gated_scan(torch.tensor(x, dtype=dtype), **tensors, activation="tanh")
    for t in range(T):
        if cell == "FastGRNN":
            z = logistic(x[t] @ W1.T + h @ V1.T + b_z)
            c = np.tanh(x[t] @ W1.T + h @ V1.T + b_c)
            h = z * h + (logistic(zeta) * (1 - z) + logistic(nu)) * c
        else:
            z = logistic(x[t] @ W1.T + h @ V1.T + b_z)
            c = np.tanh(x[t] @ W2.T + h @ V2.T + b_c)
            h = z * h + (1 - z) * c
        np.testing.assert_allclose(
            got[t].numpy(), h, atol=1e-6 if dtype == torch.float32 else 1e-14
        )


def test_numbers_for_p_and_q(products):
    arguments = problem(products, 5, 3, 4, 2)
    tensors = arguments | {k: torch.tensor(v, dtype=torch.float64) for k, v in FACTORS.items()}
    expected = outcome(gated_scan_reference, tensors, activation="tanh")
    got = gated_scan(**(arguments | FACTORS), activation="tanh")
    assert_same([got.detach()], expected[:1])


FACTORS = {"p": 0.7, "q": 0.1}


def test_bias_without_input_weights(products):
    arguments = problem(products, 5, 3, 4)
    arguments["bias"] = torch.linspace(-1, 1, 8, dtype=torch.float64).requires_grad_()
    expected = outcome(gated_scan_reference, arguments, activation="tanh")
    assert_same(outcome(gated_scan, arguments, activation="tanh"), expected)


def test_inputs_that_are_not_contiguous(products):
    arguments = problem(products, 6, 5, 7, 3)
    expected = outcome(gated_scan_reference, arguments, activation="tanh")
    strided = {
        k: v.detach().mT.contiguous().mT if v.dim() > 1 else v.detach()
        for k, v in arguments.items()
    }
    strided["bias"] = strided["bias"].repeat_interleave(2)[::2]
    assert not any(v.is_contiguous() for v in strided.values() if v.dim())
    strided = {k: v.requires_grad_() for k, v in strided.items()}
    assert_same(outcome(gated_scan, strided, activation="tanh"), expected)


@pytest.mark.parametrize("last_only", [False, True])
def test_gradient_that_is_not_contiguous(products, last_only):
    arguments = problem(products, 6, 5, 7, 3)
    options = {"activation": "tanh", "last_only": last_only}
    pair = [scan(**arguments, **options).sum() for scan in (gated_scan, gated_scan_reference)]
    got, expected = (torch.autograd.grad(y, list(arguments.values())) for y in pair)
    assert_same(got, expected)


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("size", [(6, 5, 17, 3), (6, 41, 17, 0)], ids=str)
def test_inference_equals_training(products, size, last_only):
    arguments = problem(products, *size)
    options = {"activation": "relu", "last_only": last_only}
    trained = gated_scan(**arguments, **options)
    with torch.no_grad():
        inferred = gated_scan(**arguments, **options)
    assert not inferred.requires_grad
    assert inferred.is_contiguous()
    torch.testing.assert_close(inferred, trained.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("last_only", [False, True])
def test_inference_allocates_its_output_and_nothing_else_of_length(
    products, last_only, monkeypatch
):
    sizes, empty = [], _operation.empty
    monkeypatch.setattr(
        _operation, "empty", lambda shape, like: sizes.append(shape) or empty(shape, like)
    )
    with torch.no_grad():
        gated_scan(**problem(products, 64, 2, 4, 3), activation="tanh", last_only=last_only)
    assert sizes == [(1, 2, 4) if last_only else (65, 2, 4)]


@pytest.mark.parametrize("last_only", [False, True])
def test_nothing_given_is_changed_and_backward_repeats(products, last_only):
    arguments = problem(products, 6, 5, 7, 3)
    before = {k: v.detach().clone() for k, v in arguments.items()}
    y = gated_scan(**arguments, activation="relu", last_only=last_only)
    value, weights = y.detach().clone(), torch.ones_like(y)
    wanted = list(arguments.values())
    first = torch.autograd.grad(y, wanted, weights, retain_graph=True)
    second = torch.autograd.grad(y, wanted, weights)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))
    assert torch.equal(y, value)
    assert torch.equal(weights, torch.ones_like(y))
    with torch.no_grad():
        gated_scan(**arguments, activation="relu", last_only=last_only)
    assert all(torch.equal(v, before[k]) for k, v in arguments.items())


def test_change_of_output_in_place_is_refused(products):
    y = gated_scan(**problem(products, 4, 3, 2), activation="relu")
    with pytest.raises(RuntimeError, match="cloning the output"):
        y += 1


def test_second_derivatives(products):
    arguments = problem(products, 3, 2, 2, 2)
    names = [name for name, v in arguments.items() if isinstance(v, Tensor)]

    def run(*values):
        return gated_scan(**dict(zip(names, values, strict=True)), activation="tanh")

    gradgradcheck(run, [arguments[n].detach().requires_grad_() for n in names], fast_mode=True)


@pytest.mark.parametrize("B", [1, 2, 7, 100])
def test_result_does_not_depend_on_threads(products, B):
    arguments = problem(products, 6, B, 17, 3)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(outcome(gated_scan, arguments, activation="tanh"))
    finally:
        torch.set_num_threads(threads)
    expected = outcome(gated_scan_reference, arguments, activation="tanh")
    for result in results:
        assert_same(result, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saturated_gates(products, dtype):
    """A shut gate keeps nothing of the state, an open one keeps it as it is; no NaN in between."""
    arguments = problem(products, 3, 2, 4, 2, dtype=dtype)
    with torch.no_grad():
        arguments["bias"][:4] = torch.tensor([-200.0, 200.0, -20.0, 20.0])
        arguments |= {"p": torch.ones((), dtype=dtype), "q": torch.zeros((), dtype=dtype)}
    expected = outcome(gated_scan_reference, arguments, activation="tanh")
    got = outcome(gated_scan, arguments, activation="tanh")
    assert torch.equal(got[0][:, :, 1], arguments["h0"][:, 1].expand(3, 2))
    assert_same(got, expected)


def test_nan_stays_in_its_row(products):
    arguments = problem(products, 5, 4, 7, 3, grad=False)
    clean = gated_scan(**arguments, activation="relu")
    arguments["x"][2, 1] = torch.nan
    got = gated_scan(**arguments, activation="relu")
    assert got[2:, 1].isnan().all()
    assert torch.equal(got[:, [0, 2, 3]], clean[:, [0, 2, 3]])
    assert torch.equal(got[:2], clean[:2])


@pytest.mark.parametrize(("T", "B"), [(0, 3), (3, 0)])
@pytest.mark.parametrize("d", [0, 3])
@pytest.mark.parametrize("last_only", [False, True])
def test_nothing_to_do(products, T, B, d, last_only):
    arguments = problem(products, T, B, 4, d)
    options = {"activation": "relu", "last_only": last_only}
    got, expected = (outcome(scan, arguments, **options) for scan in (gated_scan, plain_or_zero))
    assert_same(got, expected)
    with torch.no_grad():
        assert torch.equal(gated_scan(**arguments, **options), got[0])


def plain_or_zero(**arguments):
    """The plain loop, connected to every argument even without a step."""
    return gated_scan_reference(**arguments) + 0 * sum(
        v.sum() for v in arguments.values() if isinstance(v, torch.Tensor)
    )


@pytest.mark.parametrize("d", [0, 2000])
def test_no_and_many_input_features(products, d):
    arguments = problem(products, 3, 5, 17, 1)
    generator = torch.Generator().manual_seed(1)
    for name, shape in {"x": (3, 5, d), "W": (17 * products, d)}.items():
        arguments[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
        arguments[name].requires_grad_()
    del arguments["bias"]
    expected = outcome(gated_scan_reference, arguments, activation="tanh")
    assert_same(outcome(gated_scan, arguments, activation="tanh"), expected)


def test_choice_of_sweeps(monkeypatch):
    monkeypatch.undo()
    compiled = _operation.compiled("gated")
    assert (compiled is not None) == HAS_NUMBA
    if compiled:
        assert _operation.sweeps("gated", torch.empty(1, _operation.MAX_SIZE)) is compiled
    assert _operation.sweeps("gated", torch.empty(1, _operation.MAX_SIZE + 1)) is _gated_torch
    monkeypatch.setattr(_operation, "compiled", lambda name: None)
    assert _operation.sweeps("gated", torch.empty(1, 4)) is _gated_torch


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"p": torch.float32}, "one dtype.*p is torch.float32"),
        (dict.fromkeys(NAMES, torch.bfloat16), "float32 or float64.*x is torch.bfloat16"),
        ({"h0": "meta"}, "on the CPU and h0 is on meta"),
    ],
)
def test_unsupported_says_why(products, change, reason):
    arguments = problem(products, 2, 3, 4, 2, grad=False)
    assert unsupported(**arguments, activation="relu") is None
    arguments |= {k: arguments[k].to(how) for k, how in change.items()}
    with pytest.raises(ValueError, match=f"the gated scan.*{reason}.*use gated_scan_reference"):
        gated_scan(**arguments, activation="relu")


def test_under_autocast_the_plain_loop_keeps_the_dtype_of_the_state(products):
    arguments = problem(products, 6, 5, 17, 3, dtype=torch.float32)
    expected = gated_scan(**arguments, activation="tanh")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(ValueError, match="autocast is on.*use gated_scan_reference"):
            gated_scan(**arguments, activation="tanh")
        got = gated_scan_reference(**arguments, activation="tanh")
    assert got.dtype == torch.float32
    scale = expected.abs().max().item()
    torch.testing.assert_close(got, expected, rtol=0, atol=6 * 2**-8 * scale)  # 6 steps in bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "tahn"}, "unknown activation 'tahn'.*did you mean 'tanh'"),
        ({"x": torch.zeros(3, 2)}, r"x must be \(T, B, u or d\)"),
        ({"x": torch.zeros(2, 5, 2)}, r"x must be \(2, 3, 2\), not \(2, 5, 2\)"),
        ({"V": torch.zeros(12, 4)}, r"V must be \(4, 4\) or \(8, 4\), not \(12, 4\)"),
        ({"W": torch.zeros(7, 2)}, r"W must be \(4, 2\), not \(7, 2\).*V is \(4, 4\)"),
        ({"bias": torch.zeros(4)}, r"bias must be \(8,\), not \(4,\)"),
        ({"p": torch.zeros(4)}, r"p must be a number or have no axes, not \(4,\)"),
    ],
)
@pytest.mark.parametrize("scan", [gated_scan, gated_scan_reference])
def test_bad_arguments(scan, change, message):
    arguments = problem(1, 2, 3, 4, 2, dtype=torch.float32, grad=False)
    with pytest.raises(ValueError, match=message):
        scan(**(arguments | {"activation": "relu"} | change))


def test_a_module_trains_through_it(products):
    """Adam on all arguments: the loss falls, and as with the plain loop."""
    start = problem(products, 12, 8, 6, 2, dtype=torch.float32)
    losses = []
    for scan in (gated_scan, gated_scan_reference):
        held = {k: nn.Parameter(v.detach().clone()) for k, v in start.items()}
        optimiser = torch.optim.Adam(list(held.values()), lr=0.02)
        for _ in range(20):
            loss = scan(**held, activation="tanh", last_only=True).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        losses.append(loss.item())
    first = gated_scan_reference(**start, activation="tanh", last_only=True).square().mean()
    assert losses[0] < 0.5 * first.item()
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
