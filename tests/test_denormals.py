"""Gradients that vanish become 0 rather than numbers that are slow to calculate with.

Specifies: fixpoint._denormals.
"""

import signal
import threading
from contextlib import contextmanager

import pytest
import torch

from fixpoint import Implicit, InexactNewton, Picard, Unrolled
from fixpoint._denormals import rounds_to_zero as flushes
from fixpoint._denormals import with_rounding, without_denormals
from fixpoint.models import ERNN, RNN
from fixpoint.models.ops.common.dispatch import has_numba
from fixpoint.training import Recipe, prepare, run_experiment


@contextmanager
def threads_of_torch(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def a_processor_that_can():
    can = torch.set_flush_denormal(True)
    torch.set_flush_denormal(False)
    if not can:
        pytest.skip("this processor cannot round small numbers to 0")


def test_the_mode_holds_within_the_function_alone():
    assert without_denormals(flushes)()
    assert without_denormals(without_denormals(flushes))()
    assert not flushes()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer of POSIX")
def test_the_mode_ends_with_an_interrupt_at_any_moment():
    """As Ctrl-C, which can come between the change of the mode and the function."""

    class Interrupt(Exception):
        pass

    def interrupt(*_):
        raise Interrupt

    before, left, function = signal.signal(signal.SIGALRM, interrupt), 0, without_denormals(flushes)
    try:
        for i in range(5000):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + 1e-8 * (i % 1000))
                while True:
                    function()
            except Interrupt:
                left += flushes()
                torch.set_flush_denormal(False)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert left == 0


def test_threads_of_torch_keep_their_mode():
    """Those that start within the function would have its mode for good."""
    kept = []

    @without_denormals
    def function():
        torch.ones(1 << 18)

    def first_operation_of_a_thread():
        function()
        x = torch.full((1 << 18,), 1e-310, dtype=torch.float64)
        kept.append(int((x * 0.5).count_nonzero()))

    with threads_of_torch(2):
        for _ in range(2):
            thread = threading.Thread(target=first_operation_of_a_thread)
            thread.start()
            thread.join()
    assert kept == [1 << 18] * 2


def test_the_mode_ends_with_an_error():
    @without_denormals
    def fail():
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not flushes()


def test_a_mode_that_was_set_before_remains():
    torch.set_flush_denormal(True)
    try:
        assert without_denormals(flushes)()
        assert flushes()
    finally:
        torch.set_flush_denormal(False)


def vanishing(make, **options):
    """Return the gradient of each sample's first state: a tenth of the next one's, 40 times."""
    layer = make(3, 4, **options)
    for name, p in layer.named_parameters():
        if "eta" not in name:
            torch.nn.init.zeros_(p)
        if p.shape == (4, 4) and "U" not in name:
            p.data.fill_diagonal_(0.1)
    h0 = torch.zeros(1, 5, 4, requires_grad=True)
    layer(torch.zeros(40, 5, 3), h0)[0][-1].sum().backward()
    return h0.grad


STEP = {"solver": InexactNewton(1, eta=1.0), "nonlinearity": "tanh"}
LAYERS = {
    "RNN": (RNN, {}),
    "one step": (ERNN, {**STEP, "rank": 0}),
    "implicit": (
        ERNN,
        {"map": "self-feedback", "solver": Picard(rtol=1e-6), "backward": Implicit()},
    ),
    "unrolled": (
        ERNN,
        {"map": "self-feedback", "solver": Picard(max_iter=2), "backward": Unrolled()},
    ),
}


@pytest.mark.skipif(not has_numba(), reason="of the kernels of numba")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_vanishing_gradients_of_fused_layers_are_zero(name, threads):
    make, options = LAYERS[name]
    with threads_of_torch(threads):
        found = vanishing(make, implementation="fused", **options)
    assert torch.equal(found, torch.zeros(1, 5, 4))
    assert not flushes()
    slow = vanishing(make, implementation="reference", **options)
    torch.testing.assert_close(slow, torch.full_like(slow, 1e-40), rtol=1e-3, atol=0.0)


@pytest.mark.skipif(not has_numba(), reason="of the kernels of numba")
@pytest.mark.parametrize("pool", ["own", "torch"])
def test_threads_of_a_kernel_have_the_mode_of_their_caller(monkeypatch, pool):
    from fixpoint.models.ops.common import numba_blocks

    if pool == "own":
        monkeypatch.setattr(numba_blocks, "openmp", None)
    else:
        with_rounding(torch.ones, True)(1 << 18)  # its threads start in the other mode
    seen, both = [], threading.Barrier(2)

    def work(first, last):
        if last > first:
            both.wait(60)  # one each
            seen.append(flushes())

    with threads_of_torch(2):
        numba_blocks.run(work, ((0, 1), (1, 2)))
        without_denormals(numba_blocks.run)(work, ((0, 1), (1, 2)))
    assert seen == [False, False, True, True]


def test_vanishing_gradients_in_parallel_time_are_zero():
    given = {**STEP, "rank": 0, "implementation": "reference"}
    assert torch.equal(vanishing(ERNN, time="parallel", **given), torch.zeros(1, 5, 4))
    assert not flushes()


def test_a_training_rounds_to_zero():
    recipe = Recipe().changed(hidden=4, epochs=1)
    seen = []
    run_experiment(recipe, prepare(recipe).data, lambda epoch: seen.append(flushes()))
    assert seen == [True]
    assert not flushes()
