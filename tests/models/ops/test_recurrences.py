"""Every fused recurrence against its plain loop: outputs and all gradients, numba and torch."""

import importlib.util
from contextlib import nullcontext

import pytest
import torch
from support.recurrences import OPERATIONS, assert_same, connected, outcome
from torch import nn
from torch.autograd import gradgradcheck

from fixpoint.models.ops.common import buffers, dispatch
from fixpoint.models.ops.common.activations import ACTIVATIONS

HAS_NUMBA = importlib.util.find_spec("numba") is not None
pytestmark = pytest.mark.usefixtures("backend")
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


@pytest.fixture(params=OPERATIONS)
def operation(request):
    return OPERATIONS[request.param]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_plain_loop(operation, size, activation):
    """Each size and each activation with all states and with the last one alone, by turns."""
    last_only = (SIZES.index(size) + list(ACTIVATIONS).index(activation)) % 2 == 1
    arguments = operation.problem(*size)
    options = {"activation": activation, "last_only": last_only}
    expected = outcome(operation.reference, arguments, **options)
    assert_same(outcome(operation.fused, arguments, **options), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_float32_is_as_exact_as_the_plain_loop(operation, size, activation):
    exact = outcome(operation.reference, operation.problem(*size), activation=activation)
    single = operation.problem(*size, dtype=torch.float32)
    plain, got = (
        outcome(f, single, activation=activation) for f in (operation.reference, operation.fused)
    )
    for e, p, g in zip(exact, plain, got, strict=True):
        assert g.dtype == torch.float32
        size = e.abs().max()
        if e.numel() == 1:  # a sum over all steps, of terms as large as the gradients of states
            size = max(size, exact[-1].abs().max())
        rounding = (p - e).abs().max() + 16 * torch.finfo(torch.float32).eps * size
        assert (g - e).abs().max() <= 4 * rounding


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("d", [0, 2])
@pytest.mark.parametrize("steps", [1, 3])
def test_backward_in_chunks_of_time(operation, steps, d, last_only, monkeypatch):
    arguments = operation.problem(7, 3, 4, d)
    options = {"activation": "tanh", "last_only": last_only}
    expected = outcome(operation.reference, arguments, **options)
    monkeypatch.setattr(dispatch, "CHUNK_BYTES", steps * operation.variant * 3 * 4 * 8)
    assert_same(outcome(operation.fused, arguments, **options), expected)


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(operation, activation, last_only):
    arguments = operation.problem(4, 3, 3, 2, seed=3)
    if activation == "relu" and operation.kind == "leaky":
        # The state moves by less than 1e-3 in a finite difference of 1e-6.
        u = nn.functional.linear(arguments["x"], arguments["W"], arguments["bias"])
        assert (arguments["h0"] @ arguments["A"].t() + u[0]).abs().min() > 1e-3

    def scan(*values):
        named = dict(zip(arguments, values, strict=True))
        return operation.fused(**named, activation=activation, last_only=last_only)

    assert torch.autograd.gradcheck(scan, tuple(arguments.values()), fast_mode=last_only)


def test_each_gradient_alone(operation):
    arguments = operation.problem(5, 3, 4, 3)
    all_at_once = outcome(operation.fused, arguments, activation="tanh")[1:]
    for name, expected in zip(arguments, all_at_once, strict=True):
        alone = {k: v.detach().requires_grad_(k == name) for k, v in arguments.items()}
        assert_same(outcome(operation.fused, alone, activation="tanh")[1:], [expected])


def strided(v):
    """The same values in memory that is not contiguous."""
    if v.dim() < 2:
        return v.detach().repeat_interleave(2)[::2] if v.dim() else v.detach()
    return v.detach().mT.contiguous().mT


def test_inputs_that_are_not_contiguous(operation):
    arguments = operation.problem(6, 5, 7, 3)
    expected = outcome(operation.reference, arguments, activation="tanh")
    given = {k: strided(v).requires_grad_() for k, v in arguments.items()}
    assert not any(
        v.is_contiguous() for k, v in given.items() if v.dim() and v.shape[-1] > 1 and k != "a"
    )
    assert_same(outcome(operation.fused, given, activation="tanh"), expected)


@pytest.mark.parametrize("last_only", [False, True])
def test_gradient_that_is_not_contiguous(operation, last_only):
    arguments = operation.problem(6, 5, 7, 3)
    options = {"activation": "tanh", "last_only": last_only}
    pair = [scan(**arguments, **options).sum() for scan in (operation.fused, operation.reference)]
    got, expected = (torch.autograd.grad(y, list(arguments.values())) for y in pair)
    assert_same(got, expected)


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("size", [(6, 5, 17, 3), (6, 41, 17, 0)], ids=str)
def test_inference_equals_training(operation, size, last_only):
    arguments = operation.problem(*size)
    options = {"activation": "relu", "last_only": last_only}
    trained = operation.fused(**arguments, **options)
    with torch.no_grad():
        inferred = operation.fused(**arguments, **options)
    assert not inferred.requires_grad
    assert inferred.is_contiguous()
    torch.testing.assert_close(inferred, trained.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("last_only", [False, True])
def test_inference_allocates_its_output_and_nothing_else_of_length(
    operation, last_only, monkeypatch
):
    sizes, empty = [], dispatch.empty
    monkeypatch.setattr(
        dispatch, "empty", lambda shape, like: sizes.append(shape) or empty(shape, like)
    )
    with torch.no_grad():
        operation.fused(**operation.problem(64, 2, 4, 3), activation="tanh", last_only=last_only)
    whole = [shape for shape in sizes if shape[0]]
    assert whole == ([] if last_only else [(64, 2, 4)])


@pytest.mark.parametrize("last_only", [False, True])
def test_nothing_given_is_changed_and_backward_repeats(operation, last_only):
    arguments = operation.problem(6, 5, 7, 3)
    before = {k: v.detach().clone() for k, v in arguments.items()}
    y = operation.fused(**arguments, activation="relu", last_only=last_only)
    value, weights = y.detach().clone(), torch.ones_like(y)
    first, second = (
        torch.autograd.grad(y, list(arguments.values()), weights, retain_graph=True)
        for _ in range(2)
    )
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))
    assert torch.equal(y, value)
    assert torch.equal(weights, torch.ones_like(y))
    with torch.no_grad():
        operation.fused(**arguments, activation="relu", last_only=last_only)
    assert all(torch.equal(v, before[k]) for k, v in arguments.items())


@pytest.mark.parametrize("last_only", [False, True])
def test_a_change_of_the_output_in_place_changes_no_gradient(operation, last_only):
    arguments = operation.problem(4, 3, 2)
    results = []
    for scan in (operation.fused, operation.reference):
        y = scan(**arguments, activation="relu", last_only=last_only)
        loss = y.mul_(2).add_(1).square().sum()
        results.append(torch.autograd.grad(loss, list(arguments.values())))
    assert_same(*results)


@pytest.mark.parametrize("last_only", [True, False])
def test_second_derivatives(operation, last_only):
    """Also where one argument is computed from another."""
    arguments = operation.problem(3, 2, 2, 2)
    first, second = ("a", "b") if operation.kind == "leaky" else ("p", "q")
    names = [name for name in arguments if name != second]

    def run(*values):
        given = dict(zip(names, values, strict=True))
        given[second] = 1 - given[first]
        return operation.fused(**given, activation="tanh", last_only=last_only)

    leaves = [arguments[name].detach().requires_grad_() for name in names]
    gradgradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("openmp", [True, False])
@pytest.mark.parametrize("B", [1, 7, 100])
def test_result_does_not_depend_on_threads(operation, B, openmp, backend, monkeypatch):
    if not openmp:
        if backend == "torch":
            pytest.skip("only the compiled kernels start threads")
        monkeypatch.setattr("fixpoint.models.ops.common.numba_blocks.openmp", None)
    arguments = operation.problem(6, B, 17, 3)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(outcome(operation.fused, arguments, activation="tanh"))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    expected = outcome(operation.reference, arguments, activation="tanh")
    for result in results:
        assert_same(result, expected)


def test_nan_is_kept_in_its_row(operation):
    arguments = operation.problem(5, 4, 7, 3, grad=False)
    clean = operation.fused(**arguments, activation="relu")
    arguments["x"][2, 1] = torch.nan
    got = operation.fused(**arguments, activation="relu")
    assert got[2:, 1].isnan().all()
    assert torch.equal(got[:, [0, 2, 3]], clean[:, [0, 2, 3]])
    assert torch.equal(got[:2], clean[:2])


@pytest.mark.parametrize(("T", "B"), [(0, 3), (3, 0)])
@pytest.mark.parametrize("d", [0, 3])
@pytest.mark.parametrize("last_only", [False, True])
def test_nothing_to_do(operation, T, B, d, last_only):
    arguments = operation.problem(T, B, 4, d)
    options = {"activation": "relu", "last_only": last_only}
    got, expected = (
        outcome(scan, arguments, **options)
        for scan in (operation.fused, connected(operation.reference))
    )
    assert_same(got, expected)
    with torch.no_grad():
        assert torch.equal(operation.fused(**arguments, **options), got[0])


@pytest.mark.parametrize("d", [0, 2000])
def test_no_and_many_input_features_and_no_bias(operation, d):
    arguments = operation.problem(3, 5, 17, 1)
    generator = torch.Generator().manual_seed(1)
    for name, shape in {"x": (3, 5, d), "W": (len(arguments["W"]), d)}.items():
        arguments[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
        arguments[name].requires_grad_()
    del arguments["bias"]
    expected = outcome(operation.reference, arguments, activation="tanh")
    assert_same(outcome(operation.fused, arguments, activation="tanh"), expected)


def test_in_buffers_that_are_used_again(operation, monkeypatch):
    monkeypatch.setattr(buffers, "SMALL", 0)
    arguments = operation.problem(5, 3, 4)
    expected = outcome(operation.reference, arguments, activation="relu")
    for _ in range(2):
        assert_same(outcome(operation.fused, arguments, activation="relu"), expected)


def test_choice_of_kernels(operation, monkeypatch):
    monkeypatch.undo()

    def chosen(n):
        return dispatch.backend(operation.kind, torch.empty(1, n)).__name__.split(".")[-1]

    assert chosen(dispatch.MAX_SIZE) == ("numba_kernels" if HAS_NUMBA else "torch_kernels")
    assert chosen(dispatch.MAX_SIZE + 1) == "torch_kernels"
    monkeypatch.setattr(dispatch, "has_numba", lambda: False)
    monkeypatch.setattr(dispatch, "_backend", dispatch._backend.__wrapped__)
    assert chosen(4) == "torch_kernels"


def test_unsupported_says_why(operation):
    arguments = operation.problem(2, 3, 4, 2, grad=False)
    assert operation.unsupported(**arguments, activation="relu") is None
    factor = "A" if operation.kind == "leaky" else "p"
    where = "on the CPU or on one CUDA device"
    for change, reason in (
        ({factor: torch.float32}, f"one dtype.*{factor} is torch.float32"),
        (dict.fromkeys(arguments, torch.bfloat16), "float32 or float64.*x is torch.bfloat16"),
        ({"h0": "meta"}, f"{where} and h0 is on meta"),
    ):
        given = arguments | {k: arguments[k].to(how) for k, how in change.items()}
        pattern = rf"scan does not apply.*{reason}.*use {operation.reference.__name__}"
        with pytest.raises(ValueError, match=pattern):
            operation.fused(**given, activation="relu")


def test_unsupported_modes(operation, monkeypatch):
    arguments = operation.problem(2, 3, 4, grad=False)
    x = arguments.pop("x")

    def loss(x):
        return operation.fused(x, **arguments, activation="relu").sum()

    with pytest.raises(ValueError, match="torch.func"):
        torch.func.grad(loss)(x)
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(ValueError, match="forward-mode"),
    ):
        loss(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
    with torch.autocast("cpu"), pytest.raises(ValueError, match="autocast is on"):
        loss(x)
    monkeypatch.setattr("fixpoint.models.ops.common.dispatch.is_exporting", lambda: True)
    with pytest.raises(ValueError, match="traced or exported"):
        loss(x)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_plain_loop_keeps_the_dtype_of_the_state(operation, autocast):
    arguments = operation.problem(6, 5, 17, 3, dtype=torch.float32)
    expected = operation.fused(**arguments, activation="tanh")
    with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
        got = operation.reference(**arguments, activation="tanh")
    assert got.dtype == torch.float32
    scale = expected.abs().max().item()
    # 6 time steps of products in bfloat16
    eps = 6 * operation.variant * 2**-8 if autocast else 1e-5
    torch.testing.assert_close(got, expected, rtol=0, atol=eps * scale)


def test_a_module_trains_through_it(operation):
    """Adam on all arguments: the loss falls, and as with the plain loop."""
    start = operation.problem(12, 8, 6, 2, dtype=torch.float32)
    losses = []
    for scan in (operation.fused, operation.reference):
        weights = {k: nn.Parameter(v.detach().clone()) for k, v in start.items()}
        optimizer = torch.optim.Adam(list(weights.values()), lr=0.02)
        for _ in range(20):
            loss = scan(**weights, activation="tanh", last_only=True).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    first = operation.reference(**start, activation="tanh", last_only=True).square().mean()
    assert losses[0] < 0.5 * first.item()
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_bad_input_and_state(operation):
    arguments = operation.problem(2, 3, 4, 2, dtype=torch.float32, grad=False)
    for scan in (operation.fused, operation.reference):
        for change, message in (
            ({"activation": "tahn"}, "unknown activation 'tahn'.*did you mean 'tanh'"),
            ({"x": torch.zeros(3, 2)}, r"x must be \(T, B, . or d\)"),
            ({"x": torch.zeros(2, 5, 2)}, r"x must be \(2, 3, 2\), not \(2, 5, 2\)"),
        ):
            with pytest.raises(ValueError, match=message):
                scan(**(arguments | {"activation": "relu"} | change))
