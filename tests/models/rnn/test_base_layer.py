"""Every recurrent layer has the contract of torch.nn.RNN."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from fixpoint import Anderson, Implicit, InexactNewton, Unrolled
from fixpoint.models import (
    ERNN,
    EURNN,
    UGRNN,
    ERNNCell,
    EURNNCell,
    FastGRNN,
    FastGRNNCell,
    FastRNN,
    FastRNNCell,
    JordanMap,
    LastStateClassifier,
    SpectralRNN,
    SpectralRNNCell,
    StreamState,
    UGRNNCell,
    model_size_kb,
    parameter_count,
)
from fixpoint.models.ops.common.dispatch import has_numba

LAYERS = {
    "ernn": ERNN,
    "self-feedback": lambda *a, **k: ERNN(*a, map="self-feedback", **k),
    "fastrnn": FastRNN,
    "fastrnn low rank": lambda *a, **k: FastRNN(*a, rank=2, **k),
    "fastgrnn": FastGRNN,
    "fastgrnn low rank": lambda *a, **k: FastGRNN(*a, rank=2, **k),
    "ugrnn": UGRNN,
    "spectral": SpectralRNN,
    "eurnn": EURNN,
    "eurnn fft": lambda *a, **k: EURNN(*a, style="fft", **k),
}
FUSED = [name for name in LAYERS if "eurnn" not in name]
CELLS = (ERNNCell, FastRNNCell, FastGRNNCell, UGRNNCell, SpectralRNNCell, EURNNCell)


def sample(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=LAYERS)
def make(request):
    """A maker of layers with 3 features and 4 units in float64 and weights of size 1."""

    def build(*args, **options):
        torch.manual_seed(0)
        layer = LAYERS[request.param](3, 4, *args, **options).double()
        for name, p in layer.named_parameters():
            if not name.endswith(("alpha", "beta", "zeta", "nu", "p")):
                nn.init.normal_(p, std=0.5)
        return layer

    build.name = request.param
    return build


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("shape", [(5, 2), (1, 2), (5, 1), (1, 1), (5,), (1,), (5, 0)])
@pytest.mark.parametrize(("num_layers", "bidirectional"), [(1, False), (2, True)])
def test_shapes_are_those_of_torch(make, num_layers, bidirectional, batch_first, shape):
    """(T, B) or (T,) is the shape."""
    assert_shapes_of_torch(make, num_layers, bidirectional, batch_first, shape)


@pytest.mark.parametrize(("num_layers", "bidirectional"), [(2, False), (1, True)])
def test_shapes_of_layers_or_directions(make, num_layers, bidirectional):
    assert_shapes_of_torch(make, num_layers, bidirectional, True, (5, 2))


def assert_shapes_of_torch(make, num_layers, bidirectional, batch_first, shape):
    options = {"batch_first": batch_first, "bidirectional": bidirectional}
    ours = make(num_layers, **options)
    theirs = nn.RNN(3, 4, num_layers, **options).double()
    if len(shape) == 2 and batch_first:
        shape = shape[::-1]
    x = sample(*shape, 3)
    if x.numel() == 0:
        output, h_n = ours(x)
        directions = 1 + bidirectional
        assert output.shape == (*shape, 4 * directions)
        assert h_n.shape == (num_layers * directions, 0, 4)
        return
    for given, expected in zip(ours(x), theirs(x), strict=True):
        assert given.shape == expected.shape
        assert given.dtype == expected.dtype
        assert given.isfinite().all()


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_layers_and_directions_equal_torchs_rnn(nonlinearity, bias, batch_first, packed):
    """RNN is the recurrence with a = 0, b = 1: values and gradients, h_0 given."""
    torch.manual_seed(0)
    arguments = (3, 5, 2, nonlinearity, bias, batch_first, 0.0, True)
    rnn = nn.RNN(*arguments).double()
    ours = ERNN(*arguments, solver=InexactNewton(eta=1.0, learn=False)).double()
    with torch.no_grad():
        for name, cell in ours.named_children():
            cell.map.U.zero_()
            cell.map.V.copy_(getattr(rnn, f"weight_hh_{name}"))
            cell.map.W.copy_(getattr(rnn, f"weight_ih_{name}"))
            if bias:
                biases = (getattr(rnn, f"bias_{part}_{name}") for part in ("ih", "hh"))
                cell.map.b.copy_(sum(biases))
    results = []
    for module in (rnn, ours):
        x, hx = sample(6, 4, 3).requires_grad_(), sample(4, 6 if batch_first else 4, 5, seed=2)
        if packed:
            hx = hx[:, :3].contiguous()
        hx.requires_grad_()
        given = pack_sequence([x[:, 0], x[:3, 1], x[:5, 2]], enforce_sorted=False) if packed else x
        output, h_n = module(given, hx)
        if packed:
            assert torch.equal(output.batch_sizes, given.batch_sizes)
            output, lengths = pad_packed_sequence(output)
            assert lengths.tolist() == [6, 3, 5]
        (output.square().sum() + h_n.sin().sum()).backward()
        results.append((output, h_n, x.grad, hx.grad))
    for given, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-12, atol=1e-12)
    for name, cell in ours.named_children():
        expected = getattr(rnn, f"weight_hh_{name}").grad
        torch.testing.assert_close(cell.map.V.grad, expected, rtol=1e-12, atol=1e-12)


def test_a_packed_sequence_is_each_sequence_alone(make):
    layer = make(2, bidirectional=True)
    parts = [sample(T, 3, seed=T) for T in (2, 5, 3)]
    hx = sample(4, 3, 4)
    output, h_n = layer(pack_sequence(parts, enforce_sorted=False), hx)
    padded, lengths = pad_packed_sequence(output)
    assert lengths.tolist() == [2, 5, 3]
    for i, part in enumerate(parts):
        alone, last = layer(part, hx[:, i])
        torch.testing.assert_close(padded[: len(part), i], alone, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(h_n[:, i], last, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_the_last_output_alone(make, bidirectional, batch_first):
    layer = make(2, batch_first=batch_first, bidirectional=bidirectional)
    x, hx = sample(5, 5, 3), sample(4 if bidirectional else 2, 5, 4, seed=2)
    output = layer(x, hx)[0]
    expected = output[:, -1] if batch_first else output[-1]
    torch.testing.assert_close(layer.last_output(x, hx), expected, rtol=1e-13, atol=1e-13)
    alone = layer.last_output(x[:, 0], hx[:, 0])
    torch.testing.assert_close(alone, layer(x[:, 0], hx[:, 0])[0][-1], rtol=1e-13, atol=1e-13)


def test_gradients(make):
    """By finite differences, with respect to the input, h_0 and every parameter."""
    layer = make(2)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    x, hx = sample(3, 2, 3).requires_grad_(), sample(2, 2, 4, seed=2).requires_grad_()

    def run(x, hx, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x, hx))

    torch.autograd.gradcheck(run, (x, hx, *parameters), fast_mode=True)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("last_only", [False, True])
def test_the_fused_path_equals_the_reference(name, last_only):
    results = []
    for implementation in ("fused", "reference"):
        torch.manual_seed(0)
        layer = LAYERS[name](3, 7, 2, bidirectional=True, implementation=implementation).double()
        x, hx = sample(5, 3, 3).requires_grad_(), sample(4, 3, 7).requires_grad_()
        output = layer.last_output(x, hx) if last_only else layer(x, hx)[0]
        output.square().sum().backward()
        results.append([output, x.grad, hx.grad, *(p.grad for p in layer.parameters())])
    for given, expected in zip(*results, strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("cell", ["jordan", "self-feedback", "identity-feedback", "linear"])
@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("timesteps", [None, 8])
def test_which_ernns_are_fused(cell, K, timesteps):
    """All cells for any number of steps, those that depend on h_{t-1} with numba alone."""
    torch.manual_seed(0)
    layer = ERNN(3, 5, map=cell, max_iter=K, timesteps=timesteps).double()
    with torch.no_grad():
        layer.fixed_point.solver.eta.uniform_(0.1, 0.9)
    fused = K == 1 or cell == "jordan" or has_numba()
    assert (layer.l0.no_fused_path() is None) == fused
    layer.l0.implementation = "fused"
    x, start = sample(6, 4, 3), StreamState(sample(1, 4, 5), 0)
    if not fused:
        with pytest.raises(ValueError, match=r"does not apply: .* for max_iter=3; .*use \"auto\""):
            layer(x, start)
        return
    output, state = layer(x, start)
    layer.l0.implementation = "reference"
    expected = layer.trajectory(x, start)  # the loop over solves
    for found, wanted in zip((output, state.hx), expected[:2], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


class Shifted(JordanMap):
    def input_projection(self, x):
        return super().input_projection(x) + 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"map": "self-feedback", "solver": Anderson()}, "a fixed number of InexactNewton steps"),
        ({"map": "self-feedback", "backward": Unrolled(last=1), "max_iter": 2}, "through all"),
        (
            {
                "map": "self-feedback",
                "solver": InexactNewton(2, learn=False),
                "backward": Implicit(),
            },
            "through all steps, not Implicit",
        ),
        ({"max_iter": 0}, "max_iter is 0"),
        ({"map": Shifted(3, 5)}, "Shifted is not known to be"),
    ],
)
def test_what_is_not_fused_says_why(options, reason):
    assert "not fused: it" in repr(ERNN(3, 5, **options)) or "Shifted" in reason
    with pytest.raises(ValueError, match=rf'"fused" does not apply: .*{reason}.*"reference"'):
        ERNN(3, 5, **options, implementation="fused")
    assert ERNN(3, 5, **options)(torch.zeros(2, 1, 3))[0].shape == (2, 1, 5)


def test_a_fused_layer_may_be_differentiated_twice(make):
    layer = make()
    x = sample(3, 2, 3).requires_grad_()
    torch.autograd.gradgradcheck(lambda x: layer(x)[0], (x,), fast_mode=True)


@pytest.mark.parametrize("name", FUSED)
def test_a_gradient_of_a_gradient_reaches_every_parameter(name):
    """A penalty on the gradient to the input, by the fused path and by the reference."""
    results = []
    for implementation in ("fused", "reference"):
        torch.manual_seed(0)
        layer = LAYERS[name](3, 4, nonlinearity="tanh", implementation=implementation).double()
        x = sample(5, 3, 3).requires_grad_()
        (slope,) = torch.autograd.grad(layer(x)[1].square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        results.append([p.grad for p in layer.parameters()])
    for given, expected in zip(*results, strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-10, atol=1e-12)


# What is trained, saved and seen.


def test_every_parameter_changes_after_one_optimizer_step(make):
    model = LastStateClassifier(make(batch_first=True), 4, 3).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss = nn.functional.cross_entropy(model(sample(8, 6, 3)), torch.arange(8) % 3)
    loss.backward()
    optimizer.step()
    for name, p in model.named_parameters():
        assert (p.detach() != before[name]).any(), name


def test_calling_twice_gives_equal_results_and_leaves_the_start_alone(make):
    layer, x, hx = make(2), sample(5, 2, 3), sample(2, 2, 4).requires_grad_()
    before, version = hx.detach().clone(), hx._version
    first = layer(x, hx)
    first[0].sum().backward()
    for given, expected in zip(layer(x, hx), first, strict=True):
        assert torch.equal(given, expected)
    assert torch.equal(hx.detach(), before)
    assert hx._version == version
    assert hx.grad.abs().sum() > 0


def test_copies_and_saved_weights_give_the_same(make, tmp_path):
    layer, x = make(2, bidirectional=True), sample(5, 2, 3)
    expected = layer(x)[0]
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x)[0], expected)
    state = layer.state_dict()
    assert len({v.data_ptr() for v in state.values() if v.numel()}) == len(state)
    other = LAYERS[make.name](3, 4, 2, bidirectional=True).double()
    assert not torch.equal(other(x)[0], expected)
    torch.save(state, tmp_path / "weights.pt")
    other.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert torch.equal(other(x)[0], expected)


def test_a_nan_spoils_neither_its_batch_nor_any_gradient(make):
    layer = make(2)
    x, hx = sample(5, 4, 3), sample(2, 4, 4, seed=2)
    alone = x.clone()
    x[2, 1, 0], x[0, 3, 1] = torch.nan, torch.inf
    results = []
    for given, rows in ((x, [0, 2]), (alone, [0, 2])):
        layer.zero_grad()
        output, h_n = layer(given, hx)
        output[:, rows].square().sum().backward()
        results.append([output[:, rows], h_n[:, rows], *(p.grad for p in layer.parameters())])
    for given, expected in zip(*results, strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-12, atol=1e-12)
    output = layer(x, hx)[0]
    assert output[:2, 1].isfinite().all()
    assert output[2:, 1].isnan().all()
    assert output[:, 3].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(make, dtype):
    """The states keep the dtype of the input and are those of float32 to bfloat16's rounding."""
    layer = make().float()
    if "eurnn" in make.name:
        nn.init.zeros_(layer.l0.b)  # else the slope of modReLU at 0 is 100 b
    x = sample(5, 3, 3, dtype=torch.float32)
    expected = layer(x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, h_n = layer(x.to(dtype))
        output.float().sum().backward()
    assert output.dtype == h_n.dtype == dtype
    # A relative rounding of 2^-9 in each of 5 steps, and as much in x.
    torch.testing.assert_close(output.float(), expected, rtol=0.1, atol=0.1)
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


def test_one_step_of_the_cell_is_the_layer_on_one_step(make):
    layer, x, hx = make(), sample(6, 3), sample(6, 4)
    step = layer.l0(x, hx)
    torch.testing.assert_close(step, layer(x.unsqueeze(0), hx.unsqueeze(0))[1][0])
    torch.testing.assert_close(layer.l0(x[2], hx[2]), step[2], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.l0(x), layer(x.unsqueeze(0))[1][0], rtol=1e-12, atol=1e-12)


def test_steps_of_a_cell_with_an_eta_for_each_say_their_time():
    cell = ERNNCell(3, 4, timesteps=2, nonlinearity="tanh")
    with torch.no_grad():
        cell.fixed_point.solver.eta.copy_(torch.tensor([[0.2], [0.9]]))
    x, h = sample(5, 3, dtype=torch.float32), sample(5, 4, dtype=torch.float32)
    assert not torch.allclose(cell(x, h, t=0), cell(x, h, t=1))
    with pytest.raises(ValueError, match="so the solve needs its time index: pass t"):
        cell(x, h)
    with pytest.raises(ValueError, match="t=2 was asked for"):
        cell(x, h, t=2)


@pytest.mark.parametrize("cell", CELLS)
def test_cells_build_from_two_sizes_and_refuse_wrong_shapes(cell):
    step = cell(3, 4)
    assert step(torch.zeros(2, 3)).shape == (2, 4)
    with pytest.raises(ValueError, match=r"x must be \(B, 3\) or \(3,\).*got \(2, 4\)"):
        step(torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"whole sequences use the layer"):
        step(torch.zeros(5, 2, 3))
    with pytest.raises(ValueError, match=r"hx must be \(2, 4\) for x of \(2, 3\); got \(1, 4\)"):
        step(torch.zeros(2, 3), torch.zeros(1, 4))


def test_dropout_acts_between_layers_in_training(make):
    layer, x = make(2, dropout=0.5), sample(5, 2, 3)
    torch.manual_seed(0)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])
    with pytest.warns(UserWarning, match="has no effect with num_layers=1"):
        make(dropout=0.5)


def test_what_is_refused(make):
    with pytest.raises(ValueError, match=r"hx must be \(4, 2, 4\); got \(2, 2, 4\)"):
        make(2, bidirectional=True)(sample(5, 2, 3), sample(2, 2, 4))
    with pytest.raises(ValueError, match=r"input_size=3 features last; got \(3, 2, 5\)"):
        make()(sample(3, 2, 5))
    with pytest.raises(TypeError, match="torch.float64; got torch.float32: convert x"):
        make()(sample(5, 2, 3).float())
    packed = pack_sequence([sample(5, 2), sample(3, 2)])
    with pytest.raises(ValueError, match="input_size=3"):
        make(batch_first=True)(packed)
    with pytest.raises(TypeError, match=r"unknown \w+ option 'rang': .*num_layers"):
        make(rang=2)
    with pytest.raises(ValueError, match="num_layers must be at least 1; got 0"):
        make(0)
    with pytest.raises(ValueError, match="dropout must be a fraction between 0 and 1; got 2"):
        make(2, dropout=2)


@pytest.mark.parametrize("name", FUSED)
def test_unknown_names_list_the_known(name):
    with pytest.raises(ValueError, match="unknown implementation 'fuse'.*mean 'fused'"):
        LAYERS[name](3, 4, implementation="fuse")
    with pytest.raises(ValueError, match="unknown nonlinearity 'rely'.*mean 'relu'"):
        LAYERS[name](3, 4, nonlinearity="rely")


def test_repr_says_what_a_layer_is():
    shown = repr(FastRNN(3, 4, 2, batch_first=True, bidirectional=True, implementation="fused"))
    assert shown.startswith("FastRNN(\n  3, 4, num_layers=2, batch_first=True, bidirectional=True")
    assert "(l1_reverse): FastRNNCell(\n    8, 4, implementation='fused'" in shown


def test_recompute_gives_the_same_gradients():
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        layer = ERNN(3, 5, max_iter=2, recompute=recompute).double()
        layer(sample(7, 4, 3))[0].square().sum().backward()
        results.append([p.grad for p in layer.parameters()])
    for given, expected in zip(*results, strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-12, atol=1e-14)
    with pytest.raises(ValueError, match="recompute=True belongs to the fused path"):
        FastRNN(3, 5, recompute=True, implementation="reference")


# The equations.


def sigmoid(v):
    return 1 / (1 + np.exp(-v))


def weights(cell):
    return {name: p.detach().double().numpy() for name, p in cell.named_parameters()}


def fastgrnn(w, x, h):
    s = w["W.full"] @ x + w["V.full"] @ h
    z, c = sigmoid(s + w["b_z"]), np.tanh(s + w["b_h"])
    return z * h + (sigmoid(w["zeta"]) * (1 - z) + sigmoid(w["nu"])) * c


def ugrnn(w, x, h):
    s = w["W"] @ x + w["V"] @ h + w["b"]
    z, c = sigmoid(s[:4]), np.tanh(s[4:])
    return z * h + (1 - z) * c


def fastrnn(w, x, h):
    c = np.tanh(w["W.full"] @ x + w["V.full"] @ h + w["b"])
    return sigmoid(w["beta"]) * h + sigmoid(w["alpha"]) * c


def spectral(w, x, h):
    def product(vectors):
        """H_1 H_2 ... of Householder reflections, entry i of the i-th vector being 1."""
        M = np.eye(4)
        for i, v in enumerate(vectors.T):
            v = np.concatenate([np.zeros(i), [1.0], v[i + 1 :]])
            M = M @ (np.eye(4) - 2 * np.outer(v, v) / (v @ v))
        return M

    s = 1 + 2 * 0.01 * (sigmoid(w["p"]) - 0.5)
    M = product(w["P"]) @ np.diag(s) @ product(w["Q"]).T
    return np.tanh(w["W"] @ x + M @ h + w["b"])


def eurnn(w, x, h):
    def rotation(pairs, angles):
        F = np.eye(4)
        for (i, j), angle in zip(pairs, angles, strict=True):
            F[i, i] = F[j, j] = np.cos(angle)
            F[i, j], F[j, i] = -np.sin(angle), np.sin(angle)
        return F

    F = rotation([(0, 1), (2, 3)], w["angles.0"]) @ rotation([(1, 2)], w["angles.1"])
    z = w["W"] @ x + F @ h
    return np.maximum(np.abs(z) + w["b"], 0) * z / (np.abs(z) + 0.01)


@pytest.mark.parametrize(
    ("cell", "step"),
    [
        (FastRNNCell, fastrnn),
        (FastGRNNCell, fastgrnn),
        (UGRNNCell, ugrnn),
        (SpectralRNNCell, spectral),
        (EURNNCell, eurnn),
    ],
)
def test_steps_equal_a_numpy_step(cell, step):
    torch.manual_seed(0)
    layer = cell(3, 4).double()
    for p in layer.parameters():
        nn.init.normal_(p, std=0.7)
    x, h = sample(3), sample(4, seed=2)
    expected = step(weights(layer), x.numpy(), h.numpy())
    np.testing.assert_allclose(layer(x, h).detach().numpy(), expected, rtol=1e-12, atol=1e-13)


def test_fastrnn_is_ernn_without_feedback_where_beta_is_one_minus_alpha():
    torch.manual_seed(0)
    fast, ernn = FastRNN(3, 4).double(), ERNN(3, 4, nonlinearity="tanh").double()
    with torch.no_grad():
        fast.l0.beta.copy_(-fast.l0.alpha)  # sigmoid(-a) = 1 - sigmoid(a)
        ernn.map.U.zero_()
        ernn.map.V.copy_(fast.l0.V.full)
        ernn.map.W.copy_(fast.l0.W.full)
        ernn.fixed_point.solver.eta.copy_(fast.l0.alpha.sigmoid())
        x = sample(7, 2, 3)
        torch.testing.assert_close(fast(x)[0], ernn(x)[0], rtol=1e-13, atol=1e-14)
        fast.l0.beta.fill_(1.0)
        assert (fast(x)[0] - ernn(x)[0]).abs().max() > 1e-3


def trained(layer, steps=10):
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        layer(torch.randn(5, 8, 3))[0].square().sum().backward()
        optimizer.step()
    return layer


@pytest.mark.parametrize("radius", [0.01, 0.3])
def test_singular_values_of_the_spectral_rnn_remain_near_one(radius):
    torch.manual_seed(0)
    cell = trained(SpectralRNN(3, 8, radius=radius)).l0
    values = torch.linalg.svdvals(cell.transition().double())
    assert values.min() >= 1 - radius - 1e-6
    assert values.max() <= 1 + radius + 1e-6
    assert values.max() - values.min() > 0.05 * radius
    assert torch.allclose(SpectralRNNCell(3, 8).double().p, torch.zeros(8).double())


@pytest.mark.parametrize("style", ["tunable", "fft"])
def test_the_transition_of_eurnn_remains_orthogonal(style):
    torch.manual_seed(0)
    cell = EURNN(3, 8, style=style, capacity=4).l0
    before = cell.transition().detach()
    trained_cell = trained(EURNN(3, 8, style=style, capacity=4)).l0
    F = trained_cell.transition().detach()
    torch.testing.assert_close(F @ F.T, torch.eye(8), rtol=0, atol=1e-6)
    assert (F - before).abs().max() > 0.1
    if style == "fft":
        assert (F.abs() > 1e-4).float().mean() > 0.9  # every unit reaches every other


@pytest.mark.parametrize("layer", [FastRNN, FastGRNN])
def test_the_adding_problem_over_500_steps_remains_finite(layer):
    torch.manual_seed(0)
    layer = layer(2, 32, batch_first=True)
    marks = torch.zeros(16, 500).scatter_(1, torch.tensor([[20, 400]]).expand(16, 2), 1.0)
    x = torch.stack([torch.rand(16, 500), marks], 2)
    head = nn.Linear(32, 1)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=1e-2)
    names = ("alpha", "beta") if isinstance(layer, FastRNN) else ("zeta", "nu")
    before = [getattr(layer.l0, name).item() for name in names]
    for _ in range(3):
        optimizer.zero_grad()
        loss = (head(layer.last_output(x)).squeeze(1) - (x[..., 0] * marks).sum(1)).square().mean()
        loss.backward()
        assert loss.isfinite()
        optimizer.step()
    for name, value in zip(names, before, strict=True):
        assert getattr(layer.l0, name).item() != value
        assert 0 < getattr(layer.l0, name).sigmoid().item() < 1


# Sizes.

COUNTS = {
    "fastrnn": lambda n, d: n * n + n * d + n + 2,
    "fastgrnn": lambda n, d: n * n + n * d + 2 * n + 2,
    "ugrnn": lambda n, d: 2 * (n * n + n * d + n),
    "spectral": lambda n, d: 2 * n * (n // 4) + n + n * d + n,
    "eurnn": lambda n, d: n // 2 + (n // 2 - 1) + n * d + n,
}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(("n", "d"), [(4, 3), (80, 9)])
def test_parameter_counts(name, n, d):
    assert parameter_count(LAYERS[name](d, n)) == COUNTS[name](n, d)


SIZES = [
    # layer, features, units, classes, options, KB as printed in the paper's tables
    (ERNN, 9, 80, 2, {"rank": 8, "timesteps": 128}, 34.3),
    (ERNN, 9, 80, 2, {"rank": 8, "timesteps": 128, "max_iter": 2}, 34.8),
    # These three fit with one eta for all time steps; with one for each they are 0.5 KB, 0.4 KB
    # and 1.2 KB larger.
    (ERNN, 45, 64, 19, {"rank": 8}, 36.3),
    (ERNN, 32, 100, 30, {"rank": 8}, 70.0),
    (ERNN, 256, 256, 0, {"rank": 8}, 529.0),
    (FastRNN, 9, 80, 2, {}, 29),
    (FastGRNN, 9, 80, 2, {}, 29),
    (UGRNN, 9, 64, 2, {}, 37),
    (FastRNN, 45, 128, 19, {}, 97),
    (FastGRNN, 45, 200, 19, {}, 208),
    (UGRNN, 45, 200, 19, {}, 399),
    (FastRNN, 32, 128, 30, {}, 96),
    (FastGRNN, 1, 128, 10, {}, 71),
]


@pytest.mark.parametrize(("layer", "d", "n", "classes", "options", "size"), SIZES)
def test_model_sizes_are_the_printed_ones(layer, d, n, classes, options, size):
    model = layer(d, n, **options)
    model = LastStateClassifier(model, n, classes) if classes else model
    given = model_size_kb(model)
    print(f"{layer.__name__} d={d} n={n} {options}: {given:.1f} KB, printed {size}")
    assert abs(given - size) <= (0.05 if isinstance(size, float) else 1.0)


@pytest.mark.parametrize("kind", [ERNN, FastRNN, SpectralRNN, FastGRNN, UGRNN, EURNN])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_of_16_bits_is_that_of_float32_to_its_rounding(kind, dtype):
    torch.manual_seed(0)
    layer = kind(3, 6).to(dtype)
    x = torch.randn(5, 2, 3, dtype=dtype)
    states, _ = layer(x)
    states.float().sum().backward()
    assert states.dtype == dtype
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)
    exact, _ = copy.deepcopy(layer).float()(x.float())
    # a few roundings a time step, of states of order one
    assert (states - exact).abs().max() < 5 * 4 * torch.finfo(dtype).eps
