"""The language model and the dropout around a recurrent layer."""

import pytest
import torch
from torch import nn

from fixpoint import training
from fixpoint.models import (
    ERNN,
    UGRNN,
    FastGRNN,
    FastRNN,
    LanguageModel,
    RecurrentDropout,
    bound_spectral_norm,
    model_size_kb,
)
from fixpoint.training import Recipe


def test_a_tied_model_has_one_matrix_of_words():
    free = LanguageModel(nn.RNN(4, 4, batch_first=True), 4, 9)
    tied = LanguageModel(nn.RNN(4, 4, batch_first=True), 4, 9, tied=True)
    count = [sum(p.numel() for p in m.parameters()) for m in (free, tied)]
    assert count[0] - count[1] == 4 * 9
    assert model_size_kb(free) - model_size_kb(tied) == pytest.approx(4 * 4 * 9 / 1024)
    words = torch.arange(6).view(2, 3)
    output, _ = tied.layer(tied.embedding(words))
    assert torch.allclose(tied(words)[0], output @ tied.embedding.weight.T + tied.bias)


@pytest.mark.parametrize("tied", [False, True])
def test_the_bias_starts_at_the_frequencies(tied):
    counts = torch.tensor([5, 0, 2])
    model = LanguageModel(nn.RNN(4, 4, batch_first=True), 4, 3, tied=tied, counts=counts)
    logits = model.logits(torch.zeros(4))
    torch.testing.assert_close(logits.exp(), torch.tensor([6, 1, 3]) / 10)
    assert logits.requires_grad


LAYERS = {
    "rnn": lambda: nn.RNN(3, 4, batch_first=True),
    "lstm": lambda: nn.LSTM(3, 4, batch_first=True),
    "gru": lambda: nn.GRU(3, 4, batch_first=True),
    "fastrnn": lambda **options: FastRNN(3, 4, batch_first=True, **options),
    "fastrnn, rank 2": lambda **options: FastRNN(3, 4, rank=2, batch_first=True, **options),
    "fastgrnn": lambda **options: FastGRNN(3, 4, batch_first=True, **options),
    "fastgrnn, rank 2": lambda **options: FastGRNN(3, 4, rank=2, batch_first=True, **options),
    "ugrnn": lambda **options: UGRNN(3, 4, batch_first=True, **options),
    "jordan, full": lambda **options: ERNN(3, 4, batch_first=True, **options),
    "jordan": lambda **options: ERNN(3, 4, rank=2, max_iter=2, batch_first=True, **options),
    "bounded": lambda: ERNN(3, 4, map="self-feedback", solver="picard", batch_first=True),
}


@pytest.mark.parametrize("name", LAYERS)
def test_weights_are_dropped_once_a_sequence(name):
    """The output is that of the layer with the masked weights, and they are left as they were."""
    torch.manual_seed(0)
    layer = LAYERS[name]()
    dropping = RecurrentDropout(layer, weights=0.5)
    x = torch.randn(2, 5, 3)
    before = {n: p.detach().clone() for n, p in layer.named_parameters()}
    torch.manual_seed(1)
    output, _ = dropping(x)
    output.sum().backward()
    torch.manual_seed(1)
    with torch.no_grad():
        for n in dropping.recurrent:
            layer.get_parameter(n).copy_(nn.functional.dropout(before[n], 0.5))
    assert torch.allclose(layer(x)[0], output, atol=1e-6)
    for n, p in layer.named_parameters():
        assert p.grad is not None, n
        assert p.grad.abs().sum() > 0, n  # of both factors too
    with torch.no_grad():
        for n, p in layer.named_parameters():
            p.copy_(before[n])
    dropping.eval()
    assert torch.equal(dropping(x)[0], layer(x)[0])


def test_which_weights_are_recurrent():
    assert RecurrentDropout(LAYERS["lstm"]()).recurrent == ["weight_hh_l0"]
    assert RecurrentDropout(LAYERS["gru"]()).recurrent == ["weight_hh_l0"]
    assert RecurrentDropout(LAYERS["jordan"]()).recurrent == ["l0.map.V", "l0.map.U1"]
    assert RecurrentDropout(LAYERS["jordan, full"]()).recurrent == ["l0.map.V", "l0.map.U"]
    assert RecurrentDropout(LAYERS["ugrnn"]()).recurrent == ["l0.V"]
    for name in ("fastrnn", "fastgrnn"):
        assert RecurrentDropout(LAYERS[name]()).recurrent == ["l0.V.full"]
        assert RecurrentDropout(LAYERS[f"{name}, rank 2"]()).recurrent == ["l0.V.left"]
    bounded = ERNN(3, 4, map="self-feedback", solver="picard")
    bound_spectral_norm(bounded.map, "U", bound=0.5)
    names = RecurrentDropout(bounded).recurrent
    assert sorted(names) == ["l0.map.V", "l0.map.parametrizations.U.original"]


@pytest.mark.parametrize("rank", [None, 2])
def test_the_mean_over_the_masks_is_the_layer(rank):
    """One step of a FastRNN without nonlinearity is linear in its recurrent matrix."""
    torch.manual_seed(0)
    layer = FastRNN(3, 4, nonlinearity="identity", rank=rank, batch_first=True).double()
    dropping = RecurrentDropout(layer, weights=0.5)
    x = torch.randn(1, 1, 3).double()
    hx = torch.randn(1, 1, 4).double()
    draws = torch.stack([dropping(x, hx)[0].flatten() for _ in range(2000)]).detach()
    error = draws.mean(0) - layer(x, hx)[0].flatten()
    assert draws.std(0).min() > 0
    assert bool((error.abs() < 4 * draws.std(0) / 2000**0.5).all())


FUSED = [n for n in LAYERS if n not in ("rnn", "lstm", "gru", "bounded")]


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_path_has_the_same_masks(name):
    """Outputs and gradients, weights dropped, are those of the plain loop."""
    found = []
    for implementation in ("fused", "reference"):
        torch.manual_seed(0)
        dropping = RecurrentDropout(LAYERS[name](implementation=implementation), weights=0.5)
        x = torch.randn(2, 5, 3)
        output, _ = dropping(x)
        output.square().sum().backward()
        found.append([output, *(p.grad for p in dropping.parameters())])
    for fused, plain in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-6)


def test_every_layer_of_a_recipe_is_dropped_or_refused_with_the_reason():
    for name, layer in training.LAYERS.items():
        built = layer.build(Recipe().changed(model=name, hidden=4).model, 3, 5)
        if name in ("eurnn", "spectralrnn"):
            with pytest.raises(ValueError, match="RNN has no recurrent matrix of free entries, na"):
                RecurrentDropout(built, weights=0.5)
        else:
            assert RecurrentDropout(built, weights=0.5).recurrent


def test_inputs_and_outputs_are_dropped_in_training_only():
    class Same(nn.Module):
        def forward(self, x, hx=None):
            return x, x[:, -1]

    x = torch.ones(50, 4, 5)
    torch.manual_seed(0)
    for name in ("inputs", "outputs"):
        layer = RecurrentDropout(Same(), **{name: 0.25})
        output, _ = layer(x)
        # 1000 draws: the share dropped has a s.d. of 1.4 %
        assert (output == 0).double().mean().item() == pytest.approx(0.25, abs=0.06)
        assert torch.equal(output[output != 0].unique(), torch.tensor([1 / 0.75]))
        assert torch.equal(layer.eval()(x)[0], x)


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"weights must be at least 0 and below 1; got 1"):
        RecurrentDropout(nn.RNN(2, 2), weights=1)
    with pytest.raises(ValueError, match="Linear has no recurrent matrix"):
        RecurrentDropout(nn.Linear(2, 2), weights=0.5)
