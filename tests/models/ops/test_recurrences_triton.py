"""The Triton kernels: compiled without a GPU, and on a GPU where one is."""

import functools
import importlib.util
import re
import types

import pytest
import torch
from support.recurrences import leaky_problem as problem
from support.recurrences import outcome
from torch._subclasses.fake_tensor import FakeTensorMode

from fixpoint.models import FastRNNCell
from fixpoint.models.ops.common import dispatch
from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.models.ops.recurrence.leaky import LEAKY, fused_scan, scan_reference, unsupported
from fixpoint.models.rnn import base_cell as recurrent_cell

triton = pytest.importorskip("triton", reason="needs triton")

from support.compiled import SHARED, Variant, sass  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from fixpoint.models.ops.common import triton_recurrence as kernels_module  # noqa: E402
from fixpoint.models.ops.recurrence import triton_kernels as leaky_triton  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PASSES = ["forward", "backward"]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """Compile anew, and leave nothing in the home directory."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))


@functools.cache
def compiled(variant):
    kernel = variant.compile()
    return kernel, *sass.disassemble(kernel.asm["cubin"])


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "variant",
    [
        Variant("leaky", "forward", 80),
        Variant("leaky", "backward", 128, capability=80),
        pytest.param(Variant("UGRNN", "backward", 80), marks=SLOW),
        pytest.param(Variant("UGRNN", "forward", 128, capability=80), marks=SLOW),
        pytest.param(Variant("FastGRNN", "backward", 128), marks=SLOW),
        pytest.param(Variant("leaky", "forward", 33, capability=86), marks=SLOW),
    ],
    ids=str,
)
def test_nothing_is_spilled_where_a_matrix_is_in_registers(variant):
    kernel, resources, _ = compiled(variant)
    assert kernel.asm["cubin"][:4] == b"\x7fELF"
    assert resources.stack == 0
    assert 0 < kernel.metadata.shared <= 1024
    assert "tf32" not in kernel.asm["ptx"]


def test_a_step_takes_few_barriers_and_cycles():
    """One exchange of the state: a barrier before it is written and one before it is read."""
    variant = Variant("leaky", "forward", 80)
    turn = sass.inner_loop(compiled(variant)[2])
    assert sum(x.kind == "BAR" for x in turn) == 2
    assert sum(x.kind == "FFMA" for x in turn) < 90  # 80 x 80 products by 128 threads, and tanh
    assert sass.cycles(turn, variant.config.warps) <= 440


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize(("kind", "n", "capability"), [("bf16", 80, 90), ("bf16", 256, 86)])
def test_products_on_tensor_cores(kind, n, capability, pass_):
    variant = Variant("leaky", pass_, n, kind, capability=capability)
    kernel, resources, _ = compiled(variant)
    assert "mma" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED[capability]
    assert resources.stack <= 64


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("pass_", PASSES)
def test_threads_wait_before_and_after_they_exchange_a_state(pass_, kind):
    """The interpreter runs one thread: it cannot miss a barrier."""
    kernel, *_ = compiled(Variant("leaky", pass_, 256, kind, capability=86))
    text = kernel.asm["ttgir"]
    steps = re.findall(r"\b(barrier|store|async_copy)", text)
    assert "barrier store barrier async_copy" in " ".join(steps)


@pytest.mark.parametrize(
    ("T", "B", "n", "K", "kind"),
    [(1, 1, 1, 1, "fp32"), (2, 1, 16, 1, "bf16"), (3, 16, 7, 2, "fp32")],
)
def test_compiles_as_it_is_launched(T, B, n, K, kind, monkeypatch):
    """A launch compiles for the values of its arguments: a size of 1 can become a constant."""
    driver = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 80, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(LEAKY, "unsupported", lambda *args, **options: None)
    monkeypatch.setattr(dispatch, "backend", lambda name, h: leaky_triton)
    kernels = []

    class Compiled:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return lambda *args, **options: kernels.append(
                self.kernel.warmup(*args, grid=grid, **options)
            )

    for name in ("_forward", "_backward"):
        monkeypatch.setattr(kernels_module, name, Compiled(getattr(kernels_module, name)))
    for last_only in (False, True):
        options = {"activation": "relu", "last_only": last_only}
        outcome(fused_scan, problem(T, B, n, K, dtype=DTYPES[kind]), **options)
    assert len(kernels) == 4
    assert all(kernel.asm["cubin"] for kernel in kernels)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_all_around_the_kernels_remains_on_the_device(dtype, last_only, recompute, monkeypatch):
    """With meta tensors, which have a device, a dtype and a shape, and no values."""
    monkeypatch.setattr(LEAKY, "unsupported", lambda *args, **options: None)
    monkeypatch.setattr(dispatch, "backend", lambda name, h: leaky_triton)
    monkeypatch.setattr(dispatch, "by_registered_operation", lambda x: False)
    launched = []
    monkeypatch.setattr(kernels_module, "_launch", lambda *args, **options: launched.append(args))
    arguments = {
        k: v.detach().to("meta").requires_grad_()
        for k, v in problem(9, 3, 7, 2, 4, dtype=dtype).items()
    }
    options = {"activation": "tanh", "last_only": last_only}
    y = fused_scan(**arguments, recompute=recompute, **options)
    gradients = torch.autograd.grad(y, list(arguments.values()), torch.empty_like(y))
    with torch.no_grad():
        inferred = fused_scan(**arguments, **options)
    assert y.shape == inferred.shape == ((3, 7) if last_only else (9, 3, 7))
    for got, expected in zip((y, inferred, *gradients), (y, y, *arguments.values()), strict=True):
        assert (got.device, got.dtype, got.shape) == (y.device, dtype, expected.shape)
    for _, _, _, _, tensors, _ in launched:
        assert {v.device for v in tensors} == {y.device}
        assert all(v.is_contiguous() for v in tensors)
    assert len(launched) == (8 if recompute else 3)


@pytest.mark.gpu
@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "size",
    [(5, 3, 7, 1, 0), (5, 3, 33, 2, 2), (9, 67, 80, 2, 9), (9, 600, 128, 1, 3), (6, 41, 256, 2, 4)],
    ids=str,
)
def test_on_the_device(size, activation, dtype, last_only):
    """Off float64 by at most a few times as much as the plain loop in the same type, or an eps."""
    values = problem(*size, dtype=dtype)
    double = {k: v.detach().double().requires_grad_() for k, v in values.items()}
    device = {k: v.detach().cuda().requires_grad_() for k, v in values.items()}
    options = {"activation": activation, "last_only": last_only}
    exact = outcome(scan_reference, double, **options)
    plain, got = (outcome_on_device(f, device, **options) for f in (scan_reference, fused_scan))
    eps = torch.finfo(dtype).eps
    for name, e, p, g in zip(["output", *values], exact, plain, got, strict=True):
        allowed = (
            4 * (p - e).abs().max() + (16 if dtype == torch.float32 else 2) * eps * e.abs().max()
        )
        assert (g - e).abs().max() <= allowed, name


def outcome_on_device(scan, arguments, **options):
    y = scan(**arguments, **options)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    gradients = torch.autograd.grad(y, list(arguments.values()), weights.to(y))
    return [x.detach().cpu() for x in (y, *gradients)]


@pytest.fixture
def reason(monkeypatch):
    """What `unsupported` says of arguments on a device that need not be there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))

    def ask(n, dtype, **other):
        shapes = {k: v.shape for k, v in problem(2, 3, n, 1, 2, grad=False).items()}
        with FakeTensorMode():
            arguments = {
                k: torch.empty(shape, dtype=other.get(k, dtype), device="cuda")
                for k, shape in shapes.items()
            }
        return unsupported(**arguments, activation="relu")

    return ask


def test_what_the_kernels_take(reason):
    for dtype in DTYPES.values():
        assert reason(1, dtype) is None
        assert reason(256, dtype) is None
        assert "at most 256 units" in reason(257, dtype)
    assert reason(4, torch.bfloat16, a=torch.float32, b=torch.float32) is None
    assert "one dtype, but x is torch.bfloat16 and A" in reason(4, torch.bfloat16, A=torch.float32)
    assert "one dtype" in reason(4, torch.float32, a=torch.bfloat16)
    for dtype in (torch.float64, torch.float16):
        assert "float32 or bfloat16 on a CUDA device" in reason(4, dtype)


def test_what_the_kernels_need(reason, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
        assert "autocast is on" in reason(4, torch.float32)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "capability 8.0, and cuda:0 has (7, 5)" in reason(4, torch.float32)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed" in reason(4, torch.float32)


def test_autocast_on_a_gpu_multiplies_in_bfloat16(monkeypatch):
    """What a layer gives to the kernel, and when."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    for asked, expected in ((torch.bfloat16, torch.bfloat16), (torch.float16, None)):
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda device, asked=asked: asked)
        assert recurrent_cell.dtype_of_products("cuda") == expected
        assert recurrent_cell.dtype_of_products("cpu") is None
    monkeypatch.undo()
    assert recurrent_cell.dtype_of_products("cuda") is None

    monkeypatch.setattr(recurrent_cell, "dtype_of_products", lambda device: torch.bfloat16)
    given = {}
    run = lambda inputs, _: (None, [given.update(inputs._asdict()) or inputs.h0])  # noqa: E731
    monkeypatch.setattr(LEAKY, "run", run)
    with torch.autocast("cpu"):
        FastRNNCell(3, 4).states(torch.zeros(5, 2, 3), torch.zeros(2, 4), last_only=False)
    assert {given[k].dtype for k in ("x", "h0", "A", "W", "bias")} == {torch.bfloat16}
    assert given["a"].dtype == given["b"].dtype == torch.float32
