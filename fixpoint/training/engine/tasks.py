"""Tasks: the losses of an epoch, and the score of a part of the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F

from fixpoint._torch import tree_map
from fixpoint.analysis import evenly_spaced
from fixpoint.data import Dataset, stream_batches
from fixpoint.training.engine.augment import augment, check_augmentation
from fixpoint.training.recipe.schema import Training


class Score(NamedTuple):
    """Mean loss, and accuracy in percent or perplexity."""

    loss: float
    value: float


class Task(Protocol):
    """Task of `fit`: batches, loss and scores of what is learned."""

    metric: str
    """accuracy or perplexity."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that can be scored, of train, valid and test."""

    def losses(self, model: nn.Module, order: torch.Generator) -> Iterator[tuple[Tensor, int]]:
        """Yield the loss of each batch of an epoch in turn, and its weight in the mean.

        With several processes each has its part of the batch; the mean over the processes of
        loss, and of its gradient, is that of the whole batch.
        """

    def score(self, model: nn.Module, part: str) -> Score:
        """Score a part; every process computes the whole."""


class DataTask(Task, Protocol):
    """The task that a data set is."""

    data: Dataset
    """On the device."""

    def probe(self) -> Tensor:
        """Return some of the test inputs, on the device."""

    def guessing_loss(self) -> float:
        """Return the loss of the model that gives each class the same probability."""

    def class_scores(self, model: nn.Module) -> dict[str, Any]:
        """Return how a model does at each class of the test part; empty where there are none."""


class Classification:
    """Sequences with one class each; batches are index slices of tensors on the device."""

    metric = "accuracy"

    def __init__(self, fabric: Fabric, data: Dataset, training: Training) -> None:
        self.fabric, self.training = fabric, training
        self.data = data.to(fabric.device)
        self.weights = None
        if training.class_weights == "balanced":
            self.weights = balanced_weights(self.data.y_train, len(data.classes))

    @property
    def parts(self) -> tuple[str, ...]:
        return self.data.parts

    def losses(self, model: nn.Module, order: torch.Generator) -> Iterator[tuple[Tensor, int]]:
        rank, world = self.fabric.global_rank, self.fabric.world_size
        data, smoothing = self.data, self.training.label_smoothing
        size = self.training.batch_size
        for rows in torch.randperm(len(data.x_train), generator=order).split(size):
            weight = len(rows[rank::world]) * world / len(rows)
            # A process without a row of the last batch takes part with weight 0.
            part = slice(rank, None, world) if weight else slice(1)
            mine = rows[part].to(self.fabric.device)
            x = data.x_train[mine]
            x = augment(x, data, self.training, count=len(rows), part=part, order=order)
            lengths = () if data.lengths_train is None else (data.lengths_train[mine],)
            logits = model(data.inputs(x), *lengths)
            loss = F.cross_entropy(
                logits, data.y_train[mine], self.weights, label_smoothing=smoothing
            )
            yield (loss if world == 1 else weight * loss), len(rows)

    def score(self, model: nn.Module, part: str) -> Score:
        x, y, lengths = (getattr(self.data, f"{name}_{part}") for name in ("x", "y", "lengths"))
        return Score(*evaluate(model, x, y, inputs=self.data.inputs, lengths=lengths))

    def probe(self) -> Tensor:
        return self.data.inputs(self.data.x_test[evenly_spaced(len(self.data.x_test), 512)])

    def guessing_loss(self) -> float:
        return math.log(len(self.data.classes))

    @torch.no_grad()
    def class_scores(self, model: nn.Module) -> dict[str, Any]:
        data = self.data
        dtype = next(model.parameters()).dtype
        model.eval()
        logits = _logits(
            model, data.x_test, lambda rows: _of_dtype(data.inputs(rows), dtype), data.lengths_test
        )
        good = logits.isfinite().all(1)
        found = confusion_matrix(data.y_test[good], logits[good].argmax(1), len(data.classes))
        return {"classes": list(data.classes), **scores_by_class(found, data.y_test)}


class LanguageModelling:
    """The next word of a text, by truncated back-propagation through time.

    The text runs in `batch_size` parallel streams, cut into pieces of `bptt` steps. The state is
    carried from piece to piece, the gradient is not. Validation and test run alike, so the words
    that do not fill the streams are left out, fewer than `batch_size`.
    """

    metric = "perplexity"

    def __init__(self, fabric: Fabric, data: Dataset, training: Training) -> None:
        self.fabric, self.training = fabric, training
        if training.batch_size % fabric.world_size:
            raise ValueError(
                f"training.batch_size must be a multiple of machine.devices for a text; got "
                f"{training.batch_size} streams for {fabric.world_size} devices"
            )
        self.data = data.to(fabric.device)

    @property
    def parts(self) -> tuple[str, ...]:
        return self.data.parts

    def losses(self, model: nn.Module, order: torch.Generator) -> Iterator[tuple[Tensor, int]]:
        hx = None
        rank, world = self.fabric.global_rank, self.fabric.world_size
        smoothing = self.training.label_smoothing
        for words, following in self._pieces("train"):
            logits, hx = model(words[rank::world], hx)
            hx = tree_map(torch.detach, hx)
            loss = _word_loss(logits, following[rank::world], label_smoothing=smoothing)
            yield loss, following.shape[1]

    @torch.no_grad()
    def score(self, model: nn.Module, part: str) -> Score:
        model.eval()
        hx, total, count = None, 0.0, 0
        for words, following in self._pieces(part):
            logits, hx = model(words, hx)
            total += _word_loss(logits, following).item() * following.shape[1]
            count += following.shape[1]
        loss = total / count
        return Score(loss, math.exp(loss) if loss < 700 else math.inf)

    def probe(self) -> Tensor:
        return next(self._pieces("test"))[0]

    def guessing_loss(self) -> float:
        return math.log(len(self.data.vocabulary))

    def class_scores(self, model: nn.Module) -> dict[str, Any]:
        return {}

    def _pieces(self, part: str) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = getattr(self.data, f"x_{part}"), getattr(self.data, f"y_{part}")
        size, steps = self.training.batch_size, self.training.bptt
        for words, following in stream_batches(x, y, batch_size=size, steps=steps):
            yield self.data.inputs(words), following


def make_task(fabric: Fabric, data: Dataset, training: Training) -> DataTask:
    """Return the task that the data set is.

    Raises:
        ValueError: the recipe rotates vectors or moves images that the data do not have.

    Example:
        >>> from fixpoint.training import Recipe, make_task, prepare
        >>> from fixpoint.training.experiment import make_fabric
        >>> recipe = Recipe()
        >>> task = make_task(make_fabric(recipe.machine), prepare(recipe).data, recipe.training)
        >>> type(task).__name__
        'Classification'
    """
    check_augmentation(training, data)
    kind: Any = LanguageModelling if data.kind == "language-model" else Classification
    return kind(fabric, data, training)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    batch_size: int = 512,
    inputs: Callable[[Tensor], Tensor] = lambda rows: rows,
    lengths: Tensor | None = None,
) -> tuple[float, float]:
    """Return the mean loss and accuracy in percent; windows with non-finite logits count as wrong,
    and are left out of the loss. `inputs` converts stored rows to what the model takes.

    Example:
        >>> import torch
        >>> from fixpoint.training import evaluate
        >>> loss, accuracy = evaluate(torch.nn.Identity(), 9 * torch.eye(3), torch.arange(3))
        >>> round(loss, 4), accuracy
        (0.0002, 100.0)
    """
    model.eval()
    logits = _logits(model, x, inputs, lengths, batch_size)
    good = logits.isfinite().all(1)
    loss = F.cross_entropy(logits[good], y[good]).item()
    right = good & (logits.argmax(1) == y)
    return loss, 100 * right.sum().item() / len(right)


def _logits(
    model: nn.Module,
    x: Tensor,
    inputs: Callable[[Tensor], Tensor],
    lengths: Tensor | None,
    batch_size: int = 512,
) -> Tensor:
    """Return logits, (N, C), of stored rows."""
    parts = [x.split(batch_size)] + ([] if lengths is None else [lengths.split(batch_size)])
    return torch.cat([model(inputs(rows), *ends) for rows, *ends in zip(*parts, strict=True)])


def _of_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values in the dtype of the weights; word ids as they are."""
    return x.to(dtype) if x.is_floating_point() else x


def balanced_weights(y: Tensor, classes: int) -> Tensor:
    """Return the weight of each class, inverse to its number of windows; their mean over windows is
    1.

    >>> balanced_weights(torch.tensor([0, 0, 0, 1]), 2).tolist()
    [0.6666666865348816, 2.0]
    """
    counts = y.bincount(minlength=classes)
    return len(y) / ((counts > 0).sum() * counts.clamp_min(1)).float()


def confusion_matrix(y: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """Return windows of each class by the class that was predicted, (C, C): row the true one.

    >>> confusion_matrix(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), 2).tolist()
    [[1, 1], [0, 1]]
    """
    return (y * classes + predicted).bincount(minlength=classes**2).reshape(classes, classes)


def scores_by_class(confusion: Tensor, y: Tensor) -> dict[str, Any]:
    """Return recall and F1 of each class in percent, None of a class without windows, and their
    means.

    Args:
        confusion: see `confusion_matrix`; windows without a prediction are not in it.
        y: true class of every window.

    >>> found = scores_by_class(torch.tensor([[1, 1], [0, 1]]), torch.tensor([0, 0, 1]))
    >>> found["recall"], round(found["macro_f1"], 1)
    ([50.0, 100.0], 66.7)
    """
    true = y.bincount(minlength=len(confusion)).double()
    right, named = confusion.diag().double(), confusion.sum(0).double()
    recall = 100 * right / true
    f1 = 200 * right / (true + named)
    there = true > 0

    def listed(values: Tensor) -> list[float | None]:
        return [v if known else None for v, known in zip(values.tolist(), there, strict=True)]

    return {
        "confusion": confusion.tolist(),
        "recall": listed(recall),
        "f1": listed(f1),
        "macro_recall": recall[there].mean().item(),
        "macro_f1": f1[there].mean().item(),
    }


def _word_loss(logits: Tensor, following: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross entropy of logits (B, T, V) and the words (B, T) that came."""
    return F.cross_entropy(
        logits.flatten(0, 1), following.flatten(), label_smoothing=label_smoothing
    )
