"""Short training that records the quantities of the paper's hypotheses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fixpoint.analysis.training_history import History
from fixpoint.training.engine.fit import fit
from fixpoint.training.engine.tasks import Score, evaluate
from fixpoint.training.experiment import make_fabric
from fixpoint.training.recipe.schema import Machine, Training


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
    """Train a classifier with Adam at a constant rate, and keep its course.

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

    Raises:
        TypeError: x or y is not a tensor.
        ValueError: y is not an integer for each sample of x.

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
    _check("", x, y)
    if test:
        _check("test ", *test)
    training = Training(
        epochs=epochs, batch_size=batch_size, lr=lr, clip=clip, seed=seed, schedule="constant"
    )
    task = _Labelled(x, y, test or (x, y), batch_size)
    snapshots, watched = [], []

    @torch.no_grad()
    def observe() -> dict[str, Any]:
        model.eval()
        watched.append(watch(model))
        snapshots.append(nn.utils.parameters_to_vector(model.parameters()).clone())
        return {}

    losses, tested = [task.score(model, "train").loss], [task.score(model, "test")]
    observe()
    fabric = make_fabric(Machine(device=x.device.type))  # type: ignore[arg-type]
    for epoch in fit(fabric, model, task, training, observe=observe):
        losses.append(epoch.train_loss)
        tested.append(Score(epoch.test_loss, epoch.accuracy or 0.0))
    test_loss, accuracy = torch.tensor(tested).T if test else (None, None)
    return History(torch.tensor(losses), test_loss, accuracy, torch.stack(snapshots), watched)


def _check(part: str, x: Any, y: Any) -> None:
    for name, value in (("x", x), ("y", y)):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{part}{name} must be a tensor; got {type(value).__name__}: "
                f"torch.as_tensor({name}) makes one"
            )
    if y.shape != x.shape[:1] or y.dtype != torch.int64:
        raise ValueError(
            f"{part}y must be a class, int64, for each of the {len(x)} samples of x; got "
            f"{tuple(y.shape)}, {y.dtype}"
        )


class _Labelled:
    """Inputs of any shape with a class each, as a task of `fit`."""

    metric = "accuracy"
    parts = ("train", "test")

    def __init__(self, x: Tensor, y: Tensor, test: tuple[Tensor, Tensor], batch_size: int) -> None:
        self.data = {"train": (x, y), "test": test}
        self.batch_size = batch_size

    def losses(self, model: nn.Module, order: torch.Generator) -> Iterator[tuple[Tensor, int]]:
        x, y = self.data["train"]
        for rows in torch.randperm(len(x), generator=order).split(self.batch_size):
            yield F.cross_entropy(model(x[rows]), y[rows]), len(rows)

    def score(self, model: nn.Module, part: str) -> Score:
        return Score(*evaluate(model, *self.data[part]))
