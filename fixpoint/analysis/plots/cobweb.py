"""Cobweb plots: the iteration of a map of one number, over its graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from matplotlib.axes import Axes
from torch import Tensor

from fixpoint.analysis.plots.style import COLORS, add_legend, host, panel, style_of


def plot_cobweb(
    phi: Callable[[Tensor], Tensor],
    path: Tensor,
    axes: Axes | None = None,
    *,
    box: tuple[float, float] | None = None,
    name: str = "picard",
) -> Axes:
    """Draw the steps of a solver between the graph of phi and the diagonal.

    Each step goes from (z, z) to the graph at (z, phi(z)), then to the next state on the diagonal:
    level for plain iteration, aslant for a solver that extrapolates. The fixed point is where the
    graph crosses the diagonal; where the graph is steeper than 45 degrees there, plain iteration
    moves away.

    Args:
        phi: the map, on states (B, 1).
        path: iterates, (n + 1, 1, 1), see `trajectories`.
        box: range of both axes; by default the range of the path with a margin.
        name: of the solver, for color and legend.

    Raises:
        ValueError: the path has more than one sample, or more than one number in a state.

    Example:
        >>> import torch
        >>> from fixpoint import Picard
        >>> from fixpoint.analysis import plots, trajectories
        >>> path = trajectories(torch.cos, torch.zeros(1, 1), Picard())
        >>> plots.plot_cobweb(torch.cos, path).get_xlabel()
        '$z$'
    """
    if path[0].numel() != 1:
        raise ValueError(
            f"path has the shape {tuple(path.shape)}: a cobweb follows one sample of one number, "
            "(n + 1, 1, 1); for two numbers use plot_trajectories"
        )
    z = path.detach().reshape(-1, 1)
    fz = host(phi(z)).flatten()
    low, high = box or _box(torch.cat([host(z).flatten(), fz]))
    line = torch.linspace(low, high, 300, dtype=z.dtype, device=z.device)[:, None]
    z, x, y = host((z.flatten(), line.flatten(), phi(line).flatten()))
    axes = panel(axes)
    axes.plot(x, x, color=COLORS["grey"], linewidth=0.8, label="diagonal")
    axes.plot(x, y, color=COLORS["black"], linewidth=1.2, label=r"$\phi(z)$")
    corners = torch.stack([torch.stack([z, z], 1), torch.stack([z, fz], 1)], 1).reshape(-1, 2)
    style = style_of(name) | {"marker": "", "linestyle": "-", "linewidth": 1.0}
    axes.plot(corners[:, 0], corners[:, 1], **style)
    axes.plot(z[0], z[0], "o", color=style["color"], markersize=4)
    axes.set(xlabel="$z$", ylabel=r"$\phi(z)$", xlim=(low, high), ylim=(low, high))
    axes.set_aspect("equal")
    add_legend(axes, columns=3)
    return axes


def _box(values: Tensor) -> tuple[float, float]:
    """Return the range of the finite values with a margin of a tenth."""
    finite = values[values.isfinite()]
    low, high = float(finite.min()), float(finite.max())
    margin = 0.1 * (high - low or 1.0)
    return low - margin, high + margin
