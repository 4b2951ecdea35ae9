"""Texts to model word by word, and batches of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from typing_extensions import TypeIs


class Text(Protocol):
    """A text in three parts, each a stream of words (N,), int64, below `vocabulary`."""

    name: str
    train: Tensor
    valid: Tensor
    test: Tensor
    vocabulary: int


def is_text(data: object) -> TypeIs[Text]:
    """Whether data has a stream of words to train on, whatever its class."""
    return isinstance(getattr(data, "train", None), Tensor)


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenText:
    """A `Text` of tensors at hand.

    Args:
        name: what it is.
        train, valid, test: words (N,), int64.
        vocabulary: how many words there are.
    """

    name: str
    train: Tensor
    valid: Tensor
    test: Tensor
    vocabulary: int


def streams(words: Tensor, batch_size: int) -> Tensor:
    """A text (N,) as parallel streams (batch_size, N // batch_size), the rest left out.

    Raises:
        ValueError: a stream would have fewer than two words.
    """
    length = len(words) // batch_size
    if length < 2:
        raise ValueError(
            f"{len(words)} words are too few for {batch_size} parallel streams: take a batch_size "
            f"of at most {len(words) // 2}"
        )
    return words[: batch_size * length].view(batch_size, length)


def pieces(words: Tensor, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Words and the words after them, (B, at most `steps`) each, along streams (B, N)."""
    last = words.shape[1] - 1
    for start in range(0, last, steps):
        end = min(start + steps, last)
        yield words[:, start:end], words[:, start + 1 : end + 1]
