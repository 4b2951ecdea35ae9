"""Dropout of the inputs, the recurrent weights and the outputs of any recurrent layer."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from fixpoint.models.heads.packed import Sequences, on_data

# V and U of the cells here, or the left one of their factors; weight_hh_l0 of torch. U may be
# bounded by a parametrization.
_RECURRENT = re.compile(r"(^|\.)([UV](1|\.full|\.left)?|weight_hh\w*)(\.original\d*)?$")


class RecurrentDropout(nn.Module):
    """A recurrent layer with dropout around it and on its recurrent weights, in training mode.

    Input and output dropout draw a mask for each number. Weight dropout draws one mask of the
    recurrent matrices at each call, so all time steps of a sequence see the same weights: V
    becomes m * V / (1 - p), m ~ Bernoulli(1 - p) for each entry, whose mean is V.

    Of a matrix of low rank, L R, the mask is on the left factor: a unit then misses some of the r
    numbers that R computes from the past state. The rank remains r and the mean L R; a mask on both
    factors would drop twice. Of a matrix U with a bounded norm the mask is on what is bounded, so
    the bound holds, and an equilibrium exists, with any mask; the mean of the bounded U is then
    not U. Layers whose recurrent matrix is orthogonal by construction, or nearly so (EURNN,
    SpectralRNN), have no free entries to drop.

    Args:
        layer: called as `output, h_n = layer(x, hx)`, x packed or not.
        inputs, weights, outputs: share dropped, 0 <= p < 1.

    Attributes:
        recurrent: names of the parameters that weight dropout masks.

    Raises:
        ValueError: a fraction is out of range, or `weights` is asked of a layer without recurrent
            matrices named U, V (or their factors) or weight_hh...

    Source: Merity, Keskar, Socher (2018), Regularizing and optimizing LSTM language models, section
        2 (weight dropout); Wan, Zeiler, Zhang, LeCun, Fergus (2013), Regularization of neural
        networks using DropConnect.

    Example:
        >>> import torch
        >>> from fixpoint.models import RecurrentDropout
        >>> layer = RecurrentDropout(torch.nn.LSTM(3, 4, batch_first=True), weights=0.5)
        >>> output, (h, c) = layer(torch.randn(2, 5, 3))
        >>> output.shape
        torch.Size([2, 5, 4])
    """

    def __init__(
        self, layer: nn.Module, *, inputs: float = 0.0, weights: float = 0.0, outputs: float = 0.0
    ) -> None:
        super().__init__()
        for name, p in (("inputs", inputs), ("weights", weights), ("outputs", outputs)):
            if not 0 <= p < 1:
                raise ValueError(f"{name} must be at least 0 and below 1; got {p}")
        self.layer: Any = layer
        self.inputs, self.weights, self.outputs = inputs, weights, outputs
        self.recurrent = [name for name, _ in layer.named_parameters() if _RECURRENT.search(name)]
        if weights and not self.recurrent:
            raise ValueError(
                f"{type(layer).__name__} has no recurrent matrix of free entries, named U, V or "
                "weight_hh, to drop weights of: leave weight dropout out"
            )

    def forward(self, x: Sequences, hx: Any = None) -> tuple[Sequences, Any]:
        x = on_data(lambda v: F.dropout(v, self.inputs, self.training), x)
        if self.training and self.weights:
            parameters = dict(self.layer.named_parameters())
            dropped = {name: F.dropout(parameters[name], self.weights) for name in self.recurrent}
            output, h_n = functional_call(self.layer, dropped, (x, hx))
        else:
            output, h_n = self.layer(x, hx)
        return on_data(lambda v: F.dropout(v, self.outputs, self.training), output), h_n

    def extra_repr(self) -> str:
        return f"inputs={self.inputs:g}, weights={self.weights:g}, outputs={self.outputs:g}"
