"""Cross-validation over the training people of HAR or DSA, and whose windows are wrong.

    FIXPOINT_DATA=~/data python benchmarks/folds.py har2-ernn --set training.rotate=15
    FIXPOINT_DATA=~/data python benchmarks/folds.py dsa19-ernn --folds 4 --set training.rotate=60

Trains a recipe on the training people less one fold of them after the other, and prints the
accuracy on each fold after the last epoch, and the errors by activity and by subject. Settings are
chosen by this; the test people have no part in it. With --test it trains on all training people
instead and prints the same of the test people.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from fixpoint.data import Dataset, load_dataset
from fixpoint.data.splits import take
from fixpoint.training import Recipe, build_model, load_recipe, prepare, run_experiment
from fixpoint.training.recipe.toml import parse_setting


def folds(subjects: Tensor, count: int) -> list[Tensor]:
    """The subjects in `count` groups, drawn at random, always alike."""
    ids = subjects.unique()
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    return list(ids[order].tensor_split(count))


def hold_out(data: Dataset, subjects: Tensor) -> Dataset:
    """The data with the windows of some training subjects in the place of the test part."""
    assert data.groups_train is not None
    mask = torch.isin(data.groups_train, subjects)
    parts = {f"{key}_test": getattr(data, f"{key}_train")[mask] for key in ("x", "y", "groups")}
    return replace(take(data, "train", ~mask), **parts)


def wrong(recipe: Recipe, data: Dataset) -> Tensor:
    """Which test windows the recipe gets wrong after its last epoch, (N,) bool."""
    ready = prepare(recipe, data).data
    with tempfile.TemporaryDirectory() as folder:
        run_experiment(recipe, ready, folder=Path(folder))
        (weights,) = Path(folder).glob("epoch-*/model.safetensors")
        model = build_model(recipe, ready)
        model.load_state_dict(load_file(weights))
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(ready.inputs(x)) for x in ready.x_test.split(512)])
    return logits.argmax(1) != ready.y_test


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--test", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe = load_recipe(options.recipe).changed(**dict(map(parse_setting, options.set)))
    data = load_dataset(recipe.data.dataset)
    activities = load_dataset("har6") if data.name == "har2" else data
    parts, named = [data], [activities]
    if not options.test:
        assert data.groups_train is not None
        groups = folds(data.groups_train, options.folds)
        parts, named = ([hold_out(d, group) for group in groups] for d in (data, activities))
    accuracies: list[float] = []
    count = len(activities.classes)
    by_activity = torch.zeros(count, dtype=torch.long)
    by_subject: dict[int, str] = {}
    for part, six in zip(parts, named, strict=True):
        errors, subjects = wrong(recipe, part), part.groups_test
        assert subjects is not None
        accuracies.append(100 * (1 - errors.double().mean().item()))
        by_activity += six.y_test[errors].bincount(minlength=count)
        for subject in subjects.unique().tolist():
            of = subjects == subject
            by_subject[subject] = f"{int(errors[of].sum())} of {int(of.sum())}"
        print(f"{accuracies[-1]:.2f} % on subjects {subjects.unique().tolist()}")
    print(f"mean {statistics.mean(accuracies):.2f} %")
    print("errors by activity:", dict(zip(activities.classes, by_activity.tolist(), strict=True)))
    print("errors by subject:", by_subject)


if __name__ == "__main__":
    main()
