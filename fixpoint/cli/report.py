"""`fixpoint report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fixpoint.cli.errors import one_message
from fixpoint.cli.options import make_console
from fixpoint.training.commands.console import say
from fixpoint.training.results.export import as_csv, as_latex, write_table
from fixpoint.training.results.html_report import write_report

app = typer.Typer(add_completion=False)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of other commands' --out, with their runs.jsonl.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The page.", show_default="report.html in the first folder")
    ] = None,
    latex: Annotated[
        bool, typer.Option("--latex", help="Also write the table as .tex beside the page.")
    ] = False,
    csv: Annotated[
        bool, typer.Option("--csv", help="Also write a .csv of all runs beside the page.")
    ] = False,
) -> None:
    """Write one self-contained page of finished runs: tables, curves, convergence."""
    with one_message("Stopped."):
        path = out or (runs[0] if runs[0].is_dir() else runs[0].parent) / "report.html"
        count = write_report(runs, path)
        files = [path]
        for asked, suffix, form in ((latex, ".tex", as_latex), (csv, ".csv", as_csv)):
            if asked:
                files.append(write_table(runs, path.with_suffix(suffix), form))
        say(make_console(), f"{count} run{'s' * (count != 1)}: {', '.join(map(str, files))}")
