"""What is learned: the losses of an epoch, and the score of a part of the data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from fixpoint.training.prepare import Split
from fixpoint.training.recipe import Training
from fixpoint.training.texts import is_text, pieces, streams


class Score(NamedTuple):
    """Mean loss, and accuracy in percent or perplexity."""

    loss: float
    value: float


class Task(Protocol):
    """What `fit` needs to know of what is learned."""

    metric: str
    """accuracy or perplexity."""
    has_validation: bool

    def losses(self, model: nn.Module, order: torch.Generator) -> Iterator[tuple[Tensor, int]]:
        """The loss of each batch of an epoch in turn, and how much it weighs in the mean.

        With several processes each has its share of the batch; the mean over the processes of
        loss, and of its gradient, is that of the whole batch.
        """

    def score(self, model: nn.Module, part: str) -> Score:
        """Of the part "valid" or "test"; every process computes the whole."""

    def probe(self) -> Tensor:
        """Some of the test inputs, on the device."""


class Classification:
    """Windows with one class each; batches are index slices of tensors on the device."""

    metric = "accuracy"

    def __init__(self, fabric: Fabric, split: Split, training: Training) -> None:
        self.fabric, self.training = fabric, training
        data = split.data
        self.x, self.y, self.x_test, self.y_test = (
            fabric.to_device(part)
            for part in (data.x_train, data.y_train, data.x_test, data.y_test)  # type: ignore[union-attr]
        )
        self.has_validation = split.valid is not None
        if split.valid is not None:
            self.x_valid, self.y_valid = (fabric.to_device(part) for part in split.valid)

    def losses(self, model: nn.Module, order: torch.Generator) -> Iterator[tuple[Tensor, int]]:
        rank, world = self.fabric.global_rank, self.fabric.world_size
        smoothing = self.training.label_smoothing
        for rows in torch.randperm(len(self.x), generator=order).split(self.training.batch_size):
            rows = rows.to(self.fabric.device)
            mine = rows[rank::world]
            share = len(mine) * world / len(rows)
            # A process without a share of the last batch takes part with weight 0.
            mine = mine if share else rows[:1]
            loss = F.cross_entropy(model(self.x[mine]), self.y[mine], label_smoothing=smoothing)
            yield (loss if world == 1 else share * loss), len(rows)

    def score(self, model: nn.Module, part: str) -> Score:
        if part == "valid":
            return Score(*evaluate(model, self.x_valid, self.y_valid))
        return Score(*evaluate(model, self.x_test, self.y_test))

    def probe(self) -> Tensor:
        return self.x_test[:512]


class LanguageModelling:
    """The next word of a text, by truncated back-propagation through time.

    The text runs in `batch_size` parallel streams, cut into pieces of `bptt` steps. The state goes
    on from piece to piece, the gradient does not. Validation and test run alike, so the words
    that do not fill the streams are left out, fewer than `batch_size`.
    """

    metric = "perplexity"
    has_validation = True

    def __init__(self, fabric: Fabric, split: Split, training: Training) -> None:
        self.fabric, self.training = fabric, training
        if training.batch_size % fabric.world_size:
            raise ValueError(
                f"training.batch_size must be a multiple of machine.devices for a text; got "
                f"{training.batch_size} streams for {fabric.world_size} devices"
            )
        self.parts = {
            part: fabric.to_device(streams(getattr(split.data, part), training.batch_size))
            for part in ("train", "valid", "test")
        }

    def losses(self, model: nn.Module, order: torch.Generator) -> Iterator[tuple[Tensor, int]]:
        hx = None
        mine = self.parts["train"][self.fabric.global_rank :: self.fabric.world_size]
        for words, following in pieces(mine, self.training.bptt):
            logits, hx = model(words, hx)
            hx = pytree.tree_map(torch.detach, hx)
            smoothing = self.training.label_smoothing
            yield _word_loss(logits, following, label_smoothing=smoothing), following.shape[1]

    @torch.no_grad()
    def score(self, model: nn.Module, part: str) -> Score:
        model.eval()
        hx, total, count = None, 0.0, 0
        for words, following in pieces(self.parts[part], self.training.bptt):
            logits, hx = model(words, hx)
            total += _word_loss(logits, following).item() * following.shape[1]
            count += following.shape[1]
        loss = total / count
        return Score(loss, math.exp(loss) if loss < 700 else math.inf)

    def probe(self) -> Tensor:
        return self.parts["test"][:, : self.training.bptt]


def make_task(fabric: Fabric, split: Split, training: Training) -> Task:
    """The task that the data set is."""
    kind: Any = LanguageModelling if is_text(split.data) else Classification
    return kind(fabric, split, training)


@torch.no_grad()
def evaluate(
    model: nn.Module, x: Tensor, y: Tensor, *, batch_size: int = 512
) -> tuple[float, float]:
    """Mean loss and accuracy in percent; windows with non-finite logits count as wrong, and are
    left out of the loss."""
    model.eval()
    logits = torch.cat([model(rows) for rows in x.split(batch_size)])
    good = logits.isfinite().all(1)
    loss = F.cross_entropy(logits[good], y[good]).item()
    right = good & (logits.argmax(1) == y)
    return loss, 100 * right.sum().item() / len(right)


def _word_loss(logits: Tensor, following: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross entropy of logits (B, T, V) and the words (B, T) that came."""
    return F.cross_entropy(
        logits.flatten(0, 1), following.flatten(), label_smoothing=label_smoothing
    )
