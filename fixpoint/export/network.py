"""A trained classifier as plain arrays: what the generated programs compute with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fixpoint.data import Dataset, normalize
from fixpoint.export.layers import Recurrence, read_layer, row
from fixpoint.models import LastStateClassifier, RecurrentDropout
from fixpoint.training import Trained, load_trained, prepare
from fixpoint.training.engine.checkpoint import Checkpoint
from fixpoint.training.recipe.toml import RECIPE, load_recipe
from fixpoint.training.results.store import read_file


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """A recurrent classifier of windows in the units of the sensor; all arrays are float32.

    x' = scale * x + shift, asinh of it where `asinh` is set; then the recurrence, started at 0;
    scores = head h_T + head_bias.

    Args:
        recurrence: from x'_t and h_{t-1} to h_t.
        head: (C, n). head_bias: (C,).
        scale, shift: (T, d), or (1, d) where all time steps have the same.
        asinh: whether x' is the inverse hyperbolic sine.
        classes: name of each class.
        timesteps: T of a window.

    Example:
        >>> import torch
        >>> from fixpoint.export import Network, Recurrence
        >>> recurrence = Recurrence(
        ...     recurrent=(torch.zeros(2, 2),), input=(torch.eye(2),), bias=torch.zeros(1, 2),
        ...     nonlinearity="relu", leak=torch.ones(1, 1), gain=torch.ones(1, 1),
        ... )
        >>> network = Network(
        ...     recurrence=recurrence, head=torch.eye(2), head_bias=torch.zeros(2),
        ...     scale=torch.ones(1, 2), shift=torch.zeros(1, 2), classes=("a", "b"), timesteps=3,
        ... )
        >>> network.scores(torch.ones(1, 3, 2))
        tensor([[1., 1.]])
    """

    recurrence: Recurrence
    head: Tensor
    head_bias: Tensor
    scale: Tensor
    shift: Tensor
    asinh: bool = False
    classes: tuple[str, ...]
    timesteps: int

    @property
    def input_size(self) -> int:
        """Channels d of the sensor."""
        return self.scale.shape[1]

    @property
    def hidden_size(self) -> int:
        """Units n of the state."""
        return self.head.shape[1]

    @property
    def bounded(self) -> bool:
        """Whether time steps have their own normalization or step sizes: T steps at most."""
        return len(self.scale) > 1 or self.recurrence.timesteps > 1

    @property
    def normalizes(self) -> bool:
        """Whether scale and shift change anything."""
        return bool((self.scale != 1).any() or (self.shift != 0).any())

    @property
    def multiplications(self) -> int:
        """Products of a weight and a value in one time step, without those of the scores."""
        return self.input_size * self.normalizes + self.recurrence.multiplications

    def normalized(self, x: Tensor, t: int | Tensor) -> Tensor:
        """x' (B, d) of x (B, d), the input of time step t."""
        x = x * row(self.scale, t) + row(self.shift, t)
        return x.asinh() if self.asinh else x

    def scores(self, x: Tensor) -> Tensor:
        """Scores, (B, C), of windows x, (B, T, d), in the units of the sensor."""
        h = x.new_zeros(len(x), self.hidden_size)
        for t, x_t in enumerate(x.unbind(1)):
            h = self.recurrence.step(self.normalized(x_t, t), h, t)
        return F.linear(h, self.head, self.head_bias)

    def to(self, dtype: torch.dtype) -> Network:
        """The same with all arrays in another precision, apart from any graph."""
        tensors = {n: value for n, value in vars(self).items() if isinstance(value, Tensor)}
        own: dict[str, Any] = {n: value.detach().to(dtype) for n, value in tensors.items()}
        return replace(self, recurrence=self.recurrence.to(dtype), **own)


def read_network(run: Trained | Path | str, *, fold: bool = True) -> Network:
    """The network of a finished training run.

    Args:
        run: what `load_trained` gives, or the folder of a run or of one of its checkpoints.
        fold: multiply the factors of the Jordan cell together, (I + U) V, and those of a matrix
            that is smaller as a whole. Else they are applied one after the other, as trained.

    Raises:
        ValueError: the run is not finished, or its model has no such form; the message says which
            have.
        OSError: a file, or that of the data set, is not there.
    """
    if not isinstance(run, Trained):
        check_finished(Path(run).expanduser())
        run = load_trained(run)
    model = run.model
    if not isinstance(model, LastStateClassifier) or model.embedding is not None:
        raise ValueError(
            f"{run.data.name} holds words; a device program takes windows of a sensor's values: "
            "export a run on vectors, as har2"
        )
    if run.data.lengths_train is not None:
        raise ValueError(
            f"{run.data.name} has sequences of different lengths; a device program classifies "
            "windows of one length: cut the sequences into such windows, and train on these"
        )
    layer: Any = model.layer
    if isinstance(layer, RecurrentDropout):
        layer = layer.layer
    timesteps = run.data.x_train.shape[1]
    with torch.no_grad():
        recurrence = read_layer(layer, timesteps, fold=fold)
        scale, shift, asinh = _normalization(run)
        network = Network(
            recurrence=recurrence,
            head=model.head.weight,
            head_bias=model.head.bias,
            scale=scale,
            shift=shift,
            asinh=asinh,
            classes=run.data.classes,
            timesteps=timesteps,
        )
        return network.to(torch.float32)


def check_finished(path: Path) -> None:
    """Refuse the folder of a run that is still to be trained; a checkpoint in it is taken as it is.

    Raises:
        ValueError: it has fewer epochs than its recipe, and no result.
    """
    if not (path / RECIPE).is_file():
        return
    done = Checkpoint(path).epochs
    epochs = load_recipe(str(path / RECIPE)).training.epochs
    records = path.parent / "runs.jsonl"
    known = [record["key"] for record in read_file(records)] if records.is_file() else []
    number = int(done[-1].name.removeprefix("epoch-")) if done else 0
    if number and number < epochs and path.resolve().name not in known:
        raise ValueError(
            f"{path} is not finished, it has {number} of {epochs} epochs: run `fixpoint train` "
            f"with its recipe and --out again, or export the checkpoint {done[-1]}"
        )


def raw_data(run: Trained) -> Dataset:
    """The data of a run in the units of the sensor, split as for the training."""
    return prepare(run.recipe.changed(normalize="none", rotate=0.0)).data


def _normalization(run: Trained) -> tuple[Tensor, Tensor, bool]:
    """scale and shift, (1, d) or (T, d), and whether asinh follows."""
    data = raw_data(run)
    if run.recipe.data.normalize != "none":
        data = normalize(data, run.recipe.data.normalize, late=True)
    size = (1, data.x_train.shape[2])
    scale, shift = (
        torch.full(size, float(default)) if value is None else torch.atleast_2d(value)
        for value, default in ((data.scale, 1), (data.shift, 0))
    )
    rows = max(len(scale), len(shift))
    return scale.expand(rows, size[1]), shift.expand(rows, size[1]), data.asinh
