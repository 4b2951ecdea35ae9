"""Figures of solvers: cost against accuracy, gradient errors, basins and trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patheffects import withStroke
from torch import Tensor

from fixpoint.analysis.basins import Basins
from fixpoint.analysis.plots.style import COLORS, add_legend, host, panel, style_of
from fixpoint.analysis.work_precision import GradientError, ResidualCurve, WorkPoint


def plot_residual_curves(curves: Mapping[str, ResidualCurve], axes: Axes | None = None) -> Axes:
    """Draw the smallest relative residual so far over work, of the worst sample, by solver.

    Exact zeros are drawn at 1e-17.

    Example:
        >>> import torch
        >>> from fixpoint import Picard
        >>> from fixpoint.analysis import plots, residual_curves
        >>> curves = residual_curves(torch.cos, torch.zeros(1, 1), {"picard": Picard()})
        >>> plots.plot_residual_curves(curves).get_xlabel()
        'evaluations + Jacobian products'
    """
    axes = panel(axes)
    for name, curve in host(dict(curves)).items():
        worst = curve.residual.double().amax(1).clamp_min(1e-17)
        axes.plot(curve.work, worst, markevery=max(1, len(worst) // 10), **style_of(name))
    axes.set(yscale="log", xscale="log", xlabel="evaluations + Jacobian products")
    axes.set_ylabel(r"$|\phi(z) - z|$ / $|\phi(z)|$")
    add_legend(axes, columns=1 if len(curves) <= 2 else 2)
    return axes


def plot_work_precision(
    points: Mapping[str, Sequence[WorkPoint]],
    axes: Axes | None = None,
    *,
    by: Literal["work", "seconds"] = "work",
    accuracy: Literal["residual", "error"] = "residual",
) -> Axes:
    """Draw the accuracy of each solver over its work; only where all samples converged.

    Args:
        by: evaluations and products, or seconds: the shortest time in which this accuracy or a
            better one was reached.
        accuracy: relative residual, or relative error where the root is known.

    Source: Hairer and Wanner (1996), Solving ordinary differential equations II, section IV.10.

    Example:
        >>> import torch
        >>> from fixpoint import Picard
        >>> from fixpoint.analysis import plots, work_precision
        >>> points = work_precision(torch.cos, torch.zeros(1, 1).double(), {"picard": Picard()})
        >>> plots.plot_work_precision(points, by="seconds").get_xlabel()
        'time (s)'
    """
    axes = panel(axes)
    for name, row in points.items():
        good = [point for point in row if point.fraction_converged == 1]
        if good:
            x = np.array([getattr(point, by) for point in good])
            if by == "seconds":
                # Shortest time of any tolerance at least as tight: timings scatter.
                x = np.minimum.accumulate(x[::-1])[::-1]
            y = [max(getattr(point, accuracy), 1e-17) for point in good]
            axes.plot(x, y, **style_of(name))
    xlabel = "evaluations + Jacobian products" if by == "work" else "time (s)"
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=f"relative {accuracy} reached")
    add_legend(axes, columns=1 if len(points) <= 2 else 2)
    return axes


def plot_data_profile(works: Mapping[str, Sequence[float]], axes: Axes | None = None) -> Axes:
    """Draw the fraction of problems that each solver solved, over work.

    Args:
        works: work that each problem took, inf where it was not solved; one order for all.

    Source: More and Wild (2009), Benchmarking derivative-free optimization algorithms, data
        profiles.

    Example:
        >>> from fixpoint.analysis import plots
        >>> plots.plot_data_profile({"picard": [10, 40, float("inf")]}).get_ylabel()
        'problems solved (%)'
    """
    axes = panel(axes)
    most = max(w for row in works.values() for w in row if np.isfinite(w))
    for name, row in works.items():
        solved = np.sort([w for w in row if np.isfinite(w)])
        fraction = 100 * np.arange(1, len(solved) + 1) / len(row)
        x, y = np.append(solved, most), np.append(fraction, fraction[-1:] if len(fraction) else 0)
        every = max(1, len(x) // 8)
        axes.plot(x, y, drawstyle="steps-post", markevery=every, **style_of(name))
    axes.set(xscale="log", xlabel="evaluations + Jacobian products", ylim=(0, 100))
    axes.set_ylabel("problems solved (%)")
    add_legend(axes, columns=1 if len(works) <= 2 else 2)
    return axes


def plot_gradient_error(error: GradientError, axes: Axes | None = None) -> Axes:
    """Draw the error of unrolled and implicit gradients over evaluations of the forward solve.

    Source: see `gradient_error`.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import gradient_error, plots
        >>> a = torch.tensor([[0.5]], dtype=torch.float64, requires_grad=True)
        >>> z0 = torch.zeros(1, 1, dtype=torch.float64)
        >>> plots.plot_gradient_error(gradient_error(lambda z: a * z + 1, z0, [a])).get_yscale()
        'log'
    """
    axes = panel(axes)
    error, floor = host(error), 1e-17
    unrolled, implicit = (e.double().clamp_min(floor) for e in (error.unrolled, error.implicit))
    axes.plot(error.unrolled_work, unrolled, **{**style_of("unrolled"), "label": "unrolled, K"})
    axes.plot(
        error.implicit_work, implicit, **{**style_of("implicit"), "label": "implicit, tolerance"}
    )
    axes.set(xscale="log", yscale="log", xlabel=r"evaluations of $\phi$, forward")
    axes.set_ylabel("relative error of the gradient")
    add_legend(axes)
    return axes


def plot_basins(ends: Basins, axes: Axes | None = None) -> Axes:
    """Draw the basin of each fixed point in a color, paler where it took longer; grey: none.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import basins, plots
        >>> ends = basins(lambda z: torch.tanh(2 * z), "picard", size=10)
        >>> plots.plot_basins(ends).get_xlabel()
        '$z_1$'
    """
    axes = panel(axes)
    ends = host(ends)
    palette = ["blue", "orange", "green", "purple", "vermilion", "sky", "black"]
    colors = [COLORS["grey"], *(COLORS[palette[i % 7]] for i in range(max(len(ends.roots), 1)))]
    box = (ends.x[0].item(), ends.x[-1].item(), ends.y[0].item(), ends.y[-1].item())
    taken = ends.iterations.double().numpy()
    shade = 0.85 - 0.55 * np.log1p(taken) / max(np.log1p(taken.max()), 1e-9)
    axes.imshow(
        ends.basin.numpy() + 1,
        extent=box,
        origin="lower",
        aspect="auto",
        cmap=ListedColormap(colors),
        vmin=-0.5,
        vmax=len(colors) - 0.5,
        alpha=shade,
        interpolation="nearest",
    )
    star: dict[str, Any] = {
        "color": "black",
        "markersize": 7,
        "markeredgecolor": "white",
        "zorder": 5,
    }
    x, y = ends.roots.T.tolist()
    axes.plot(x, y, "*", linestyle="", label="fixed point", **star)
    if bool((ends.basin < 0).any()):
        axes.plot([], [], "s", color=colors[0], alpha=0.5, label="none reached")
    axes.plot([], [], "s", color=colors[1], alpha=0.35, label="pale: more updates")
    axes.set(xlabel="$z_1$", ylabel="$z_2$", xlim=box[:2], ylim=box[2:])
    return axes


def plot_trajectories(
    path: Tensor, axes: Axes | None = None, *, name: str = "picard", title: str | None = None
) -> Axes:
    """Draw the iterates of a solver in the plane, from each start (dot).

    Args:
        path: (n + 1, B, 2), see `trajectories`.
        name: of the solver, for color and legend.
        title: of the legend, which lies above the axes, where a title of the axes would be.

    Example:
        >>> import torch
        >>> from fixpoint import Picard
        >>> from fixpoint.analysis import plots, trajectories
        >>> path = trajectories(torch.cos, torch.rand(3, 2), Picard())
        >>> plots.plot_trajectories(path).get_ylabel()
        '$z_2$'
    """
    axes = panel(axes)
    path = host(path)
    outline = [withStroke(linewidth=3, foreground="white")]
    style = {**style_of(name), "markersize": 2, "path_effects": outline}
    for row in range(path.shape[1]):
        axes.plot(path[:, row, 0], path[:, row, 1], **{**style, "label": name if not row else None})
        axes.plot(
            *path[0, row].tolist(), "o", color=style["color"], markersize=4, markeredgecolor="white"
        )
    axes.set(xlabel="$z_1$", ylabel="$z_2$")
    add_legend(axes, title=title, columns=2)
    return axes
