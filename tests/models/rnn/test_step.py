"""Step by step a layer gives what it gives for the whole sequence."""

import pytest
import torch

from fixpoint import Implicit, Picard
from fixpoint.models import ERNN, EURNN, UGRNN, FastGRNN, FastRNN, SpectralRNN, StreamState

T, B = 7, 3


def contraction(*sizes, **options):
    solver = Picard(rtol=1e-10, atol=1e-12, max_iter=500)
    return ERNN(*sizes, map="self-feedback", solver=solver, backward=Implicit(), **options)


LAYERS = {
    "ernn": lambda *sizes, **options: ERNN(*sizes, max_iter=2, timesteps=T, rank=2, **options),
    "ernn, shared eta": ERNN,
    "ernn, to a tolerance": contraction,
    "fastrnn": FastRNN,
    "fastgrnn": FastGRNN,
    "ugrnn": UGRNN,
    "spectralrnn": SpectralRNN,
    "eurnn": EURNN,
}


@pytest.fixture(params=LAYERS)
def make(request):
    torch.manual_seed(0)
    return lambda **options: LAYERS[request.param](4, 6, **options).double()


def run(layer, x):
    outputs, state = [], None
    for x_t in x:
        output, state = layer.step(x_t, state)
        outputs.append(output)
    return torch.stack(outputs), state


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("batch", [(), (B,)])
def test_every_output_is_that_of_the_sequence(batch, num_layers, make):
    layer = make(num_layers=num_layers)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 2 and parameter.shape[1] < 3:
                parameter.mul_(1 + torch.rand_like(parameter))
    x = torch.randn(T, *batch, 4, dtype=torch.float64)
    output, h_n = layer(x)
    stepped, state = run(layer, x)
    torch.testing.assert_close(stepped, output, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state.hx, h_n, rtol=1e-9, atol=1e-9)
    assert state.t == T


def test_gradients_are_those_of_the_sequence():
    torch.manual_seed(0)
    layer = ERNN(4, 6, num_layers=2, timesteps=T).double()
    x = torch.randn(T, B, 4, dtype=torch.float64, requires_grad=True)
    whole = torch.autograd.grad(layer(x)[0].square().sum(), [x, *layer.parameters()])
    steps = torch.autograd.grad(run(layer, x)[0].square().sum(), [x, *layer.parameters()])
    for given, expected in zip(steps, whole, strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-9, atol=1e-12)


def test_a_nan_spoils_its_own_sample_from_there_on():
    torch.manual_seed(0)
    layer, x = FastGRNN(4, 6), torch.randn(T, B, 4)
    x[3, 1, 2] = torch.nan
    torch.testing.assert_close(run(layer, x)[0], layer(x)[0], equal_nan=True)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("grad", [True, False])
def test_a_step_of_a_sample_that_is_not_finite(make, grad, value):
    layer = make()
    for place in ("x", "h"):
        x, h = (torch.randn(*s, dtype=torch.float64) for s in ((T, B, 4), (1, B, 6)))
        (x if place == "x" else h)[0, 1, 2] = value
        with torch.set_grad_enabled(grad):
            whole, _ = layer(x, StreamState(h, 0))
            first, state = layer.step(x[0], StreamState(h, 0))
            second, _ = layer.step(x[1], state)
        found = torch.stack([first, second])
        torch.testing.assert_close(found, whole[:2], rtol=1e-9, atol=1e-9, equal_nan=True)
        assert found[:, 1].isnan().all()


@pytest.mark.filterwarnings("ignore::fixpoint.ConvergenceWarning")  # its tolerance is of float64
@pytest.mark.parametrize("grad", [True, False])
def test_a_step_under_autocast_keeps_the_dtypes_of_the_sequence(make, grad):
    layer, x = make().float(), torch.randn(T, B, 4)
    with torch.set_grad_enabled(grad):
        expected = run(layer, x)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            whole, (stepped, state) = layer(x)[0], run(layer, x)
            lower = layer.step(x[0].bfloat16())[0]
        after = run(layer, x)[0]
    assert (whole.dtype, stepped.dtype, state.hx.dtype) == (torch.float32,) * 3
    assert lower.dtype == torch.bfloat16
    torch.testing.assert_close(stepped, whole, rtol=0.02, atol=0.02)
    torch.testing.assert_close(after, expected)


def test_batch_first_has_no_part_in_a_step():
    torch.manual_seed(0)
    layer, x = FastRNN(4, 6, batch_first=True), torch.randn(B, T, 4)
    torch.testing.assert_close(run(layer, x.transpose(0, 1))[0].transpose(0, 1), layer(x)[0])


def test_a_step_after_the_last_one_is_refused():
    layer, x = ERNN(4, 6, timesteps=T), torch.randn(T + 1, B, 4)
    with pytest.raises(ValueError, match=rf"eta has {T} rows .* but t={T} was asked for"):
        run(layer, x)


def test_both_directions_are_refused():
    with pytest.raises(ValueError, match="build it with bidirectional=False to step"):
        FastRNN(4, 6, bidirectional=True).step(torch.randn(B, 4))


def test_a_sequence_is_refused():
    with pytest.raises(ValueError, match=r"x must be \(B, 4\) or \(4,\), the input of one step"):
        FastRNN(4, 6).step(torch.randn(T, B, 4))


def test_a_state_of_another_kind_is_refused(make):
    layer, h = make(), torch.zeros(1, B, 6).double()
    x = torch.zeros(T, B, 4).double()
    with pytest.raises(TypeError, match="state must be a StreamState; got torch.DoubleTensor: giv"):
        layer.step(x[0], h)
    for run_from in (lambda state: layer.step(x[0], state), lambda state: layer(x, state)):
        with pytest.raises(ValueError, match="t of a StreamState must be at least 0; got -1"):
            run_from(StreamState(h, -1))
