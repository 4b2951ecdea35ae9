"""The training loop, on Lightning Fabric."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from math import inf
from typing import Any, NamedTuple

import torch
from lightning_fabric import Fabric
from torch import nn

from fixpoint.training.engine.checkpoint import Checkpoint
from fixpoint.training.engine.optim import Schedule, make_optimizer
from fixpoint.training.engine.tasks import Score, Task
from fixpoint.training.recipe.schema import Training


class Epoch(NamedTuple):
    """What one epoch of training came to.

    number: 1, 2, ..
    train_loss: mean over its batches, in training mode.
    test_loss, accuracy, perplexity: of the test part after it; accuracy in percent.
    seconds: training time, evaluation left out.
    lr: learning rate during the epoch.
    valid_loss, valid_score: of the validation part after it.
    iterations, residual: mean over test states, of a layer that solves for them.
    peak_memory_mib: so far.
    """

    number: int
    train_loss: float
    test_loss: float
    accuracy: float | None
    perplexity: float | None
    seconds: float
    lr: float
    valid_loss: float | None = None
    valid_score: float | None = None
    iterations: float | None = None
    residual: float | None = None
    peak_memory_mib: float | None = None


def fit(
    fabric: Fabric,
    model: nn.Module,
    task: Task,
    training: Training,
    *,
    checkpoint: Checkpoint | None = None,
    observe: Callable[[], dict[str, Any]] = dict,
) -> Iterator[Epoch]:
    """Train, and yield after each epoch.

    Order and rotations of the batches depend on `training.seed` alone. With a checkpoint that holds
    epochs, these are yielded first and training goes on after them, bit for bit as if it had not
    stopped.

    Args:
        checkpoint: where to save after each epoch, before it is yielded.
        observe: called after each epoch, gives further fields of `Epoch`.

    Raises:
        OSError: a checkpoint cannot be written; the one before it is kept.
    """
    optimizer = make_optimizer(model.parameters(), training)
    wrapped, optimizer = fabric.setup(model, optimizer)
    schedule = Schedule(optimizer, training)
    order = torch.Generator().manual_seed(training.seed)
    state = {"optimizer": optimizer, "schedule": schedule.scheduler, "order": order}
    history = [Epoch(**e) for e in checkpoint.load(fabric, model, state)] if checkpoint else []
    yield from history
    while len(history) < training.epochs and not _stopped(history, task, training):
        start, lr = time.perf_counter(), optimizer.param_groups[0]["lr"]
        wrapped.train()
        total, count = torch.zeros((), device=fabric.device), 0
        for loss, weight in task.losses(wrapped, order):
            optimizer.zero_grad()
            fabric.backward(loss)
            if training.clip is not None:
                fabric.clip_gradients(
                    wrapped, optimizer, max_norm=training.clip, error_if_nonfinite=False
                )
            optimizer.step()
            total += loss.detach() * weight
            count += weight
        mean: Any = fabric.all_reduce(total / count, reduce_op="mean")
        seconds = time.perf_counter() - start
        valid = task.score(wrapped, "valid") if task.data.x_valid is not None else None
        schedule.step(valid.loss if valid else None)
        test = task.score(wrapped, "test")
        epoch = _epoch(len(history) + 1, mean.item(), test, valid, task, seconds, lr)
        history.append(epoch._replace(**observe()))
        if checkpoint:
            best = valid is not None and best_epoch(history, task.metric) == len(history) - 1
            checkpoint.save(fabric, model, state, [e._asdict() for e in history], best=best)
        yield history[-1]


def best_epoch(history: list[Epoch], metric: str) -> int:
    """Index of the first epoch with the best validation score."""
    sign = 1 if metric == "perplexity" else -1
    # A score that is no number is None once it has been through JSON.
    scores = [inf if e.valid_score is None else sign * e.valid_score for e in history]
    return scores.index(min(scores))


def _stopped(history: list[Epoch], task: Task, training: Training) -> bool:
    if training.stop_after is None or not history:
        return False
    return len(history) - 1 - best_epoch(history, task.metric) >= training.stop_after


def _epoch(
    number: int,
    train_loss: float,
    test: Score,
    valid: Score | None,
    task: Task,
    seconds: float,
    lr: float,
) -> Epoch:
    values = {"accuracy": None, "perplexity": None, task.metric: test.value}
    return Epoch(
        number=number,
        train_loss=train_loss,
        test_loss=test.loss,
        seconds=seconds,
        lr=lr,
        valid_loss=valid.loss if valid else None,
        valid_score=valid.value if valid else None,
        **values,
    )
