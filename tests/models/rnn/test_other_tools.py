"""Layers under tools of others: counters of FLOPs, quantization, LoRA, subclasses of tensors.

Specifies: fixpoint.models.ops.recurrence.flops.
"""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode

from fixpoint.models import ERNN, GRU, LSTM, RNN, UGRNN, FastGRNN, FastRNN, LastStateClassifier

T, B, d, n = 5, 3, 4, 6
# Products with the state and with x in one time step.
GATES = {ERNN: 1, FastRNN: 1, FastGRNN: 1, UGRNN: 2, RNN: 1, GRU: 3, LSTM: 4}


@pytest.mark.parametrize("kind", GATES)
def test_flops_are_those_of_the_products(kind):
    options = {"rank": 2} if kind is ERNN else {}
    layer, x = kind(d, n, **options), torch.randn(T, B, d)
    inside = 2 * T * B * GATES[kind] * (n * n + n * d)
    with FlopCounterMode(display=False) as counter:
        layer(x)[0].sum().backward()
    counts = counter.get_flop_counts()["Global"]
    fused = {str(name): count for name, count in counts.items() if "fixpoint" in str(name)}
    assert sum(fused.values()) == 3 * inside
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(x)
    counts = counter.get_flop_counts()["Global"]
    assert sum(count for name, count in counts.items() if "fixpoint" in str(name)) == inside


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_dynamic_quantization_leaves_layers_and_takes_the_head():
    quantize = pytest.importorskip("torch.ao.quantization").quantize_dynamic
    for layer in (GRU(d, n, batch_first=True), FastRNN(d, n, batch_first=True)):
        model = LastStateClassifier(layer, n, 2).eval()
        small = quantize(model, {nn.Linear, nn.GRU, nn.LSTM}, dtype=torch.qint8)
        assert type(small.layer) is type(layer)
        assert type(small.head) is not nn.Linear
        x = torch.randn(B, T, d)
        torch.testing.assert_close(small(x), model(x), rtol=0.1, atol=0.1)


class LowRankUpdate(nn.Module):
    def __init__(self, rows, columns):
        super().__init__()
        self.left = nn.Parameter(torch.randn(rows, 1))
        self.right = nn.Parameter(torch.randn(1, columns))

    def forward(self, weight):
        return weight + self.left @ self.right


def test_lora_by_a_parametrization_keeps_the_fused_path():
    layer, x = UGRNN(d, n, implementation="fused"), torch.randn(T, B, d)
    before = layer(x)[0]
    cell = layer.l0.requires_grad_(False)
    parametrize.register_parametrization(cell, "V", LowRankUpdate(2 * n, n))
    assert not torch.allclose(layer(x)[0], before)
    layer(x)[0].sum().backward()
    trained = [name for name, p in layer.named_parameters() if p.grad is not None]
    assert sorted(name.rpartition(".")[2] for name in trained) == ["left", "right"]


class Wrapped(torch.Tensor):
    """A subclass that sees operations, as quantized weights are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def plain(v):
            return v.inner if isinstance(v, Wrapped) else v

        found = function(*[plain(v) for v in args], **(kwargs or {}))
        return Wrapped(found) if function is torch.ops.aten.detach.default else found


def test_a_subclass_as_weight_takes_plain_operations():
    layer, x = FastRNN(d, n).requires_grad_(False), torch.randn(T, B, d)
    expected = layer(x)[0]
    layer.l0.V.full = nn.Parameter(Wrapped(layer.l0.V.full.data), requires_grad=False)
    torch.testing.assert_close(layer(x)[0], expected)
    layer.l0.implementation = "fused"
    with pytest.raises(ValueError, match="it takes plain tensors and A is a Wrapped"):
        layer(x)
