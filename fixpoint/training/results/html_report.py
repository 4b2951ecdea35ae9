"""`fixpoint report`: the records of runs as one page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from fixpoint._messages import missing_extra, printable
from fixpoint.training.engine.checkpoint import replace_file
from fixpoint.training.results.aggregate import Column, by_dataset, columns, groups, mean_and_sd
from fixpoint.training.results.confusion import confusions
from fixpoint.training.results.description import descriptions
from fixpoint.training.results.report_charts import Line, charts, legend
from fixpoint.training.results.store import Record, read_records
from fixpoint.training.results.summary import summary
from fixpoint.training.results.table import confounded
from fixpoint.training.results.verdict import row_names, shared_findings

try:
    import jinja2
except ModuleNotFoundError:
    raise missing_extra("a report", "jinja2", "bench") from None


class Cell(NamedTuple):
    """A cell of the table: mean and s.d. as shown, and by what it is sorted."""

    mean: str
    sd: str
    value: float | None


def write_report(sources: Sequence[Path], out: Path) -> int:
    """Write the page, and say of how many runs.

    Args:
        sources: folders of `runs.jsonl`, or such files.
        out: the page.

    Raises:
        ValueError: there are no runs, a line in a file is not a record, or `out` is a folder.
        OSError: the page cannot be written.
    """
    if out.is_dir():
        raise ValueError(
            f"--out must be the file of the page; {out} is a folder: try {out / 'report.html'}"
        )
    records = read_records(*sources)
    if not records:
        raise ValueError(f"no run is recorded in {', '.join(map(str, sources))}")
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, render(records).encode())
    return len(records)


def render(records: list[Record]) -> str:
    """Return the page as HTML."""
    template = (resources.files(__package__) / "report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    parts = [_part(name, group) for name, group in by_dataset(records).items()]
    return environment.from_string(template).render(parts=parts, count=len(records))


def _part(dataset: str, records: list[Record]) -> dict[str, Any]:
    found = groups(records)
    details = [_details(group[0]) for group in found]
    common = [d for d in details[0] if all(d in own for own in details)] if len(found) > 1 else []
    names = row_names(found)
    lines = [
        Line(i, names[i], ", ".join(d for d in own if d not in common), group)
        for i, (group, own) in enumerate(zip(found, details, strict=True))
    ]
    metric = records[0]["metric"]
    runs = [group[0]["run"] for group in found]
    return {
        "dataset": dataset,
        "common": ", ".join(common),
        "seeds": max(len(group) for group in found),
        "validated": any(r[f"{metric}_chosen"] is not None for r in records),
        **_table(lines, metric),
        "caution": confounded((run["solver"], run["map"]) for run in runs if run["map"]),
        "models": descriptions(zip(names, runs, strict=True)),
        "verdict": summary(records),
        "findings": shared_findings(found),
        "confusions": confusions(lines),
        "legend": legend(lines),
        "charts": charts(lines, metric),
        "how": [_how(line) for line in lines],
    }


def _details(record: Record) -> list[str]:
    run = record["run"]
    return [f"{run['hidden']} units", f"{run['epochs']} epochs"]


def _table(lines: list[Line], metric: str) -> dict[str, Any]:
    """Return heads and rows, without columns that are empty."""
    shown = [
        (column.head, [_cell(line.records, column) for line in lines]) for column in columns(metric)
    ]
    top = [_top(line.records, metric) for line in lines]
    shown.insert(2, ("best of all seeds", top))
    full = [(head, cells) for head, cells in shown if any(c.value is not None for c in cells)]
    rows = [
        {"line": line, "seeds": len(line.records), "cells": [cells[i] for _, cells in full]}
        for i, line in enumerate(lines)
    ]
    return {"heads": [head for head, _ in full], "rows": rows}


def _top(records: list[Record], metric: str) -> Cell:
    values = columns(metric)[1].values(records)
    best = (max if metric == "accuracy" else min)(values, default=None)
    return Cell(mean_and_sd([] if best is None else [best], 2), "", best)


def _cell(records: list[Record], column: Column) -> Cell:
    values = column.values(records)
    mean, _, sd = mean_and_sd(values, column.digits, joint="|").partition("|")
    return Cell(mean, sd, sum(values) / len(values) if values else None)


def _how(line: Line) -> dict[str, Any]:
    first = line.records[0]
    run = {k: v for k, v in first["run"].items() if v is not None and k != "seed" and v != []}
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    return {
        "line": line,
        "seeds": ", ".join(map(str, sorted(r["run"]["seed"] for r in line.records))),
        "run": run,
        "machine": f"{first['device']}, {first.get('machine', '')}, {first['threads']} thread(s); "
        f"{versions}",
        "tuning": first.get("tuning") or [],
    }
