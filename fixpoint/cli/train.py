"""`fixpoint train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fixpoint.cli.errors import one_message
from fixpoint.cli.options import (
    RECORDING,
    Plugins,
    Settings,
    make_run_console,
    override,
    recipe_options,
)
from fixpoint.training.commands.single_run import train_and_show
from fixpoint.training.recipe.schema import Recipe
from fixpoint.training.recipe.toml import load_recipe

app = typer.Typer(add_completion=False)


@app.command()
@recipe_options(
    *("dataset", "model", "hidden", "map", "solver", "max_iter", "backward", "epochs"),
    *("batch_size", "lr", "optimizer", "schedule", "seed", "device", "devices", "precision"),
    *RECORDING,
)
def train(
    *,
    recipe: Annotated[
        str | None, typer.Argument(help="Name of a recipe, or a .toml file.", show_default="ERNN")
    ] = None,
    settings: Settings = None,
    plugins: Plugins = None,
    out: Annotated[Path, typer.Option(help="Folder for runs.jsonl and checkpoints.")] = Path(
        "runs/train"
    ),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Discard checkpoints and restart (default: resume).")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write events for TensorBoard.")
    ] = False,
    logger: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="mlflow, wandb, or one that a plugin registers; repeatable."
        ),
    ] = None,
    flags: dict[str, Any],
) -> None:
    """Train one model as a recipe says.

    Options override the recipe. Stopped or killed, the same command continues after the last
    finished epoch; finished, it shows the result again.
    """
    with one_message("Stopped; the same command continues after the last finished epoch."):
        base = Recipe() if recipe is None else load_recipe(recipe)
        changed = override(base, settings, plugins, flags)
        loggers = [*(["tensorboard"] if tensorboard else []), *(logger or [])]
        train_and_show(make_run_console(), changed, out=out, fresh=fresh, loggers=loggers)
