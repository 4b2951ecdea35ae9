"""The language model and the dropout around a recurrent layer."""

import pytest
import torch
from torch import nn

from fixpoint.models import ERNN, LanguageModel, RecurrentDropout, model_size_kb


def test_a_tied_model_has_one_matrix_of_words():
    free = LanguageModel(nn.RNN(4, 4, batch_first=True), 4, 9)
    tied = LanguageModel(nn.RNN(4, 4, batch_first=True), 4, 9, tied=True)
    count = [sum(p.numel() for p in m.parameters()) for m in (free, tied)]
    assert count[0] - count[1] == 4 * 9
    assert model_size_kb(free) - model_size_kb(tied) == pytest.approx(4 * 4 * 9 / 1024)
    words = torch.arange(6).view(2, 3)
    output, _ = tied.layer(tied.embedding(words))
    assert torch.allclose(tied(words)[0], output @ tied.embedding.weight.T + tied.bias)


LAYERS = {
    "rnn": lambda: nn.RNN(3, 4, batch_first=True),
    "lstm": lambda: nn.LSTM(3, 4, batch_first=True),
    "jordan": lambda: ERNN(3, 4, rank=2, batch_first=True),
    "bounded": lambda: ERNN(3, 4, cell="self-feedback", solver="picard", batch_first=True),
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
    assert all(p.grad is not None for p in layer.parameters())
    with torch.no_grad():
        for n, p in layer.named_parameters():
            p.copy_(before[n])
    dropping.eval()
    assert torch.equal(dropping(x)[0], layer(x)[0])


def test_which_weights_are_recurrent():
    assert RecurrentDropout(LAYERS["lstm"]()).recurrent == ["weight_hh_l0"]
    assert RecurrentDropout(LAYERS["jordan"]()).recurrent == [
        "l0.cell.V",
        "l0.cell.U1",
        "l0.cell.U2",
    ]
    bounded = ERNN(3, 4, cell="self-feedback", solver="picard")
    from fixpoint.models import contract

    contract(bounded.cell, "U", bound=0.5)
    names = RecurrentDropout(bounded).recurrent
    assert sorted(names) == ["l0.cell.V", "l0.cell.parametrizations.U.original"]


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
    with pytest.raises(ValueError, match="Linear has no recurrent matrices"):
        RecurrentDropout(nn.Linear(2, 2), weights=0.5)
