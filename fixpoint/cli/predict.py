"""`fixpoint predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fixpoint.cli.errors import one_message
from fixpoint.cli.options import make_console
from fixpoint.training.commands.prediction import predict_files

app = typer.Typer(add_completion=False)


@app.command()
def predict(
    run: Annotated[
        Path, typer.Argument(help="Folder of a training, as runs/train/KEY, or a checkpoint in it.")
    ],
    files: Annotated[
        list[Path],
        typer.Argument(
            help="New windows: .npz files, CSV files or folders of them; - is standard input."
        ),
    ],
    form: Annotated[
        str, typer.Option("--format", help="table, csv, or json with an object a line.")
    ] = "table",
) -> None:
    """Classify new windows, or recordings cut as in the training, by a trained model."""
    with one_message("Stopped."):
        predict_files(make_console(), run, files, form=form)
