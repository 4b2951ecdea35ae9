"""Figures of the study of solvers, drawn from its records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from fixpoint.analysis.plots.style import (
    COLORS,
    Figure,
    add_legend,
    add_title,
    epoch_axis,
    figure_of,
    legend_below,
    panels,
    plot_runs,
    style_of,
)

Record = dict[str, Any]

TOLERANCE_COLORS = {1e-2: "sky", 1e-3: "blue", 1e-5: "indigo"}
LINES = {"picard": "--", "anderson": "-"}
STEP_COLORS = {"K=1": "blue", "K=2": "sky", "K=5": "indigo"}
BACKWARD_COLORS = {"unrolled": "black", "phantom": "grey"}
MAP_COLORS = {0.5: "blue", 0.9: "green", 0.99: "orange", 0.0: "vermilion"}


def accuracy_figure(records: Sequence[Record]) -> Figure:
    """Test accuracy of each epoch against training time, by model and solver: median and range."""
    (axes,) = panels(height=2.9)
    rows: dict[str, list[Record]] = {}
    longest, _ = _by_length(records)
    for record in longest:
        run = record["run"]
        if record["accuracy_last"] is not None:  # it did not diverge
            name = f"K={run['max_iter']}" if run["map"] == "jordan" else run["solver"]
            rows.setdefault(name, []).append(record)
    for name, seeds in rows.items():
        runs = [[epoch["accuracy"] for epoch in record["epochs"]] for record in seeds]
        seconds = np.mean([record["measures"]["seconds_per_epoch"] for record in seeds])
        x = seconds * np.arange(1, len(runs[0]) + 1)
        if name in STEP_COLORS:
            color = COLORS[STEP_COLORS[name]]
            plot_runs(axes, x, runs, method=f"ERNN {name}", label=name, color=color)
        else:
            plot_runs(axes, x, runs, method=name, label=name.capitalize())
    axes.set(xlabel="training time (s)", ylabel="test accuracy (%)", xscale="log")
    add_legend(axes, columns=3)
    return figure_of(axes)


def iterations_figure(records: Sequence[Record]) -> Figure:
    """Draw iterations over the time steps by tolerance and map, and over the epochs."""
    over_t, epochs, maps = panels(1, 3, height=2.6)
    longest, shorter = _by_length(records)
    for record in shorter or records:
        run = record["run"]
        if run["solver"] not in LINES or run["backward"] != "implicit":
            continue
        if run["bound"] == 0.5:
            label = f"{run['solver'].capitalize()}, rtol {run['rtol']:g}"
            style = {"color": COLORS[TOLERANCE_COLORS[run["rtol"]]], "ls": LINES[run["solver"]]}
            _over_time(over_t, record, label, style)
        if run["solver"] == "anderson" and run["rtol"] == 1e-3:
            bound = run["bound"]
            label = f"Anderson, ||U|| = {bound:g}" if bound else "Anderson, U free"
            _over_time(maps, record, label, {"color": COLORS[MAP_COLORS[bound]]})
    solved = [record for record in longest if record["run"]["map"] != "jordan"]
    solvers = list(dict.fromkeys(record["run"]["solver"] for record in solved))
    for solver in solvers:
        seeds = [record["epochs"] for record in solved if record["run"]["solver"] == solver]
        runs = [[epoch["iterations"] for epoch in run] for run in seeds]
        whole = [run for run in runs if len(run) == len(runs[0])]
        plot_runs(epochs, np.arange(1, len(whole[0]) + 1), whole, method=solver)
    for axes in (over_t, epochs, maps):
        axes.set_ylim(bottom=0)
        axes.set_ylabel("iterations a time step")
    for axes in (over_t, maps):
        axes.set_xlabel("time step $t$")
    epoch_axis(epochs)
    add_title(over_t, "tolerances, $||U|| = 0.5$")
    add_title(epochs, f"over training, {', '.join(map(str.capitalize, solvers))}")
    add_title(maps, "maps, rtol 0.001")
    figure = figure_of(over_t)
    legend_below(figure, [over_t, maps], columns=4)
    return figure


def gradient_figure(records: Sequence[Record]) -> Figure:
    """Draw the relative error of the gradient over the tolerance, on the weights of one model."""
    (axes,) = panels(height=2.9)
    rows = [row for record in records for row in record["measures"]["grid"]]
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["gradient_error"] is not None:
            method = row["solver"] if row["backward"] == "implicit" else row["backward"]
            curves.setdefault(method, []).append((row["rtol"], row["gradient_error"]))
    for name, points in curves.items():
        own = BACKWARD_COLORS.get(name)
        label = f"Picard, {name}" if own else f"{name.capitalize()}, implicit"
        color = {"color": COLORS[own]} if own else {}
        axes.plot(*zip(*points, strict=True), **{**style_of(name), **color, "label": label})
    axes.set(xscale="log", yscale="log", xlabel="rtol", ylabel="relative error of the gradient")
    if rows:
        axes.invert_xaxis()
        add_legend(axes, columns=2)
    return figure_of(axes)


STUDY_FIGURES: dict[str, Callable[[Sequence[Record]], Figure]] = {
    "accuracy": accuracy_figure,
    "iterations": iterations_figure,
    "gradients": gradient_figure,
}
"""Figures of the study by the names of their files."""


def _by_length(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Return the runs of the most epochs, and the others."""
    most = max((record["run"]["epochs"] for record in records), default=0)
    parts: tuple[list[Record], list[Record]] = [], []
    for record in records:
        parts[record["run"]["epochs"] < most].append(record)
    return parts


def _over_time(axes: Axes, record: Record, label: str, style: dict[str, Any]) -> None:
    y = record["measures"]["iterations"]
    axes.plot(np.arange(1, len(y) + 1), y, lw=1.2, label=label, **style)
