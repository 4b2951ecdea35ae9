"""The table of a comparison, one row a configuration, and what it means in words."""

from __future__ import annotations

import json
import statistics

from rich import box
from rich.table import Table

from fixpoint.training.results.store import Record

_SCORES: dict[str, tuple[tuple[str, str, int], ...]] = {
    "accuracy": (("last\nacc %", "accuracy_last", 2), ("best\nacc %", "accuracy_best", 2)),
    "perplexity": (("last\nperp.", "perplexity_last", 2), ("best\nperp.", "perplexity_best", 2)),
}
_COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("train\nloss", "loss", 3),
    ("s per\nepoch", "seconds_per_epoch", 2),
    ("peak\nMiB", "peak_memory_mib", 0),
    ("para-\nmeters", "parameters", 0),
    ("\nKB", "size_kb", 1),
    ("iter-\nations", "mean_iterations", 1),
    ("resi-\ndual", "mean_residual", 4),
    ("conv.\n%", "fraction_converged", 1),
)


def comparison_table(records: list[Record]) -> Table:
    """Rows in the order of the records, all of one data set; several seeds of one configuration
    share a row."""
    columns = _SCORES[records[0]["metric"]] + _COLUMNS
    table = Table(title=_title(records), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.padding = (0, 0, 0, 1)
    table.add_column("solver or model\ncell, backward", no_wrap=True)
    for head, _, _ in columns:
        table.add_column(head, justify="right", no_wrap=True)
    for group in groups(records):
        run = group[0]["run"]
        cells = [_cell([r[name] for r in group], digits, name) for _, name, digits in columns]
        own = f"\n{run['cell']}, {run['backward']}" if run["cell"] else ""
        table.add_row(f"{group[0]['label']}{own}", *cells)
    return table


def _title(records: list[Record]) -> str:
    run = records[0]["run"]
    seeds = sorted({r["run"]["seed"] for r in records})
    seed = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds, mean ± s.d."
    alike = [
        f"{run[name]} {unit}"
        for name, unit in (("hidden", "hidden units"), ("epochs", "epochs"))
        if all(r["run"][name] == run[name] for r in records)
    ]
    return (
        f"{', '.join([run['dataset'], *alike, seed])}; "
        f"{records[0]['threads']} thread each, torch {records[0]['versions']['torch']}"
    )


def groups(records: list[Record]) -> list[list[Record]]:
    """Records that differ in nothing but the seed, together."""
    found: dict[str, list[Record]] = {}
    for record in records:
        # By the recipe: the period that it chose may differ from seed to seed.
        settings = record["recipe"] if "recipe" in record else record["run"]
        key = json.dumps({n: v for n, v in settings.items() if n != "seed"}, sort_keys=True)
        found.setdefault(key, []).append(record)
    return list(found.values())


def _cell(values: list[float | None], digits: int, name: str) -> str:
    numbers = [v for v in values if v is not None]
    if not numbers:
        return "-"
    factor = 100 if name == "fraction_converged" else 1
    mean = f"{factor * statistics.fmean(numbers):.{digits}f}"
    if len(numbers) < 2 or name in ("parameters", "size_kb"):
        return mean
    return f"{mean}\n± {factor * statistics.stdev(numbers):.{digits}f}"


def findings(record: Record) -> str:
    """One sentence or two on convergence: the condition, the sign of eta, the distance."""
    after = record["contraction"]["after"]
    gap = record["mean_residual"]
    parts = [
        f"||I + eta f'|| < 1 at {100 * after['fraction_holding']:.0f} % of the states looked at "
        f"({100 * record['contraction']['before']['fraction_holding']:.0f} % before training)"
    ]
    etas = [eta for row in after["eta"] for eta in row]
    negative = sum(eta < 0 for eta in etas)
    if negative:
        parts.append(
            f"{negative} of {len(etas)} etas looked at are negative, which breaks it wherever f' is"
            " negative"
        )
    if gap > 0.1:
        parts.append(
            f"the residual is {gap:.2f} of the target: this state integrates its input over time, "
            "it is not an equilibrium"
        )
    return f"{record['label']}, {record['run']['backward']}: " + "; ".join(parts) + "."
