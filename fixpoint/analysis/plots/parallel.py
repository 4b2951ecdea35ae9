"""Figures of recurrences solved for all time steps at once."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fixpoint.analysis.lyapunov import LyapunovExponent
from fixpoint.analysis.parallel_iterations import ParallelIterations
from fixpoint.analysis.plots.style import COLORS, add_legend, figure_of, host, panel, panels

PALETTE = tuple(COLORS.values())


def plot_growth(found: LyapunovExponent, axes: Axes | None = None) -> Axes:
    """Draw the size of a small change of the state over time: median and range of the windows.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import lyapunov_exponent, plots
        >>> from fixpoint.models import FastRNN
        >>> found = lyapunov_exponent(FastRNN(9, 8), torch.randn(20, 4, 9))
        >>> plots.plot_growth(found).get_xlabel()
        'time step $t$'
    """
    axes = panel(axes)
    growth = host(found.growth).numpy() / np.log(10)
    t = np.arange(1, len(growth) + 1)
    axes.fill_between(t, growth.min(1), growth.max(1), color=PALETTE[0], alpha=0.2, linewidth=0)
    axes.plot(t, np.median(growth, 1), color=PALETTE[0], marker="")
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set_xlabel("time step $t$")
    axes.set_ylabel(r"$\log_{10} |e_t| / |e_0|$")
    return axes


def parallel_iterations_figure(found: ParallelIterations, *, title: str = "") -> Figure:
    """Draw the iterations of each Jacobian over T and over the sum of |eta|, with a bound.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import parallel_iterations, plots
        >>> from fixpoint.models import ERNN
        >>> found = parallel_iterations(ERNN(9, 8), torch.randn(64, 2, 9), [16, 64])
        >>> len(plots.parallel_iterations_figure(found).axes)
        2
    """
    found = host(found)
    left, right = panels(1, 2)
    for axes, values in ((left, found.lengths), (right, found.total)):
        for i, (name, iterations) in enumerate(found.iterations.items()):
            axes.plot(values, iterations, marker="o", markersize=3, color=PALETTE[i], label=name)
        axes.plot(values, found.bound, "--", marker="", color="black", label="bound, leaky")
        axes.set_yscale("log")
        axes.set_ylabel("iterations")
    left.set_xscale("log", base=2)
    left.set_xlabel("time steps $T$")
    right.set_xlabel(r"$\sum_t |\eta_t|$")
    left.set_title(title)
    add_legend(left)
    return figure_of(left)
