"""Small charts of curves as SVG, for pages that hold everything themselves."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fixpoint.analysis.plots.style import log_y

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Colors that color-blind readers can tell apart (Okabe and Ito, 2008)."""
DASHES: tuple[tuple[float, ...], ...] = ((), (6, 2), (2, 2), (7, 2, 2, 2))


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


def style_of(number: int) -> tuple[str, tuple[float, ...]]:
    """Color and dashes of the curve of that number; the first 28 differ."""
    return COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)]


def curve_chart(
    curves: Sequence[Curve], *, x: str, y: str, log: bool = False, line: float | None = None
) -> str:
    """The curves as an SVG text, without a legend.

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
    axes = figure.subplots()
    for curve in curves:
        color, dashes = style_of(curve.style)
        marker = "o" if len(curve.x) == 1 else None
        y_values = _positive(curve.y) if log else np.array(curve.y, dtype=float)
        (drawn,) = axes.plot(curve.x, y_values, color=color, linewidth=1.6, marker=marker)
        if dashes:
            drawn.set_dashes(dashes)
        if curve.low is not None and curve.high is not None:
            low, high = (np.array(part, dtype=float) for part in (curve.low, curve.high))
            axes.fill_between(curve.x, low, high, color=color, alpha=0.15, linewidth=0)
    if line is not None:
        axes.axhline(line, color="#777777", linestyle="--", linewidth=1)
    if log:
        log_y(axes)
    axes.set_xlabel(x)
    axes.set_ylabel(y, labelpad=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if all(float(value).is_integer() for curve in curves for value in curve.x):
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    text = io.StringIO()
    # Text stays text, and the same curves give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fixpoint"}):
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})
    return text.getvalue()


def _positive(values: Sequence[float]) -> np.ndarray:
    array = np.array(values, dtype=float)
    return np.where(array > 0, array, np.nan)
