"""Optimizers and schedules of the learning rate, by the names of a recipe."""

from __future__ import annotations

import math
import re
from typing import Any

from torch import nn, optim
from torch.optim import lr_scheduler

from fixpoint.training.recipe.schema import Training

# V and U or their factors, weight_hh of torch, eta of the learned steps; parametrized or not.
_RECURRENT = re.compile(r"(^|\.)([UV]([12]|\.\w+)?|weight_hh\w*|eta)(\.original\d*)?$")


def make_optimizer(model: nn.Module, training: Training) -> optim.Optimizer:
    """Return the optimizer that a recipe names, for all parameters of a model."""
    options: dict[str, Any] = {"lr": training.lr, "weight_decay": training.weight_decay}
    groups = _groups(model, training)
    if training.optimizer == "sgd":
        return optim.SGD(groups, momentum=training.momentum, **options)
    kind = optim.Adam if training.optimizer == "adam" else optim.AdamW
    return kind(groups, **options)


def _groups(model: nn.Module, training: Training) -> list[dict[str, Any]]:
    """Return one group of all parameters, or a second one of those with a learning rate of their
    own.
    """
    if training.recurrent_lr == 1:
        return [{"params": list(model.parameters())}]
    names = [name for name, _ in model.named_parameters() if _RECURRENT.search(name)]
    if not names:
        raise ValueError(
            "training.recurrent_lr is of recurrent matrices named U, V or weight_hh, and of eta; "
            "the model has none: leave it out"
        )
    own = [p for name, p in model.named_parameters() if name in names]
    rest = [p for name, p in model.named_parameters() if name not in names]
    lr = training.recurrent_lr * training.lr
    return [{"params": rest}, {"params": own, "lr": lr}]


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
        """Step after an epoch with that validation loss."""
        if self.by_loss:
            self.scheduler.step(valid_loss)  # type: ignore[arg-type]
        else:
            self.scheduler.step()
