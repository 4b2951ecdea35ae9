"""`fixpoint reproduce`: recipes of a table of the paper, our numbers next to the paper's."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fixpoint._messages import SomeFailed, unknown_name
from fixpoint.paper.tables import TABLES, Row
from fixpoint.training.commands.comparison import list_runs, run_missing
from fixpoint.training.commands.console import say
from fixpoint.training.engine.model_factory import resolve
from fixpoint.training.engine.run_data import preparer
from fixpoint.training.experiment import build_model
from fixpoint.training.recipe.schema import DEFAULTS, Recipe
from fixpoint.training.recipe.toml import known_recipes, load_recipe
from fixpoint.training.results.aggregate import Column, mean_and_sd
from fixpoint.training.results.html_report import write_report
from fixpoint.training.results.store import Record, open_records
from fixpoint.training.results.table import FittingTable


def reproduce_table(
    console: Console,
    target: str,
    *,
    out: Path,
    jobs: int,
    cluster: str | None = None,
    datasets: list[str] | None,
    models: list[str] | None,
    seeds: list[int],
    protocol: str | None = None,
    dry: bool = False,
    changes: dict[str, Any],
) -> list[Record]:
    """Run the recipes of a table, and print our numbers next to the paper's.

    Rows whose data or model is not there are named and left out. Finished runs in `out` are not
    run again. The page `report.html` has the curves.

    Args:
        console: where to print.
        target: a name in `TABLES`.
        out: folder of `runs.jsonl`, `report.html` and the checkpoints.
        jobs: runs at a time.
        cluster: where else the runs are trained; see `make_executor`.
        datasets, models: take only these; None takes all.
        seeds: a run each.
        protocol: "paper" takes the recipe by the paper's protocol where the row has another.
        dry: print the runs with their keys, and run nothing.
        changes: keys of the recipes to change, e.g. epochs for a first look.

    Raises:
        ValueError: a name is unknown, or no row is left.
        OSError: `out` cannot be written.
    """
    if target not in TABLES:
        raise ValueError(unknown_name("table", target, (*TABLES, "figures", "solvers")))
    if protocol not in (None, "paper"):
        raise ValueError(unknown_name("protocol", protocol, ("paper",)))
    load = paper_recipe if protocol else load_recipe
    recipes = {row.recipe: load(row.recipe).changed(**changes) for row in TABLES[target]}
    recipes = _chosen(recipes, "dataset", datasets, {r.data.dataset for r in recipes.values()})
    recipes = _chosen(recipes, "model", models, {r.model.model for r in recipes.values()})
    recipes = _runnable(console, recipes)
    runs = {
        (name, seed): recipe.changed(seed=seed)
        for name, recipe in recipes.items()
        for seed in seeds
    }
    if dry:
        list_runs(console, list(runs.values()), out)
        return []
    records = open_records(out)
    done = run_missing(console, list(runs.values()), records, out=out, jobs=jobs, cluster=cluster)
    rows = [row for row in TABLES[target] if row.recipe in recipes]
    keys = {row: [runs[row.recipe, seed].key for seed in seeds] for row in rows}
    ours = {
        row: [records.by_key[key] for key in keys[row] if key in records.by_key] for row in rows
    }
    console.print(beside_table(target, ours))
    if done:
        write_report([out], out / "report.html")
        say(console, f"Results: {records.path}   Report: {out / 'report.html'}")
    if len(done) < len(runs):
        raise SomeFailed(f"{len(runs) - len(done)} of {len(runs)} runs failed, see above")
    return done


def beside_table(target: str, ours: dict[Row, list[Record]]) -> FittingTable:
    """Return a line a row of the paper: value, size and training time, the paper's and ours."""
    heads = ("paper", "ours\nbest", "ours\nlast", "paper\nKB", "ours\nKB", "paper\nhours")
    rows, notes = [], []
    for row, records in ours.items():
        metric = records[0]["metric"] if records else "accuracy"
        numbers = (
            f"{row.value:.2f}",
            _mean(records, f"{metric}_best", 2),
            _mean(records, f"{metric}_last", 2),
            f"{row.size_kb:.0f}",
            _mean(records, "size_kb", 0),
            "-" if row.hours is None else f"{row.hours:.3f}",
            _hours([r["seconds_per_epoch"] * len(r["epochs"]) / 3600 for r in records]),
            str(len(records)),
        )
        rows.append(((row.dataset, row.algorithm), numbers))
        found = differences(records[0], paper_recipe(row.recipe)) if records else []
        notes.append(", ".join(found))
    return FittingTable(
        f"{target} of the paper, and ours",
        ("data set", "model"),
        (*heads, "ours\nhours", "seeds"),
        rows,
        "Accuracy in %, or perplexity on PTB. Times are of different machines. Differs in: "
        "settings that are not those of the paper's protocol.",
        ("differs in", notes),
    )


def paper_recipe(name: str) -> Recipe:
    """Return the recipe of a row by the paper's protocol: NAME-paper where NAME differs from it."""
    other = f"{name}-paper"
    return load_recipe(other if other in known_recipes() else name)


def differences(record: Record, recipe: Recipe) -> list[str]:
    """Return settings of a run that are not those of a recipe, as "rotate 30".

    Seed, device and the chosen period of the halvings are left out.

    Example:
        >>> from fixpoint.paper.table_runs import differences
        >>> from fixpoint.training import load_recipe
        >>> recipe = load_recipe("har2-lstm-paper")
        >>> differences({"recipe": recipe.changed(epochs=2).differing}, recipe)
        ['epochs 2 (paper 60)']
    """
    if "recipe" not in record:
        return []  # a record of an earlier version without its recipe
    asked = replace(recipe, model=resolve(recipe.model)).flat
    used = DEFAULTS | record["recipe"]
    found = []
    for name, value in asked.items():
        if name in _NOT_COMPARED or used[name] == value:
            continue
        found.append(f"{name} {_short(used[name])} (paper {_short(value)})")
    return found


_NOT_COMPARED = ("seed", "device", "devices", "halve_every")


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value in (None, []) else str(value)


def _mean(records: list[Record], field: str, digits: int) -> str:
    return mean_and_sd(Column("", field, digits).values(records), digits, joint="\n± ")


def _hours(values: list[float]) -> str:
    """Return their mean, by two digits however short it is."""
    return f"{statistics.fmean(values):.2g}" if values else "-"


def _chosen(
    recipes: dict[str, Recipe], key: str, wanted: list[str] | None, known: set[str]
) -> dict[str, Recipe]:
    """Return the recipes with one of the values of `key`, or all."""
    for name in wanted or []:
        if name not in known:
            raise ValueError(unknown_name(f"{key} of this table", name, sorted(known)))
    return {n: r for n, r in recipes.items() if wanted is None or r.flat[key] in wanted}


def _runnable(console: Console, recipes: dict[str, Recipe]) -> dict[str, Recipe]:
    """Return the recipes, resolved, whose data and model are there; print why others are not."""
    good, prepared = {}, preparer()
    reasons: dict[str, list[str]] = {}
    parts: dict[str, str] = {}
    for name, recipe in recipes.items():
        try:
            full = replace(recipe, model=resolve(recipe.model))
            data = prepared(full).data
            build_model(full, data)
            good[name] = full
            parts[data.name] = data.subset
        except (ValueError, OSError) as error:
            reasons.setdefault(str(error), []).append(name)
    if not good:
        raise ValueError(f"no row can be run: {next(iter(reasons), 'none was asked for')}")
    for reason, names in reasons.items():
        say(console, f"{', '.join(names)} left out: {reason}")
    for data_name, subset in parts.items():
        if subset:
            text = f"{data_name} is a part here, not comparable with the paper: {subset}"
            say(console, text)
    return good
