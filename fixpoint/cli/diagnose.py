"""`fixpoint diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fixpoint.cli.errors import one_message
from fixpoint.cli.options import Formats, make_console, number, split_formats
from fixpoint.training.commands.run_diagnosis import diagnose_run

app = typer.Typer(add_completion=False)


@app.command()
def diagnose(
    checkpoint: Annotated[
        Path,
        typer.Argument(help="Folder of a training, as runs/train/KEY, or a checkpoint in it."),
    ],
    part: Annotated[str, typer.Option(help="Part of the data: train, valid or test.")] = "test",
    windows: Annotated[int, number("Most windows to examine, evenly spaced.")] = 512,
    data: Annotated[
        str | None, typer.Option(help="Where the data of the run are now, if they were moved.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the figures.", show_default="diagnosis in that of the training"
        ),
    ] = None,
    formats: Formats = "png",
) -> None:
    """Say in plain sentences, and draw, whether a trained model converges on its data."""
    with one_message("Stopped."):
        diagnose_run(
            make_console(),
            checkpoint,
            out=out,
            part=part,
            windows=windows,
            data=data,
            formats=split_formats(formats),
        )
