"""`fixpoint figures`: the figures of the paper, and of its analysis, as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fixpoint._messages import unknown_name
from fixpoint.data import Dataset, load_dataset, normalize
from fixpoint.data.sources.toy_walks import toy_walks
from fixpoint.training.commands.console import say
from fixpoint.training.commands.save_figure import caption, save_figure


def draw_figures(
    console: Console,
    names: list[str],
    *,
    out: Path,
    dataset: str = "har2-sample",
    epochs: int = 25,
    walks: int = 2000,
    seeds: Sequence[int] = (0,),
    formats: Sequence[str] = ("png",),
) -> list[Path]:
    """Draw figures from fresh short runs, and say what the models behind them reached.

    Learned eta is that of two data sets in the paper: DSA-19 is left out, and named, where its
    file is not there.

    Args:
        console: where to print.
        names: of `fixpoint.paper.figures.FIGURES`.
        out: folder of the files, made if need be.
        dataset: the real windows.
        epochs: of each training.
        walks: toy walks of each class to train on.
        seeds: of weights and order, drawn as a band; the walks are those of the first.
        formats: of the files, of png, pdf and svg; the caption is beside them.

    Raises:
        ValueError: a name is unknown, or the data cannot be used.
        OSError: a data file is missing, or `out` cannot be written.
    """
    from fixpoint.paper.figures import FIGURES, Runs, figure

    for name in names:
        if name not in FIGURES:
            raise ValueError(unknown_name("figure", name, FIGURES))
    data = _windows(dataset)
    other = _dsa19(console) if "eta" in names and dataset != "dsa19" else None
    out.mkdir(parents=True, exist_ok=True)
    # One half of the walks is for testing.
    toy = toy_walks(walks=2 * walks, seed=seeds[0])
    runs = Runs(data, toy, other=other, epochs=epochs, seeds=seeds)
    band = " Median of the seeds, in a band of their range." if len(seeds) > 1 else ""
    paths = []
    for name in names:
        about = caption(FIGURES[name]) + band
        with console.status(f"drawing {name}"):
            files = save_figure(figure(name, runs), out / name, formats, about)
        paths += files
        say(console, f"{', '.join(map(str, files))}: {about}")
    for line in runs.summary():
        say(console, line)
    return paths


def _windows(name: str) -> Dataset:
    """Return the data normalized, and as numbers where they are stored smaller."""
    data = normalize(load_dataset(name))
    if data.kind != "classification":
        raise ValueError(f"{name} holds words; the figures are of windows of numbers, as har2")
    numbers: dict[str, Any] = {
        f"x_{part}": data.inputs(getattr(data, f"x_{part}")) for part in data.parts
    }
    return replace(data, scale=None, shift=None, **numbers)


def _dsa19(console: Console) -> Dataset | None:
    try:
        return _windows("dsa19")
    except OSError as error:
        say(console, f"eta is drawn without DSA-19: {error}")
        return None
