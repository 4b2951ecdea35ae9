"""Small charts of curves as SVG, for pages that hold everything themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fixpoint.analysis.plots.style import COLORS, log_y, rendered, style_of


class Curve(NamedTuple):
    """A line with a band, in the style of its number.

    style: which color and dashes; see `style_of`.
    x, y: the line, (n,) each.
    low, high: ends of the band, (n,), or None.
    """

    style: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def curve_chart(
    curves: Sequence[Curve], *, x: str, y: str, log: bool = False, line: float | None = None
) -> str:
    """Draw curves as an SVG text on a clear ground, without a legend.

    Args:
        x, y: labels of the axes.
        log: logarithmic y; values that are not positive are left out.
        line: where to draw a horizontal line.

    Example:
        >>> from fixpoint.analysis.plots.svg import Curve, curve_chart
        >>> curve_chart([Curve(0, [1, 2], [3, 4])], x="epoch", y="loss")[:5]
        '<?xml'
    """
    figure = Figure(figsize=(4.6, 3.0), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    for curve in curves:
        style = {**style_of(curve.style), "marker": "o" if len(curve.x) == 1 else None}
        y_values = _positive(curve.y) if log else np.array(curve.y, dtype=float)
        axes.plot(curve.x, y_values, linewidth=1.6, **style)
        if curve.low is not None and curve.high is not None:
            low, high = (np.array(part, dtype=float) for part in (curve.low, curve.high))
            axes.fill_between(curve.x, low, high, color=style["color"], alpha=0.15, linewidth=0)
    if line is not None:
        axes.axhline(line, color=COLORS["grey"], linestyle="--", linewidth=1)
    if log:
        log_y(axes)
    axes.set_xlabel(x)
    axes.set_ylabel(y, labelpad=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if all(float(value).is_integer() for curve in curves for value in curve.x):
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    return rendered(figure, "svg").decode()


def dash_array(style: Mapping[str, Any]) -> str:
    """Return the dashes of a numbered style as SVG writes them."""
    return " ".join(map(str, style["linestyle"][1]))


def _positive(values: Sequence[float]) -> np.ndarray:
    array = np.array(values, dtype=float)
    return np.where(array > 0, array, np.nan)
