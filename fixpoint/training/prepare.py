"""The data of a run: loaded, split into training and validation, normalised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fixpoint.data import Dataset, drop_nonfinite, load_dataset, normalise
from fixpoint.training.recipe import Data, Recipe, Training
from fixpoint.training.texts import Text, is_text


class Split(NamedTuple):
    """Data ready for training.

    data: the data set, its training part without the validation part.
    valid: windows and classes of the validation part; None if there is none, or for a text, which
        has its own.
    dropped: training windows left out since they hold NaN or inf.
    """

    data: Dataset | Text
    valid: tuple[Tensor, Tensor] | None = None
    dropped: int = 0


def prepare(recipe: Recipe, data: Dataset | Text | None = None) -> Split:
    """Load (unless given), split and normalise the data of a recipe.

    Statistics of the normalisation come from what is trained on alone.

    Raises:
        ValueError: the data set is unknown or damaged, or the recipe needs a validation part.
        FileNotFoundError: its file is not there.
    """
    data = load_dataset(recipe.data.dataset) if data is None else data
    share = recipe.data.validation
    if is_text(data):
        if share:
            raise ValueError(f"{data.name} has a validation part of its own: leave validation out")
        return Split(data)
    if not share:
        _check_needs(recipe)
    if data.x_train.ndim == 2:  # words have no NaN and no scale
        train, valid = (data, None) if not share else _hold_out(data, share, recipe)
        return Split(train, valid)
    data, dropped = drop_nonfinite(data)
    per = recipe.data.normalise
    if not share:
        return Split(data if per == "none" else normalise(data, per), None, dropped)
    train, (x, y) = _hold_out(data, share, recipe)
    if per != "none":
        both = replace(
            train,
            x_test=torch.cat([x, data.x_test]),
            y_test=torch.cat([y, data.y_test]),
            groups_test=None,
        )
        both = normalise(both, per)
        x, x_test = both.x_test.split([len(x), len(data.x_test)])
        train = replace(train, x_train=both.x_train, x_test=x_test)
    return Split(train, (x, y), dropped)


def preparer() -> Callable[[Recipe], Split]:
    """`prepare` that does equal work once, for as long as it is kept."""
    known: dict[tuple[Data, Training], Split] = {}

    def once(recipe: Recipe) -> Split:
        part = (recipe.data, recipe.training)
        if part not in known:
            known[part] = prepare(recipe)
        return known[part]

    return once


def validation_rows(data: Dataset, share: float, seed: int) -> Tensor:
    """Which training windows are held out, (N,) bool: whole groups, where groups are known.

    Windows of one group, say one person, are alike: with some of them in training the others
    would be too easy. Groups are taken in random order as long as that brings the share nearer.
    """
    random = torch.Generator().manual_seed(seed)
    count = len(data.x_train)
    if data.groups_train is None:
        held = torch.zeros(count, dtype=torch.bool)
        held[torch.randperm(count, generator=random)[: round(share * count)]] = True
        return held
    groups, sizes = data.groups_train.unique(return_counts=True)
    held = torch.zeros(count, dtype=torch.bool)
    missing = share * count
    for i in torch.randperm(len(groups), generator=random).tolist():
        if abs(missing - sizes[i].item()) < missing:
            held |= data.groups_train == groups[i]
            missing -= sizes[i].item()
    return held


def _hold_out(data: Dataset, share: float, recipe: Recipe) -> tuple[Dataset, tuple[Tensor, Tensor]]:
    held = validation_rows(data, share, recipe.training.seed)
    if not held.any() or held.all():
        raise ValueError(
            f"data.validation={share} leaves no window for training or none for validation of "
            f"{len(held)} in {data.name}: choose another share"
        )
    train = replace(
        data,
        x_train=data.x_train[~held],
        y_train=data.y_train[~held],
        groups_train=None if data.groups_train is None else data.groups_train[~held],
    )
    return train, (data.x_train[held], data.y_train[held])


def _check_needs(recipe: Recipe) -> None:
    t = recipe.training
    needs = {
        "training.schedule='plateau'": t.schedule == "plateau",
        "training.stop_after": t.stop_after is not None,
        "training.halve_choices": bool(t.halve_choices),
    }
    for name, asked in needs.items():
        if asked:
            raise ValueError(f"{name} needs a validation part: set data.validation, e.g. to 0.2")
