"""A model of the next word of a text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fixpoint.models.heads.packed import Sequences, on_data
from fixpoint.models.rnn.base_layer import StreamState


class LanguageModel(nn.Module):
    """Logits of the next word: embedding, recurrent layer, linear output.

    The embedding has as many features as the layer has units.

    Args:
        layer: recurrent layer from n to n features, built with `batch_first=True`, called as
            `output, h_n = layer(x, hx)`.
        hidden_size: n.
        vocabulary: number of words.
        tied: use the embedding as the output weights, so that only a bias is added.
        counts: how often each word occurs, (vocabulary,); the output bias starts at the logarithms
            of the frequencies, one occurrence added to each. Without them the layer learns the
            frequencies, in the first updates all of its states grow in one direction, and a
            recurrence without bounds, as of an ERNN with relu, may diverge by it.

    Inputs: words (B, T) int64, or packed, hx the state that the layer takes, or None. An `ERNN`
        with steps of their own at each time index begins with each call at t = 0, whatever state
        it takes: they are those of the places in a piece of text.

    Outputs: logits (B, T, vocabulary), or packed, and the state after the last word.

    Source: Press, Wolf (2017), Using the output embedding to improve language models (tied).

    Example:
        >>> import torch
        >>> from fixpoint.models import ERNN, LanguageModel
        >>> model = LanguageModel(ERNN(8, 8, batch_first=True), 8, 50, tied=True)
        >>> logits, h = model(torch.randint(50, (2, 7)))
        >>> logits.shape, h.shape
        (torch.Size([2, 7, 50]), torch.Size([1, 2, 8]))
    """

    def __init__(
        self,
        layer: nn.Module,
        hidden_size: int,
        vocabulary: int,
        *,
        tied: bool = False,
        counts: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden_size)
        # The default N(0, 1) would start a tied model with logits of s.d. sqrt(n).
        nn.init.normal_(self.embedding.weight, std=hidden_size**-0.5 if tied else 0.1)
        self.layer: Any = layer
        self.tied = tied
        self.head = None if tied else nn.Linear(hidden_size, vocabulary)
        self.bias = nn.Parameter(self.embedding.weight.new_zeros(vocabulary)) if tied else None
        if counts is not None:
            bias: Any = self.bias if self.head is None else self.head.bias
            with torch.no_grad():
                bias.copy_(torch.log_softmax((counts + 1.0).log(), 0))

    def features(self, words: Sequences) -> Sequences:
        """Return what the layer gets, (B, T, n), or packed."""
        return on_data(self.embedding, words)

    def forward(self, words: Sequences, hx: Any = None) -> tuple[Sequences, Any]:
        restarted = (
            hx is not None and not isinstance(hx, StreamState) and self._has_steps_of_its_own()
        )
        output, state = self.layer(self.features(words), StreamState(hx, 0) if restarted else hx)
        return on_data(self.logits, output), state.hx if restarted else state

    def _has_steps_of_its_own(self) -> bool:
        cell = getattr(getattr(self.layer, "layer", self.layer), "l0", None)
        return getattr(cell, "timesteps", None) is not None

    def logits(self, output: Tensor) -> Tensor:
        """Return logits (..., vocabulary) of outputs of the layer, (..., n)."""
        if self.head is None:
            return F.linear(output, self.embedding.weight, self.bias)
        return self.head(output)
