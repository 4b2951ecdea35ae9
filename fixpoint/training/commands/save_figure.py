"""Files of a figure: one a format, and its caption beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fixpoint.analysis import plots
from fixpoint.analysis.plots import Figure


def save_figure(figure: Figure, stem: Path, formats: Sequence[str], caption: str) -> list[Path]:
    """Write `stem` with the suffix of each format, and the caption with the suffix .txt.

    Raises:
        ValueError: a format is unknown.
        OSError: the folder cannot be written.
    """
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in formats]
    for path in paths:
        plots.save(figure, path, caption=caption)
    return paths


def caption(draw: Callable[..., Any]) -> str:
    """Return the first line of the docstring of a function that draws, without "Draw"."""
    text = (draw.__doc__ or "").partition("\n")[0].removeprefix("Draw ")
    return text[:1].upper() + text[1:]
