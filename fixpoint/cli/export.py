"""`fixpoint export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fixpoint.cli.errors import one_message
from fixpoint.cli.options import make_console
from fixpoint.export.command import export_c
from fixpoint.export.onnx import export_onnx

app = typer.Typer(add_completion=False)


@app.command()
def export(
    run: Annotated[
        Path, typer.Argument(help="Folder of a training, as runs/train/KEY, or a checkpoint in it.")
    ],
    to: Annotated[str, typer.Option(help="c or onnx.")] = "c",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the files.", show_default="c or onnx in that of the training"),
    ] = None,
    bits: Annotated[
        int | None,
        typer.Option(
            help="c: of the weights; 32 is float, 16 and 8 are fixed point.", show_default="32"
        ),
    ] = None,
    samples: Annotated[
        str | None,
        typer.Option(
            "--input",
            help="c in fixed point: float samples, or int16 as a sensor counts, without floats.",
            show_default="float",
        ),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            help="c: beginning of all public names, for several networks in one firmware.",
            show_default="fixpoint",
        ),
    ] = None,
    fold: Annotated[
        bool,
        typer.Option(
            help="c: multiply the factors of a matrix together where that saves multiplications."
        ),
    ] = True,
    streaming: Annotated[
        bool,
        typer.Option("--streaming", help="onnx: a graph of one time step; else of a window."),
    ] = False,
    data: Annotated[
        str | None, typer.Option(help="Where the data of the run are now, if they were moved.")
    ] = None,
) -> None:
    """Write a trained network as a C program without dependencies, or as an ONNX graph.

    Prints its sizes, its rounding errors and its agreement with torch on the test windows.
    """
    with one_message("Stopped."):
        if to not in ("c", "onnx"):
            raise ValueError(f"--to must be c or onnx; got {to!r}")
        if to == "c" and streaming:
            raise ValueError("--streaming is for --to onnx: a C program steps in any case")
        if to == "onnx" and (bits is not None or not fold or samples or prefix):
            raise ValueError(
                "--bits, --input, --prefix and --no-fold are for --to c: a graph is float32 and "
                "folded"
            )
        if to == "c":
            given: Any = {"samples": samples, "prefix": prefix, "bits": bits}
            given = {name: value for name, value in given.items() if value is not None}
            export_c(make_console(), run, out=out, fold=fold, data=data, **given)
        else:
            export_onnx(make_console(), run, out=out, streaming=streaming, data=data)
