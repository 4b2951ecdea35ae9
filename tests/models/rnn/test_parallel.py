"""time="parallel" against time="sequential": states and gradients of every kind of cell."""

import copy
import warnings

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.utils.rnn import pack_sequence

from fixpoint import Anderson, ConvergenceWarning, Implicit, InexactNewton, Result
from fixpoint.models import (
    ERNN,
    EURNN,
    UGRNN,
    FastGRNN,
    FastRNN,
    RecurrentCell,
    SpectralRNN,
)
from fixpoint.models.rnn.base_layer import Recurrent, StreamState

T, B, d, n = 40, 3, 4, 6

pytestmark = pytest.mark.filterwarnings("ignore:ERNN has steps of their own")


class OwnCell(RecurrentCell):
    """A user's cell: a residual step of three small operations, without a fused path."""

    def __init__(self, input_size, hidden_size, *, bias=True, time="sequential"):
        super().__init__(input_size, hidden_size, time=time)
        self.inner = torch.nn.Linear(input_size + hidden_size, hidden_size, bias=bias)
        self.norm = torch.nn.LayerNorm(hidden_size)

    def states(self, x, h0, *, last_only):
        h, states = h0, []
        for x_t in x.unbind(0):
            h = 0.9 * h + 0.1 * torch.tanh(self.norm(self.inner(torch.cat([x_t, h], 1))))
            states.append(h)
        return h if last_only else torch.stack(states)


class OwnRNN(Recurrent):
    cell_class = OwnCell


LAYERS = {
    "ERNN": lambda **o: ERNN(d, n, **o),
    "ERNN, eta of each step": lambda **o: ERNN(d, n, timesteps=T, **o),
    "ERNN, K = 3, low rank": lambda **o: ERNN(d, n, max_iter=3, timesteps=T, rank=2, **o),
    "ERNN, self-feedback, K = 2": lambda **o: ERNN(d, n, map="self-feedback", max_iter=2, **o),
    "ERNN, equilibrium": lambda **o: ERNN(
        d,
        n,
        map="self-feedback",
        solver=Anderson(rtol=1e-12, atol=1e-13),
        backward=Implicit(),
        **o,
    ),
    "FastRNN": lambda **o: FastRNN(d, n, **o),
    "FastGRNN": lambda **o: FastGRNN(d, n, **o),
    "UGRNN": lambda **o: UGRNN(d, n, **o),
    "SpectralRNN": lambda **o: SpectralRNN(d, n, **o),
    "EURNN": lambda **o: EURNN(d, n, **o),
    "a user's": lambda **o: OwnRNN(d, n, **o),
}


def pair(name, dtype=torch.float64, **options):
    """The same layer with the sequential and the parallel path."""
    torch.manual_seed(0)
    sequential = LAYERS[name](**options).to(dtype)
    for parameter in sequential.parameters():  # away from eta = 0.01 and from zero biases
        parameter.data += 0.1 * torch.randn_like(parameter)
    parallel = copy.deepcopy(sequential)
    for module in parallel.modules():
        if isinstance(module, RecurrentCell):
            module.time = "parallel"
    return sequential, parallel


def run(layer, x, hx):
    x, hx = x.clone().requires_grad_(), hx.clone().requires_grad_()
    output, h_n = layer(x, hx)
    ((output * output).sum() + h_n.sum()).backward()
    return output, h_n, x.grad, hx.grad, *(p.grad for p in layer.parameters())


def inputs(dtype=torch.float64, layers=1):
    torch.manual_seed(1)
    return torch.randn(T, B, d, dtype=dtype), 0.5 * torch.randn(layers, B, n, dtype=dtype)


@pytest.fixture(autouse=True)
def quiet():
    """Unitary recurrences do not contract, and say so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


@pytest.mark.parametrize("name", LAYERS)
def test_forward_mode_and_transforms_take_the_steps_one_after_the_other(name):
    x, hx = inputs()
    tangent, values = torch.randn_like(x), []
    for layer in pair(name):
        layer.requires_grad_(False)
        values.append(torch.func.jvp(lambda x, layer=layer: layer(x, hx)[0], (x,), (tangent,)))
        with forward_ad.dual_level():
            dual = layer(forward_ad.make_dual(x, tangent), hx)[0]
            values[-1] += (forward_ad.unpack_dual(dual).tangent,)
    for sequential, parallel in zip(*values, strict=True):
        torch.testing.assert_close(parallel, sequential, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(values[1][2], values[1][1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LAYERS)
def test_training_under_autocast_keeps_the_dtype_of_the_parameters(name):
    _, parallel = pair(name, torch.float32)
    x, hx = inputs(torch.float32)
    exact = run(copy.deepcopy(parallel), x, hx)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, h_n = parallel(x, hx)
    ((output * output).sum() + h_n.sum()).backward()
    torch.testing.assert_close(output, exact[0])
    for parameter, gradient in zip(parallel.parameters(), exact[4:], strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_export_takes_the_steps_one_after_the_other():
    sequential, parallel = pair("FastRNN")
    x, _ = inputs()
    exported = torch.export.export(parallel, (x,)).module()
    torch.testing.assert_close(exported(x)[0], sequential(x)[0])


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("name", LAYERS)
def test_parallel_equals_sequential(name, dtype, limit):
    if name == "ERNN, equilibrium" and dtype == torch.float32:
        pytest.skip("the sequential solve is no more exact than its tolerance")
    sequential, parallel = pair(name, dtype)
    x, hx = inputs(dtype)
    exact = run(copy.deepcopy(sequential).double(), x.double(), hx.double())
    found = run(parallel, x, hx), run(sequential, x, hx)
    for ours, theirs, true in zip(*found, exact, strict=True):
        # Sums that cancel, as that of a shared eta, are no more exact in the sequential path.
        rounding = (theirs - true).norm()
        assert (ours - theirs).norm() <= limit * theirs.norm() + 4 * rounding
    solution = parallel.l0.time_solution
    assert solution.z is None
    assert ((solution.result == Result.CONVERGED) | (solution.result == Result.FALLBACK)).all()
    if name not in ("SpectralRNN", "EURNN"):
        assert solution.converged.all()


def test_layers_and_directions():
    sequential, parallel = pair("FastRNN", num_layers=2, bidirectional=True)
    x, hx = inputs(layers=4)
    for ours, theirs in zip(run(parallel, x, hx), run(sequential, x, hx), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_packed_sequences():
    sequential, parallel = pair("ERNN")
    packed = pack_sequence(
        [torch.randn(length, d, dtype=torch.float64) for length in (5, 40, 17)],
        enforce_sorted=False,
    )
    ours, theirs = parallel(packed), sequential(packed)
    torch.testing.assert_close(ours[0].data, theirs[0].data, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-10, atol=1e-12)


def test_samples_that_are_not_finite():
    sequential, parallel = pair("FastGRNN")
    x, hx = inputs()
    x[20, 1, 0] = torch.nan
    hx[0, 2, 1] = torch.inf
    ours, theirs = parallel(x, hx)[0], sequential(x, hx)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, equal_nan=True)
    assert ours[20:, 1].isnan().all()
    assert ours[:20, 1].isfinite().all()
    ours[:, 0].sum().backward()
    assert all(p.grad.isfinite().all() for p in parallel.parameters())


def test_a_recurrence_that_does_not_contract_warns_once():
    layer = OwnRNN(d, n, time="parallel")
    with torch.no_grad():
        layer.l0.norm.weight.mul_(300)
    x = torch.randn(600, B, d)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        with pytest.raises(ConvergenceWarning, match="fell back"):
            layer(x)
    sequential = copy.deepcopy(layer)
    sequential.l0.time = "sequential"
    torch.testing.assert_close(layer(x)[0], sequential(x)[0])
    assert (layer.l0.time_solution.result == Result.FALLBACK).any()


def test_auto_takes_the_fused_path_where_there_is_one():
    fused, plain = ERNN(d, n, time="auto"), ERNN(d, n, time="auto", implementation="reference")
    own = OwnRNN(d, n, time="auto")
    for layer in (fused, plain, own):
        layer(torch.randn(40, B, d))
        layer(torch.randn(1100, 60, d))
        assert layer.l0.time_solution is None
    long = torch.randn(1100, B, d)
    fused(long), plain(long), own(long)
    assert fused.l0.time_solution is None
    assert own.l0.time_solution is None  # of an unknown Jacobian
    assert plain.l0.time_solution.converged.all()


def test_the_choice_is_shown_and_checked():
    assert "time='parallel'" in repr(FastRNN(d, n, time="parallel"))
    with pytest.raises(ValueError, match="parallel"):
        FastRNN(d, n, time="both")
    with pytest.raises(ValueError, match="Implicit"):
        ERNN(d, n, map="self-feedback", solver="picard", time="parallel")
    with pytest.raises(ValueError, match="InexactNewton"):
        ERNN(d, n, solver=InexactNewton(0), time="parallel")


@pytest.mark.parametrize("name", [name for name in LAYERS if "eta" in name or "K = 3" in name])
def test_a_piece_of_a_stream_has_the_steps_of_its_time_indices(name):
    torch.manual_seed(0)
    layer = LAYERS[name](time="parallel").double()
    with torch.no_grad():
        layer.fixed_point.solver.eta.uniform_(0.1, 0.6)
    x, start = torch.randn(T, B, d, dtype=torch.float64), torch.zeros(1, B, n, dtype=torch.float64)
    first, state = layer(x[:15], StreamState(start, 0))
    second, _ = layer(x[15:], state)
    layer.l0.time = "sequential"
    torch.testing.assert_close(torch.cat([first, second]), layer(x)[0])


def test_inner_steps_of_a_piece_of_a_stream():
    torch.manual_seed(0)
    options = {"map": "self-feedback", "max_iter": 2, "timesteps": T, "time": "parallel"}
    layer = ERNN(d, n, **options).double()
    with torch.no_grad():
        layer.fixed_point.solver.eta.uniform_(0.1, 0.6)
    x, start = torch.randn(T, B, d, dtype=torch.float64), torch.zeros(1, B, n, dtype=torch.float64)
    whole = layer(x)[0]
    _, state = layer(x[:15], StreamState(start, 0))
    torch.testing.assert_close(layer(x[15:], state)[0], whole[15:])
