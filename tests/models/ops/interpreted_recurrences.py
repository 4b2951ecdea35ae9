"""The Triton kernels on the CPU, run by Triton's interpreter, against the plain loop.

`test_interpreted.py` runs this file in a process of its own.
"""

import functools

import pytest
import torch
import triton.language as tl
from support.recurrences import connected, gated_problem, outcome
from support.recurrences import leaky_problem as problem
from triton.runtime.interpreter import InterpreterBuilder

from fixpoint.models.ops.common import dispatch
from fixpoint.models.ops.common import triton_recurrence as kernels
from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.models.ops.recurrence import gated, triton_kernels
from fixpoint.models.ops.recurrence.gated import gated_scan_reference
from fixpoint.models.ops.recurrence.leaky import LEAKY, fused_scan, scan_reference

FLOAT, BRAIN = torch.float32, torch.bfloat16
# T, B, n, K, d; d = 0: x is u itself. Three rows are two programs, the second of them not full.
SIZES = [(3, 3, 7, 1, 0), (3, 3, 33, 2, 2), (1, 1, 1, 3, 1)]


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    """Tensors on the CPU go to the kernels; new buffers are full of NaN."""
    monkeypatch.setattr(dispatch, "backend", lambda name, h: triton_kernels)
    empty = dispatch.empty
    monkeypatch.setattr(dispatch, "empty", lambda *args: empty(*args).fill_(torch.nan))


@pytest.fixture
def bfloat16(monkeypatch):
    """Let it through, and give the interpreter, which multiplies the bits, its exact products."""
    for recurrence in (LEAKY, gated.GATED):
        monkeypatch.setattr(recurrence, "unsupported", lambda *args, **options: None)
    dot = InterpreterBuilder.create_dot

    def exact(self, x, y, *rest):
        single = (
            (self.create_fp_ext(v, tl.float32) for v in (x, y))
            if x.dtype == tl.bfloat16
            else (x, y)
        )
        return dot(self, *single, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", exact)


@pytest.fixture
def config(monkeypatch):
    """Set a field of every launch configuration."""

    def change(**fields):
        original = kernels.launch_config
        monkeypatch.setattr(
            kernels,
            "launch_config",
            lambda *args, **options: original(*args, **options)._replace(**fields),
        )

    return change


def assert_as_exact_as_plain(size, dtype=FLOAT, **options):
    recompute = options.pop("recompute", False)
    fused = functools.partial(fused_scan, recompute=recompute)
    assert_exact(problem(*size, dtype=dtype), fused, scan_reference, **options)


def assert_gated_as_exact_as_plain(size, dtype=FLOAT, **options):
    assert_exact(
        gated_problem(*size, dtype=dtype), gated.gated_scan, gated_scan_reference, **options
    )


def assert_exact(arguments, fused, reference, **options):
    """Off float64 by at most a few times as much as the plain loop in the same type, or an eps."""
    dtype = arguments["x"].dtype
    double = {k: v.detach().double().requires_grad_() for k, v in arguments.items()}
    exact, plain = (outcome(reference, x, **options) for x in (double, arguments))
    got = outcome(fused, arguments, **options)
    eps = torch.finfo(dtype).eps
    for name, e, p, g in zip(["output", *arguments], exact, plain, got, strict=True):
        assert g.dtype == dtype
        assert g.shape == e.shape
        allowed = 4 * (p - e).abs().max() + (16 if dtype == FLOAT else 2) * eps * e.abs().max()
        assert (g - e).abs().max() <= allowed, name


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_plain_loop(size, activation):
    assert_as_exact_as_plain(size, activation=activation)


# T, B, n, products, d
GATED_SIZES = [(3, 2, 7, 1, 0), (3, 2, 33, 2, 2), (2, 1, 20, 1, 2)]


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("size", GATED_SIZES, ids=str)
def test_gated_equals_plain_loop(size, activation):
    assert_gated_as_exact_as_plain(size, activation=activation)


def test_gated_last_state():
    assert_gated_as_exact_as_plain((4, 3, 7, 1, 2), activation="tanh", last_only=True)


def test_gated_with_lanes_of_a_large_n(config):
    """Eight threads share an output, where two matrices would take too many registers of four."""
    config(lanes=8)
    assert_gated_as_exact_as_plain((2, 1, 40, 2, 2), activation="tanh")


def test_gated_weights_read_by_tiles(config):
    config(rows=2, size=32, tile=16)
    assert_gated_as_exact_as_plain((2, 3, 19, 2, 2), activation="tanh")


@pytest.mark.parametrize("products", [1, 2])
@pytest.mark.usefixtures("bfloat16")
def test_gated_bfloat16(products):
    assert_gated_as_exact_as_plain((3, 17, 19, products, 2), BRAIN, activation="tanh")


@pytest.mark.parametrize("last_only", [False, True])
def test_gated_inference_equals_training(last_only):
    arguments = gated_problem(3, 2, 9, 2, 3, dtype=FLOAT)
    options = {"activation": "tanh", "last_only": last_only}
    trained = gated.gated_scan(**arguments, **options)
    with torch.no_grad():
        inferred = gated.gated_scan(**arguments, **options)
    torch.testing.assert_close(inferred, trained.detach(), rtol=0, atol=0)


@pytest.mark.parametrize(("last_only", "recompute"), [(True, False), (False, True), (True, True)])
def test_last_state_and_recomputation(last_only, recompute):
    options = {"last_only": last_only, "recompute": recompute}
    assert_as_exact_as_plain((5, 3, 7, 2, 2), activation="tanh", **options)


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_of_a_program(rows, config):
    config(rows=rows)
    assert_as_exact_as_plain((3, 5, 17, 2, 0), activation="tanh")


def test_weights_read_by_tiles(config):
    config(rows=2)
    assert_as_exact_as_plain((2, 3, 130, 2, 0), activation="tanh")


@pytest.mark.parametrize(
    ("activation", "tile"), [*((name, 32) for name in ACTIVATIONS), ("tanh", 16)]
)
@pytest.mark.usefixtures("bfloat16")
def test_bfloat16(activation, tile, config):
    """With all of A at once and by tiles; two programs."""
    config(tile=tile)
    assert_as_exact_as_plain((3, 17, 19, 2, 2), BRAIN, activation=activation)


@pytest.mark.usefixtures("bfloat16")
def test_bfloat16_keeps_a_state_of_float32():
    """Steps of 1/512 of the state vanish in bfloat16 and add up in float32."""
    T, eta = 200, 2**-9
    x, h0 = torch.ones(T, 1, 4, dtype=BRAIN), torch.ones(1, 4, dtype=BRAIN) / 2
    arguments = {"x": x, "A": torch.zeros(4, 4, dtype=BRAIN), "a": 1 - eta, "b": eta, "h0": h0}
    expected = 1 - 0.5 * (1 - eta) ** T
    plain, got = (f(**arguments, activation="relu")[-1, 0, 0] for f in (scan_reference, fused_scan))
    assert abs(plain - expected) > 0.1
    assert abs(got - expected) <= 2**-8 * expected


@pytest.mark.usefixtures("bfloat16")
def test_float32_a_and_b_beside_bfloat16():
    arguments = problem(4, 3, 7, 2, dtype=BRAIN)
    for name in ("a", "b"):
        arguments[name] = arguments[name].detach().float().requires_grad_()
    expected = outcome(scan_reference, arguments, activation="tanh")
    got = outcome(fused_scan, arguments, activation="tanh")
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == e.dtype
        torch.testing.assert_close(g, e, rtol=0, atol=0.05 * e.abs().max().item())


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("K", [1, 3])
def test_inference_equals_training(K, last_only):
    arguments = problem(4, 3, 17, K, 3, dtype=FLOAT)
    options = {"activation": "relu", "last_only": last_only}
    trained = fused_scan(**arguments, **options)
    with torch.no_grad():
        inferred = fused_scan(**arguments, **options)
    torch.testing.assert_close(inferred, trained.detach(), rtol=0, atol=0)


def test_one_launch_each_way(monkeypatch):
    launches, launch = [], kernels._launch

    def count(kernel, *args, **options):
        launches.append(kernel)
        launch(kernel, *args, **options)

    monkeypatch.setattr(kernels, "_launch", count)
    outcome(fused_scan, problem(6, 3, 7, 2, 3, dtype=FLOAT), activation="relu")
    outcome(gated.gated_scan, gated_problem(6, 3, 7, 2, 3, dtype=FLOAT), activation="relu")
    assert launches == [kernels._forward, kernels._backward] * 2


def test_inputs_that_are_not_contiguous():
    arguments = problem(3, 3, 7, 2, 3, dtype=FLOAT)
    expected = outcome(fused_scan, arguments, activation="tanh")
    strided = {
        k: (v.detach().mT.contiguous().mT if v.dim() > 1 else v.detach()).requires_grad_()
        for k, v in arguments.items()
    }
    got = outcome(fused_scan, strided, activation="tanh")
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e)


def test_nothing_given_is_changed():
    arguments = problem(4, 3, 7, 2, 3, dtype=FLOAT)
    before = {k: v.detach().clone() for k, v in arguments.items()}
    outcome(fused_scan, arguments, activation="relu")
    assert all(torch.equal(v, before[k]) for k, v in arguments.items())


@pytest.mark.parametrize(("T", "B"), [(0, 3), (3, 0)])
@pytest.mark.parametrize("last_only", [False, True])
def test_nothing_to_do(T, B, last_only):
    arguments = problem(T, B, 4, 2, 3, dtype=FLOAT)
    options = {"activation": "relu", "last_only": last_only}
    got, expected = (
        outcome(scan, arguments, **options) for scan in (fused_scan, connected(scan_reference))
    )
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_values(activation):
    """Over the whole range, to a few units in the last place; NaN and infinity as in torch."""
    u = torch.cat((torch.linspace(-30, 30, 1920), torch.logspace(-30, 0, 125)))
    x = torch.cat((u, torch.tensor([torch.nan, torch.inf, -torch.inf]))).view(1, 16, 128)
    zero = torch.zeros(128, 128)
    got = fused_scan(x, zero, 0.0, 1.0, torch.zeros(16, 128), activation=activation)
    eps = torch.finfo(FLOAT).eps
    atol = 4 * eps if activation == "sigmoid" else 0
    expected = ACTIVATIONS[activation](x.double())
    torch.testing.assert_close(got.double(), expected, rtol=8 * eps, atol=atol, equal_nan=True)


def test_nan_remains_in_its_row(config):
    config(rows=4)
    arguments = problem(5, 4, 7, 2, 3, dtype=FLOAT, grad=False)
    clean = fused_scan(**arguments, activation="relu")
    arguments["x"][2, 1] = torch.nan
    got = fused_scan(**arguments, activation="relu")
    assert got[2:, 1].isnan().all()
    assert torch.equal(got[:, [0, 2, 3]], clean[:, [0, 2, 3]])
    assert torch.equal(got[:2], clean[:2])


def test_padding_does_not_grow():
    """Where n is padded sigmoid(0) is not 0: states there would pass the largest float32."""
    x, A, h0 = torch.full((8, 2, 7), -100.0), torch.zeros(7, 7), torch.zeros(2, 7)
    assert fused_scan(x, A, 1e6, 1.0, h0, activation="sigmoid").isfinite().all()
