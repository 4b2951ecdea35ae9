"""A trained classifier as plain arrays, the ones that generated programs compute with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fixpoint.data import Dataset, in_units
from fixpoint.export.layers import read_layers
from fixpoint.export.normalization import InputScale
from fixpoint.export.recurrence import Observer, Recurrence
from fixpoint.models import LastStateClassifier, RecurrentDropout
from fixpoint.training import Trained, load_trained
from fixpoint.training.engine.checkpoint import Checkpoint
from fixpoint.training.recipe.toml import RECIPE, load_recipe
from fixpoint.training.results.store import read_file


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """A recurrent classifier of windows in the units of the sensor; all arrays are float32.

    Samples are normalized; then the layers, started at 0; scores = head h_T + head_bias of the
    last layer.

    Args:
        inputs: the normalization.
        layers: each from its x_t and h_{t-1} to h_t, which is x_t of the next one.
        head: (C, n). head_bias: (C,).
        classes: name of each class.
        channels: name of each channel, or empty.
        timesteps: T of a window.
        step: samples from one window of a recording to the next.

    Example:
        >>> import torch
        >>> from fixpoint.export import InputScale, Network, Recurrence
        >>> recurrence = Recurrence(
        ...     recurrent=(torch.zeros(2, 2),), input=(torch.eye(2),), bias=torch.zeros(1, 2),
        ...     nonlinearity="relu", leak=torch.ones(1, 1), gain=torch.ones(1, 1),
        ... )
        >>> network = Network(
        ...     inputs=InputScale.identity(2), layers=(recurrence,), head=torch.eye(2),
        ...     head_bias=torch.zeros(2), classes=("a", "b"), timesteps=3,
        ... )
        >>> network.scores(torch.ones(1, 3, 2))
        tensor([[1., 1.]])
    """

    inputs: InputScale
    layers: tuple[Recurrence, ...]
    head: Tensor
    head_bias: Tensor
    classes: tuple[str, ...]
    channels: tuple[str, ...] = ()
    timesteps: int
    step: int | None = None

    @property
    def input_size(self) -> int:
        """Channels d of the sensor."""
        return self.inputs.channels

    @property
    def state_size(self) -> int:
        """Numbers of the state, of all layers."""
        return sum(layer.state_size for layer in self.layers)

    @property
    def own_steps(self) -> tuple[str, ...]:
        """Names of the constants that differ from step to step: there are T steps at most then."""
        own = {
            "normalization": self.inputs.rows > 1,
            "step sizes": any(layer.timesteps > 1 for layer in self.layers),
        }
        return tuple(name for name, is_own in own.items() if is_own)

    @property
    def multiplications(self) -> int:
        """Products of a weight and a value in one time step, without those of the scores."""
        own = 0 if self.inputs.is_identity else self.input_size
        return own + sum(layer.multiplications for layer in self.layers)

    def advance(
        self, sample: Tensor, state: Tensor, t: int | Tensor, watch: Observer | None = None
    ) -> Tensor:
        """Return the state, (B, state_size), after a sample, (B, d), at time step t.

        Args:
            watch: called with LAYER.NAME and value of each intermediate result.
        """
        x, states = self.inputs.apply(sample, t), []
        sizes = [layer.state_size for layer in self.layers]
        for i, (layer, part) in enumerate(zip(self.layers, state.split(sizes, 1), strict=True)):

            def named(name: str, value: Tensor, layer: int = i) -> Tensor:
                return value if watch is None else watch(f"{layer}.{name}", value)

            states.append(layer.step(x, part, t, named))
            x = states[-1][:, : layer.size]
        return torch.cat(states, 1)

    def output(self, state: Tensor) -> Tensor:
        """Return h of the last layer, (B, n)."""
        last = self.layers[-1]
        start = self.state_size - last.state_size
        return state[:, start : start + last.size]

    def scores(self, x: Tensor) -> Tensor:
        """Return scores, (B, C), of windows x, (B, T, d), in the units of the sensor."""
        x = x.to(self.head.dtype)
        state = x.new_zeros(len(x), self.state_size)
        for t, sample in enumerate(x.unbind(1)):
            state = self.advance(sample, state, t)
        return F.linear(self.output(state), self.head, self.head_bias)

    def to(self, dtype: torch.dtype) -> Network:
        """Return the same with all arrays in another precision, apart from any graph."""
        return replace(
            self,
            inputs=self.inputs.to(dtype),
            layers=tuple(layer.to(dtype) for layer in self.layers),
            head=self.head.detach().to(dtype),
            head_bias=self.head_bias.detach().to(dtype),
        )


def read_network(
    run: Trained | Path | str, *, fold: bool = True, equilibria: bool = False
) -> Network:
    """Return the network of a finished training run.

    Args:
        run: what `load_trained` gives, or the folder of a run or of one of its checkpoints.
        fold: multiply the factors of the Jordan map together, (I + U) V, and those of a matrix
            that is smaller as a whole. Else they are applied one after the other, as trained.
        equilibria: whether layers that are solved to a tolerance are read too, as a graph can
            hold them.

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
            f"{run.form.name} holds words; a device program takes windows of a sensor's values: "
            "export a run on vectors, as har2"
        )
    if run.form.lengths:
        raise ValueError(
            f"{run.form.name} has sequences of different lengths; a device program classifies "
            "windows of one length: cut the sequences into such windows, and train on these"
        )
    layer: Any = model.layer
    if isinstance(layer, RecurrentDropout):
        layer = layer.layer
    with torch.no_grad():
        network = Network(
            inputs=InputScale.of(run.form.normalization),
            layers=read_layers(layer, run.form.timesteps, fold=fold, equilibria=equilibria),
            head=model.head.weight,
            head_bias=model.head.bias,
            classes=run.form.classes,
            channels=run.form.channels,
            timesteps=run.form.timesteps,
            step=run.recipe.windows.step,
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


def sensor_windows(data: Dataset, part: str) -> Tensor:
    """Return the windows of a part of data that are not normalized, (N, T, d) float32 in their
    units.
    """
    windows: Tensor = getattr(data, f"x_{part}")
    return torch.cat([in_units(data, rows).float() for rows in windows.split(1024)])
