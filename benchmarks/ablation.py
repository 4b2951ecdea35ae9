"""Is it the equilibrium that helps an ERNN, or the small residual step? Models of equal size.

    python benchmarks/ablation.py har2-sample --seeds 0,1,2,3,4 --out runs/ablation

Trains each variant by the same recipe and prints the test accuracy after the last epoch and at
best. Variants have as many weights as the ERNN with the Jordan cell, as nearly as whole units
allow. Finished runs in --out are not run again. As a plugin of a recipe the file adds two cells and
three solvers; run it from the folder above benchmarks/.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fixpoint import SOLVERS, InexactNewton
from fixpoint.models import CELLS, EquilibriumMap, SelfFeedbackMap, parameter_count
from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.training import Recipe, build_model, prepare
from fixpoint.training.commands.single_run import train_recipe
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


CELLS |= {"no-feedback": NoFeedbackMap, "leaky-feedback": LeakyFeedbackMap}
SOLVERS |= {
    # eta ||U|| is below 0.01: three updates solve it to rounding.
    "three-updates": lambda **_: InexactNewton(3, eta=1.0, learn=False),
    "one-eta": lambda **_: InexactNewton(1, eta=0.01),
    "fixed-eta": lambda **_: InexactNewton(1, eta=0.01, learn=False),
}

NEWTON = {"solver": "inexact-newton", "backward": "unrolled"}
JORDAN = {"cell": "jordan", "backward": "unrolled"}
VARIANTS: dict[str, dict[str, Any]] = {
    "RNN": {"model": "rnn", "clip": 1.0},
    "FastRNN": {"model": "fastrnn"},
    "leaky step, no self-feedback": {**NEWTON, "cell": "no-feedback"},
    "ERNN K=1": {**NEWTON, "cell": "jordan"},
    "ERNN K=2": {**NEWTON, "cell": "jordan", "max_iter": 2},
    "ERNN K=1, one eta for all t": {**JORDAN, "solver": "one-eta"},
    "ERNN K=1, eta fixed at 0.01": {**JORDAN, "solver": "fixed-eta"},
    "exact equilibrium": {"cell": "self-feedback", "solver": "anderson"},
    "small step to an exact equilibrium": {
        **{"cell": "leaky-feedback", "solver": "three-updates", "bound": 0.8},
        "backward": "unrolled",
    },
    "equilibrium manifold, exact": {"cell": "manifold", "solver": "anderson"},
}
SIZES = {"toy-walks": (10, 2), "har2-sample": (32, 4), "har2": (80, 8), "dsa19": (64, 8)}
"""Units and rank of U of the ERNN."""
PROTOCOL = {"epochs": 40, "schedule": "cosine", "lr": 0.01, "plugins": ["benchmarks/ablation.py"]}
TREATMENT = {
    "toy-walks": {"normalize": "none", "nonlinearity": "tanh", "epochs": 15},
    "har2-sample": {"normalize": "asinh", "rotate": 30.0, "nonlinearity": "relu"},
    "har2": {"normalize": "asinh", "rotate": 30.0, "nonlinearity": "relu"},
    "dsa19": {"normalize": "column", "nonlinearity": "relu"},
}


def variant(dataset: str, name: str, seed: int) -> Recipe:
    """The recipe of a variant, with units for the size of the ERNN."""
    hidden, rank = SIZES[dataset]
    own = VARIANTS[name]
    base = Recipe().changed(dataset=dataset, seed=seed, **{**PROTOCOL, **TREATMENT[dataset], **own})
    if own.get("cell") == "jordan":
        return base.changed(hidden=hidden, rank=rank)
    data = prepare(base).data
    ernn = variant(dataset, "ERNN K=1", seed)
    size = parameter_count(build_model(ernn, data))

    def excess(hidden: int) -> int:
        return abs(parameter_count(build_model(base.changed(hidden=hidden), data)) - size)

    return base.changed(hidden=min(range(hidden // 2, 2 * hidden), key=excess))


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
    records = Records(options.out)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in map(int, options.seeds.split(",")):
        for name in names:
            recipe = variant(options.dataset, name, seed)
            if recipe.key not in records.by_key:
                records.append(train_recipe(recipe, options.out))
            found[name].append(records.by_key[recipe.key])
            print(f"{name}, seed {seed}: {found[name][-1]['accuracy_last']:.2f} %", flush=True)
    print("\n| variant | units | weights | last epoch | best epoch | s an epoch |")
    print("|---|---|---|---|---|---|")
    for name, rows in found.items():
        last, best = (
            mean_and_sd([r[f"accuracy_{part}"] for r in rows]) for part in ("last", "best")
        )
        seconds = statistics.mean(r["seconds_per_epoch"] for r in rows)
        sizes = f"{rows[0]['run']['hidden']} | {rows[0]['parameters']:,}"
        print(f"| {name} | {sizes} | {last} | {best} | {seconds:.2f} |")


def mean_and_sd(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


if __name__ == "__main__":
    main()
