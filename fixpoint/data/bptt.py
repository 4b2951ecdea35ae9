"""Batches of a token stream for truncated backpropagation through time (BPTT)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor


def stream_batches(
    x: Tensor, y: Tensor, *, batch_size: int, steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut a stream into `batch_size` pieces and iterate over them in parallel.

    Row b of each batch continues row b of the previous batch, so the last state of a model is the
    initial state for the next batch. The last N mod batch_size tokens are left out; the last batch
    may be shorter.

    Args:
        x: the stream (N,), e.g. `Dataset.x_train`.
        y: the target at each position (N,), e.g. `Dataset.y_train`.
        batch_size: number of pieces B.
        steps: time steps T of a batch.

    Yields:
        x and y of a batch, (B, T) each.

    Raises:
        ValueError: x and y are not one-dimensional, or too short for `batch_size` pieces.

    >>> import torch
    >>> for x, y in stream_batches(torch.arange(9), torch.arange(1, 10), batch_size=2, steps=3):
    ...     print(x.tolist(), y.tolist())
    [[0, 1, 2], [4, 5, 6]] [[1, 2, 3], [5, 6, 7]]
    [[3], [7]] [[4], [8]]
    """
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(f"x and y must be (N,) each, got {tuple(x.shape)} and {tuple(y.shape)}")
    if batch_size < 1 or steps < 1 or len(x) < batch_size:
        raise ValueError(
            f"{len(x)} tokens cannot be cut into {batch_size} pieces and batches of {steps} steps"
        )
    pieces = len(x) // batch_size
    x, y = (part[: pieces * batch_size].view(batch_size, pieces) for part in (x, y))
    yield from zip(x.split(steps, 1), y.split(steps, 1), strict=True)
