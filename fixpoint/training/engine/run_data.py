"""The data of a run: loaded, split into training and validation, normalized."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from fixpoint.data import (
    DATASETS,
    Dataset,
    drop_nonfinite,
    find_normalization,
    fingerprint,
    load_dataset,
    normalize_by,
    validation_split,
)
from fixpoint.data.storage import expand
from fixpoint.training.engine.augment import augments, check_augmentation
from fixpoint.training.engine.checkpoint import replace_file
from fixpoint.training.engine.run_form import InputForm
from fixpoint.training.recipe.schema import Data, Recipe, Training, Windows

ORIGIN = "data.json"
"""File that says where the data of a run were, and their fingerprint."""


class Prepared(NamedTuple):
    """Data ready for training.

    dropped: training windows that were left out for NaN or inf.
    form: of the windows before the normalization.
    """

    data: Dataset
    dropped: int
    form: InputForm


def prepare(recipe: Recipe, data: Dataset | None = None) -> Prepared:
    """Load (unless given), split and normalize the data of a recipe.

    A validation part is taken off the training part where the data set has none of its own.
    Statistics of the normalization come from what is trained on alone; words have none.

    Raises:
        ValueError: the data set is unknown or damaged, or the recipe needs a validation part or
            vectors to rotate, or images to move.
        OSError: its file is not there.

    Example:
        >>> from fixpoint.training import Recipe, prepare
        >>> data = prepare(Recipe().changed(validation=0.2)).data
        >>> len(data.x_train) > 4 * len(data.x_valid) - 40
        True
    """
    if data is None:
        data = load_dataset(recipe.data.dataset, **asdict(recipe.windows))
    data, dropped = drop_nonfinite(data)
    if recipe.data.validation:
        data = validation_split(data, recipe.data.validation, seed=recipe.training.seed)
    if data.x_valid is None:
        _check_needs(recipe.training)
    elif not len(data.x_valid):
        raise ValueError(
            f"data.validation={recipe.data.validation} leaves no window of {len(data.x_train)} for "
            f"validation in {data.name}: choose a larger fraction"
        )
    check_augmentation(recipe.training, data)
    if data.kind != "language-model" and recipe.training.bptt != Training.bptt:
        raise ValueError(
            f"training.bptt is for language models; {data.name} has classes: leave it out"
        )
    if data.kind != "classification":
        return Prepared(data, dropped, InputForm.of(data, None))
    found = find_normalization(data, recipe.data.normalize)
    form = InputForm.of(data, found)
    if recipe.data.normalize != "none":
        data = normalize_by(data, found, late=augments(recipe.training))
    return Prepared(data, dropped, form)


def save_origin(recipe: Recipe, folder: Path) -> None:
    """Write where the data of a run were, and their fingerprint, into the folder of the run."""
    name = recipe.data.dataset
    place = name if name in DATASETS else str(expand(name).absolute())
    content = {"dataset": place, "fingerprint": fingerprint(name)}
    replace_file(folder / ORIGIN, json.dumps(content, indent=1).encode())


def locate_data(recipe: Recipe, folder: Path, place: str | None = None) -> Recipe:
    """Return the recipe of a finished run with the place where its data are.

    Args:
        folder: of the run.
        place: where the data are now; None: where they were.

    Raises:
        ValueError: they are not there, or other data are.
    """
    path = folder / ORIGIN
    origin = json.loads(path.read_text()) if path.exists() else {}
    name = place or recipe.data.dataset
    if name in DATASETS:
        return recipe.changed(dataset=name)
    name = place or origin.get("dataset", name)
    if not Path(name).expanduser().exists():
        raise ValueError(f"the data {name} are not there: give their place by --data PATH")
    if origin and origin["fingerprint"] != fingerprint(name):
        raise ValueError(
            f"{name} is not what this model was trained on, its content differs: give the place of "
            "those data by --data PATH, or train again"
        )
    return recipe.changed(dataset=name)


def preparer() -> Callable[[Recipe], Prepared]:
    """Return `prepare` that does equal work once, for as long as it is kept."""
    known: dict[tuple[Data, Windows, Training], Prepared] = {}

    def once(recipe: Recipe) -> Prepared:
        part = (recipe.data, recipe.windows, recipe.training)
        if part not in known:
            known[part] = prepare(recipe)
        return known[part]

    return once


def _check_needs(training: Training) -> None:
    needs = {
        "training.schedule='plateau'": training.schedule == "plateau",
        "training.stop_after": training.stop_after is not None,
        "training.halve_choices": bool(training.halve_choices),
    }
    for name, asked in needs.items():
        if asked:
            raise ValueError(f"{name} needs a validation part: set data.validation, e.g. to 0.2")
