"""Figures. The only module that loads matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

BEFORE, AFTER, INTERVAL = "#777777", "#0072B2", "#E69F00"
"""Colours that colour-blind readers can tell apart (Okabe and Ito, 2008)."""


def plot_contraction(axes: Axes, before: dict[str, Any], after: dict[str, Any], k: int) -> None:
    """||I + eta f'(h)||_2 of update k over time: median of the windows, and their range.

    Args:
        axes: where to draw.
        before, after: a `ContractionProfile` as lists, see `fixpoint.training.execute`.
        k: index of the update.
    """
    for profile, colour, name in ((before, BEFORE, "before training"), (after, AFTER, "after")):
        norm = np.array(profile["norm"])[:, k]
        t = np.array(profile["t"]) + 1
        axes.plot(t, np.median(norm, 1), color=colour, marker="o", markersize=3, label=name)
        axes.fill_between(t, norm.min(1), norm.max(1), color=colour, alpha=0.2, linewidth=0)
    axes.axhline(1, color="black", linestyle="--", linewidth=1)
    axes.set_ylabel(r"$\|I + \eta f'(h)\|_2$")


def plot_feasible_eta(axes: Axes, after: dict[str, Any], k: int) -> None:
    """eta of update k over time, and the interval in which the condition holds in all windows.

    The interval is left out at time steps where some window has none.
    """
    t = np.array(after["t"]) + 1
    lower = np.array(after["lower"], dtype=float)[:, k].max(1)
    upper = np.array(after["upper"], dtype=float)[:, k].min(1)
    eta = np.array(after["eta"])[:, k]
    good = upper > lower  # False where NaN
    axes.fill_between(
        t, lower, upper, where=good, color=INTERVAL, alpha=0.35, linewidth=0, label="feasible"
    )
    axes.vlines(t[good], lower[good], upper[good], color=INTERVAL, linewidth=1.5)
    if not good.all():
        axes.plot(
            t[~good], np.zeros((~good).sum()), "x", color=INTERVAL, label="no feasible $\\eta$"
        )
    axes.plot(t, eta, color=AFTER, marker="o", markersize=3, label=r"$\eta$ used")
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set_ylabel(r"$\eta$")
    axes.set_xlabel("time step $t$")


def contraction_figure(records: list[dict[str, Any]]) -> Figure:
    """One column for each update of each record: the norm above, eta and its interval below."""
    columns = [(r, k) for r in records for k in range(len(r["contraction"]["after"]["eta"][0]))]
    figure = Figure(figsize=(max(3.1 * len(columns), 5), 5.2), layout="constrained")
    grid = figure.subplots(2, len(columns), sharex=True, squeeze=False)
    for (record, k), top, bottom in zip(columns, grid[0], grid[1], strict=True):
        before, after = record["contraction"]["before"], record["contraction"]["after"]
        plot_contraction(top, before, after, k)
        plot_feasible_eta(bottom, after, k)
        updates = len(after["eta"][0])
        which = f", k={k + 1}" if updates > 1 else ""
        top.set_title(f"{record['label']}{which}\n{record['run']['cell']} cell", fontsize=10)
    _legend_below(figure, grid.ravel().tolist())
    run = records[0]["run"]
    figure.suptitle(f"Convergence condition on {run['dataset']}: below 1 the solve contracts")
    return figure


def _legend_below(figure: Figure, panels: list[Axes]) -> None:
    """One legend for all panels, under them: inside it would hide a curve."""
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=len(handles)
    )


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG."""
    FigureCanvasAgg(figure).print_figure(path, dpi=150)
