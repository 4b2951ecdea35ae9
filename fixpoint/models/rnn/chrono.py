"""Start of the gates of a layer at memories as long as a sequence."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from fixpoint._validation import at_least
from fixpoint.models._parameters import assign
from fixpoint.models.rnn.base_layer import Recurrent
from fixpoint.models.rnn.ugrnn import UGRNNCell

Layer = TypeVar("Layer", bound=nn.Module)


@torch.no_grad()
def chrono_biases_(layer: Layer, timesteps: int) -> Layer:
    """Start the gates at memories of 2 to `timesteps` steps, by their biases, in place.

    A gate sigmoid(b) keeps the state for about 1 / (1 - sigmoid(b)) = 1 + exp(b) steps. Layers
    start with b near 0, at two steps: an input of some hundred steps ago has left the state, and no
    gradient reaches it. Here the gate that keeps the state has b = log u, u uniform in [1,
    timesteps - 1], drawn for each unit of each layer and direction, and the input gate of an LSTM
    has -b. Choose it where a gated layer does not begin to learn on long sequences.

    A FastGRNN, whose gate does not bound what it adds to the state, is not among them.
    `reset_parameters` draws the layer's own biases again.

    Args:
        layer: an LSTM, GRU or UGRNN, of this package or of torch, or a cell of one; returned.
            torch adds two biases in each gate (an LSTM's are in the order i, f, g, o, a GRU's r, z,
            n): of the gates set here the second becomes 0. Other gates are left.
        timesteps: steps of the longest memory, at least 2: the length of the sequences, or of a
            stream the steps between an event and what depends on it.

    Raises:
        TypeError: another layer, or a number of steps that is not an integer.
        ValueError: less than 2 steps, or a layer without biases.

    Source: Tallec, Ollivier (2018), Can recurrent neural networks warp time?

    Example:
        >>> from fixpoint.models import LSTM, chrono_biases_
        >>> layer = chrono_biases_(LSTM(1, 32), 784)
        >>> forget = layer.bias_ih_l0[32:64]
        >>> memory = 1 + forget.exp()
        >>> bool(memory.min() >= 2), bool(memory.max() <= 784)
        (True, True)
    """
    at_least(2, timesteps=timesteps)
    for cell in layer.cells() if isinstance(layer, Recurrent) else [layer]:
        if isinstance(cell, UGRNNCell):
            _write(cell, "b", 0, _draw(cell, "b", timesteps))
        elif isinstance(cell, nn.LSTM | nn.LSTMCell | nn.GRU | nn.GRUCell):
            for name in _input_biases(cell):
                start, first = _draw(cell, name, timesteps), cell.hidden_size
                if isinstance(cell, nn.LSTM | nn.LSTMCell):
                    start, first = torch.cat([-start, start]), 0
                _write(cell, name, first, start)
                _write(cell, name.replace("ih", "hh"), first, torch.zeros_like(start))
        else:
            raise TypeError(
                f"chrono_biases_ is for an LSTM, GRU or UGRNN; got {type(layer).__name__}: "
                "pass the recurrent layer itself"
            )
    return layer


def _input_biases(layer: nn.LSTM | nn.LSTMCell | nn.GRU | nn.GRUCell) -> list[str]:
    if isinstance(layer, nn.LSTMCell | nn.GRUCell):
        return ["bias_ih"]
    directions = ("", "_reverse") if layer.bidirectional else ("",)
    return [f"bias_ih_l{k}{direction}" for k in range(layer.num_layers) for direction in directions]


def _draw(cell: nn.Module, name: str, timesteps: int) -> Tensor:
    bias = getattr(cell, name, None)
    if bias is None:
        raise ValueError(
            f"chrono_biases_ needs biases; {type(cell).__name__} was built with bias=False"
        )
    return bias.new_empty(cell.hidden_size).uniform_(1, timesteps - 1).log_()


def _write(cell: nn.Module, name: str, first: int, value: Tensor) -> None:
    bias = getattr(cell, name).clone()
    bias[first : first + len(value)] = value
    assign(cell, name, bias)
