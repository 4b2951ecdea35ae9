"""Optimizers and schedules of the learning rate, by the names of a recipe."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import optim
from torch.nn import Parameter
from torch.optim import lr_scheduler

from fixpoint.training.recipe.schema import Training


def make_optimizer(parameters: Iterable[Parameter], training: Training) -> optim.Optimizer:
    """The optimizer that a recipe names."""
    options: dict[str, Any] = {"lr": training.lr, "weight_decay": training.weight_decay}
    if training.optimizer == "sgd":
        return optim.SGD(parameters, momentum=training.momentum, **options)
    kind = optim.Adam if training.optimizer == "adam" else optim.AdamW
    return kind(parameters, **options)


class Schedule:
    """The learning rate after each epoch."""

    def __init__(self, optimizer: optim.Optimizer, training: Training) -> None:
        self.by_loss = training.schedule == "plateau"
        self.scheduler: lr_scheduler.LRScheduler
        if training.schedule == "halve":
            period = training.halve_every or max(1, math.ceil(training.epochs / 3))
            self.scheduler = lr_scheduler.StepLR(optimizer, period, gamma=0.5)
        elif training.schedule == "cosine":
            self.scheduler = lr_scheduler.CosineAnnealingLR(optimizer, training.epochs)
        elif training.schedule == "plateau":
            self.scheduler = lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.5, patience=training.patience
            )
        else:
            self.scheduler = lr_scheduler.ConstantLR(optimizer, factor=1.0)

    def step(self, valid_loss: float | None) -> None:
        """After an epoch with that validation loss."""
        if self.by_loss:
            self.scheduler.step(valid_loss)  # type: ignore[arg-type]
        else:
            self.scheduler.step()
