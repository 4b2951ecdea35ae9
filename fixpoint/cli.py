"""The command line: `fixpoint compare`, `fixpoint figures`."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from fixpoint import __version__

# UsageError of the click that typer uses: some versions bring their own copy of it.
_UsageError: Any = typer.BadParameter.__base__


class _OneLine(TyperGroup):
    """Says what is wrong with a command line in one line, with exit status 2."""

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            result = super().main(*args, **{**extra, "standalone_mode": False})
        except _UsageError as error:
            _refuse(error.format_message())
        except typer.Abort:
            raise SystemExit(130) from None
        if extra.get("standalone_mode", True):
            raise SystemExit(result if isinstance(result, int) else 0)
        return result


app = typer.Typer(
    cls=_OneLine,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Fixed-point and implicit layers: compare solvers and models.",
)
console = Console()
if not console.is_terminal:
    console = Console(width=120)


def _version(show: bool) -> None:
    if show:
        console.print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Fixed-point and implicit layers: compare solvers and models."""


def _count(text: str) -> int:
    """A whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise typer.BadParameter(f"expected a whole number of at least 1, got {text}")
    return number


@app.command()
def compare(
    dataset: Annotated[str, typer.Option(help="har2-sample (bundled), har2 or har6.")] = (
        "har2-sample"
    ),
    solvers: Annotated[
        str,
        typer.Option(
            help="Comma-separated NAME or NAME:MAX_ITER of inexact-newton, picard, anderson, "
            "broyden."
        ),
    ] = "inexact-newton,inexact-newton:2,picard,anderson,broyden",
    backward: Annotated[
        str | None,
        typer.Option(help="unrolled, implicit or both by comma. [default: what makes sense]"),
    ] = None,
    cell: Annotated[
        str | None,
        typer.Option(
            help="jordan, self-feedback, identity-feedback or linear. [default: jordan for "
            "inexact-newton, self-feedback for the others]"
        ),
    ] = None,
    hidden: Annotated[int, typer.Option(parser=_count, metavar="N", help="Hidden units.")] = 80,
    epochs: Annotated[int, typer.Option(parser=_count, metavar="N", help="Epochs.")] = 6,
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds.")] = "0",
    out: Annotated[Path, typer.Option(help="Folder for runs.jsonl and contraction.png.")] = Path(
        "runs/compare"
    ),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    batch_size: Annotated[int, typer.Option(parser=_count, metavar="N", help="Batch size.")] = 128,
    lr: Annotated[
        float, typer.Option(help="Learning rate of Adam, halved twice over the training.")
    ] = 1e-2,
    jobs: Annotated[
        int | None,
        typer.Option(
            parser=_count,
            metavar="N",
            help="Runs at a time, one thread each. [default: number of cores]",
        ),
    ] = None,
) -> None:
    """Train ERNN with each solver and backward, and compare accuracy, time and convergence.

    Finished runs of the same settings in --out are not run again.
    """
    from fixpoint.training import compare as comparison

    try:
        comparison.compare(
            console,
            dataset=dataset,
            solvers=_split(solvers),
            backwards=None if backward is None else _split(backward),
            cell=cell,
            hidden=hidden,
            epochs=epochs,
            seeds=_integers("--seeds", seeds),
            out=out,
            device=device,
            batch_size=batch_size,
            lr=_learning_rate(lr),
            jobs=jobs or (1 if device != "cpu" else os.cpu_count() or 1),
        )
    except (ValueError, OSError) as error:
        _refuse(str(error))
    except KeyboardInterrupt:
        Console(stderr=True).print("Stopped; finished runs are kept, the same command goes on.")
        raise typer.Exit(130) from None


@app.command()
def figures(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Figures to draw, as: h1 h2 h3 eta. All if none is named.", show_default=False
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Real windows; if not given har2 where FIXPOINT_DATA is set, else har2-sample."
        ),
    ] = None,
    epochs: Annotated[
        int, typer.Option(parser=_count, metavar="N", help="Epochs of each training.")
    ] = 25,
    walks: Annotated[
        int, typer.Option(parser=_count, metavar="N", help="Toy walks of each class.")
    ] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, walks and order.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the PNG files.")] = Path("runs/figures"),
) -> None:
    """Draw the figures of the ERNN paper, and of its analysis, from fresh short runs."""
    from fixpoint.analysis import plots
    from fixpoint.analysis.figures import FIGURES, Runs, figure
    from fixpoint.data import load_dataset, normalise
    from fixpoint.names import unknown_name

    names = names or list(FIGURES)
    dataset = dataset or ("har2" if os.environ.get("FIXPOINT_DATA") else "har2-sample")
    try:
        for name in names:
            if name not in FIGURES:
                raise ValueError(unknown_name("figure", name, FIGURES))
        data = normalise(load_dataset(dataset))
        out.mkdir(parents=True, exist_ok=True)
        runs = Runs(data, epochs=epochs, walks=walks, seed=seed)
        for name in names:
            path = out / f"{name}.png"
            with console.status(f"drawing {name}"):
                plots.save(figure(name, runs), path)
            console.print(f"{path}: {(FIGURES[name].__doc__ or '').splitlines()[0]}")
    except (ValueError, OSError) as error:
        _refuse(str(error))
    for line in runs.summary():
        console.print(line)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _integers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in _split(text)]
    except ValueError:
        raise ValueError(f"{option} takes whole numbers by comma, as 0,1,2; got {text!r}") from None
    if not all(0 <= number < 2**63 for number in numbers):
        raise ValueError(f"{option} takes numbers from 0 to 2^63 - 1; got {text!r}")
    return numbers


def _learning_rate(lr: float) -> float:
    if not (math.isfinite(lr) and lr > 0):
        raise ValueError(f"--lr must be a finite number > 0; got {lr}")
    return lr


def _refuse(message: str) -> NoReturn:
    print(f"fixpoint: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    """Entry point of the command `fixpoint`."""
    app()
