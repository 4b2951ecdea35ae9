"""A short training that keeps what the hypotheses of the paper are about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fixpoint.analysis.training_history import History


def record_training(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    test: tuple[Tensor, Tensor] | None = None,
    epochs: int = 10,
    batch_size: int = 128,
    lr: float = 1e-2,
    clip: float | None = None,
    seed: int = 0,
    watch: Callable[[nn.Module], Any] = lambda model: None,
) -> History:
    """Train a classifier with Adam and keep what the paper's hypotheses are about.

    A plain loop for short runs that are looked at closely; `fixpoint.training` trains for
    results.

    Args:
        model: logits (B, C) of x.
        x, y: inputs, first axis the samples, and classes (N,).
        test: the same of the test set.
        epochs: passes over the data.
        batch_size: samples a step.
        lr: learning rate of Adam.
        clip: largest 2-norm of the gradient, None for no limit.
        seed: of the order of the samples.
        watch: called with the model before training and after each epoch, without gradient.

    Source: H1 to H3 of Zhang, Kag, Sullivan, Saligrama (2019), Equilibrated Recurrent Neural
        Network, section 1.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import parameter_drift
        >>> from fixpoint.training import record_training
        >>> x = torch.randn(64, 2)
        >>> history = record_training(torch.nn.Linear(2, 2), x, (x[:, 0] > 0).long(), epochs=3)
        >>> history.parameters.shape, parameter_drift(history.parameters).to_last[-1].item()
        (torch.Size([4, 6]), 0.0)
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    order = torch.Generator().manual_seed(seed)
    tested, snapshots, watched = [], [], []
    losses = [_evaluate(model, x, y)[0]]

    def look() -> None:
        model.eval()
        with torch.no_grad():
            watched.append(watch(model))
            snapshots.append(nn.utils.parameters_to_vector(model.parameters()).clone())
        if test is not None:
            tested.append(_evaluate(model, *test))

    look()
    for _ in range(epochs):
        model.train()
        total = 0.0
        for rows in torch.randperm(len(x), generator=order).split(batch_size):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            total += loss.item() * len(rows)
        losses.append(total / len(x))
        look()
    test_loss, accuracy = torch.tensor(tested).T if tested else (None, None)
    return History(torch.tensor(losses), test_loss, accuracy, torch.stack(snapshots), watched)


@torch.no_grad()
def _evaluate(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Mean loss, and accuracy in percent."""
    model.eval()
    logits = torch.cat([model(rows) for rows in x.split(512)])
    return F.cross_entropy(logits, y).item(), 100 * (logits.argmax(1) == y).double().mean().item()
