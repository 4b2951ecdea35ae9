"""`fixpoint report`: the records of runs as one page that needs nothing else."""

from __future__ import annotations

import base64
import statistics
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from fixpoint.analysis.plots.svg import Curve, curve_chart, style_of
from fixpoint.training.engine.checkpoint import replace_file
from fixpoint.training.results.store import Record, read_file
from fixpoint.training.results.table import groups

_NEEDED = ("run", "label", "metric", "epochs", "contraction", "versions", "device", "threads")


class Cell(NamedTuple):
    """A cell of the table: what is shown, and by what it is sorted."""

    text: str
    value: float | str | None


class Line(NamedTuple):
    """A configuration: its number in the charts, name, what else tells it apart, its runs."""

    number: int
    name: str
    detail: str
    records: list[Record]


def write_report(sources: Sequence[Path], out: Path) -> int:
    """Write the page, and say of how many runs.

    Args:
        sources: folders of `runs.jsonl`, or such files.
        out: the page.

    Raises:
        ValueError: there are no runs, a line in a file is no record, or `out` is a folder.
        OSError: the page cannot be written.
    """
    if out.is_dir():
        raise ValueError(
            f"--out must be the file of the page; {out} is a folder: try {out / 'report.html'}"
        )
    records = [record for source in sources for record in read_records(source)]
    if not records:
        raise ValueError(f"no run is recorded in {', '.join(map(str, sources))}")
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, render(records).encode())
    return len(records)


def read_records(source: Path) -> list[Record]:
    """The records in a folder or file.

    Raises:
        ValueError: there is no such file, or it is none of records.
    """
    folder = source if source.is_dir() else source.parent
    if not (folder / "runs.jsonl").is_file() or (source.is_file() and source.name != "runs.jsonl"):
        raise ValueError(
            f"{source} is no folder with a runs.jsonl: give the --out of other commands"
        )
    # The runs may be going on: the file is not touched.
    records = {record["key"]: record for record in read_file(folder / "runs.jsonl")}
    for key, record in records.items():
        lacking = [name for name in _NEEDED if name not in record]
        if lacking:
            raise ValueError(
                f"the record {key} in {folder / 'runs.jsonl'} lacks {', '.join(lacking)}: remove "
                "that line"
            )
    return list(records.values())


def render(records: list[Record]) -> str:
    """The page as HTML."""
    template = (resources.files(__package__) / "report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    names = list(dict.fromkeys(r["run"]["dataset"] for r in records))
    parts = [_part(name, [r for r in records if r["run"]["dataset"] == name]) for name in names]
    return environment.from_string(template).render(parts=parts, count=len(records))


def _part(dataset: str, records: list[Record]) -> dict[str, Any]:
    found = groups(records)
    details = [_details(group[0]) for group in found]
    common = [d for d in details[0] if all(d in own for own in details)] if len(found) > 1 else []
    lines = [
        Line(i, group[0]["label"], ", ".join(d for d in own if d not in common), group)
        for i, (group, own) in enumerate(zip(found, details, strict=True))
    ]
    metric = records[0]["metric"]
    return {
        "dataset": dataset,
        "common": ", ".join(common),
        "seeds": max(len(group) for group in found),
        "validated": any(r[f"{metric}_chosen"] is not None for r in records),
        **_table(lines, metric),
        "legend": [_legend(line) for line in lines],
        "charts": _charts(lines, metric),
        "how": [_how(line) for line in lines],
    }


def _details(record: Record) -> list[str]:
    run = record["run"]
    own = [run["cell"], run["backward"]] if run["cell"] else []
    return [*own, f"{run['hidden']} units", f"{run['epochs']} epochs"]


Get = Callable[[Record], float | None]


def _columns(metric: str) -> list[tuple[str, Get, int]]:
    """Head, number of a record, digits."""
    unit = "acc. %" if metric == "accuracy" else "perplexity"

    def of(name: str, factor: float = 1) -> Get:
        return lambda r: None if r.get(name) is None else factor * r[name]

    def holding(r: Record) -> float | None:
        return r["contraction"] and 100 * r["contraction"]["after"]["fraction_holding"]

    return [
        (f"last {unit}", of(f"{metric}_last"), 2),
        (f"best {unit}", of(f"{metric}_best"), 2),
        ("by validation", of(f"{metric}_chosen"), 2),
        ("train loss", of("loss"), 3),
        ("s / epoch", of("seconds_per_epoch"), 2),
        ("peak MiB", of("peak_memory_mib"), 0),
        ("numbers", of("parameters"), 0),
        ("KB", of("size_kb"), 1),
        ("iterations", of("mean_iterations"), 1),
        ("residual", of("mean_residual"), 4),
        ("converged %", of("fraction_converged", 100), 1),
        ("contracts %", holding, 0),
    ]


def _table(lines: list[Line], metric: str) -> dict[str, Any]:
    """Heads and rows, without columns that are empty."""
    columns = [
        (head, [_cell([get(r) for r in line.records], digits) for line in lines])
        for head, get, digits in _columns(metric)
    ]
    top = [_top([r[f"{metric}_best"] for r in line.records], metric) for line in lines]
    columns.insert(2, ("best of all seeds", top))
    full = [(head, cells) for head, cells in columns if any(c.value is not None for c in cells)]
    rows = [
        {"line": line, "seeds": len(line.records), "cells": [cells[i] for _, cells in full]}
        for i, line in enumerate(lines)
    ]
    return {"heads": [head for head, _ in full], "rows": rows}


def _top(values: list[float | None], metric: str) -> Cell:
    numbers = [v for v in values if v is not None]
    top = (max if metric == "accuracy" else min)(numbers, default=None)
    return _cell([top], 2)


def _cell(values: list[float | None], digits: int) -> Cell:
    numbers = [v for v in values if v is not None]
    if not numbers:
        return Cell("-", None)
    mean = statistics.fmean(numbers)
    text = f"{mean:,.{digits}f}"
    if len(set(numbers)) > 1:
        text += f" ± {statistics.stdev(numbers):,.{digits}f}"
    return Cell(text, mean)


def _legend(line: Line) -> dict[str, Any]:
    color, dashes = style_of(line.number)
    return {"line": line, "color": color, "dashes": " ".join(map(str, dashes))}


_LOG: dict[str, Any] = {"log": True}


def _charts(lines: list[Line], metric: str) -> list[dict[str, str]]:
    score = "test accuracy, %" if metric == "accuracy" else "test perplexity"
    solved = [line for line in lines if line.records[0]["contraction"]]
    learned = [line for line in solved if line.records[0]["run"]["solver"] == "inexact-newton"]
    tolerance = [line for line in solved if line not in learned]
    found: list[tuple[str, str, str, list[Curve], dict[str, Any]]] = [
        ("Score over epochs", score, "epoch", _history(lines, metric), {}),
        (
            "Training loss over epochs",
            "training loss",
            "epoch",
            _history(lines, "train_loss"),
            _LOG,
        ),
        ("Score against training time", score, "seconds of training", _by_time(lines, metric), {}),
        ("Learning rate", "learning rate", "epoch", _history(lines, "lr"), _LOG),
        (
            "Iterations of a solve over training",
            "updates a time step",
            "epoch",
            _history(tolerance, "iterations"),
            {},
        ),
        (
            "Distance from equilibrium over training",
            "relative residual",
            "epoch",
            _history(solved, "residual"),
            _LOG,
        ),
        (
            "Contraction over time, after training",
            "‖I + η f'(h)‖, median",
            "time step",
            _over_time(solved, "norm"),
            {"line": 1.0},
        ),
        ("Learned η over time", "η", "time step", _over_time(learned, "eta"), {"line": 0.0}),
    ]
    return [
        {"title": title, "image": _data_uri(curve_chart(curves, x=x, y=y, **options))}
        for title, y, x, curves, options in found
        if curves
    ]


def _history(lines: list[Line], name: str) -> list[Curve]:
    """Mean over the seeds and their range, epoch by epoch."""
    curves = []
    for line in lines:
        epochs = zip(*([e[name] for e in r["epochs"]] for r in line.records), strict=False)
        values = [[v for v in seeds if v is not None] for seeds in epochs]
        rows = [(n, v) for n, v in enumerate(values, 1) if v]
        if rows:
            x = [n for n, _ in rows]
            y = [statistics.fmean(v) for _, v in rows]
            low, high = ([end(v) for _, v in rows] for end in (min, max))
            curves.append(Curve(line.number, x, y, low, high))
    return curves


def _by_time(lines: list[Line], metric: str) -> list[Curve]:
    """The mean score against the mean time until then."""
    curves = []
    for line, curve in zip(lines, _history(lines, metric), strict=False):
        times = _history([line], "seconds")[0].y
        total = [sum(times[: n + 1]) for n in range(len(times))]
        curves.append(curve._replace(x=total[: len(curve.y)], low=None, high=None))
    return curves


def _over_time(lines: list[Line], name: str) -> list[Curve]:
    """A curve for each update of the first seed; of several windows their median."""
    curves = []
    for line in lines:
        after = line.records[0]["contraction"]["after"]
        t = [step + 1 for step in after["t"]]
        for k in range(len(after["eta"][0])):
            at_k = [row[k] for row in after[name]]
            y = [_median(v) if isinstance(v, list) else v for v in at_k]
            curves.append(Curve(line.number, t, y))
    return curves


def _median(values: list[float | None]) -> float:
    numbers = [v for v in values if v is not None]
    return statistics.median(numbers) if numbers else float("nan")


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


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
