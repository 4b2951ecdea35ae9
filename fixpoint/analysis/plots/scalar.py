"""Figures of the scalar equilibrium Phi(alpha)."""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from fixpoint.analysis.plots.style import COLORS, add_legend, host, panel, style_of
from fixpoint.analysis.scalar.iteration import tanh_newton_steps, tanh_plain_steps
from fixpoint.analysis.scalar.tanh import (
    EXPANDING_BAND,
    tanh_equilibrium,
    tanh_equilibrium_derivative,
)


def plot_equilibrium(axes: Axes | None = None, *, reach: float = 1.0) -> Axes:
    """Draw Phi and Phi' over alpha, and the band in which Phi' exceeds 1.

    Args:
        reach: alpha from -reach to reach.

    Source: Zhang, Kag, Sullivan, Saligrama (2019), Equilibrated Recurrent Neural Network, figure
        "fixed-point and derivative of Phi vs alpha".

    Example:
        >>> from fixpoint.analysis import plots
        >>> plots.plot_equilibrium().get_xlabel()
        '$\\\\alpha$'
    """
    axes = panel(axes)
    # Odd: both sides of 0, where Phi' is infinite, but not 0 itself.
    half = torch.logspace(-5, 0, 300, dtype=torch.float64) * reach
    alpha = torch.cat([-half.flip(0), half])
    axes.axvspan(
        -EXPANDING_BAND,
        EXPANDING_BAND,
        color=COLORS["grey"],
        alpha=0.2,
        linewidth=0,
        label=r"$\Phi' > 1$",
    )
    axes.plot(alpha, tanh_equilibrium(alpha), color=COLORS["blue"], label=r"$\Phi(\alpha)$")
    slope = tanh_equilibrium_derivative(alpha)
    axes.plot(alpha, slope, "--", color=COLORS["vermilion"], label=r"$\Phi'(\alpha)$")
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set(xlabel=r"$\alpha$", ylabel=r"$\Phi$ and $\Phi'$", ylim=(-1.2, 4), xlim=(-reach, reach))
    add_legend(axes, loc="upper right")
    return axes


def plot_steps(
    alpha: Tensor | None = None,
    axes: Axes | None = None,
    *,
    atol: float = 1e-6,
    eta: float = 0.5,
    max_iter: int = 100_000,
) -> Axes:
    """Draw the steps of plain, damped and Newton iteration to the equilibrium, over alpha.

    Args:
        alpha: positive numbers; 1e-5 to 10 if not given.
        atol: distance to Phi that plain and damped iteration have to reach.
        eta: step of damped iteration.
        max_iter: most steps; longer runs are left out.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import plots
        >>> plots.plot_steps(torch.tensor([0.1, 1.0], dtype=torch.float64)).get_yscale()
        'log'
    """
    axes = panel(axes)
    alpha = host(torch.logspace(-5, 1, 25, dtype=torch.float64) if alpha is None else alpha)
    for name, label, steps in (
        ("picard", "plain", tanh_plain_steps(alpha, atol=atol, max_iter=max_iter)),
        (
            "inexact-newton",
            rf"damped, $\eta = {eta:g}$",
            tanh_plain_steps(alpha, eta=eta, atol=atol, max_iter=max_iter),
        ),
        ("newton", "Newton, to rounding", tanh_newton_steps(alpha)),
    ):
        count = np.where(steps.numpy() >= 0, steps.numpy(), np.nan)
        axes.plot(alpha, count, **{**style_of(name), "label": label})
    axes.axvline(EXPANDING_BAND, color=COLORS["grey"], linewidth=0.8, label=r"$\Phi' = 1$")
    axes.set(xscale="log", yscale="log", xlabel=r"$\alpha$")
    axes.set_ylabel(rf"steps to $|h - \Phi| \leq$ {atol:g}")
    add_legend(axes, columns=2)
    return axes
