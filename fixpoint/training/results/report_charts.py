"""The charts of a report: curves of each configuration over epochs and over time steps."""

from __future__ import annotations

import base64
import statistics
from typing import Any, NamedTuple

from fixpoint.analysis.plots.style import style_of
from fixpoint.analysis.plots.svg import Curve, curve_chart, dash_array
from fixpoint.training.results.store import Record

_LOG: dict[str, Any] = {"log": True}


class Line(NamedTuple):
    """A configuration: its number in the charts, name, what else tells it apart, its runs."""

    number: int
    name: str
    detail: str
    records: list[Record]


def legend(lines: list[Line]) -> list[dict[str, Any]]:
    """Return the color and dashes of each line, for an SVG element."""
    styles = [style_of(line.number) for line in lines]
    return [
        {"line": line, "color": style["color"], "dashes": dash_array(style)}
        for line, style in zip(lines, styles, strict=True)
    ]


def charts(lines: list[Line], metric: str) -> list[dict[str, str]]:
    """Return the title and image of each chart that has a curve; the image as a data URI."""
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
    """Return the mean over the seeds and their range, epoch by epoch."""
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
    """Return the mean score against the mean time until then."""
    curves = []
    for line in lines:
        for curve in _history([line], metric):
            times = _history([line], "seconds")[0].y
            total = [sum(times[: int(epoch)]) for epoch in curve.x]
            curves.append(curve._replace(x=total, low=None, high=None))
    return curves


def _over_time(lines: list[Line], name: str) -> list[Curve]:
    """Return a curve for each update: mean and range over seeds, of several windows the median."""
    curves = []
    for line in lines:
        seeds = [r["contraction"]["after"] for r in line.records if r["contraction"]]
        t = [step + 1 for step in seeds[0]["t"]]
        for k in range(len(seeds[0]["eta"][0])):
            at_k = [[_of_windows(row[k]) for row in after[name]] for after in seeds]
            steps = list(zip(*at_k, strict=True))
            y = [statistics.fmean(v) for v in steps]
            low, high = ([end(v) for v in steps] for end in (min, max))
            curves.append(Curve(line.number, t, y, low, high))
    return curves


def _of_windows(value: float | list[float | None]) -> float:
    return _median(value) if isinstance(value, list) else value


def _median(values: list[float | None]) -> float:
    numbers = [v for v in values if v is not None]
    return statistics.median(numbers) if numbers else float("nan")


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
