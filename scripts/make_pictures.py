"""Draw the pictures of README and of the site: python scripts/make_pictures.py

cobweb.png, residuals.png: cos(z) = z by plain iteration, and by two solvers against evaluations.
logo.svg: the cobweb of z <- cos(z), its fixed point in the middle, on a transparent ground.
"""

from pathlib import Path

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

from fixpoint import Anderson, Picard
from fixpoint.analysis import plots, residual_curves, trajectories

STATIC = Path(__file__).parent.parent / "docs" / "_static"
START = torch.zeros(1, 1, dtype=torch.float64)


def cobweb() -> Figure:
    """Draw plain iteration of cos."""
    path = trajectories(torch.cos, START, Picard(), max_iter=15)
    axes = plots.plot_cobweb(torch.cos, path, plots.panels(height=2.9)[0], box=(-0.05, 1.25))
    return plots.figure_of(axes)


def residuals() -> Figure:
    """Draw the residual of each solver of cos(z) = z against evaluations."""
    curves = residual_curves(torch.cos, START, {"picard": Picard(), "anderson": Anderson()})
    axes = plots.plot_residual_curves(curves, plots.panels(height=2.9)[0])
    axes.set_xscale("linear")
    axes.set(xlabel="evaluations of phi", ylim=(1e-12, 3))
    return plots.figure_of(axes)


def logo() -> Figure:
    figure = Figure(figsize=(2, 2))
    axes = figure.add_axes((0, 0, 1, 1))
    line = torch.linspace(0.0, 1.5, 100)
    color = plots.COLORS["blue"]
    axes.plot(line, line, color="0.6", linewidth=2)
    axes.plot(line, torch.cos(line), color=color, linewidth=4)
    z, points = torch.tensor(0.05), [(0.05, 0.0)]
    for _ in range(12):
        points += [(z.item(), torch.cos(z).item()), (torch.cos(z).item(), torch.cos(z).item())]
        z = torch.cos(z)
    axes.plot(*zip(*points, strict=True), color=plots.COLORS["vermilion"], linewidth=1.8)
    axes.plot(0.7391, 0.7391, "o", color=color, markersize=9)
    axes.set(xlim=(-0.02, 1.42), ylim=(-0.02, 1.42))
    axes.axis("off")
    figure.patch.set_alpha(0)
    return figure


if __name__ == "__main__":
    plots.save(cobweb(), STATIC / "cobweb.png", dpi=200)
    plots.save(residuals(), STATIC / "residuals.png", dpi=200)
    with rc_context({"savefig.transparent": True}):
        plots.save(logo(), STATIC / "logo.svg")
