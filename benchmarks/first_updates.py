"""The first updates of a language model on PTB, by how its recurrence starts.

    FIXPOINT_DATA=~/data python benchmarks/first_updates.py --updates 100

Trains ERNN from the start that the paper's classifiers have, and changes one setting after the
other until it is the recipe. Prints for each the loss of the last update, the largest one, and the
largest state at the end of a piece of text.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from fixpoint.training import Recipe, build_model, load_recipe, make_task, prepare
from fixpoint.training.engine.optim import make_optimizer
from fixpoint.training.experiment import make_fabric

CHANGES: dict[str, dict[str, Any]] = {
    "as the classifiers": {
        **{"word_frequencies": False, "nonlinearity": "relu", "eta": 0.01, "recurrent_gain": None}
    },
    "output bias at the frequencies": {"word_frequencies": True},
    "tanh": {"nonlinearity": "tanh"},
    "eta 0.4": {"eta": 0.4},
    "V and U times 0.3": {"recurrent_gain": 0.3},
}
"""Settings that each row changes, those of the rows above kept."""


def first_updates(recipe: Recipe, updates: int) -> tuple[list[float], float]:
    """The loss of each update, and the largest state at the end of one."""
    torch.manual_seed(recipe.training.seed)
    data, fabric = prepare(recipe).data, make_fabric(recipe.machine)
    model = build_model(recipe, data).train()
    task = make_task(fabric, data, recipe.training)
    wrapped, optimizer = fabric.setup(model, make_optimizer(model, recipe.training))
    ends: list[float] = []

    def largest_state(layer: Any, inputs: Any, outputs: Any) -> None:
        state = outputs[1]
        ends.append(getattr(state, "hx", state).abs().max().item())

    model.layer.register_forward_hook(largest_state)
    losses: list[float] = []
    for loss, _ in task.losses(wrapped, torch.Generator()):
        optimizer.zero_grad()
        fabric.backward(loss)
        if recipe.training.clip is not None:
            fabric.clip_gradients(wrapped, optimizer, max_norm=recipe.training.clip)
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == updates:
            break
    return losses, max(ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="ptb-ernn")
    parser.add_argument("--updates", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe = load_recipe(options.recipe)
    print("| start | last loss | largest loss | largest h |")
    print("|---" * 4 + "|")
    for name, change in CHANGES.items():
        recipe = recipe.changed(**change)
        losses, state = first_updates(recipe, options.updates)
        print(f"| {name} | {losses[-1]:.3g} | {max(losses):.3g} | {state:.2g} |", flush=True)


if __name__ == "__main__":
    main()
