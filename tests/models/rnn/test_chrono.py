"""Gates that start at memories as long as a sequence."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from fixpoint.models import GRU, LSTM, UGRNN, FastGRNN, UGRNNCell, chrono_biases_

n = 64


def gates(layer):
    """Return the biases of the gates that keep the state and of those that take an input."""
    if isinstance(layer, UGRNN):
        return [cell.b[:n] for cell in layer.cells()], []
    names = [name for name, _ in layer.named_parameters() if name.startswith("bias_ih")]
    sums = [getattr(layer, name) + getattr(layer, name.replace("ih", "hh")) for name in names]
    return [b[n : 2 * n] for b in sums], [b[:n] for b in sums] if len(sums[0]) == 4 * n else []


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.parametrize("kind", [LSTM, GRU, UGRNN, nn.LSTM, nn.GRU])
def test_memories_are_spread_over_the_sequence(kind, options):
    torch.manual_seed(0)
    layer = kind(3, n, **options)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    assert chrono_biases_(layer, 100) is layer
    keep, take = gates(layer)
    assert len(keep) == (4 if options else 1)
    for b in keep:
        memory = 1 / (1 - b.double().sigmoid())
        assert memory.min() >= 2
        assert memory.max() <= 100.001
        assert 40 < memory.mean() < 62  # uniform: 51
    assert len({float(b.detach()[0]) for b in keep}) == len(keep)
    for b, of_input in zip(keep, take, strict=False):
        torch.testing.assert_close(of_input, -b, rtol=0, atol=0)
    changed = {name for name, p in layer.named_parameters() if not torch.equal(p, before[name])}
    assert all("bias" in name or name.endswith(".b") for name in changed)
    assert all(p.requires_grad for p in layer.parameters())


@pytest.mark.parametrize("kind", [LSTM, GRU, UGRNN])
def test_what_else_a_bias_has_is_left(kind):
    layer = kind(3, n)
    name = "l0.b" if kind is UGRNN else "bias_ih_l0"
    bias = dict(layer.named_parameters())[name]
    first = {LSTM: 2 * n, GRU: 2 * n, UGRNN: n}[kind]
    before = bias.detach().clone()
    chrono_biases_(layer, 50)
    assert torch.equal(bias[first:], before[first:])
    assert not torch.equal(bias[:first], before[:first])


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, UGRNNCell])
def test_cells_are_taken_too(kind):
    cell = chrono_biases_(kind(3, n), 2)  # two steps: every gate is one half
    name, first = ("b", 0) if kind is UGRNNCell else ("bias_ih", n)
    assert not getattr(cell, name)[first : first + n].any()


def test_a_state_is_kept_longer():
    """The gradient of the last state by the first, 200 steps earlier, through zero inputs."""
    sizes = []
    for start in (lambda layer: layer, lambda layer: chrono_biases_(layer, 200)):
        torch.manual_seed(0)
        layer = start(UGRNN(1, n).double())
        h0 = torch.zeros(1, 1, n, dtype=torch.float64, requires_grad=True)
        last = layer(torch.zeros(200, 1, 1, dtype=torch.float64), h0)[1]
        sizes.append(float(torch.autograd.grad(last.sum(), h0)[0].norm()))
    assert sizes[0] < 1e-10
    assert sizes[1] > 1e-2


def test_a_parametrized_bias_takes_the_start():
    class Double(nn.Module):
        def forward(self, stored):
            return 2 * stored

        def right_inverse(self, value):
            return value / 2

    cell = nn.GRUCell(3, n)
    nn.utils.parametrize.register_parametrization(cell, "bias_ih", Double())
    chrono_biases_(cell, 2)
    assert not cell.bias_ih[n : 2 * n].any()


@pytest.mark.parametrize("hook", ["pruned", "normalized"])
def test_a_bias_made_by_a_hook_takes_the_start(hook):
    torch.manual_seed(0)
    cell = nn.GRUCell(3, n)
    if hook == "pruned":
        prune.identity(cell, "bias_ih")
    else:
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(cell, "bias_ih", dim=None)
    chrono_biases_(cell, 2)
    cell(torch.zeros(1, 3))
    torch.testing.assert_close(cell.bias_ih[n : 2 * n], torch.zeros(n))


def test_a_bias_that_is_not_a_parameter_is_refused():
    cell = nn.GRUCell(3, n)
    fixed = cell.bias_ih.detach()
    del cell.bias_ih
    cell.bias_ih = fixed
    with pytest.raises(ValueError, match="bias_ih of GRUCell is not a parameter"):
        chrono_biases_(cell, 10)


@pytest.mark.parametrize("kind", [LSTM, UGRNN, nn.GRUCell])
def test_biases_are_needed(kind):
    with pytest.raises(ValueError, match="needs biases.*bias=False"):
        chrono_biases_(kind(3, 4, bias=False), 10)


def test_other_layers_and_lengths_are_refused():
    with pytest.raises(TypeError, match="is for an LSTM, GRU or UGRNN; got FastGRNN: pass the"):
        chrono_biases_(FastGRNN(3, 4), 10)
    with pytest.raises(ValueError, match="timesteps must be at least 2; got 1"):
        chrono_biases_(LSTM(3, 4), 1)
    with pytest.raises(TypeError, match=r"timesteps must be an integer; got 10\.5"):
        chrono_biases_(LSTM(3, 4), 10.5)
