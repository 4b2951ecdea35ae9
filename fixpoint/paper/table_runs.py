"""`fixpoint reproduce`: recipes of a table of the paper, our numbers beside the paper's."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fixpoint._messages import unknown_name
from fixpoint.paper.tables import TABLES, Row
from fixpoint.training.commands.comparison import run_missing
from fixpoint.training.engine.model_factory import resolve
from fixpoint.training.engine.run_data import preparer
from fixpoint.training.experiment import build_model
from fixpoint.training.recipe.schema import Recipe
from fixpoint.training.recipe.toml import load_recipe
from fixpoint.training.results.html_report import write_report
from fixpoint.training.results.store import Record, open_records


def reproduce_table(
    console: Console,
    target: str,
    *,
    out: Path,
    jobs: int,
    datasets: list[str] | None,
    models: list[str] | None,
    seeds: list[int],
    changes: dict[str, Any],
) -> list[Record]:
    """Run the recipes of a table, and print ours beside the paper's numbers.

    Rows whose data or model is not there are named and left out. Finished runs in `out` are not
    run again. The page `report.html` has the curves.

    Args:
        console: where to print.
        target: a name in `TABLES`.
        out: folder of `runs.jsonl`, `report.html` and the checkpoints.
        jobs: runs at a time.
        datasets, models: take only these; None takes all.
        seeds: a run each.
        changes: keys of the recipes to change, e.g. epochs for a first look.

    Raises:
        ValueError: a name is unknown, or no row is left.
        OSError: `out` cannot be written.
    """
    if target not in TABLES:
        raise ValueError(unknown_name("table", target, (*TABLES, "figures")))
    recipes = {row.recipe: load_recipe(row.recipe).changed(**changes) for row in TABLES[target]}
    recipes = _chosen(recipes, "dataset", datasets, {r.data.dataset for r in recipes.values()})
    recipes = _chosen(recipes, "model", models, {r.model.model for r in recipes.values()})
    recipes = _runnable(console, recipes)
    runs = {
        (name, seed): recipe.changed(seed=seed)
        for name, recipe in recipes.items()
        for seed in seeds
    }
    records = open_records(out)
    done = run_missing(console, list(runs.values()), records, out=out, jobs=jobs)
    by_key = {record["key"]: record for record in done}
    rows = [row for row in TABLES[target] if row.recipe in recipes]
    ours = {
        row: [by_key[runs[row.recipe, s].key] for s in seeds if runs[row.recipe, s].key in by_key]
        for row in rows
    }
    console.print(beside_table(target, ours))
    if done:
        write_report([out], out / "report.html")
        console.print(f"Results: {records.path}   Report: {out / 'report.html'}", soft_wrap=True)
    if len(done) < len(runs):
        raise ValueError(f"{len(runs) - len(done)} of {len(runs)} runs failed, see above")
    return done


def beside_table(target: str, ours: dict[Row, list[Record]]) -> Table:
    """A line a row of the paper: value, size and training time, the paper's and ours."""
    table = Table(
        title=f"{target} of the paper, and ours", title_justify="left", box=box.SIMPLE_HEAD
    )
    for head in ("data set", "model"):
        table.add_column(head, no_wrap=True)
    heads = ("paper", "ours\nbest", "ours\nlast", "paper\nKB", "ours\nKB", "paper\nhours")
    for head in (*heads, "ours\nhours", "seeds"):
        table.add_column(head, justify="right", no_wrap=True)
    for row, records in ours.items():
        metric = records[0]["metric"] if records else "accuracy"
        table.add_row(
            row.dataset,
            row.algorithm,
            f"{row.value:.2f}",
            _mean([r[f"{metric}_best"] for r in records], 2),
            _mean([r[f"{metric}_last"] for r in records], 2),
            f"{row.size_kb:.0f}",
            _mean([r["size_kb"] for r in records], 0),
            "-" if row.hours is None else f"{row.hours:.3f}",
            _hours([r["seconds_per_epoch"] * len(r["epochs"]) / 3600 for r in records]),
            str(len(records)),
        )
    table.caption = "Accuracy in %, or perplexity on PTB. Times are of different machines."
    return table


def _mean(values: list[float | None], digits: int) -> str:
    numbers = [v for v in values if v is not None]
    if not numbers:
        return "-"
    mean = f"{statistics.fmean(numbers):.{digits}f}"
    return mean if len(set(numbers)) < 2 else f"{mean}\n± {statistics.stdev(numbers):.{digits}f}"


def _hours(values: list[float]) -> str:
    """Their mean, by two digits however short it is."""
    return f"{statistics.fmean(values):.2g}" if values else "-"


def _chosen(
    recipes: dict[str, Recipe], key: str, wanted: list[str] | None, known: set[str]
) -> dict[str, Recipe]:
    """The recipes whose `key` is wanted."""
    for name in wanted or []:
        if name not in known:
            raise ValueError(unknown_name(f"{key} of this table", name, sorted(known)))
    return {n: r for n, r in recipes.items() if wanted is None or r.flat[key] in wanted}


def _runnable(console: Console, recipes: dict[str, Recipe]) -> dict[str, Recipe]:
    """The recipes, resolved, whose data and model are there; why not is said of the others."""
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
        console.print(f"{', '.join(names)} left out: {reason}", highlight=False, soft_wrap=True)
    for data_name, subset in parts.items():
        if subset:
            text = f"{data_name} is a part here, not comparable with the paper: {subset}"
            console.print(text, highlight=False, soft_wrap=True)
    return good
