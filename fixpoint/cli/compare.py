"""`fixpoint compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fixpoint.cli.errors import one_message
from fixpoint.cli.options import (
    RECORDING,
    Cluster,
    Formats,
    Jobs,
    Plugins,
    Settings,
    integers,
    keys_of,
    make_run_console,
    override,
    parallel_runs,
    recipe_options,
    refuse_set,
    split,
    split_formats,
)
from fixpoint.training.commands.comparison import run_comparison
from fixpoint.training.commands.grid import DEFAULT_SOLVERS, make_grid
from fixpoint.training.recipe.schema import Recipe

app = typer.Typer(add_completion=False)

OWNERS = {
    **{"dataset": "--dataset", "model": "--models", "solver": "--solvers", "map": "--map"},
    **{"backward": "--backward", "seed": "--seeds"},
}
"""Options of the grid by the key that each sets in every run."""


@app.command()
@recipe_options(
    *("hidden", "epochs", "batch_size", "lr", "device"),
    *RECORDING,
    defaults=True,
    shown={"lr": "per map"} | dict.fromkeys(RECORDING, ""),
)
def compare(
    *,
    dataset: Annotated[
        str,
        typer.Option(
            help="Comma-separated names in 'fixpoint data list', own .npz files or CSV folders."
        ),
    ] = "har2-sample",
    models: Annotated[
        str, typer.Option(help="Comma-separated models: ernn, rnn, lstm, gru, ...")
    ] = "ernn",
    solvers: Annotated[
        str,
        typer.Option(
            help="Comma-separated NAME or NAME:MAX_ITER of inexact-newton, picard, anderson, "
            "broyden, ..."
        ),
    ] = ",".join(DEFAULT_SOLVERS),
    backward: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated unrolled, implicit, phantom.",
            show_default="per solver",
        ),
    ] = None,
    map: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated jordan, self-feedback, identity-feedback, linear.",
            show_default="jordan for inexact-newton, self-feedback for the others",
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds.")] = "0",
    settings: Settings = None,
    plugins: Plugins = None,
    out: Annotated[
        Path, typer.Option(help="Folder for runs.jsonl, report.html and checkpoints.")
    ] = Path("runs/compare"),
    formats: Formats = "png",
    jobs: Jobs = None,
    cluster: Cluster = None,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Print the runs with their keys, and run nothing.")
    ] = False,
    only_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run those alone that failed before.")
    ] = False,
    flags: dict[str, Any],
) -> None:
    """Train models with each solver and backward; compare accuracy, time and convergence.

    Finished runs of the same settings in --out are not run again, unfinished ones are continued.
    The exit status is 1 where some runs failed, 2 where the command is wrong.
    """
    with one_message("Stopped; finished epochs are kept, the same command continues."):
        refuse_set(settings, OWNERS)
        base = override(Recipe(), settings, plugins, flags)
        runs = make_grid(
            base,
            datasets=split(dataset),
            models=split(models),
            solvers=split(solvers),
            maps=None if map is None else split(map),
            backwards=None if backward is None else split(backward),
            seeds=integers("--seeds", seeds),
            given={*flags, *keys_of(settings)},
        )
        run_comparison(
            make_run_console(),
            runs,
            out=out,
            jobs=parallel_runs(jobs, cluster, base.machine.device),
            cluster=cluster,
            formats=split_formats(formats),
            dry=dry,
            only_failed=only_failed,
        )
