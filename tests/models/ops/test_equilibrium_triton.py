"""The Triton kernels of an equilibrium: compiled without a GPU, and on a GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fixpoint import Anderson, Broyden, Implicit, Picard
from fixpoint.models import ERNN
from fixpoint.models.ops.common import dispatch
from fixpoint.models.ops.equilibrium import autograd
from fixpoint.models.ops.equilibrium.arguments import Inputs, Method
from fixpoint.models.rnn import base_cell, equilibrium

triton = pytest.importorskip("triton", reason="needs triton")

from support.compiled import Variant, sass  # noqa: E402

from fixpoint.models.ops.equilibrium import triton_kernels as kernels  # noqa: E402

CUDA = torch.device("cuda")


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "variant",
    [
        Variant("equilibrium", "forward", 80),
        pytest.param(Variant("equilibrium", "backward", 128, capability=80), marks=SLOW),
        pytest.param(Variant("equilibrium", "forward", 128, capability=80), marks=SLOW),
        pytest.param(Variant("equilibrium", "forward", 128, memory=5, capability=80), marks=SLOW),
        pytest.param(Variant("equilibrium", "backward", 80, memory=5), marks=SLOW),
    ],
    ids=str,
)
def test_nothing_is_spilled(variant, monkeypatch, tmp_path):
    """Exact products, U and V in registers, and few barriers in an update."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    kernel = variant.compile()
    resources, code = sass.disassemble(kernel.asm["cubin"])
    assert "tf32" not in kernel.asm["ptx"]
    assert resources.stack == 0
    assert resources.registers * variant.config.warps * 32 <= 2**16
    assert 0 < kernel.metadata.shared <= 48 * 1024
    if variant == Variant("equilibrium", "forward", 80):
        turn = sass.inner_loop(code)
        assert sum(x.kind == "BAR" for x in turn) <= 2
        assert sass.cycles(turn, variant.config.warps) <= 700


def problem(T, B, n, d=3):
    generator = torch.Generator().manual_seed(0)
    sizes = {"x": (T, B, d), "W": (n, d), "bias": (n,), "U": (n, n), "V": (n, n), "h0": (B, n)}
    inputs = Inputs(**{k: torch.randn(v, generator=generator) for k, v in sizes.items()})
    U = 0.7 * inputs.U / torch.linalg.matrix_norm(inputs.U, 2)
    return inputs._replace(U=U, V=0.5 * inputs.V / n**0.5)


def gradients(states, inputs):
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(9))
    return torch.autograd.grad(states, inputs, weights.to(states))


def test_one_launch_each_way_and_all_on_the_device(monkeypatch):
    """With meta tensors, which have a device, a dtype and a shape, and no values."""
    launched = []
    for name in ("_forward", "_backward"):

        class Kernel:
            def __init__(self, name):
                self.name = name

            def __getitem__(self, grid):
                return lambda *args, **options: launched.append((self.name, grid, args))

        monkeypatch.setattr(kernels, name, Kernel(name))
    monkeypatch.setattr(dispatch, "backend", lambda name, h: kernels)
    monkeypatch.setattr(dispatch, "unsupported_reason", lambda *args, **options: None)
    monkeypatch.setattr(autograd, "unsupported_method", lambda *args: None)
    monkeypatch.setattr(autograd, "as_solution", lambda z, end: None)
    monkeypatch.setattr(Implicit, "_finish", lambda self, adjoint: None)
    inputs = Inputs(*(v.to("meta").requires_grad_() for v in problem(5, 3, 7)))
    method = Method("tanh", Anderson(rtol=1e-3), Implicit())
    states, report = autograd.equilibrium_scan(inputs, method)
    found = torch.autograd.grad(states, inputs, torch.empty_like(states))
    assert [name for name, *_ in launched] == ["_forward", "_backward"]
    for _, _, args in launched:
        tensors = [v for v in args if isinstance(v, torch.Tensor)]
        assert {v.device.type for v in tensors} == {"meta"}
        assert all(v.is_contiguous() for v in tensors)
    for g, e in zip((states, *report, *found), (states, *report, *inputs), strict=True):
        assert (g.device.type, g.shape, g.dtype) == ("meta", e.shape, e.dtype)


def test_what_the_kernels_take(monkeypatch):
    """Asked of arguments on a device that need not be there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))

    def reason(n, dtype=torch.float32):
        with FakeTensorMode():
            inputs = {
                k: torch.empty(v.shape, dtype=dtype, device="cuda")
                for k, v in problem(2, 3, n)._asdict().items()
            }
        return autograd.unsupported(**inputs, activation="tanh")

    assert reason(128) is None
    assert "at most 128 units on a CUDA device" in reason(129)
    for dtype in (torch.bfloat16, torch.float64):
        assert "it takes float32 " in reason(8, dtype)

    def method(solver, adjoint=None):
        return autograd.unsupported_method(solver, Implicit(adjoint), CUDA)

    monkeypatch.setattr(dispatch, "has_numba", lambda: False)
    assert method(Picard()) is method(Anderson()) is None
    assert "memory of at most 8 on a CUDA device" in method(Anderson(memory=9))
    assert "adjoint solver must be Picard, Anderson" in method(Picard(), Broyden())


def test_repr_says_why_a_layer_on_a_gpu_is_not_fused(monkeypatch):
    def text(n, solver):
        return repr(ERNN(3, n, map="self-feedback", solver=solver, backward=Implicit()))

    with FakeTensorMode():
        weight = torch.empty(0, device=CUDA)
    for module in (base_cell, equilibrium):
        monkeypatch.setattr(module, "first_parameter", lambda module: weight)
    assert "not fused" not in text(128, Picard())
    assert "at most 128 units on a CUDA device, and the state has 129" in text(129, Picard())
    assert "must have memory of at most 8 on a CUDA device" in text(8, Anderson(memory=9))


@pytest.mark.gpu
@pytest.mark.parametrize("solver", [Picard, Anderson])
@pytest.mark.parametrize("size", [(3, 5, 7), (9, 67, 80), (4, 600, 128), (3, 1, 33)], ids=str)
def test_on_the_device(size, solver):
    """As on the CPU; where rounding decides of an update, to what the tolerance leaves."""
    inputs, reports = problem(*size), []
    for device in ("cpu", "cuda"):
        leaves = Inputs(*(v.to(device).detach().requires_grad_() for v in inputs))
        method = Method("tanh", solver(rtol=1e-4, atol=0.0), Implicit())
        states, report = autograd.equilibrium_scan(leaves, method)
        reports.append((report, [v.cpu() for v in (states, *gradients(states, leaves))]))
    (expected, values), (got, others) = reports
    assert torch.equal(got.result.cpu(), expected.result)
    assert (got.iterations.cpu() != expected.iterations).double().mean() < 0.01
    for g, e in zip(others, values, strict=True):
        torch.testing.assert_close(g, e, rtol=0, atol=2e-3 * e.abs().max().item())


@pytest.mark.gpu
def test_the_kernels_do_not_wait_for_the_host():
    inputs = Inputs(*(v.cuda().requires_grad_() for v in problem(9, 67, 80)))
    method = Method("tanh", Picard(rtol=1e-4), Implicit(on_failure="ignore"))
    autograd.equilibrium_scan(inputs, method)  # compile
    torch.cuda.set_sync_debug_mode("error")
    try:
        autograd.equilibrium_scan(inputs, method)
    finally:
        torch.cuda.set_sync_debug_mode("default")
