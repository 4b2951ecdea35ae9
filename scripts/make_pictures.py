"""Draw the pictures of README and of the site: python scripts/make_pictures.py

convergence.png: residual against evaluations of three solvers on one slow map.
logo.png: the cobweb of z <- cos(z), its fixed point in the middle.
"""

from pathlib import Path

import torch
from matplotlib.figure import Figure

from fixpoint import Anderson, Broyden, Picard
from fixpoint.analysis import plots, residual_curves

STATIC = Path(__file__).parent.parent / "docs" / "_static"


def convergence() -> Figure:
    """phi(z) = tanh(z U^T + x), U symmetric with ||U||_2 = 0.98, D = 50, float64."""
    generator = torch.Generator().manual_seed(0)
    U = torch.randn(50, 50, generator=generator, dtype=torch.float64)
    U = 0.98 * (U + U.T) / torch.linalg.matrix_norm(U + U.T, 2)
    x = 0.1 * torch.randn(1, 50, generator=generator, dtype=torch.float64)
    solvers = {"picard": Picard(), "anderson": Anderson(), "broyden": Broyden()}
    start = torch.zeros_like(x)
    curves = residual_curves(lambda z: torch.tanh(z @ U.T + x), start, solvers, max_iter=60)
    axes = plots.plot_residual_curves(curves)
    axes.set_xscale("linear")
    axes.set_xlabel("evaluations of phi")
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
    return figure


if __name__ == "__main__":
    plots.save(convergence(), STATIC / "convergence.png", dpi=200)
    plots.save(logo(), STATIC / "logo.png", dpi=120)
