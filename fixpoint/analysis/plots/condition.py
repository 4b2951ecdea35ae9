"""Figures of the convergence condition: over time, over updates, over training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from fixpoint.analysis.contraction_profile import ContractionProfile
from fixpoint.analysis.convergence_rate import ConvergenceRate
from fixpoint.analysis.diagnosis import Diagnosis
from fixpoint.analysis.plots.style import (
    COLORS,
    add_legend,
    add_title,
    each_run,
    epoch_axis,
    figure_of,
    host,
    legend_below,
    literal,
    log_y,
    panel,
    panels,
)

BEFORE, AFTER = COLORS["grey"], COLORS["blue"]
INTERVAL, USED = COLORS["orange"], COLORS["green"]
WIDEST = 3
"""Most columns of a figure side by side."""

NORM = r"$\|I + \eta f'(h)\|_2$"
CONTRACTION_CAPTION = (
    "Above: ||I + eta f'(h)||_2 over time before and after training, median and range of the "
    "windows of all seeds; below 1 (dashed) the iteration contracts. Below: eta used, of several "
    "seeds median and range, and the interval of eta in which it contracts for every window. One "
    "column for each model and update."
)
CONDITION_CAPTION = (
    "From above: ||I + eta f'(h)||_2 over time, median and range of the windows, below 1 (dashed) "
    "the iteration contracts; eta used and the interval in which it contracts for every window; "
    "distance of the states from equilibrium, median and 10 % to 90 % of the windows."
)


Profiles = dict[str, Any] | list[dict[str, Any]]
"""A `ContractionProfile` as lists, see `fixpoint.training.run_experiment`; or one for each seed."""


def plot_contraction(
    axes: Axes, before: Profiles | None = None, after: Profiles | None = None, k: int = 0
) -> None:
    """Draw ||I + eta f'(h)||_2 of update k over time: median and range of all windows and seeds.

    Args:
        axes: where to draw.
        before, after: the profiles.
        k: index of the update.

    Raises:
        TypeError: `axes` is a profile, or a profile is missing.
    """
    if isinstance(axes, ContractionProfile) or before is None or after is None:
        raise TypeError("plot_contraction takes axes and two profiles: use plot_profile(profile)")
    for profile, color, name in (
        (before, BEFORE, "before training"),
        (after, AFTER, "after training"),
    ):
        t, norm = _steps(profile), _windows(profile, "norm", k)
        axes.plot(t, np.nanmedian(norm, 1), color=color, marker="o", markersize=3, label=name)
        low, high = np.nanmin(norm, 1), np.nanmax(norm, 1)
        axes.fill_between(t, low, high, color=color, alpha=0.2, linewidth=0)
    axes.axhline(1, color="black", linestyle="--", linewidth=1)
    axes.set_ylabel(NORM)


def plot_feasible_eta(axes: Axes, after: Profiles, k: int) -> None:
    """Draw eta of update k over time, and the interval in which the condition holds everywhere.

    At time steps where some window has none, a tick at the foot takes its place. Of several seeds
    the eta is their median, in a band from the smallest to the largest.
    """
    t = _steps(after)
    lower, upper = _windows(after, "lower", k).max(1), _windows(after, "upper", k).min(1)
    etas = np.array([np.array(one["eta"])[:, k] for one in each_run(after, dict)])
    good = upper > lower  # False where NaN
    band = "feasible" if good.any() else None
    axes.fill_between(
        t, lower, upper, where=good, color=INTERVAL, alpha=0.35, linewidth=0, label=band
    )
    # Between two steps without an interval the band has no width.
    alone = good & ~np.append(False, good[:-1]) & ~np.append(good[1:], False)
    axes.vlines(t[alone], lower[alone], upper[alone], color=INTERVAL, alpha=0.35, linewidth=3)
    if not good.all():
        axes.plot(
            t[~good],
            np.full((~good).sum(), 0.03),
            "|",
            color=INTERVAL,
            markersize=4,
            transform=axes.get_xaxis_transform(),
            label="no feasible $\\eta$",
        )
    axes.plot(t, np.median(etas, 0), color=USED, marker="s", markersize=2.5, label=r"$\eta$ used")
    if len(etas) > 1:
        axes.fill_between(t, etas.min(0), etas.max(0), color=USED, alpha=0.25, linewidth=0)
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set_xlabel("time step $t$")
    axes.set_ylabel(r"$\eta$")


def _steps(profiles: Profiles) -> np.ndarray:
    """Return the time steps, counted from 1."""
    return np.array(each_run(profiles, dict)[0]["t"]) + 1


def _windows(profiles: Profiles, name: str, k: int) -> np.ndarray:
    """Return a figure of update k, (S, windows of all seeds)."""
    parts = [np.array(one[name], dtype=float)[:, k] for one in each_run(profiles, dict)]
    return np.concatenate(parts, 1)


def contraction_figure(records: list[Profiles]) -> Figure:
    """Draw a column for each update of each model: the norm above, eta and its interval below.

    At most three columns lie side by side; more go below them.

    Args:
        records: a record of each model, or the records of its seeds.

    Raises:
        TypeError: not records of runs, as of `fixpoint.training.run_experiment`.
    """
    if isinstance(records, ContractionProfile):
        raise TypeError("contraction_figure takes records of runs: use plot_profile(profile)")
    models = [each_run(record, dict) for record in records]
    updates = [len(runs[0]["contraction"]["after"]["eta"][0]) for runs in models]
    columns = [(runs, k, K) for runs, K in zip(models, updates, strict=True) for k in range(K)]
    width = min(len(columns), WIDEST)
    axes = panels(2 * -(-len(columns) // width), width, height=2.2, sharex=True)
    figure, grid = figure_of(axes[0]), np.array(axes).reshape(-1, 2, width).swapaxes(0, 1)
    tops, bottoms = grid[0].ravel(), grid[1].ravel()
    for unused in (*tops[len(columns) :], *bottoms[len(columns) :]):
        unused.remove()
    drawn = [*tops[: len(columns)], *bottoms[: len(columns)]]
    for (runs, k, K), top, bottom in zip(columns, tops, bottoms, strict=False):
        before, after = ([r["contraction"][when] for r in runs] for when in ("before", "after"))
        plot_contraction(top, before, after, k)
        plot_feasible_eta(bottom, after, k)
        which = f", k={k + 1}" if K > 1 else ""
        add_title(top, f"{literal(runs[0]['label'])}{which}")
    legend_below(figure, drawn, columns=2 * width)
    return figure


def plot_profile(profile: ContractionProfile, axes: Axes | None = None) -> Axes:
    """Draw ||I + eta f'(h)||_2 over time, one curve an update: median and range of the windows.

    The dots below mark the steps at which eta is negative.

    Source: Theorem 1 of Zhang et al. (2019), at every time step of a sequence.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import contraction_profile, plots
        >>> from fixpoint.models import ERNN
        >>> profile = contraction_profile(ERNN(9, 8), torch.randn(20, 4, 9))
        >>> plots.plot_profile(profile).get_xlabel()
        'time step $t$'
    """
    axes = panel(axes)
    profile = host(profile)
    t = profile.t.numpy() + 1
    styles = ("-", "--", ":", "-.")
    for k in range(profile.eta.shape[1]):
        norm, eta = profile.norm[:, k].double(), profile.eta[:, k].numpy()
        median, (low, high) = norm.nanmedian(1)[0], _range(norm)
        color = list(COLORS.values())[k % 4]
        axes.plot(t, median, color=color, linestyle=styles[k % 4], label=f"$k = {k + 1}$")
        label = None if k else "range"
        axes.fill_between(t, low, high, color=color, alpha=0.2, linewidth=0, label=label)
        negative = eta < 0
        if negative.any():
            axes.plot(
                t[negative],
                np.full(negative.sum(), 0.03),
                "v",
                color=color,
                markersize=3,
                clip_on=False,
                transform=axes.get_xaxis_transform(),
                label=f"$\\eta < 0$, $k = {k + 1}$",
            )
    axes.axhline(1, color="black", linestyle="--", linewidth=0.8)
    axes.set(xlabel="time step $t$", ylabel=NORM)
    add_legend(axes)
    return axes


def plot_gap(gap: Tensor, axes: Axes | None = None) -> Axes:
    """Draw the distance of each state from equilibrium: median, 10 % and 90 % of the windows.

    Args:
        gap: (T, B), see `equilibrium_gap`.

    Source: Zhang et al. (2019), Eq. h: h_t = phi(h_t, h_{t-1}, x_t) would be a gap of 0.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import plots
        >>> plots.plot_gap(torch.rand(20, 4)).get_xlabel()
        'time step $t$'
    """
    axes = panel(axes)
    t = np.arange(1, len(gap) + 1)
    low, middle, high = np.nanquantile(host(gap).double().numpy(), [0.1, 0.5, 0.9], axis=1)
    axes.plot(t, middle, color=AFTER, label="median")
    axes.fill_between(t, low, high, color=AFTER, alpha=0.2, linewidth=0, label="10 % .. 90 %")
    small = middle.max() < 0.05 or middle.max() > 100 * middle.min()
    if middle.min() > 0 and small:
        log_y(axes)
    else:
        axes.set_ylim(0, 1.05 * max(1, high.max()))
    axes.set(xlabel="time step $t$", ylabel=r"$|\phi(h_t) - h_t|$ / size")
    add_legend(axes)
    return axes


def diagnosis_figure(diagnosis: Diagnosis) -> Figure:
    """Draw the condition, eta with its feasible interval, and the distance from equilibrium.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import diagnose, plots
        >>> from fixpoint.models import ERNN
        >>> figure = plots.diagnosis_figure(diagnose(ERNN(9, 8), torch.randn(20, 4, 9)))
        >>> len(figure.axes)
        3
    """
    profile = diagnosis.profile
    updates = profile.eta.shape[1]
    axes = panels(2 + updates, sharex=True, height=2.0)
    plot_profile(profile, axes[0])
    lists = {name: part.tolist() for name, part in profile._asdict().items()}
    for k in range(updates):
        plot_feasible_eta(axes[1 + k], lists, k)
        axes[1 + k].set(xlabel="", ylabel=rf"$\eta$, $k = {k + 1}$" if updates > 1 else r"$\eta$")
    axes[0].set_xlabel("")
    plot_gap(diagnosis.gap, axes[-1])
    for one in axes:
        add_legend(one, columns=3)  # above the axes, where it hides nothing
    return figure_of(axes[0])


def plot_epochs(
    profiles: Sequence[ContractionProfile | Sequence[ContractionProfile]],
    axes: Axes | None = None,
) -> Axes:
    """Draw ||I + eta f'(h)||_2 over training: all (t, k) and windows of each epoch; 0: untrained.

    Args:
        profiles: one an epoch, or the profiles of all seeds, which are drawn together.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import contraction_profile, plots
        >>> from fixpoint.models import ERNN
        >>> profile = contraction_profile(ERNN(9, 8), torch.randn(20, 4, 9))
        >>> plots.plot_epochs([profile, profile]).get_xlabel()
        'epoch'
    """
    axes = panel(axes)
    values = np.stack(
        [
            np.concatenate([host(one.norm).double().flatten().numpy() for one in seeds])
            for seeds in (each_run(profile, ContractionProfile) for profile in profiles)
        ],
        1,
    )
    low, middle, high = np.nanquantile(values, [0.05, 0.5, 0.95], axis=0)
    epochs = np.arange(len(profiles))
    axes.plot(epochs, middle, color=AFTER, marker="o", markersize=2.5, label="median")
    axes.fill_between(epochs, low, high, color=AFTER, alpha=0.2, linewidth=0, label="5 % .. 95 %")
    axes.axhline(1, color="black", linestyle="--", linewidth=0.8)
    epoch_axis(axes)
    axes.set(ylabel=NORM)
    add_legend(axes)
    return axes


def plot_iterations(profile: ContractionProfile, axes: Axes | None = None) -> Axes:
    """Draw ||I + eta f'(z)||_2 and the largest feasible eta over the updates of one solve.

    Median and range of the samples; where some sample has no feasible eta none is drawn.

    Args:
        profile: of `iteration_profile`.

    Source: Theorem 1 of Zhang et al. (2019), for k = 1, 2, ...

    Example:
        >>> import torch
        >>> from fixpoint import Picard, solve
        >>> from fixpoint.analysis import iteration_profile, plots
        >>> solver = Picard(max_iter=9, rtol=0, atol=0, record="iterates")
        >>> trace = solve(torch.cos, torch.zeros(1, 1), solver).trace
        >>> plots.plot_iterations(iteration_profile(torch.cos, trace, 1.0)).get_xlabel()
        'update $k$'
    """
    axes = panel(axes)
    profile = host(profile)
    norm = profile.norm[0].double()
    k = np.arange(1, len(norm) + 1)
    axes.plot(k, norm.nanmedian(1)[0], "o-", color=AFTER, markersize=2.5, label=NORM)
    axes.fill_between(k, *_range(norm), color=AFTER, alpha=0.2, linewidth=0)
    upper = profile.upper[0].amin(1)  # NaN where one sample has none
    axes.plot(k, upper, "s--", color=INTERVAL, markersize=2.5, label=r"largest feasible $\eta$")
    axes.plot(k, profile.eta[0], ":", color=USED, label=r"$\eta$ used")
    axes.axhline(1, color="black", linestyle="--", linewidth=0.8)
    axes.set(xlabel="update $k$", ylabel=r"norm, $\eta$")
    axes.set_ylim(bottom=min(0, float(profile.eta.min())))
    add_legend(axes)
    return axes


def plot_rate(speed: ConvergenceRate, axes: Axes | None = None, *, row: int = 0) -> Axes:
    """Draw Lemma 1's ||r_k|| / ||f(z_k)||, tau and the measured rate over the updates.

    Args:
        row: which sample.

    Source: Dembo, Eisenstat, Steihaug (1982), as Lemma 1 of Zhang et al. (2019).

    Example:
        >>> import torch
        >>> from fixpoint import Picard, solve
        >>> from fixpoint.analysis import convergence_rate, plots
        >>> solver = Picard(record="iterates")
        >>> speed = convergence_rate(solve(torch.cos, torch.zeros(1, 1), solver).trace, torch.cos)
        >>> plots.plot_rate(speed).get_xlabel()
        'update $k$'
    """
    axes = panel(axes)
    speed = host(speed)
    k = np.arange(1, len(speed.rate) + 1)
    axes.plot(k, speed.rate[:, row], "o-", color=AFTER, markersize=3, label="measured rate")
    axes.plot(
        k, speed.forcing[:, row], "x--", color=INTERVAL, markersize=4, label=r"$\|r\| / \|f\|$"
    )
    axes.axhline(speed.tau[row].item(), color=BEFORE, linestyle=":", label=r"$\tau$ of Lemma 1")
    axes.axhline(1, color="black", linestyle="--", linewidth=0.8)
    axes.set(xlabel="update $k$", ylabel="error ratio of one update")
    axes.set_ylim(bottom=0)
    add_legend(axes)
    return axes


def _range(norm: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and largest of each row without NaN; NaN where a row has nothing else."""
    nan = norm.isnan()
    low = norm.masked_fill(nan, float("inf")).amin(1)
    high = norm.masked_fill(nan, float("-inf")).amax(1)
    empty = nan.all(1)
    return low.masked_fill(empty, float("nan")).numpy(), high.masked_fill(
        empty, float("nan")
    ).numpy()
