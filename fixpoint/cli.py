"""The command line: `fixpoint compare`."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from fixpoint import __version__

app = typer.Typer(
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
    hidden: Annotated[int, typer.Option(min=1, help="Hidden units.")] = 80,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of training.")] = 6,
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds.")] = "0",
    out: Annotated[Path, typer.Option(help="Folder for runs.jsonl and contraction.png.")] = Path(
        "runs/compare"
    ),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    batch_size: Annotated[int, typer.Option(min=1, help="Windows in a batch.")] = 128,
    lr: Annotated[
        float, typer.Option(help="Learning rate of Adam, halved twice over the training.")
    ] = 1e-2,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Runs at a time, one thread each. [default: number of cores]"),
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
        _refuse(error)
    except KeyboardInterrupt:
        Console(stderr=True).print("Stopped; finished runs are kept, the same command goes on.")
        raise typer.Exit(130) from None


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _integers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in _split(text)]
    except ValueError:
        raise ValueError(f"{option} takes whole numbers by comma, as 0,1,2; got {text!r}") from None


def _learning_rate(lr: float) -> float:
    if not (math.isfinite(lr) and lr > 0):
        raise ValueError(f"--lr must be a finite number > 0; got {lr}")
    return lr


def _refuse(error: Exception) -> NoReturn:
    print(f"fixpoint: {' '.join(str(error).split())}", file=sys.stderr)
    raise typer.Exit(2)


def main() -> None:
    """Entry point of the command `fixpoint`."""
    app()
