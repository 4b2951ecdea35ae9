"""A linear classifier on the last hidden state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from fixpoint.models.heads.packed import Sequences, on_data
from fixpoint.models.rnn.base_layer import Recurrent


class LastStateClassifier(nn.Module):
    """logits = C h_T + c for a recurrent layer built with `batch_first=True`.

    Args:
        layer: recurrent layer called as `output, h_n = layer(x)`.
        hidden_size: units n of its state.
        classes: number of classes.
        vocabulary: number of words where x holds words; they are embedded in as many features as
            the layer has inputs, here `hidden_size`.

    Raises:
        ValueError: `hidden_size` is not the number of outputs of the layer.

    Example:
        >>> import torch
        >>> from fixpoint.models import FastRNN, LastStateClassifier
        >>> model = LastStateClassifier(FastRNN(3, 8, batch_first=True), 8, 2)
        >>> model(torch.randn(4, 20, 3)).shape
        torch.Size([4, 2])
    """

    def __init__(
        self, layer: nn.Module, hidden_size: int, classes: int, *, vocabulary: int | None = None
    ) -> None:
        super().__init__()
        outputs = _outputs(layer)
        if outputs not in (None, hidden_size):
            raise ValueError(
                f"the layer has {outputs} outputs; got hidden_size={hidden_size}: "
                f"give hidden_size={outputs}"
            )
        self.layer: Any = layer
        self.head = nn.Linear(hidden_size, classes)
        self.embedding = None if vocabulary is None else nn.Embedding(vocabulary, hidden_size)

    def features(self, x: Sequences) -> Sequences:
        """Return what the layer gets, (B, T, d), or packed."""
        return x if self.embedding is None else on_data(self.embedding, x)

    def forward(self, x: Sequences, lengths: Tensor | None = None) -> Tensor:
        """Return logits, (B, classes), of x, (B, T, d), or words (B, T), or packed.

        With `lengths`, (B,), the last state is that of this time step, 1 at least. Packed
        sequences have theirs.

        Raises:
            ValueError: lengths are given with packed sequences.
        """
        packed = isinstance(x, PackedSequence)
        if packed and lengths is not None:
            raise ValueError("packed sequences have their lengths: leave out lengths")
        if lengths is None and isinstance(self.layer, Recurrent):
            return self.logits(self.layer.last_output(self.features(x)))
        output, _ = self.layer(self.features(x))
        if packed:
            output, lengths = pad_packed_sequence(output, batch_first=True)
            lengths = lengths.to(output.device)
        if lengths is None:
            return self.logits(output[:, -1])
        rows = torch.arange(len(output), device=output.device)
        return self.logits(output[rows, lengths.clamp_min(1) - 1])

    def logits(self, output: Tensor) -> Tensor:
        """Return logits (..., classes) of outputs of the layer, (..., n)."""
        return self.head(output)


def _outputs(layer: nn.Module) -> int | None:
    """Return the number of outputs of a layer like torch's; None of others."""
    n = getattr(layer, "proj_size", 0) or getattr(layer, "hidden_size", None)
    if not isinstance(n, int):
        return None
    return 2 * n if getattr(layer, "bidirectional", False) is True else n


def parameter_count(model: nn.Module) -> int:
    """Count how many numbers the model's parameters hold.

    Example:
        >>> import torch
        >>> from fixpoint.models import parameter_count
        >>> parameter_count(torch.nn.Linear(3, 2))
        8
    """
    return sum(p.numel() for p in model.parameters())


def model_size_kb(model: nn.Module) -> float:
    """Return the size of the parameters in float32, in KB of 1024 bytes; word embeddings are not
    counted.

    Example:
        >>> import torch
        >>> from fixpoint.models import model_size_kb
        >>> model_size_kb(torch.nn.Linear(255, 1))
        1.0
    """
    embedded = sum(parameter_count(m) for m in model.modules() if isinstance(m, nn.Embedding))
    return 4 * (parameter_count(model) - embedded) / 1024
