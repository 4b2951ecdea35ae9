"""Is it the equilibrium that helps an ERNN, or the small residual step? Models of equal size.

    python benchmarks/ablation.py har2-sample --seeds 0,1,2,3,4 --out runs/ablation

Trains each variant by the same recipe and prints the test accuracy after the last epoch and at
best, the epochs to 85 % or so, and the relative residual of the equilibrium. Variants have as many
weights as the ERNN with the Jordan map, as nearly as whole units allow. Finished runs in --out are
not run again; summary.jsonl there holds a line a run. As a plugin of a recipe the file adds two
maps and three solvers; run it from the folder above benchmarks/.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fixpoint import SOLVERS, InexactNewton
from fixpoint.models import MAPS, EquilibriumMap, SelfFeedbackMap, parameter_count
from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.training import Recipe, build_model, prepare
from fixpoint.training.commands.single_run import train_recipe
from fixpoint.training.results.aggregate import mean_and_sd
from fixpoint.training.results.store import Records

Phi = Callable[[Tensor], Tensor]


class NoFeedbackMap(EquilibriumMap):
    """phi = sigma(V h_{t-1} + W x + b): what a leaky step approaches without self-feedback."""

    def bind(self, x: Tensor) -> Callable[[int, Tensor], Phi]:
        u, sigma = self.input_projection(x).unbind(0), ACTIVATIONS[self.nonlinearity]

        def at(t: int, h_prev: Tensor) -> Phi:
            h = sigma(torch.addmm(u[t], h_prev, self.V.mT))
            return lambda _: h

        return at

    def as_leaky_step(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.V, self.W, self.b


class LeakyFeedbackMap(SelfFeedbackMap):
    """phi = (1 - eta) h_{t-1} + eta sigma(U h + V h_{t-1} + W x + b): a small step, solved."""

    def __init__(self, input_size: int, hidden_size: int, **options: Any) -> None:
        super().__init__(input_size, hidden_size, **options)
        self.eta = nn.Parameter(torch.tensor(0.01))

    def bind(self, x: Tensor) -> Callable[[int, Tensor], Phi]:
        inner, eta = super().bind(x), self.eta

        def at(t: int, h_prev: Tensor) -> Phi:
            sigma, kept = inner(t, h_prev), (1 - eta) * h_prev
            return lambda h: kept + eta * sigma(h)

        return at

    def as_leaky_step(self) -> None:
        return None

    def as_self_feedback(self) -> None:
        return None


MAPS |= {"no-feedback": NoFeedbackMap, "leaky-feedback": LeakyFeedbackMap}
SOLVERS |= {
    # eta ||U|| is below 0.01: three updates solve it to rounding.
    "three-updates": lambda **_: InexactNewton(3, eta=1.0, learn=False),
    "one-eta": lambda **_: InexactNewton(1, eta=0.01),
    "fixed-eta": lambda **_: InexactNewton(1, eta=0.01, learn=False),
}

NEWTON = {"solver": "inexact-newton", "backward": "unrolled"}
JORDAN = {"map": "jordan", "backward": "unrolled"}
VARIANTS: dict[str, dict[str, Any]] = {
    "RNN": {"model": "rnn", "clip": 1.0},
    "FastRNN": {"model": "fastrnn"},
    "leaky step, no self-feedback": {**NEWTON, "map": "no-feedback"},
    "ERNN K=1": {**NEWTON, "map": "jordan"},
    "ERNN K=2": {**NEWTON, "map": "jordan", "max_iter": 2},
    "ERNN K=1, one eta for all t": {**JORDAN, "solver": "one-eta"},
    "ERNN K=1, eta fixed at 0.01": {**JORDAN, "solver": "fixed-eta"},
    "exact equilibrium": {"map": "self-feedback", "solver": "anderson"},
    "exact equilibrium, V = I - U at the start": {
        **{"solver": "anderson", "nonlinearity": "relu", "init": "identity", "bound": 0.5},
        **{"lr": 0.003, "clip": 1.0},
    },
    "small step to an exact equilibrium": {
        **{"map": "leaky-feedback", "solver": "three-updates", "bound": 0.8},
        "backward": "unrolled",
    },
    "equilibrium manifold, exact": {"map": "manifold", "solver": "anderson"},
    "ERNN K=1, identity feedback": {**NEWTON, "map": "identity-feedback"},
    "ERNN K=2, identity feedback": {**NEWTON, "map": "identity-feedback", "max_iter": 2},
    "ERNN K=1, linear": {**NEWTON, "map": "linear", "nonlinearity": None},
    "FastGRNN": {"model": "fastgrnn"},
    "UGRNN": {"model": "ugrnn"},
    "GRU": {"model": "gru", "nonlinearity": None},
    "LSTM": {"model": "lstm", "nonlinearity": None},
    "SpectralRNN": {"model": "spectralrnn"},
    "EURNN": {"model": "eurnn", "nonlinearity": None},
}
SIZES = {"toy-walks": (10, 2), "har2-sample": (32, 4), "har2": (80, 8), "dsa19": (64, 8)}
"""Units and rank of U of the ERNN."""
PROTOCOL = {"epochs": 40, "schedule": "cosine", "lr": 0.01, "plugins": ["benchmarks/ablation.py"]}
TREATMENT = {
    "toy-walks": {"normalize": "none", "nonlinearity": "tanh", "epochs": 15},
    "har2-sample": {"normalize": "asinh", "rotate": 30.0, "nonlinearity": "relu"},
    "har2": {"normalize": "asinh", "rotate": 30.0, "nonlinearity": "relu"},
    "dsa19": {"normalize": "column", "rotate": 90.0, "nonlinearity": "relu", "epochs": 30},
}
GOAL = {"toy-walks": 90, "har2-sample": 85, "har2": 95, "dsa19": 85}
"""The accuracy in % whose first epoch the table has."""


def variant(dataset: str, name: str, seed: int) -> Recipe:
    """The recipe of a variant, with units for the size of the ERNN."""
    hidden, rank = SIZES[dataset]
    base = _with_default_units(dataset, name).changed(seed=seed)
    if VARIANTS[name].get("map") == "jordan":
        return base.changed(hidden=hidden, rank=rank)
    return base.changed(hidden=_units(dataset, name))


def _with_default_units(dataset: str, name: str) -> Recipe:
    own = PROTOCOL | TREATMENT[dataset] | VARIANTS[name]
    return Recipe().changed(dataset=dataset, **own)


@functools.cache
def _units(dataset: str, name: str) -> int:
    """Those with which a variant comes next to the size of the ERNN."""
    hidden, base = SIZES[dataset][0], _with_default_units(dataset, name)
    data = prepare(base).data
    size = parameter_count(build_model(variant(dataset, "ERNN K=1", 0), data))

    def excess(hidden: int) -> int:
        return abs(parameter_count(build_model(base.changed(hidden=hidden), data)) - size)

    return min(range(hidden // 2, 2 * hidden), key=excess)


def summary(name: str, record: dict[str, Any]) -> dict[str, Any]:
    """What the table needs of a record, and what the run was."""
    condition = record["contraction"] and record["contraction"]["after"]
    return {
        "variant": name,
        "dataset": record["run"]["dataset"],
        "seed": record["run"]["seed"],
        "units": record["run"]["hidden"],
        "weights": record["parameters"],
        "accuracy_last": record["accuracy_last"],
        "accuracy_best": record["accuracy_best"],
        "accuracies": [round(epoch["accuracy"], 3) for epoch in record["epochs"]],
        "residual": record["mean_residual"],
        "condition holds": condition and condition["fraction_holding"],
        "seconds": sum(epoch["seconds"] for epoch in record["epochs"]),
        "recipe": record["recipe"],
        "versions": record["versions"],
        "machine": record["machine"],
    }


def table(lines: list[dict[str, Any]]) -> str:
    """A row a variant of one data set: mean and s.d. over its seeds."""
    goal = GOAL[lines[0]["dataset"]]
    heads = ("variant", "seeds", "units", "weights", "last epoch", "best epoch")
    rows = [f"| {' | '.join(heads)} | epochs to {goal} % | residual |", "|---" * 8 + "|"]
    for name in dict.fromkeys(line["variant"] for line in lines):
        own = [line for line in lines if line["variant"] == name]
        last, best = (
            mean_and_sd([r[f"accuracy_{part}"] for r in own], 2) for part in ("last", "best")
        )
        sizes = f"{len(own)} | {own[0]['units']} | {own[0]['weights']:,}"
        soon = " ".join(reached(line["accuracies"], goal) for line in own)
        residuals = [line["residual"] for line in own]
        gap = "-" if None in residuals else f"{statistics.mean(residuals):.1g}"
        rows.append(f"| {name} | {sizes} | {last} | {best} | {soon} | {gap} |")
    return "\n".join(rows)


def reached(accuracies: list[float], goal: float) -> str:
    """The first epoch with an accuracy of `goal` %."""
    return next((str(n) for n, value in enumerate(accuracies, 1) if value >= goal), "never")


def tables(lines: list[dict[str, Any]]) -> dict[str, str]:
    """`table` of each data set."""
    names = dict.fromkeys(line["dataset"] for line in lines)
    return {name: table([line for line in lines if line["dataset"] == name]) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset", choices=SIZES)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--variants", help="numbers of rows by comma, from 0")
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = list(VARIANTS)
    if options.variants:
        names = [names[int(number)] for number in options.variants.split(",")]
    records, lines = Records(options.out), []
    for seed in map(int, options.seeds.split(",")):
        for name in names:
            recipe = variant(options.dataset, name, seed)
            if recipe.key not in records.by_key:
                records.append(train_recipe(recipe, options.out))
            lines.append(summary(name, records.by_key[recipe.key]))
            print(f"{name}, seed {seed}: {lines[-1]['accuracy_last']:.2f} %", flush=True)
    lines.sort(key=lambda line: (names.index(line["variant"]), line["seed"]))
    (options.out / "summary.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    print("\n" + table(lines))


if __name__ == "__main__":
    main()
