"""The training loop, on Lightning Fabric."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from math import inf, isfinite, nan
from typing import Any, NamedTuple

import torch
from lightning_fabric import Fabric
from torch import nn

from fixpoint.training.engine.checkpoint import Checkpoint
from fixpoint.training.engine.optim import Schedule, make_optimizer
from fixpoint.training.engine.tasks import Score, Task
from fixpoint.training.recipe.schema import Training

LOST = Score(nan, nan)
"""Of a model whose weights are lost."""


class Epoch(NamedTuple):
    """Result of one epoch of training.

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


class PastEpoch(Epoch):
    """Epoch that an earlier process trained."""

    __slots__ = ()


def fit(
    fabric: Fabric,
    model: nn.Module,
    task: Task,
    training: Training,
    *,
    checkpoint: Checkpoint | None = None,
    observe: Callable[[], dict[str, Any]] = dict,
) -> Iterator[Epoch]:
    """Train and yield after each epoch.

    Order and rotations of the batches depend on `training.seed` alone. With a checkpoint that holds
    epochs, these are yielded first, as `PastEpoch`, and training continues after them, bit for bit
    as if it had not stopped. Training ends at the first loss that is not finite: the last epoch
    then has no score.

    Args:
        checkpoint: where to save after each epoch with a finite loss, before it is yielded.
        observe: called after each such epoch, gives further fields of `Epoch`.

    Raises:
        OSError: a checkpoint cannot be written; the one before it is kept.
    """
    optimizer = make_optimizer(model, training)
    wrapped, optimizer = fabric.setup(model, optimizer)
    schedule = Schedule(optimizer, training)
    order = torch.Generator().manual_seed(training.seed)
    state = {"optimizer": optimizer, "schedule": schedule.scheduler, "order": order}
    history: list[Epoch] = (
        [PastEpoch(**e) for e in checkpoint.load(fabric, model, state)] if checkpoint else []
    )
    yield from history
    while len(history) < training.epochs and not _stopped(history, task, training):
        start, lr = time.perf_counter(), optimizer.param_groups[0]["lr"]
        train_loss = _pass(fabric, wrapped, optimizer, task, order, training.clip)
        seconds = time.perf_counter() - start
        if not isfinite(train_loss):
            history.append(_epoch(len(history) + 1, train_loss, LOST, None, task, seconds, lr))
            yield history[-1]
            return
        valid = task.score(wrapped, "valid") if "valid" in task.parts else None
        schedule.step(valid.loss if valid else None)
        test = task.score(wrapped, "test")
        epoch = _epoch(len(history) + 1, train_loss, test, valid, task, seconds, lr)
        history.append(epoch._replace(**observe()))
        if checkpoint:
            best = valid is not None and best_epoch(history, task.metric) == len(history) - 1
            checkpoint.save(fabric, model, state, [e._asdict() for e in history], best=best)
        yield history[-1]


def _pass(
    fabric: Fabric,
    model: Any,
    optimizer: Any,
    task: Task,
    order: torch.Generator,
    clip: float | None,
) -> float:
    """Train on each batch once and return the mean loss, NaN or inf where a loss was not finite."""
    model.train()
    total, count = torch.zeros((), device=fabric.device), 0
    # Elsewhere the rest of the pass costs less than a wait for each loss, or others wait for it.
    may_leave = fabric.device.type == "cpu" and fabric.world_size == 1
    try:
        for loss, weight in task.losses(model, order):
            if may_leave and not isfinite(loss.item()):
                return loss.item()
            optimizer.zero_grad()
            fabric.backward(loss)
            if clip is not None:
                fabric.clip_gradients(model, optimizer, max_norm=clip, error_if_nonfinite=False)
            optimizer.step()
            total += loss.detach() * weight
            count += weight
    except torch.linalg.LinAlgError:
        if not may_leave:
            raise
        return nan  # a decomposition of weights that are huge or not finite
    mean: Any = fabric.all_reduce(total / count, reduce_op="mean")
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    return float(mean.item()) if finite else nan


def best_epoch(history: list[Epoch], metric: str) -> int:
    """Return the index of the first epoch with the best validation score."""
    sign = 1 if metric == "perplexity" else -1
    # A score of NaN is None once it has been through JSON.
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
