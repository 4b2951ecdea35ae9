"""Every registered solver, and a counter of device synchronisations."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from fixpoint import SOLVERS, make_solver
from fixpoint._torch import TorchDispatchMode

OWN_OPTIONS = {
    "inexact-newton": {"eta": 1.0, "learn": False, "max_iter": 50, "rtol": 1e-5, "atol": 1e-6}
}


@pytest.fixture(params=SOLVERS)
def build(request):
    """A function that makes one registered solver with the options of `IterativeSolver`."""

    def make(**options):
        return make_solver(request.param, **{**OWN_OPTIONS.get(request.param, {}), **options})

    make.name = request.param
    return make


class SyncCount:
    """Counts what makes the host wait for a device: reads of values, and checks of errors."""

    WAITING = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_linalg_check_errors")
    READING = ("tolist", "numpy", "cpu")

    def __init__(self):
        counter = self
        self.count = 0

        class Dispatch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                counter.count += func.overloadpacket.__name__ in counter.WAITING
                return func(*args, **(kwargs or {}))

        class Function(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                counter.count += getattr(func, "__name__", "") in counter.READING
                return func(*args, **(kwargs or {}))

        self.modes = Dispatch(), Function()

    def __enter__(self):
        for mode in self.modes:
            mode.__enter__()
        return self

    def __exit__(self, *error):
        for mode in reversed(self.modes):
            mode.__exit__(*error)


@pytest.fixture
def sync_count():
    return SyncCount()


@pytest.fixture
def count_calls():
    """Wrap a map so that it counts its calls."""

    def wrap(phi):
        def counted(z):
            counted.calls += 1
            return phi(z)

        counted.calls = 0
        return counted

    return wrap


@pytest.fixture
def tanh_layer():
    """phi(z) = tanh(z U^T + x) with ||U||_2 = 0.9, and the start 0, (6, 5)."""
    generator = torch.Generator().manual_seed(3)
    U = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    U = 0.9 * U / torch.linalg.matrix_norm(U, 2)
    x = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    return lambda z: torch.tanh(z @ U.T.to(z.dtype) + x.to(z.dtype)), torch.zeros_like(x)
