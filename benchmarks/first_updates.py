"""The first updates of a language model on PTB, by how its recurrence is trained.

    FIXPOINT_DATA=~/data python benchmarks/first_updates.py --updates 20

Trains ERNN by its recipe, with and without an output bias that starts at the words' frequencies
(`model.word_frequencies`) and a lower learning rate of V, U and eta (`training.recurrent_lr`), and
prints for each the loss of the last update, the largest one, and the largest state.
"""

from __future__ import annotations

import argparse

import torch

from fixpoint.training import Recipe, build_model, load_recipe, make_task, prepare
from fixpoint.training.engine.optim import make_optimizer
from fixpoint.training.experiment import make_fabric


def first_updates(recipe: Recipe, updates: int) -> tuple[list[float], float]:
    """The loss of each update, and the largest state at the end of one."""
    torch.manual_seed(recipe.training.seed)
    data, fabric = prepare(recipe).data, make_fabric(recipe.machine)
    model = build_model(recipe, data).train()
    task = make_task(fabric, data, recipe.training)
    wrapped, optimizer = fabric.setup(model, make_optimizer(model, recipe.training))
    ends: list[float] = []
    model.layer.register_forward_hook(lambda *call: ends.append(call[-1][1].abs().max().item()))
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
    parser.add_argument("--updates", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe = load_recipe(options.recipe)
    print("| bias at the frequencies | rate of V, U, eta | last loss | largest loss | largest h |")
    print("|---" * 5 + "|")
    for frequencies in (False, True):
        for factor in (1.0, 0.1):
            changed = recipe.changed(word_frequencies=frequencies, recurrent_lr=factor)
            losses, state = first_updates(changed, options.updates)
            cells = ["yes" if frequencies else "no", f"x {factor:g}", f"{losses[-1]:.3g}"]
            cells += [f"{max(losses):.3g}", f"{state:.2g}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
