"""Style of the figures: one table of colors, column width, 8 point text; nothing global is set."""

from __future__ import annotations

import builtins
import io
import logging
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, FuncFormatter, MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from fixpoint._messages import unknown_name

COLUMN = 3.3
"""Width of a column of a two-column paper, in inches."""

COLORS = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "purple": "#CC79A7",
    "vermilion": "#D55E00",
    "sky": "#56B4E9",
    "black": "#000000",
    "grey": "#777777",
    "indigo": "#332288",
    "wine": "#882255",
    "olive": "#999933",
    "teal": "#44AA99",
}
"""Colors that color-blind readers can tell apart (Okabe and Ito, 2008), without their yellow,
which is too pale for a line on white; then four of the muted scheme of Tol (2021)."""

METHODS: dict[str, tuple[str, str, str]] = {
    "inexact-newton": ("blue", "o", "-"),
    "picard": ("orange", "s", "--"),
    "anderson": ("green", "^", "-"),
    "broyden": ("purple", "D", "-."),
    "newton": ("vermilion", "v", "-"),
    "newton-krylov": ("sky", "x", "--"),
    "barzilai-borwein": ("black", "+", ":"),
    "levenberg-marquardt": ("indigo", "<", "-."),
    "squarem": ("wine", "P", "--"),
    "damped-picard": ("olive", "h", "-."),
    "auto": ("teal", "X", "-"),
    "scipy": ("grey", "*", ":"),
    "ERNN": ("blue", "o", "-"),
    "ERNN K=1": ("blue", "o", "-"),
    "ERNN K=2": ("vermilion", "v", "-"),
    "RNN": ("orange", "s", "--"),
    "LSTM": ("purple", "D", "-."),
    "GRU": ("sky", "x", "--"),
    "FastRNN": ("green", "^", "-."),
    "FastGRNN": ("black", "+", ":"),
    "unrolled": ("orange", "s", "--"),
    "implicit": ("blue", "o", "-"),
}
"""Color, marker and line of each method: the same in every figure, and told apart in grey too."""

FORMATS = ("png", "pdf", "svg")
"""Formats of a saved figure."""

T = TypeVar("T")

TEXT: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.6,
}


NUMBERED = ("blue", "vermilion", "green", "purple", "sky", "orange", "black")
DASHES: tuple[tuple[float, ...], ...] = ((), (6, 2), (2, 2), (7, 2, 2, 2))


def style_of(method: str | int) -> dict[str, Any]:
    """Return keywords of `Axes.plot` for a method: from `METHODS`, or derived from its name.

    A number, as of a configuration among others, has color and dashes alone; the first 28 differ.

    Example:
        >>> from fixpoint.analysis import plots
        >>> plots.style_of("anderson")["color"]
        '#009E73'
    """
    if isinstance(method, int):
        dashes = DASHES[method // len(NUMBERED) % len(DASHES)]
        return {"color": COLORS[NUMBERED[method % len(NUMBERED)]], "linestyle": (0, dashes)}
    if method in METHODS:
        color, marker, line = METHODS[method]
    else:
        palette = list(COLORS)
        color = palette[zlib.crc32(method.encode()) % len(palette)]
        marker, line = "p", (0, (4, 1, 1, 1))  # type: ignore[assignment]
    return {
        "color": COLORS[color],
        "marker": marker,
        "markersize": 3.5,
        "linestyle": line,
        "label": method,
    }


def host(value: T) -> T:
    """Copy tensors to main memory as matplotlib reads them: without a graph, at least float32.

    Args:
        value: a tensor, or a tuple, list or dict with tensors in it; all else is unchanged.
    """
    if isinstance(value, Tensor):
        copy = value.detach().cpu()
        return copy.float() if copy.dtype in (torch.bfloat16, torch.float16) else copy  # type: ignore[return-value]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(host, value))
    if isinstance(value, list | tuple):
        return type(value)(map(host, value))
    if isinstance(value, Mapping):
        return {name: host(part) for name, part in value.items()}  # type: ignore[return-value]
    return value


def shows_figures() -> bool:
    """Say whether figures appear as they are made: in a notebook, or after `pyplot.ion()`."""
    return matplotlib.is_interactive() or hasattr(builtins, "get_ipython")


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure, which a notebook shows below its cell.

    Elsewhere it is a figure of no window: nothing holds it but the caller.
    """
    if shows_figures():
        from matplotlib import pyplot

        return pyplot.figure(figsize=(width, height), layout="constrained")
    return Figure(figsize=(width, height), layout="constrained")


def panels(rows: int = 1, columns: int = 1, *, height: float = 2.4, **options: Any) -> list[Axes]:
    """Make the axes of a new figure, row by row, each a column wide and `height` inches high.

    Args:
        options: of `Figure.subplots`, as sharex.
    """
    with matplotlib.rc_context(TEXT):
        figure = new_figure(COLUMN * columns, height * rows)
        return list(figure.subplots(rows, columns, squeeze=False, **options).ravel())


def panel(axes: Axes | None) -> Axes:
    """Return the given axes, or those of a new figure of column width."""
    return panels()[0] if axes is None else axes


def figure_of(axes: Axes) -> Figure:
    """Return the figure that holds the axes."""
    figure = axes.figure
    assert isinstance(figure, Figure)
    return figure


def add_legend(axes: Axes, *, title: str | None = None, columns: int = 1, **options: Any) -> None:
    """Add a legend a point smaller than the labels of the axes; above them with several columns."""
    size = axes.xaxis.label.get_fontsize() - 1  # type: ignore[operator]
    if columns > 1:
        options = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "frameon": False, **options}
    axes.legend(
        fontsize=size,
        title=title,
        title_fontsize=size,
        ncols=columns,
        handlelength=1.8,
        framealpha=0.7,
        **options,
    )


def plot_runs(axes: Axes, x: Any, runs: Sequence[Any], *, method: str, **given: Any) -> None:
    """Draw the median of the runs of a method, in a band from the smallest to the largest.

    Args:
        x: where each value lies.
        runs: one curve for each seed.
        given: keywords of `Axes.plot` that replace the method's.
    """
    values = np.array([np.asarray(host(y), dtype=float) for y in runs])
    style = style_of(method) | given
    axes.plot(x, np.median(values, 0), markevery=max(1, len(x) // 10), **style)
    if len(values) > 1:
        low, high = values.min(0), values.max(0)
        axes.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)


def each_run(value: Any, kind: type | tuple[type, ...]) -> list[Any]:
    """Return one run as a list of one, several as a list."""
    return [value] if isinstance(value, kind) else list(value)


def epoch_axis(axes: Axes) -> None:
    """Label the x axis with epochs, in whole numbers."""
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))


def log_y(axes: Axes) -> None:
    """Make the y axis logarithmic, with plain numbers such as 0.02 between 1e-4 and 1e4.

    Over less than two decades there are numbers between the powers of ten, too.
    """
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if low > 1e-4 and high < 1e4:
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    some = "123456789" if high < 3 * low else "25" if high < 100 * low else ""
    axes.yaxis.set_minor_formatter(
        FuncFormatter(lambda y, _: f"{y:g}" if f"{y:e}"[0] in some else "")
    )


def cross_out(axes: Axes, x: NDArray[Any], y: NDArray[Any], *, label: str) -> None:
    """Mark points that fail with crosses, if there are any."""
    if len(x):
        axes.plot(x, y, "x", color=COLORS["vermilion"], markersize=4, label=label)


def add_title(axes: Axes, text: str) -> None:
    """Add a title in the size of the labels of the axes."""
    axes.set_title(text, fontsize=axes.xaxis.label.get_fontsize())


def literal(text: str) -> str:
    """Escape a text so that matplotlib reads it without formulas."""
    return text.replace("$", r"\$")


def legend_below(figure: Figure, axes: list[Axes], *, columns: int = 2) -> None:
    """Replace the legends of all axes by one below them, where it hides no curve."""
    handles: dict[str, Any] = {}
    for one in axes:
        if (own := one.get_legend()) is not None:
            own.remove()
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=min(columns, len(handles)),
        fontsize=axes[0].xaxis.label.get_fontsize() - 1,  # type: ignore[operator]
    )


def save(figure: Figure, path: Path | str, *, dpi: int = 150, caption: str | None = None) -> None:
    """Write a figure in the format of the suffix: .png, .pdf or .svg.

    Text is text in a PDF, in an embedded TrueType font, and in an SVG.

    Args:
        dpi: dots an inch, of a PNG.
        caption: written to the same place with the suffix .txt.

    Raises:
        ValueError: another suffix.
    """
    path = Path(path)
    path.write_bytes(rendered(figure, path.suffix.removeprefix("."), dpi=dpi))
    if caption is not None:
        path.with_suffix(".txt").write_text(caption + "\n", encoding="utf-8")


def rendered(figure: Figure, kind: str, *, dpi: int = 150) -> bytes:
    """Render a figure as the content of a file; the same figure gives the same bytes.

    Raises:
        ValueError: the kind is none of `FORMATS`.
    """
    if kind not in FORMATS:
        raise ValueError(unknown_name("format", kind, FORMATS))
    options: Any = {
        "pdf.fonttype": 42,
        "svg.fonttype": "none",
        "svg.hashsalt": "fixpoint",
    }
    dates: dict[str, Any] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    content = io.BytesIO()
    # It reports the dates in the fonts that it embeds.
    fonts = logging.getLogger("fontTools")
    level = fonts.level
    fonts.setLevel(logging.ERROR)
    with matplotlib.rc_context(options):
        figure.savefig(content, format=kind, dpi=dpi, metadata=dates.get(kind))
    fonts.setLevel(level)
    return content.getvalue()
