"""Trained models, out of the folders that a training leaves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from fixpoint.data import Dataset
from fixpoint.training.engine.checkpoint import WEIGHTS, Checkpoint
from fixpoint.training.engine.run_data import locate_data, prepare
from fixpoint.training.engine.run_form import InputForm
from fixpoint.training.experiment import build_model
from fixpoint.training.prediction import Predictions, predict
from fixpoint.training.recipe.schema import Recipe
from fixpoint.training.recipe.toml import RECIPE, load_recipe


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """A trained model with its recipe and the form of its inputs; its data are loaded when used.

    Args:
        recipe: it was trained by.
        model: with its weights, in evaluation mode, on the CPU; float32, or float64 if trained so.
        form: shape, units and classes of the windows that it takes.
        weights: the file that they are from.
        folder: of the training.
        place: where its data are now, if they were moved.
    """

    recipe: Recipe
    model: Any
    form: InputForm
    weights: Path
    folder: Path
    place: str | None = None

    @cached_property
    def located(self) -> Recipe:
        """The recipe with the place where the data are now."""
        return locate_data(self.recipe, self.folder, self.place)

    @cached_property
    def data(self) -> Dataset:
        """The data that it was trained on, normalized as then.

        Raises:
            ValueError: they are not there, or are not those that it was trained on.
            OSError: a file is not there.
        """
        return prepare(self.located).data

    @cached_property
    def raw(self) -> Dataset:
        """The data in their own units, split as for the training."""
        return prepare(self.located.changed(normalize="none", rotate=0.0)).data

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        dtype: torch.dtype = next(self.model.parameters()).dtype
        return dtype

    def predict(self, x: Any, lengths: Any = None) -> Predictions:
        """Classify windows in the units of the sensor.

        Args:
            x: windows (B, T, d), or one (T, d): a tensor, an array or a data frame of T rows.
            lengths: time steps of each window (B,), where shorter ones are padded at their end.

        Returns:
            Scores and classes; a window with NaN or inf has NaN scores and the label -1.

        Raises:
            ValueError: the model takes words, or windows of another shape.
        """
        return predict(self.model, self.form, x, lengths)


def load_trained(path: Path | str, *, data: str | None = None) -> Trained:
    """Return the model that `fixpoint train` or `compare` left in a folder.

    Args:
        path: the folder of a run, as runs/train/KEY, whose last checkpoint is taken; one
            of its checkpoints; or a file of weights in it, as best.safetensors.
        data: where its data are now, if they were moved.

    Raises:
        ValueError: there is no such run, it has no checkpoint yet, a file of it is damaged, or
            `data` are not those it was trained on.
        OSError: a file is not there.

    Example:
        >>> import tempfile
        >>> from fixpoint.training import Recipe, load_trained
        >>> from fixpoint.training.commands.single_run import train_recipe
        >>> recipe = Recipe().changed(model="gru", hidden=4, epochs=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = train_recipe(recipe, Path(folder), lambda epoch: None)
        ...     load_trained(Path(folder) / recipe.key).model.layer
        GRU(9, 4, batch_first=True)
    """
    folder, weights = _find(Path(path).expanduser())
    recipe = load_recipe(str(folder / RECIPE))
    if recipe.training.halve_choices:
        # The period was chosen on a validation part, the model then trained on all.
        recipe = recipe.changed(halve_choices=(), validation=0.0)
    form, ready = InputForm.load(folder), None
    if form is None or form.kind != "classification" or data is not None:
        ready = prepare(locate_data(recipe, folder, data))
        form = ready.form
    model = build_model(recipe, form.blank() if ready is None else ready.data)
    state = _read(weights)
    if any(value.dtype == torch.float64 for value in state.values()):
        model.double()
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split()).partition(": ")[2]
        raise ValueError(
            f"{weights} does not fit the model of {folder / RECIPE} ({reason}): they are of "
            "different runs, or its data set has changed"
        ) from None
    return Trained(
        recipe=recipe, model=model.eval(), form=form, weights=weights, folder=folder, place=data
    )


def _find(path: Path) -> tuple[Path, Path]:
    """Return the folder of the run, and the file of weights in it."""
    if not path.exists():
        raise ValueError(
            f"there is no file or folder {path}: give the folder of a training run, as "
            "runs/train/KEY"
        )
    place = path if path.is_dir() else path.parent
    of_epoch = place.name.startswith("epoch-")
    folder = place.parent if of_epoch else place
    if not (folder / RECIPE).is_file():
        raise ValueError(f"{path} {_what_instead(path)}")
    if path.suffix == ".safetensors":
        return folder, path
    if of_epoch:
        return folder, place / WEIGHTS
    epochs = Checkpoint(folder).epochs
    if not epochs:
        raise ValueError(
            f"{folder} has no checkpoint: one is written after each epoch of training with a loss "
            "that is finite"
        )
    return folder, epochs[-1] / WEIGHTS


def _what_instead(path: Path) -> str:
    runs = sorted(found.parent for found in path.glob(f"*/{RECIPE}"))
    if not runs:
        return (
            f"is not a training run, it has no {RECIPE}: give the folder that `fixpoint train` "
            "names, as runs/train/KEY"
        )
    shown = ", ".join(map(str, runs[:3])) + (", ..." if len(runs) > 3 else "")
    return f"holds {len(runs)} training run{'s' * (len(runs) != 1)}: give one, of {shown}"


def _read(path: Path) -> dict[str, Tensor]:
    try:
        state = load(path.read_bytes())
    except OSError as error:
        raise ValueError(
            f"the weights {path} cannot be read ({error.strerror}): give another checkpoint"
        ) from None
    except SafetensorError as error:
        raise ValueError(
            f"{path} is truncated or not a safetensors file ({error}): train again or give another "
            "checkpoint"
        ) from None
    lost = sum(int((~value.isfinite()).sum()) for value in state.values())
    if lost:
        raise ValueError(
            f"{lost} of the weights in {path} are NaN or inf: the training diverged; train again "
            "with a smaller training.lr, or with training.clip"
        )
    return state
