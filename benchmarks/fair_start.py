"""Settings that `fixpoint compare` gives K steps and equilibria, found on the training people.

    python benchmarks/fair_start.py

Both kinds of models get the same search: 16 settings, each trained for the six epochs of the
command on the training people of har2-sample less one of three folds of seven, and scored after the
last epoch on that fold. The test people have no part in it. Prints a table, the best first; what
was taken is in `fixpoint.training.commands.grid`. The last table is about the first loss of
equilibria, the mean of the first epoch, which is to be near that of guessing, 0.69.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import torch
from folds import folds, hold_out

from fixpoint.data import Dataset, load_dataset
from fixpoint.training import Recipe, prepare, run_experiment

STEPS = Recipe().changed(solver="inexact-newton", map="jordan", rank=8)
SEARCHES: dict[str, tuple[Recipe, dict[str, tuple[Any, ...]]]] = {
    **{
        f"K = {K} steps, Jordan map": (
            STEPS.changed(max_iter=K),
            {
                "eta": (0.01, 0.03),
                "lr": (0.003, 0.01),
                "clip": (None, 1.0),
                "nonlinearity": ("tanh", "relu"),
            },
        )
        for K in (1, 2)
    },
    "equilibria, self-feedback map (Picard, implicit)": (
        Recipe().changed(solver="picard", map="self-feedback", backward="implicit", clip=1.0),
        {
            "init": ("normal", "identity"),
            "lr": (0.003, 0.01),
            "bound": (0.5, 0.8),
            "nonlinearity": ("tanh", "relu"),
        },
    ),
    "first loss of equilibria with V = I - U, bound 0.5, lr 0.003, relu": (
        Recipe().changed(
            **{"solver": "picard", "map": "self-feedback", "backward": "implicit", "clip": 1.0},
            **{"init": "identity", "bound": 0.5, "lr": 0.003, "nonlinearity": "relu"},
        ),
        {"input_gain": (1.0, 0.1), "recurrent_lr": (1.0, 0.1)},
    ),
}


def scores(recipe: Recipe, parts: list[Dataset]) -> list[tuple[float, float]]:
    """Accuracy in percent on each fold after the last epoch, and the loss of the first epoch."""
    records = [run_experiment(recipe, prepare(recipe, d).data) for d in parts]
    return [(r["accuracy_last"], r["epochs"][0]["train_loss"]) for r in records]


def main() -> None:
    torch.set_num_threads(1)
    data = load_dataset("har2-sample")
    assert data.groups_train is not None
    parts = [hold_out(data, group) for group in folds(data.groups_train, 3)]
    for title, (base, grid) in SEARCHES.items():
        found = []
        for values in itertools.product(*grid.values()):
            settings = dict(zip(grid, values, strict=True))
            found.append((scores(base.changed(**settings), parts), settings))
        found.sort(key=lambda row: -statistics.mean(score for score, _ in row[0]))
        heads = " | ".join([*grid, "folds", "mean", "first losses"])
        print(f"\n{title}\n\n| {heads} |\n|{'---|' * (len(grid) + 3)}")
        for each, settings in found:
            cells = ["-" if value is None else str(value) for value in settings.values()]
            accuracies, losses = zip(*each, strict=True)
            cells += [", ".join(f"{a:.1f}" for a in accuracies)]
            cells += [f"{statistics.mean(accuracies):.2f}", ", ".join(f"{x:.2f}" for x in losses)]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
