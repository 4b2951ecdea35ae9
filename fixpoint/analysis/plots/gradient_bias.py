"""Cheap gradients of an equilibrium compared with the exact one."""

from __future__ import annotations

from matplotlib.axes import Axes

from fixpoint.analysis.gradient_bias import GOOD, GradientBias
from fixpoint.analysis.plots.style import COLORS, panel


def plot_gradient_bias(bias: GradientBias, axes: Axes | None = None) -> Axes:
    """Plot the cosine with the exact gradient and relative size of each cheap one.

    Args:
        bias: of `gradient_bias`.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import GradientBias, plots
        >>> bias = GradientBias(("one step",), torch.ones(1), torch.ones(1), 1.0)
        >>> plots.plot_gradient_bias(bias).get_ylabel()
        'relative to the exact gradient'
    """
    axes = panel(axes)
    places = range(len(bias.names))
    axes.plot(places, bias.cosine.numpy(), "o", color=COLORS["blue"], label="cosine")
    axes.plot(places, bias.size.numpy(), "s", color=COLORS["orange"], label="size")
    axes.axhline(GOOD, color="0.7", linewidth=0.8, linestyle="--")
    axes.set(xticks=list(places), xticklabels=bias.names, ylabel="relative to the exact gradient")
    axes.set_ylim(min(0.0, 1.1 * float(bias.cosine.min())), 1.1 * max(1.0, float(bias.size.max())))
    axes.margins(x=0.15)
    axes.legend(frameon=False)
    return axes
