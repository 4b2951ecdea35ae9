"""What code written for torch.nn.RNN calls, over all layers: checkpoints, hooks, devices, streams.

Specifies: fixpoint.models._parameters, rnn.stack, rnn.torch_layers, heads.packed.
"""

import copy
import importlib.util
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import prune, skip_init
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fixpoint import Anderson, Implicit, InexactNewton
from fixpoint.models import (
    ERNN,
    EURNN,
    GRU,
    LSTM,
    RNN,
    UGRNN,
    FastGRNN,
    FastRNN,
    LanguageModel,
    LastStateClassifier,
    RecurrentDropout,
    SpectralRNN,
    StreamState,
)
from fixpoint.models.ops.common import dispatch

# Random weights at 16 bits may miss a tolerance.
pytestmark = pytest.mark.filterwarnings("ignore::fixpoint.ConvergenceWarning")


def equilibrium(*sizes, **options):
    solver = Anderson(rtol=1e-9, atol=0)
    return ERNN(*sizes, map="self-feedback", solver=solver, backward=Implicit(), **options)


LAYERS = {
    "ernn": lambda *sizes, **options: ERNN(*sizes, timesteps=6, rank=2, **options),
    "equilibrium": equilibrium,
    "fastrnn": FastRNN,
    "fastgrnn": FastGRNN,
    "ugrnn": UGRNN,
    "spectral": SpectralRNN,
    "eurnn": EURNN,
    "rnn": RNN,
    "gru": GRU,
    "lstm": LSTM,
}
OURS = [name for name in LAYERS if name not in ("rnn", "gru", "lstm")]
SINGLE = {"dtype": torch.float64}


@pytest.fixture(params=LAYERS)
def make(request):
    torch.manual_seed(0)
    return lambda *more, **options: LAYERS[request.param](3, 4, *more, **(SINGLE | options))


@pytest.fixture(params=OURS)
def make_ours(request):
    torch.manual_seed(0)
    return lambda *more, **options: LAYERS[request.param](3, 4, *more, **(SINGLE | options))


def sample(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradients(layer, run):
    """Of the input and all parameters, for a run of an input to one tensor."""
    x = sample(6, 2, 3).requires_grad_()
    layer.zero_grad()
    run(x).square().sum().backward()
    return [x.grad, *(p.grad for p in layer.parameters())]


def assert_equal(found, expected):
    for f, e in zip(found, expected, strict=True):
        assert (f is None) == (e is None)
        if f is not None:
            torch.testing.assert_close(f, e, rtol=1e-12, atol=1e-12)


def keep_products():
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    return create_selective_checkpoint_contexts(
        lambda ctx, op, *args, **options: (
            CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE
        )
    )


CHECKPOINTS = {
    "not reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {"use_reentrant": False, "context_fn": keep_products},
}


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_a_checkpoint_changes_no_gradient(make, how):
    layer = make()
    if how == "selective" and isinstance(layer, ERNN) and layer.fixed_point.solver.has_tolerance:
        pytest.skip("how many products a solve to a tolerance makes is known to itself alone")
    expected = gradients(layer, lambda x: layer(x)[0])
    found = gradients(layer, lambda x: checkpoint(lambda q: layer(q)[0], x, **CHECKPOINTS[how]))
    assert_equal(found, expected)


def test_a_checkpoint_around_a_model(make):
    model = LastStateClassifier(make(batch_first=True), 4, 2).double()
    expected = gradients(model, model)
    assert_equal(gradients(model, lambda x: checkpoint(model, x, use_reentrant=False)), expected)


def test_several_cotangents_in_one_backward_pass(make):
    layer, x = make(), torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    inputs = [x, *layer.parameters()]
    output = layer(x)[0]
    g = torch.randn(3, *output.shape, dtype=torch.float64)
    found = torch.autograd.grad(output, inputs, g, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(output, inputs, v, retain_graph=True) for v in g]
    for together, apart in zip(found, zip(*one_by_one, strict=True), strict=True):
        torch.testing.assert_close(together, torch.stack(apart))


def test_saved_tensors_may_lie_elsewhere(make):
    layer = make()
    expected = gradients(layer, lambda x: layer(x)[0])
    with torch.autograd.graph.save_on_cpu():
        assert_equal(gradients(layer, lambda x: layer(x)[0]), expected)


@pytest.mark.parametrize(
    "change", [torch.relu_, lambda y: y.add_(1), nn.Dropout(0.5, inplace=True)]
)
def test_outputs_may_be_changed_in_place(make, change):
    layer, results = make(), []
    for own in (True, False):
        torch.manual_seed(0)
        results.append(
            gradients(layer, lambda x, own=own: change(layer(x)[0] if own else layer(x)[0].clone()))
        )
    assert_equal(*results)


def test_last_states_may_be_changed_in_place(make):
    layer = make()

    def last(h_n):
        return h_n[0] if isinstance(h_n, tuple) else h_n

    expected = gradients(layer, lambda x: last(layer(x)[1]).clone().mul_(2))
    assert_equal(gradients(layer, lambda x: last(layer(x)[1]).mul_(2)), expected)


# What modules of torch have.


def test_attributes_and_methods_of_torchs_rnn(make):
    layer = make(2, bidirectional=True)
    layer.flatten_parameters()
    assert layer.bias is True
    assert len(layer.all_weights) == 4
    flat = [p for weights in layer.all_weights for p in weights]
    names = {id(p) for name, p in layer.named_parameters() if ".solver." not in name}
    assert names <= {id(p) for p in flat}


def draw_again(layer):
    """Draw all parameters, 7 before, with the seed 3."""
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(7.0)
    torch.manual_seed(3)
    layer.reset_parameters()
    assert not any((p == 7).all() for p in layer.parameters() if p.numel() > 1)


def test_parameters_drawn_again_are_those_of_a_new_layer(make):
    layer = make(2)
    draw_again(layer)
    torch.manual_seed(3)
    for (name, p), new in zip(layer.named_parameters(), make(2).parameters(), strict=True):
        assert torch.equal(p, new), name


def test_device_and_dtype(make):
    layer = make(2, dtype=torch.float32, device="cpu")
    assert {p.dtype for p in layer.parameters()} == {torch.float32}
    assert layer(torch.randn(6, 2, 3))[0].dtype == torch.float32


def test_skip_init_and_deferred_initialization(make):
    """As FSDP does it: each module with parameters of its own fills them after `to_empty`."""
    layer = make(2, device="meta")
    assert {p.device.type for p in layer.parameters()} == {"meta"}
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(torch.nan)
    for module in layer.modules():
        if list(module.parameters(recurse=False)):
            module.reset_parameters()
    assert all(p.isfinite().all() for p in layer.parameters())
    assert layer(sample(6, 2, 3))[0].isfinite().all()


def test_deferred_initialization_by_a_context(make):
    with torch.device("meta"):
        layer = make(2)
    assert {p.device.type for p in layer.parameters()} == {"meta"}
    new = make(2)
    for one in (layer.to_empty(device="cpu"), new):
        torch.manual_seed(3)
        one.reset_parameters()
    for p, other in zip(layer.parameters(), new.parameters(), strict=True):
        assert torch.equal(p, other)


@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_deferred_initialization_of_sharded_steps(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        with torch.device("meta"):
            layer = ERNN(3, 4, timesteps=6)
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        layer.to_empty(device="cpu").reset_parameters()
        assert torch.equal(layer.fixed_point.solver.eta.full_tensor(), torch.full((6, 1), 0.01))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "kind", [FastRNN, FastGRNN, UGRNN, SpectralRNN, EURNN, ERNN, RNN, GRU, LSTM]
)
def test_skip_init(kind):
    layer = skip_init(kind, 3, 4, dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("cpu", torch.float64)}


def test_tensors_without_values_have_their_shapes(make):
    layer = make(2, bidirectional=True, device="meta")
    output, _ = layer(torch.empty(6, 2, 3, dtype=torch.float64, device="meta"))
    assert output.shape == (6, 2, 8)
    assert output.is_meta
    output.sum().backward()
    mode = FakeTensorMode()
    with mode:
        fake = make(2, bidirectional=True, dtype=None)
        output = fake(torch.randn(6, 2, 3))[0]
        assert output.shape == (6, 2, 8)
        output.sum().backward()
        assert all(p.grad.shape == p.shape for p in fake.parameters() if p.grad is not None)


@pytest.mark.parametrize("device", ["meta", "fake"])
@pytest.mark.parametrize("kind", ["parallel", "manifold"])
def test_all_time_steps_at_once_without_values(kind, device):
    def run():
        where = None if device == "fake" else "meta"
        if kind == "parallel":
            layer = FastRNN(3, 4, time="parallel", device=where)
        else:
            layer = ERNN(3, 4, map="manifold", solver="anderson", backward=Implicit(), device=where)
        output = layer(torch.randn(6, 2, 3, device=where))[0]
        output.sum().backward()
        return output.shape

    with FakeTensorMode() if device == "fake" else nullcontext():
        assert run() == (6, 2, 4)


@pytest.mark.parametrize("name", ["batch_first", "bias", "bidirectional"])
def test_a_word_in_place_of_a_bool(make, name):
    with pytest.raises(TypeError, match=name):
        make(**{name: "False"})


# Hooks.


def weight_of(layer):
    """A module with a weight of its own, and its name."""
    cell = layer.l0
    for module in (getattr(cell, "map", None), cell, getattr(cell, "W", None)):
        for name in ("W", "full"):
            if isinstance(module, nn.Module) and name in module._parameters:
                return module, name
    raise AssertionError


def test_hooks_of_a_cell_run(make_ours):
    layer, calls = make_ours(), []
    layer.l0.register_forward_pre_hook(lambda module, given: calls.append("before"))
    layer.l0.register_forward_hook(lambda module, given, output: calls.append(output.shape))
    layer(sample(6, 2, 3))
    layer.last_output(sample(6, 2, 3))
    assert calls == ["before", (6, 2, 4), "before", (2, 4)]


def test_pruned_weights_are_pruned(make_ours):
    layer, x = make_ours(), sample(6, 2, 3)
    masked = copy.deepcopy(layer)
    module, name = weight_of(layer)
    prune.l1_unstructured(module, name, amount=0.5)
    other, _ = weight_of(masked)
    with torch.no_grad():
        getattr(other, name).copy_(getattr(module, name))
    torch.testing.assert_close(layer(x)[0], masked(x)[0], rtol=1e-12, atol=1e-12)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):  # each time through the mask anew
        optimizer.zero_grad()
        layer(x)[0].square().sum().backward()
        optimizer.step()
    assert (getattr(module, name) == 0).any()
    step, _ = layer.step(x[0])
    torch.testing.assert_close(step, layer(x[:1])[0][0], rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_norms_by_hooks_follow_the_weights(make_ours, norm):
    layer, x = make_ours().train(), sample(6, 2, 3)
    module, name = weight_of(layer)
    norm(module, name)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    before = layer(x)[0].detach()
    for _ in range(2):
        optimizer.zero_grad()
        layer(x)[0].square().sum().backward()
        optimizer.step()
    assert not torch.allclose(layer(x)[0], before)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
def test_normalized_weights_are_drawn_again(make_ours, norm):
    layer = make_ours()
    module, name = weight_of(layer)
    norm(module, name)
    draw_again(layer)
    x = sample(6, 2, 3)
    output = layer(x)[0]
    torch.manual_seed(3)
    torch.testing.assert_close(output, make_ours()(x)[0])


# Streams and packed sequences.


@pytest.mark.parametrize("num_layers", [1, 2])
def test_pieces_of_a_sequence_by_their_state(make_ours, num_layers):
    layer, x = make_ours(num_layers), sample(6, 2, 3)
    with torch.no_grad():
        for p in layer.parameters():
            if p.dim() == 2 and len(p) == 6:
                p.copy_(torch.rand_like(p))  # another eta at each t
    whole, h_n = layer(x)
    start = StreamState(torch.zeros(num_layers, 2, 4, dtype=x.dtype), 0)
    first, state = layer(x[:2], start)
    second, state = layer(x[2:5], state)
    last, state = layer.step(x[5], state)
    joined = torch.cat([first, second, last.unsqueeze(0)])
    torch.testing.assert_close(joined, whole, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(state.hx, h_n, rtol=1e-8, atol=1e-8)
    assert state.t == 6
    assert isinstance(layer(x[:1], StreamState(state.hx, 0))[1], StreamState)


def test_a_layer_with_steps_of_its_own_never_begins_again_silently():
    layer, x = ERNN(3, 4, timesteps=6), torch.randn(6, 2, 3)
    with pytest.warns(UserWarning, match="begins again at t = 0: to continue"):
        layer(x[:2], torch.zeros(1, 2, 4))
    with pytest.raises(ValueError, match="t=6 was asked for"):
        layer(x[:2], StreamState(torch.zeros(1, 2, 4), 5))
    packed = pack_sequence([x[:3, 0], x[:2, 1]])
    with pytest.raises(ValueError, match="of one length"):
        layer(packed, StreamState(torch.zeros(1, 2, 4), 0))
    both = FastRNN(3, 4, bidirectional=True)
    with pytest.raises(ValueError, match="bidirectional=False to step"):
        both(x, StreamState(torch.zeros(2, 2, 4), 0))


def test_a_language_model_begins_each_piece_with_its_first_steps():
    model = LanguageModel(ERNN(4, 4, timesteps=5, batch_first=True), 4, 9)
    words = torch.randint(9, (2, 5))
    _, h = model(words)
    assert h.shape == (1, 2, 4)
    logits, _ = model(words, h)
    expected = model.logits(model.layer(model.features(words), StreamState(h, 0))[0])
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_packed_sequences_wherever_a_sequence_is_taken(make, batch_first, bidirectional):
    layer = make(2, batch_first=batch_first, bidirectional=bidirectional)
    parts = [sample(T, 3, seed=T) for T in (2, 5, 3)]
    packed = pack_sequence(parts, enforce_sorted=False)
    ends = [layer(part)[0][-1] for part in parts]
    if not isinstance(layer, (RNN, GRU, LSTM)):
        torch.testing.assert_close(layer.last_output(packed), torch.stack(ends))
    if batch_first:
        n = 8 if bidirectional else 4
        model = LastStateClassifier(layer, n, 2).double()
        torch.testing.assert_close(model(packed), model.head(torch.stack(ends)))
        with pytest.raises(ValueError, match="have their lengths"):
            model(packed, torch.tensor([2, 5, 3]))
    dropped, _ = RecurrentDropout(layer, inputs=0.5).eval()(packed)
    torch.testing.assert_close(dropped.data, layer(packed)[0].data)


def test_packed_words():
    model = LanguageModel(FastRNN(4, 4, batch_first=True), 4, 9)
    classifier = LastStateClassifier(FastRNN(4, 4, batch_first=True), 4, 2, vocabulary=9)
    parts = [torch.randint(9, (T,)) for T in (2, 5)]
    packed = pack_sequence(parts, enforce_sorted=False)
    logits, _ = pad_packed_sequence(model(packed)[0], batch_first=True)
    torch.testing.assert_close(logits[1], model(parts[1].unsqueeze(0))[0][0])
    alone = torch.cat([classifier(part.unsqueeze(0)) for part in parts])
    torch.testing.assert_close(classifier(packed), alone)


def test_a_trajectory_takes_a_tensor():
    with pytest.raises(TypeError, match="unpack x"):
        ERNN(3, 4).trajectory(pack_sequence([torch.randn(3, 3)]))


def test_a_step_of_another_dtype_is_refused(make_ours):
    layer = make_ours(dtype=torch.float32)
    with pytest.raises(TypeError, match="x must have the dtype of the cell, torch.float32"):
        layer.step(sample(2, 3))


# Steps of an ERNN for sequences of another length.


@pytest.mark.parametrize("learn", [True, False])
def test_eta_for_another_number_of_time_steps(learn):
    eta = torch.tensor([[0.1], [0.2], [0.4]])
    solver = InexactNewton(timesteps=3, eta=eta, learn=learn)
    layer = ERNN(3, 4, 2, solver=solver)
    layer.grow_steps(5)
    for cell in layer.cells():
        found = cell.fixed_point.solver.eta
        torch.testing.assert_close(
            found.detach(), torch.tensor([[0.1], [0.2], [0.4], [0.4], [0.4]])
        )
        assert isinstance(found, nn.Parameter) == learn
    layer.grow_steps(3)
    layer.resample_steps(5)
    expected = torch.tensor([[0.1], [0.15], [0.2], [0.3], [0.4]])
    torch.testing.assert_close(layer.fixed_point.solver.eta.detach(), expected)
    assert layer(torch.randn(5, 2, 3))[0].shape == (5, 2, 4)
    assert "timesteps=5" in repr(layer)
    with pytest.raises(ValueError, match="no steps of their own"):
        ERNN(3, 4).grow_steps(5)


# Without the packages of the extra `fast`.


def test_numba_without_scipy_counts_as_none(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "scipy" else find(name)
    )
    dispatch._are_installed.cache_clear()
    assert not dispatch.has_numba()
    dispatch._are_installed.cache_clear()


def test_a_variable_of_the_environment_turns_fused_paths_off(tmp_path):
    used = FastRNN(3, 4)
    assert used.l0.plan().fused
    torch.save(used, tmp_path / "used.pt")
    code = (
        "from fixpoint.models import FastRNN, GRU; import torch;"
        f"used = torch.load({str(tmp_path / 'used.pt')!r}, weights_only=False);"
        "print(used.l0.plan().fused);"
        "layer = FastRNN(3, 4); print(layer.l0.plan().fused, GRU(3, 4).plan().fused);"
        "layer(torch.randn(2, 2, 3)); print(layer)"
    )
    environment = os.environ | {"FIXPOINT_FUSED": "0"}
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert shown.stdout.startswith("False\nFalse False")
    assert "not fused: FIXPOINT_FUSED=0 turns fused paths off" in shown.stdout
