"""The paper's claims about training and states, measured on toy walks: RNN and ERNN, a line a seed.

    python benchmarks/claims.py --seeds 0,1,2,3,4 --out results/claims.jsonl

Appends a JSON line for each seed that the file lacks, and prints tables of docs/claims.md: this
one, Theorem 1's condition in the trained networks of results/runs.jsonl, and the runs by the
paper's protocol, those of results/paper_protocol/runs.jsonl.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fixpoint import InexactNewton, __version__, solve
from fixpoint._messages import percent
from fixpoint.analysis import (
    History,
    class_distance_ratio,
    contraction_profile,
    convergence_rate,
    evenly_spaced,
    gradient_norms,
    hidden_states,
    parameter_drift,
)
from fixpoint.data.sources.toy_walks import toy_walks
from fixpoint.paper.figures import Runs
from fixpoint.paper.table_runs import differences, paper_recipe
from fixpoint.paper.tables import TABLES, Row
from fixpoint.training import load_recipe
from fixpoint.training.results.aggregate import Column
from fixpoint.training.results.store import Record, read_records

WALKS = 2000
"""Of each class, half of them to train on."""
THRESHOLD = 90.0
"""Test accuracy in percent that an epoch has to reach first."""
ETA = 0.5
"""Step of the solve by which Lemma 1 is measured."""
PAPER = {row.recipe: row for table in TABLES.values() for row in table}
"""Rows of the paper by recipe."""
OWN = Row("permuted-mnist-ernn", "Permuted MNIST", "ERNN", nan, nan, None)
ROWS = PAPER | {OWN.recipe: OWN}
"""The same and those that the paper does not have."""
PARTS = ("Google-12", "Yelp-5")
"""Data sets that are at hand in part."""


def measure(seed: int, epochs: int) -> dict[str, Any]:
    """Both models of the paper's toy experiment by one seed."""
    start = time.process_time()
    runs = Runs(walks=toy_walks(walks=WALKS, seed=seed), epochs=epochs, seed=seed)
    x, y = runs.toy_walks.x_test, runs.toy_walks.y_test
    few = evenly_spaced(len(x), 200)
    models = {
        name: course(history) | states(model, x[few], y[few])
        for name, (model, history) in runs.toy.items()
    }
    ernn = runs.toy["ERNN"][0]
    models["ERNN"]["condition holds"] = contraction_profile(ernn, x[few]).fraction_holding
    return {
        "seed": seed,
        "epochs": epochs,
        "models": models,
        "lemma 1": lemma(ernn, x[few]),
        "seconds": time.process_time() - start,
        "versions": {"fixpoint": __version__, "torch": torch.__version__},
        "machine": platform.machine(),
    }


def course(history: History) -> dict[str, float | None]:
    """How far the parameters moved, how low the loss fell, how soon the threshold was reached."""
    drift = parameter_drift(history.parameters)
    assert history.accuracy is not None
    reached = (history.accuracy >= THRESHOLD).nonzero()
    return {
        "change an epoch": (drift.change.mean() / drift.size).item(),
        "training loss": history.loss[-1].item(),
        "accuracy": history.accuracy[-1].item(),
        "epochs to 90 %": int(reached[0]) if len(reached) else None,
    }


def states(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Gradient through time, and distances of the states at the end."""
    head: Any = model.head

    def loss(h: Tensor) -> Tensor:
        return F.cross_entropy(head(h), y, reduction="sum")

    norms = gradient_norms(model, x, loss)
    return {
        "gradient at t = 1": (norms[0] / norms[-1]).nanmedian().item(),
        "intra / inter": class_distance_ratio(hidden_states(model, x)[-1:], y).item(),
    }


def lemma(model: Any, x: Tensor) -> dict[str, float]:
    """Fraction of the updates of one solve whose error shrinks at least by Lemma 1's tau."""
    own, t = model.layer.map.double(), x.shape[1] // 2
    with torch.no_grad():
        h_prev = hidden_states(model.layer.double(), x.double())[t - 1]
        phi = own.bind(x[:, t : t + 1].transpose(0, 1).double())(0, h_prev)
        solver = InexactNewton(40, eta=ETA, learn=False, record="iterates")
        rate = convergence_rate(solve(phi, h_prev, solver).trace, phi)
    applies = rate.tau < 1
    known = rate.rate[:, applies]
    good = known <= rate.tau[applies] * (1 + 1e-9)
    return {
        "tau below 1": applies.double().mean().item(),
        "rate at most tau": good[~known.isnan()].double().mean().item(),
    }


def table(lines: list[dict[str, Any]]) -> str:
    """A row a measure: median and range over the seeds."""
    rows = ["| measure | RNN | ERNN |", "|---|---|---|"]
    for name in lines[0]["models"]["RNN"]:
        both = ([line["models"][model][name] for line in lines] for model in ("RNN", "ERNN"))
        rows.append(f"| {name} | {' | '.join(map(spread, both))} |")
    holds = [line["models"]["ERNN"]["condition holds"] for line in lines]
    rows.append(f"| Theorem 1's condition holds, fraction | - | {spread(holds)} |")
    for name in lines[0]["lemma 1"]:
        rows.append(
            f"| Lemma 1: {name}, fraction | - | {spread([r['lemma 1'][name] for r in lines])} |"
        )
    return "\n".join(rows)


def condition_table(records: list[Record]) -> str:
    """Theorem 1's condition in trained ERNNs: a row a data set and K, medians over the seeds.

    Why it fails: no eta satisfies it at that state, or eta is negative. Steps without
    self-feedback are left out.
    """
    heads = ("data", "K", "seeds", "holds before", "holds after", "no eta could", "eta < 0")
    rows = [f"| {' | '.join((*heads, 'eta after', 'residual'))} |", "|---" * 9 + "|"]
    groups: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        if record["contraction"] and record["run"]["rank"] != 0:
            run = record["run"]
            groups.setdefault((run["dataset"], run["max_iter"]), []).append(record)
    for (dataset, K), group in groups.items():
        ends = [[record["contraction"][when] for record in group] for when in ("before", "after")]
        eta = [np.array(end["eta"]) for end in ends[1]]
        lower = [np.array(end["lower"], dtype=float) for end in ends[1]]  # null is NaN
        values = [
            *(statistics.median(end["fraction_holding"] for end in part) for part in ends),
            statistics.median(np.isnan(low).mean() for low in lower),
            statistics.median((e < 0).mean() for e in eta),
        ]
        least, most = min(e.min() for e in eta), max(e.max() for e in eta)
        cells = [percent(value, 0) for value in values] + [f"{least:.2f} to {most:.2f}"]
        cells.append(f"{statistics.median(record['mean_residual'] for record in group):.2f}")
        rows.append(f"| {dataset} | {K} | {len(group)} | {' | '.join(cells)} |")
    return "\n".join(rows)


def protocol_table(records: list[Record]) -> str:
    """Test accuracy after the last epoch and at best, next to the paper's best: a row a model.

    In place of accuracy perplexity on PTB. A row some of whose runs diverged says so. The hours are
    those of all its seeds, without the runs that choose a period.
    """
    heads = ("data", "model", "seeds", "last epoch", "best epoch", "paper", "hours")
    heads = (*heads, "other than the paper's protocol")
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        name = paper_row(record["run"]).recipe
        changed = "; ".join(differences(record, paper_recipe(name)))
        own, run = load_recipe(name), record["run"]
        precision, epochs = run.get("precision", own.machine.precision), run["epochs"]
        ours = not differences(record, own.changed(precision=precision, epochs=epochs))
        if ours and (changed or name not in PAPER):
            changed = f"recipe `{name}`"
            changed += "" if precision == own.machine.precision else f", {precision}"
            changed += "" if epochs == own.training.epochs else f", {epochs} epochs"
        if not changed:
            changed = "; ".join(_unlike_the_paper(ROWS[name], run))
        found.setdefault((name, changed), []).append(record)
    datasets = [row.dataset for row in ROWS.values()]
    order = sorted(ROWS, key=lambda name: datasets.index(ROWS[name].dataset))
    for (name, changed), group in sorted(found.items(), key=lambda item: order.index(item[0][0])):
        row = ROWS[name]
        metric = group[0]["metric"]
        last, best = (Column("", f"{metric}_{part}", 2) for part in ("last", "best"))
        paper = f"{row.value:.2f}" if name in PAPER else "-"
        numbers = [last.text(group), best.text(group), paper]
        if any(record["loss"] is None for record in group):
            numbers[0] = "diverged"
        seconds = sum(epoch["seconds"] for record in group for epoch in record["epochs"])
        numbers.append(f"{seconds / 3600:.2f}")
        cells = (row.dataset, row.algorithm, str(len(group)), *numbers)
        rows.append(f"| {' | '.join(cells)} | {changed or '-'} |")
    return "\n".join(rows)


def _unlike_the_paper(row: Row, run: dict[str, Any]) -> list[str]:
    """Return what a recipe by the protocol has that the paper does not."""
    clipped = run.get("clip")
    return [
        *(["a part of the data"] if row.dataset in PARTS else []),
        *([f"gradient clipped at {clipped:g}"] if clipped else []),
    ]


def paper_row(run: dict[str, Any]) -> Row:
    """The row that a run stands for."""
    name = f"{run['dataset']}-{run['model']}"
    return ROWS.get(f"{name}-k{run['max_iter']}", ROWS[name])


def spread(values: list[float | None]) -> str:
    """Median (least to most); a value that is None is never reached."""
    known = sorted(v for v in values if v is not None)
    if len(known) < len(values):
        return f"never in {len(values) - len(known)} of {len(values)}"
    return f"{statistics.median(known):.2g} ({known[0]:.2g} to {known[-1]:.2g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("results/claims.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = options.out.read_text().splitlines() if options.out.exists() else []
    lines = [json.loads(line) for line in known]
    for seed in map(int, options.seeds.split(",")):
        if seed not in [line["seed"] for line in lines]:
            lines.append(measure(seed, options.epochs))
            with options.out.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    print(table(lines))
    print("\n" + condition_table(read_records(Path("results"))))
    print("\n" + protocol_table(read_records(Path("results/paper_protocol"))))


if __name__ == "__main__":
    main()
