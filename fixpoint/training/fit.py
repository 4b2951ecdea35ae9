"""The training loop of a classifier, on Lightning Fabric."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F

from fixpoint.data import Dataset


class Epoch(NamedTuple):
    """One epoch: mean training loss, test loss and accuracy after it, training time in seconds."""

    number: int
    train_loss: float
    test_loss: float
    accuracy: float
    seconds: float


def fit(
    fabric: Fabric,
    model: nn.Module,
    data: Dataset,
    *,
    epochs: int,
    batch_size: int,
    lr: float,
    halve_every: int,
    seed: int,
) -> Iterator[Epoch]:
    """Train with Adam, the learning rate halved every so many epochs; yield after each epoch.

    Order of the batches depends on `seed` alone. Batches are index slices of tensors that lie on
    the device.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    wrapped, optimizer = fabric.setup(model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, halve_every, gamma=0.5)
    order = torch.Generator().manual_seed(seed)
    data = data.to(fabric.device)
    x, y = data.x_train, data.y_train
    for number in range(1, epochs + 1):
        start = time.perf_counter()
        wrapped.train()
        total = torch.zeros((), device=fabric.device)
        for rows in torch.randperm(len(x), generator=order).split(batch_size):
            rows = rows.to(fabric.device)
            loss = F.cross_entropy(wrapped(data.inputs(x[rows])), y[rows])
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            total += loss.detach() * len(rows)
        schedule.step()
        train_loss = (total / len(x)).item()
        seconds = time.perf_counter() - start
        test = evaluate(wrapped, data.x_test, data.y_test, inputs=data.inputs)
        yield Epoch(number, train_loss, *test, seconds)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    batch_size: int = 512,
    inputs: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> tuple[float, float]:
    """Mean loss and accuracy in percent; windows with non-finite logits count as wrong, and are
    left out of the loss. `inputs` makes of stored rows what the model takes."""
    model.eval()
    logits = torch.cat([model(inputs(rows)) for rows in x.split(batch_size)])
    good = logits.isfinite().all(1)
    loss = F.cross_entropy(logits[good], y[good]).item()
    right = good & (logits.argmax(1) == y)
    return loss, 100 * right.double().mean().item()
