"""`fixpoint reproduce` and `fixpoint figures`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from fixpoint.cli.errors import one_message
from fixpoint.cli.options import (
    Cluster,
    Formats,
    Jobs,
    Settings,
    check_once,
    integers,
    make_console,
    make_run_console,
    number,
    parallel_runs,
    refuse_set,
    seeds_or_count,
    split,
    split_formats,
)
from fixpoint.paper import figure_files
from fixpoint.paper.figures import FIGURES, PAPER
from fixpoint.paper.solver_study import reproduce_solvers
from fixpoint.paper.table_runs import reproduce_table
from fixpoint.training.recipe.toml import parse_setting

app = typer.Typer(add_completion=False)
figures_app = typer.Typer(add_completion=False)

OWNERS_OF_TABLES = {"model": "--models", "seed": "--seeds", "device": "--device"}
OWNERS = OWNERS_OF_TABLES | {"dataset": "--dataset"}
"""Options of `reproduce` by the key that each sets."""


@app.command()
def reproduce(
    target: Annotated[str, typer.Argument(help="table2, table3, table4, figures or solvers.")],
    dataset: Annotated[
        str | None, typer.Option(help="Comma-separated data sets.", show_default="all")
    ] = None,
    models: Annotated[
        str | None, typer.Option(help="Comma-separated models.", show_default="all")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="How many seeds, from 0, or comma-separated ones.",
            show_default="0,1,2,3,4; figures: 0",
        ),
    ] = None,
    epochs: Annotated[int | None, number("Epochs, for a first look.")] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            help="paper: the paper's treatment of the data and protocol in every recipe.",
            show_default="of each recipe",
        ),
    ] = None,
    settings: Settings = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or mps.")] = "cpu",
    out: Annotated[
        Path, typer.Option(help="Folder for runs.jsonl, report.html and checkpoints, or figures.")
    ] = Path("runs/reproduce"),
    formats: Formats = "png",
    jobs: Jobs = None,
    cluster: Cluster = None,
    dry: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the runs of a table with their keys, run nothing."),
    ] = False,
) -> None:
    """Run the recipes of a table of the paper, and print our numbers next to the paper's.

    Finished runs in --out are not run again, unfinished ones are continued. With figures, draw
    those of the paper, as "fixpoint figures" does. With solvers, repeat the comparison of solvers,
    backwards, tolerances and maps on HAR-2.
    """
    with one_message("Stopped; finished epochs are kept, the same command continues."):
        if target == "figures":
            others = {"--models": models, "--set": settings, "--jobs": jobs, "--protocol": protocol}
            others |= {"--cluster": cluster, "--dry-run": dry or None}
            others["--device"] = None if device == "cpu" else device
            _draw_figures(dataset, seeds or "0", epochs, out, formats, others)
            return
        # A table's --dataset chooses rows; --set gives these another data set.
        refuse_set(settings, OWNERS if target == "solvers" else OWNERS_OF_TABLES)
        given = {} if epochs is None else {"epochs": epochs}
        check_once(settings or [], given)
        changes = dict(parse_setting(text) for text in settings or [])
        changes |= {"device": device} | given
        if target == "solvers":
            others = {"--models": models, "--protocol": protocol, "--cluster": cluster}
            others["--dry-run"] = dry or None
            _study_solvers(dataset, seeds, changes, out, jobs, formats, others)
            return
        reproduce_table(
            make_run_console(),
            target,
            out=out,
            jobs=parallel_runs(jobs, cluster, device),
            cluster=cluster,
            datasets=None if dataset is None else split(dataset),
            models=None if models is None else split(models),
            seeds=seeds_or_count("--seeds", seeds or "5"),
            protocol=protocol,
            dry=dry,
            changes=changes,
        )


def _study_solvers(
    dataset: str | None,
    seeds: str | None,
    changes: dict[str, Any],
    out: Path,
    jobs: int | None,
    formats: str,
    others: dict[str, Any],
) -> None:
    """Study solvers; `others` are options that this does not have."""
    for option, value in others.items():
        if value is not None:
            raise ValueError(f"{option} is for tables: leave it out to study the solvers")
    reproduce_solvers(
        make_run_console(),
        out=out,
        jobs=parallel_runs(jobs, None, changes["device"]),
        seeds=None if seeds is None else seeds_or_count("--seeds", seeds),
        changes=changes | ({} if dataset is None else {"dataset": dataset}),
        formats=split_formats(formats),
    )


def _draw_figures(
    dataset: str | None,
    seeds: str,
    epochs: int | None,
    out: Path,
    formats: str,
    others: dict[str, Any],
) -> None:
    """Draw the figures of the paper; `others` are options that they do not have."""
    for option, value in others.items():
        if value is not None:
            raise ValueError(f"{option} is for tables: leave it out to draw the figures")
    figure_files.draw_figures(
        make_console(),
        list(PAPER),
        out=out,
        dataset=dataset or real_windows(),
        epochs=epochs or 25,
        seeds=integers("--seeds", seeds),
        formats=split_formats(formats),
    )


@figures_app.command()
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
    epochs: Annotated[int, number("Epochs of each training.")] = 25,
    walks: Annotated[int, number("Toy walks of each class to train on.")] = 2000,
    seeds: Annotated[
        str,
        typer.Option(
            "--seeds", "--seed", help="Comma-separated seeds; several are drawn as a band."
        ),
    ] = "0",
    out: Annotated[Path, typer.Option(help="Folder for the figures and captions.")] = Path(
        "runs/figures"
    ),
    formats: Formats = "png",
) -> None:
    """Draw the figures of the ERNN paper, and of its analysis, from new short runs."""
    with one_message("Stopped."):
        figure_files.draw_figures(
            make_console(),
            names or list(FIGURES),
            out=out,
            dataset=dataset or real_windows(),
            epochs=epochs,
            walks=walks,
            seeds=integers("--seeds", seeds),
            formats=split_formats(formats),
        )


def real_windows() -> str:
    """Return the data set of the figures on real windows, if none is named."""
    return "har2" if os.environ.get("FIXPOINT_DATA") else "har2-sample"
