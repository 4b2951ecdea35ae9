"""Figures of trained models: H1 to H3, learned eta, gradients through time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from fixpoint.analysis.contraction_profile import least_squares_line
from fixpoint.analysis.plots.style import (
    COLORS,
    add_legend,
    cross_out,
    each_run,
    epoch_axis,
    figure_of,
    host,
    log_y,
    panel,
    panels,
    plot_runs,
)
from fixpoint.analysis.training_history import History, ParameterDrift


def plot_drift(
    drifts: Mapping[str, ParameterDrift | Sequence[ParameterDrift]],
    axes: Axes | None = None,
    *,
    change: bool = False,
) -> Axes:
    """Draw the distance of the parameters from the last ones, by model; a band over several runs.

    Args:
        change: the distance from the epoch before instead.

    Source: H1 of Zhang, Kag, Sullivan, Saligrama (2019), Equilibrated Recurrent Neural Network,
        figure val (a).

    Example:
        >>> import torch
        >>> from fixpoint.analysis import parameter_drift, plots
        >>> drift = parameter_drift(torch.rand(5, 3))
        >>> plots.plot_drift({"RNN": drift}).get_xlabel()
        'epoch'
    """
    axes = panel(axes)
    for name, given in drifts.items():
        runs = each_run(given, ParameterDrift)
        curves = [drift.change if change else drift.to_last[1:] for drift in runs]
        plot_runs(axes, np.arange(1, len(curves[0]) + 1), curves, method=name)
    other = r"\theta_{\mathrm{before}}" if change else r"\theta_{\mathrm{last}}"
    epoch_axis(axes)
    axes.set(ylabel=rf"parameter change $|\theta - {other}|$")
    _from_zero(axes)
    add_legend(axes)
    return axes


def plot_discrimination(
    ratios: Mapping[str, Tensor | Sequence[Tensor]], axes: Axes | None = None
) -> Axes:
    """Draw the intra-class over inter-class distance of the states over time, by model.

    Args:
        ratios: (T,) each, see `discrimination`; several runs of a model are drawn as a band.

    Source: H2 of Zhang et al. (2019), figure val (b).

    Example:
        >>> import torch
        >>> from fixpoint.analysis import plots
        >>> plots.plot_discrimination({"RNN": torch.rand(20)}).get_xlabel()
        'time step $t$'
    """
    axes = panel(axes)
    for name, given in ratios.items():
        runs = each_run(given, Tensor)
        plot_runs(axes, np.arange(1, len(runs[0]) + 1), runs, method=name)
    axes.set(xlabel="time step $t$", ylabel="intra / inter-class distance")
    _from_zero(axes)
    add_legend(axes, columns=max(2, _columns(ratios)))  # above: the curves cross the panel
    return axes


def plot_loss(
    histories: Mapping[str, History | Sequence[History]],
    axes: Axes | None = None,
    *,
    accuracy: bool = False,
    title: str | None = None,
) -> Axes:
    """Draw the training loss over epochs, by model; epoch 0: untrained. A band over several runs.

    Args:
        accuracy: test accuracy in percent instead.
        title: of the legend, as the name of the data.

    Source: H3 of Zhang et al. (2019), figures H3 and acc_vs_epoch_har_2.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import plots
        >>> from fixpoint.training import record_training
        >>> x = torch.randn(64, 2)
        >>> history = record_training(torch.nn.Linear(2, 2), x, (x[:, 0] > 0).long(), epochs=2)
        >>> plots.plot_loss({"RNN": history}).get_yscale()
        'log'
    """
    axes = panel(axes)
    for name, given in histories.items():
        runs = each_run(given, History)
        if accuracy and any(history.accuracy is None for history in runs):
            raise ValueError(f"the history of {name} has no accuracy: record it with test=(x, y)")
        curves = [history.accuracy if accuracy else history.loss for history in runs]
        plot_runs(axes, np.arange(len(runs[0].loss)), curves, method=name)
    epoch_axis(axes)
    axes.set(ylabel="test accuracy (%)" if accuracy else "training loss (nats)")
    if not accuracy:
        log_y(axes)
    add_legend(axes, title=title, columns=_columns(histories))
    return axes


def plot_eta(
    eta: Tensor | Sequence[Tensor],
    axes: Axes | None = None,
    *,
    k: int = 0,
    title: str | None = None,
) -> Axes:
    """Draw the learned eta of update k over time, with its line; negative ones are crossed.

    Args:
        eta: (T, K), see `learned_eta`; of several runs the median is drawn, and their range.
        k: which update, from 0.
        title: of the legend.

    Source: Zhang et al. (2019), figure eta.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import plots
        >>> plots.plot_eta(torch.rand(20, 1)).get_ylabel()
        '$\\\\eta_t$'
    """
    axes = panel(axes)
    runs = np.array([host(one)[:, k].double().numpy() for one in each_run(eta, Tensor)])
    values = np.median(runs, 0)
    t = np.arange(1, len(values) + 1)
    negative = values < 0
    axes.plot(t[~negative], values[~negative], "o", color=COLORS["blue"], markersize=2.5)
    cross_out(axes, t[negative], values[negative], label=r"$\eta_t < 0$")
    if len(runs) > 1:
        low, high = runs.min(0), runs.max(0)
        axes.fill_between(t, low, high, color=COLORS["blue"], alpha=0.2, linewidth=0)
    slope, intercept = least_squares_line(torch.from_numpy(values)[:, None])[0].tolist()
    sign = "+" if slope >= 0 else "-"
    axes.plot(
        t,
        intercept + slope * t,
        color=COLORS["black"],
        label=rf"{intercept:.3g} {sign} {abs(slope):.1e} $t$",
    )
    axes.axhline(0, color=COLORS["grey"], linewidth=0.5)
    axes.set(xlabel="time step $t$", ylabel=r"$\eta_t$")
    add_legend(axes, title=title, columns=2)
    return axes


def eta_figure(eta: Tensor) -> Figure:
    """Draw the learned eta over time with its line, a panel each update, three in a row.

    Args:
        eta: (T, K), see `learned_eta`.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import plots
        >>> len(plots.eta_figure(torch.rand(20, 2)).axes)
        2
    """
    K = eta.shape[1]
    axes = panels(-(-K // 3), min(K, 3))
    for k in range(K):
        plot_eta(eta, axes[k], k=k, title=f"$k = {k + 1}$, $K = {K}$")
    for unused in axes[K:]:
        unused.remove()
    return figure_of(axes[0])


def plot_gradient_norms(
    norms: Mapping[str, Tensor | Sequence[Tensor]], axes: Axes | None = None
) -> Axes:
    """Draw |d loss / d h_t| over |d loss / d h_T|: median of the samples, by model.

    Args:
        norms: (T, B) each, see `gradient_norms`; several runs of a model are drawn as a band.

    Source: Pascanu, Mikolov, Bengio (2013); Zhang et al. (2019), "Vanishing and exploding
        gradients".

    Example:
        >>> import torch
        >>> from fixpoint.analysis import plots
        >>> plots.plot_gradient_norms({"RNN": torch.rand(20, 4) + 1}).get_yscale()
        'log'
    """
    axes = panel(axes)
    for name, given in norms.items():
        # A sample whose own loss has no gradient has no ratio.
        ratios = [(norm / norm[-1]).nanmedian(1)[0] for norm in host(each_run(given, Tensor))]
        plot_runs(axes, np.arange(1, len(ratios[0]) + 1), ratios, method=name)
    axes.axhline(1, color="black", linewidth=0.5)
    log_y(axes)
    axes.set_xlabel("time step $t$")
    axes.set_ylabel(r"$|\partial\ell / \partial h_t|$ over that at $T$")
    add_legend(axes, columns=_columns(norms))
    return axes


def plot_jacobian_spectrum(
    values: Tensor, axes: Axes | None = None, *, times: Sequence[int] | None = None
) -> Axes:
    """Draw the largest, median and smallest singular value of d h_T / d h_t over t.

    Args:
        values: (S, B, n), see `jacobian_spectrum`.
        times: the S time indices; 0 .. S - 1 if not given.

    Source: Pascanu, Mikolov, Bengio (2013), section 2.1.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import plots
        >>> plots.plot_jacobian_spectrum(torch.rand(20, 4, 8)).get_yscale()
        'log'
    """
    axes = panel(axes)
    t = np.arange(len(values)) + 1 if times is None else np.array(times) + 1
    middle = host(values).median(1)[0]
    tiny = float(np.finfo(np.float32).tiny)
    for column, name, color, line in (
        (0, "largest", "vermilion", "-"),
        (values.shape[2] // 2, "median", "blue", "--"),
        (values.shape[2] - 1, "smallest", "grey", ":"),
    ):
        y = middle[:, column].clamp_min(tiny)
        axes.plot(t, y, color=COLORS[color], linestyle=line, marker="o", markersize=2, label=name)
    axes.axhline(1, color="black", linewidth=0.5)
    axes.set(xlabel="time step $t$", yscale="log")
    axes.set_ylabel(r"singular values of $\partial h_T / \partial h_t$")
    add_legend(axes)
    return axes


def _from_zero(axes: Axes) -> None:
    """Start y at 0, with room for markers above the highest curve; end at 1 where all are 0."""
    axes.set_ylim(0, 1.05 * axes.dataLim.y1 or 1)


def _columns(methods: Mapping[str, object]) -> int:
    """Return the columns of a legend; one or two methods find room inside the axes."""
    return 1 if len(methods) <= 2 else min(len(methods), 3)
