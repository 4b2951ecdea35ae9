"""Plots of the solves of a sequence."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from fixpoint.analysis.plots.style import COLORS, add_legend, cross_out, host, panel
from fixpoint.solution import Result


def plot_updates(iterations: Tensor, result: Tensor, axes: Axes | None = None) -> Axes:
    """Draw the updates of the solve at each time step: median and range of the windows.

    The crosses mark time steps at which some window did not converge.

    Args:
        iterations: updates, (T, B), of `ERNN.trajectory` or `diagnose`.
        result: how each solve ended, (T, B), a `Result` each.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import plots
        >>> plots.plot_updates(torch.ones(20, 4), torch.zeros(20, 4)).get_xlabel()
        'time step $t$'
    """
    axes = panel(axes)
    updates = host(iterations).double().numpy()
    t = np.arange(1, len(updates) + 1)
    blue = COLORS["blue"]
    axes.plot(t, np.median(updates, 1), color=blue, label="median")
    low, high = updates.min(1), updates.max(1)
    axes.fill_between(t, low, high, color=blue, alpha=0.2, linewidth=0, label="range")
    open_ = (host(result) != Result.CONVERGED).any(1).numpy()
    cross_out(axes, t[open_], high[open_], label="some window did not converge")
    axes.set(xlabel="time step $t$", ylabel="updates of a solve")
    axes.set_ylim(0, 1.08 * max(1, high.max()))  # room for the crosses
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    add_legend(axes, columns=2)  # above: the median crosses the panel
    return axes
