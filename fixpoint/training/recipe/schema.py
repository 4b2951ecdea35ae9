"""A recipe: everything that decides the outcome of a training run, as typed values."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

from fixpoint._messages import unknown_name
from fixpoint.data import fingerprint
from fixpoint.training.recipe.coerce import check_value, coerce
from fixpoint.training.recipe.defaults import fill_defaults
from fixpoint.training.recipe.names import run_label
from fixpoint.training.recipe.plugins import plugin_content


def key(default: Any, help: str, *, low: float | None = None, below: float | None = None) -> Any:
    """Return a field with its help, and the range low <= value < below of numbers."""
    return field(default=default, metadata={"help": help, "low": low, "below": below})


@dataclass(frozen=True, kw_only=True)
class Data:
    """Data set, its normalization and its parts."""

    dataset: str = key("har2-sample", "data set, a name in fixpoint.data.DATASETS")
    normalize: Literal["column", "channel", "asinh", "none"] = key(
        "column",
        "zero mean, unit s.d. for each (time step, channel) or each channel; asinh about the "
        "median of each channel; or none",
    )
    validation: float = key(
        0.0,
        "fraction of the training part held out for validation, if the data set has no such part",
        low=0,
        below=1,
    )


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Cutting of a long recording into windows; all None for data that are windows already."""

    window: int | None = key(None, "samples of a window of a recording", low=1)
    step: int | None = key(
        None, "samples from one window to the next; half a window if not given", low=1
    )
    label: str | None = key(None, "column of the class of each sample")
    subject: str | None = key(
        None, "column of the person; of a folder the name of its file or folder if not given"
    )
    time: str | None = key(None, "column of the time, by which gaps are noticed")
    channels: tuple[str, ...] = key((), "columns to learn from; all other numbers if not given")
    fill: Literal["none", "hold", "linear"] = key(
        "none",
        "hold or linear: fill missing values by the last one, or by a line between neighbors; "
        "none refuses them",
    )


@dataclass(frozen=True, kw_only=True)
class Model:
    """Model and its options. Options that are None take the model's own default."""

    model: str = key("ernn", "model, as ernn, rnn, lstm, gru: a name in fixpoint.training.LAYERS")
    hidden: int = key(80, "hidden units", low=1)
    num_layers: int = key(1, "recurrent layers, each reading the states of the one before", low=1)
    nonlinearity: str | None = key(None, "of the layer: relu, tanh, ...")
    map: str | None = key(None, "map of ernn")
    solver: str | None = key(None, "solver of ernn")
    max_iter: int | None = key(None, "updates of the solver a time step (K of the paper)", low=1)
    backward: str | None = key(None, "backward of ernn: unrolled, implicit or phantom")
    rtol: float | None = key(
        None, "relative tolerance of a solver that has one; atol is a tenth of it", low=0
    )
    eta: float | None = key(None, "start of the learned steps of inexact-newton")
    init: str | None = key(
        None,
        "start of weights other than the model's own; ernn with the self-feedback or linear map: "
        "normal, or identity for V = I - U; lstm, gru, ugrnn: chrono, gates that remember up to "
        "the number of time steps (of a text, training.bptt)",
    )
    input_gain: float | None = key(
        None, "factor of W at the start, with init = identity; 1 if not given", low=1e-30
    )
    recurrent_gain: float | None = key(
        None,
        "factor of V and of the factors of U of the jordan cell at the start; 1 if not given",
        low=1e-30,
    )
    bound: float | None = key(
        None, "bound on ||U||_2 of the self-feedback and linear maps; 0 leaves U free", low=0
    )
    rank: int | None = key(None, "rank of U of the Jordan map, 0 for none", low=0)
    reflections: int | None = key(None, "Householder reflections of spectralrnn", low=1)
    capacity: int | None = key(None, "layers of rotations of eurnn", low=1)
    tied: bool = key(False, "language models: use the embedding as the output weights")
    word_frequencies: bool = key(
        False, "language models: start the output bias at the logarithms of the words' frequencies"
    )
    input_dropout: float = key(0.0, "fraction of the layer's inputs dropped", low=0, below=1)
    weight_dropout: float = key(
        0.0, "fraction of the recurrent weights dropped, one mask a sequence", low=0, below=1
    )
    plugins: tuple[str, ...] = key(
        (), "Python files or modules that register maps, solvers or models of your own"
    )
    output_dropout: float = key(0.0, "fraction of the layer's outputs dropped", low=0, below=1)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Optimizer, learning rate and length of the training."""

    epochs: int = key(6, "passes over the training part", low=1)
    batch_size: int = key(128, "windows a step, or parallel streams of a text", low=1)
    optimizer: Literal["adam", "adamw", "sgd"] = key("adam", "adam, adamw or sgd")
    lr: float = key(1e-2, "learning rate at the start, > 0", low=1e-30)
    recurrent_lr: float = key(
        1.0,
        "factor of the learning rate for the recurrent matrices (V, U) and the learned steps (eta)",
        low=0,
    )
    momentum: float = key(0.0, "of sgd", low=0, below=1)
    weight_decay: float = key(0.0, "L2 penalty (adam, sgd) or decoupled decay (adamw)", low=0)
    schedule: Literal["halve", "cosine", "plateau", "constant"] = key(
        "halve", "halve, cosine, plateau or constant: how the learning rate falls"
    )
    halve_every: int | None = key(
        None, "halve: epochs after which it is halved; a third of them if not given", low=1
    )
    halve_choices: tuple[int, ...] = key(
        (), "halve: periods to choose from on the validation part, before training on all", low=1
    )
    patience: int = key(
        2, "plateau: epochs without a lower validation loss before it is halved", low=0
    )
    clip: float | None = key(None, "bound on the 2-norm of the gradient", low=1e-30)
    rotate: float = key(
        0.0,
        "degrees: the vectors of each training window, as accelerations, are turned about a random "
        "axis by an angle of 0 up to this, differently at each use",
        low=0,
        below=181,
    )
    move: int = key(
        0,
        "pixels: each training image is moved by 0 up to as many rows and columns, differently at "
        "each use",
        low=0,
    )
    class_weights: Literal["none", "balanced"] = key(
        "none", "balanced weighs each class in the loss by 1 / its number of training windows"
    )
    label_smoothing: float = key(0.0, "of the cross entropy", low=0, below=1)
    stop_after: int | None = key(
        None, "stop after this many epochs without a better validation score", low=1
    )
    bptt: int = key(300, "text: time steps that a gradient goes back", low=1)
    seed: int = key(0, "seed of weights, order of the batches and dropout", low=0, below=2**63)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Device, its number and precision."""

    device: Literal["cpu", "cuda", "mps"] = key("cpu", "cpu, cuda or mps")
    devices: int = key(1, "processes, each with a device and its part of every batch", low=1)
    precision: Literal["32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"] = (
        key("32-true", "32-true, bf16-mixed, 64-true, ..., as in Lightning Fabric")
    )


SECTIONS: dict[str, type] = {
    "data": Data,
    "windows": Windows,
    "model": Model,
    "training": Training,
    "machine": Machine,
}
"""The sections of a recipe. No two have a key in common, so a key names its section."""

SECTION_OF = {f.name: section for section, kind in SECTIONS.items() for f in fields(kind)}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Recipe of a run: all that decides its outcome.

    Raises:
        ValueError: a value is out of its range, or two do not go together.

    Example:
        >>> from fixpoint.training import Recipe
        >>> recipe = Recipe().changed(lr=0.005, model="lstm")
        >>> recipe.training.lr, recipe.model.model
        (0.005, 'lstm')
    """

    data: Data = Data()
    windows: Windows = Windows()
    model: Model = Model()
    training: Training = Training()
    machine: Machine = Machine()

    def __post_init__(self) -> None:
        for name, kind in SECTIONS.items():
            for f in fields(kind):
                check_value(f"{name}.{f.name}", getattr(getattr(self, name), f.name), f.metadata)
        _check_together(self)

    @property
    def flat(self) -> dict[str, Any]:
        """All keys and values as JSON has them, without the sections."""
        parts = (asdict(getattr(self, section)) for section in SECTIONS)
        values = {name: value for part in parts for name, value in part.items()}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}

    @cached_property
    def key(self) -> str:
        """Name of the recipe: equal recipes (and equal files of a user's own) have equal keys.

        Computed from the values that differ from the defaults, so that a new option does not change
        old keys, with those of an ERNN filled in, so that a default that is given changes none.
        """
        full = replace(self, model=fill_defaults(self.model))
        text = json.dumps(full.differing, sort_keys=True) + fingerprint(self.data.dataset)
        text += plugin_content(self.model.plugins)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def differing(self) -> dict[str, Any]:
        """The keys whose values are not the defaults."""
        return {name: value for name, value in self.flat.items() if value != DEFAULTS[name]}

    @property
    def label(self) -> str:
        """Short name of what is compared, as ERNN K=1 (inexact Newton, Jordan)."""
        return run_label(self.flat)

    def changed(self, **changes: Any) -> Recipe:
        """Return this recipe with other values of some keys, of the right type each.

        Raises:
            ValueError, TypeError: a key is unknown, or a value has the wrong type or range.
        """
        parts: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            section, name = find_key(name)
            parts.setdefault(section, {})[name] = coerce(
                f"{section}.{name}", value, SECTIONS[section], name
            )
        return replace(
            self, **{name: replace(getattr(self, name), **part) for name, part in parts.items()}
        )


def find_key(name: str) -> tuple[str, str]:
    """Return the section and key of `key` or `section.key`.

    Raises:
        ValueError: there is none; the nearest is named.
    """
    section, dot, rest = name.rpartition(".")
    section = section.removeprefix("data.")
    if dot and section not in SECTIONS:
        raise ValueError(unknown_name("section", section, SECTIONS))
    known = [k for k, owner in SECTION_OF.items() if not dot or owner == section]
    if rest not in known:
        raise ValueError(unknown_name(f"key of {section}" if dot else "key", rest, known))
    return SECTION_OF[rest], rest


def _check_together(recipe: Recipe) -> None:
    t = recipe.training
    if t.momentum and t.optimizer != "sgd":
        raise ValueError(
            f"training.momentum is of sgd; got optimizer {t.optimizer!r}: leave it out"
        )
    for name, of in (("halve_every", "halve"), ("patience", "plateau")):
        value = getattr(t, name)
        if value != getattr(Training, name) and t.schedule != of:
            raise ValueError(
                f"training.{name} is of the schedule {of!r}; got {value} with {t.schedule!r}: "
                "leave it out"
            )
    if t.halve_choices and t.schedule != "halve":
        raise ValueError(
            f"training.halve_choices needs the schedule 'halve'; got {t.schedule!r}: set it to []"
        )
    if t.halve_choices and t.stop_after is not None:
        raise ValueError(
            "training.halve_choices retrains on all data, so training.stop_after has no validation "
            "score: set only one of them"
        )


DEFAULTS = Recipe().flat
