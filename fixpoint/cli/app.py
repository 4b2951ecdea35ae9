"""The command line: `fixpoint train`, `compare`, `diagnose`, `report`, `reproduce`, ..."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from fixpoint import __version__
from fixpoint.cli.data import data_app

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
app.add_typer(data_app, name="data")
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


Devices = Annotated[
    int | None,
    typer.Option(parser=_count, metavar="N", help="Processes that share each batch (DDP)."),
]
Setting = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other key of the recipe; repeatable."),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        parser=_count, metavar="N", help="Runs at a time, one thread each.", show_default="cores"
    ),
]


def _number(help: str) -> Any:
    return typer.Option(parser=_count, metavar="N", help=help)


@app.command()
def train(
    recipe: Annotated[
        str | None, typer.Argument(help="Name of a recipe, or a .toml file.", show_default="ERNN")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Data set.")] = None,
    model: Annotated[str | None, typer.Option(help="ernn, rnn, lstm, gru, ...")] = None,
    hidden: Annotated[int | None, _number("Hidden units.")] = None,
    cell: Annotated[str | None, typer.Option(help="Cell of ernn.")] = None,
    solver: Annotated[str | None, typer.Option(help="Solver of ernn.")] = None,
    max_iter: Annotated[int | None, _number("Updates of the solver a time step.")] = None,
    backward: Annotated[str | None, typer.Option(help="unrolled or implicit.")] = None,
    epochs: Annotated[int | None, _number("Epochs.")] = None,
    batch_size: Annotated[int | None, _number("Batch size.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adam, adamw or sgd.")] = None,
    schedule: Annotated[
        str | None, typer.Option(help="halve, cosine, plateau or constant.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or mps.")] = None,
    devices: Devices = None,
    precision: Annotated[
        str | None, typer.Option(help="32-true, bf16-mixed, 64-true, ... as in Lightning Fabric.")
    ] = None,
    settings: Setting = None,
    out: Annotated[Path, typer.Option(help="Folder for runs.jsonl and checkpoints.")] = Path(
        "runs/train"
    ),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start anew; else an unfinished run goes on.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write events for TensorBoard.")
    ] = False,
) -> None:
    """Train one model as a recipe says.

    Options override the recipe. Stopped or killed, the same command goes on after the last
    finished epoch; finished, it shows the result again.
    """
    flags = {
        "dataset": dataset,
        "model": model,
        "hidden": hidden,
        "cell": cell,
        "solver": solver,
        "max_iter": max_iter,
        "backward": backward,
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "optimizer": optimizer,
        "schedule": schedule,
        "seed": seed,
        "device": device,
        "devices": devices,
        "precision": precision,
    }
    with _one_line("Stopped; the same command goes on after the last finished epoch."):
        from fixpoint.training import load_recipe
        from fixpoint.training.commands.single_run import train_and_show
        from fixpoint.training.recipe.schema import Recipe

        base = Recipe() if recipe is None else load_recipe(recipe)
        train_and_show(
            console, _override(base, settings, flags), out=out, fresh=fresh, tensorboard=tensorboard
        )


@app.command()
def compare(
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
    ] = "inexact-newton,inexact-newton:2,picard,anderson,broyden",
    backward: Annotated[
        str | None,
        typer.Option(help="unrolled, implicit or both by comma.", show_default="what makes sense"),
    ] = None,
    cell: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated jordan, self-feedback, identity-feedback, linear.",
            show_default="jordan for inexact-newton, self-feedback for the others",
        ),
    ] = None,
    hidden: Annotated[int, _number("Hidden units.")] = 80,
    epochs: Annotated[int, _number("Epochs.")] = 6,
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds.")] = "0",
    out: Annotated[
        Path, typer.Option(help="Folder for runs.jsonl, report.html and checkpoints.")
    ] = Path("runs/compare"),
    device: Annotated[str, typer.Option(help="cpu, cuda or mps.")] = "cpu",
    batch_size: Annotated[int, _number("Batch size.")] = 128,
    lr: Annotated[
        float, typer.Option(help="Learning rate of Adam, halved twice over the training.")
    ] = 1e-2,
    settings: Setting = None,
    jobs: Jobs = None,
) -> None:
    """Train models with each solver and backward; compare accuracy, time and convergence.

    Finished runs of the same settings in --out are not run again, unfinished ones go on.
    """
    flags: dict[str, Any] = {
        "hidden": hidden,
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "device": device,
    }
    with _one_line("Stopped; finished epochs are kept, the same command goes on."):
        from fixpoint.training import make_grid
        from fixpoint.training.commands.comparison import run_comparison
        from fixpoint.training.recipe.schema import Recipe

        runs = make_grid(
            _override(Recipe(), settings, flags),
            datasets=_split(dataset),
            models=_split(models),
            solvers=_split(solvers),
            cells=None if cell is None else _split(cell),
            backwards=None if backward is None else _split(backward),
            seeds=_integers("--seeds", seeds),
        )
        run_comparison(console, runs, out=out, jobs=jobs or _cores(device))


@app.command()
def diagnose(
    checkpoint: Annotated[
        Path,
        typer.Argument(help="Folder of a training, as runs/train/KEY, or a checkpoint in it."),
    ],
    part: Annotated[str, typer.Option(help="Part of the data: train, valid or test.")] = "test",
    windows: Annotated[int, _number("Most windows to look at, spread evenly.")] = 512,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the PNG files.", show_default="diagnosis in that of the training"
        ),
    ] = None,
) -> None:
    """Say in plain sentences, and draw, whether a trained model converges on its data."""
    with _one_line("Stopped."):
        from fixpoint.training.commands.run_diagnosis import diagnose_run

        diagnose_run(console, checkpoint, out=out, part=part, windows=windows)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of other commands' --out, with their runs.jsonl.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The page.", show_default="report.html in the first folder")
    ] = None,
) -> None:
    """Write one self-contained page of finished runs: tables, curves, convergence."""
    with _one_line("Stopped."):
        from fixpoint.training.results.html_report import write_report

        path = out or (runs[0] if runs[0].is_dir() else runs[0].parent) / "report.html"
        count = write_report(runs, path)
        console.print(f"{count} runs: {path}", soft_wrap=True)


@app.command()
def reproduce(
    target: Annotated[str, typer.Argument(help="table2, table3, table4 or figures.")],
    dataset: Annotated[
        str | None, typer.Option(help="Comma-separated data sets.", show_default="all")
    ] = None,
    models: Annotated[
        str | None, typer.Option(help="Comma-separated models.", show_default="all")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help="Comma-separated seeds.", show_default="0,1,2,3,4; figures: 0"),
    ] = None,
    epochs: Annotated[int | None, _number("Epochs, for a first look.")] = None,
    settings: Setting = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or mps.")] = "cpu",
    out: Annotated[
        Path, typer.Option(help="Folder for runs.jsonl, report.html and checkpoints, or figures.")
    ] = Path("runs/reproduce"),
    jobs: Jobs = None,
) -> None:
    """Run the recipes of a table of the paper, and print ours beside the paper's numbers.

    Finished runs in --out are not run again, unfinished ones go on. With figures, draw those of the
    paper, as "fixpoint figures" does.
    """
    if target == "figures":
        others = {"--models": models, "--set": settings, "--jobs": jobs}
        _paper_figures(
            dataset, seeds or "0", epochs, out, others | {"--device": device != "cpu" or None}
        )
        return
    with _one_line("Stopped; finished epochs are kept, the same command goes on."):
        from fixpoint.paper.table_runs import reproduce_table
        from fixpoint.training.recipe.toml import parse_setting

        changes = dict(parse_setting(text) for text in settings or [])
        changes |= {"device": device} | ({} if epochs is None else {"epochs": epochs})
        reproduce_table(
            console,
            target,
            out=out,
            jobs=jobs or _cores(device),
            datasets=None if dataset is None else _split(dataset),
            models=None if models is None else _split(models),
            seeds=_integers("--seeds", seeds or "0,1,2,3,4"),
            changes=changes,
        )


def _paper_figures(
    dataset: str | None, seeds: str, epochs: int | None, out: Path, others: dict[str, Any]
) -> None:
    """The figures of the paper; `others` are options that they do not have."""
    with _one_line("Stopped."):
        from fixpoint.paper.figure_files import draw_figures
        from fixpoint.paper.figures import PAPER

        for option, value in others.items():
            if value is not None:
                raise ValueError(f"{option} is for tables: leave it out to draw the figures")
        numbers = _integers("--seeds", seeds)
        if len(numbers) != 1:
            raise ValueError(f"the figures are drawn with one seed; got --seeds {seeds}")
        draw_figures(
            console,
            list(PAPER),
            out=out,
            dataset=dataset or _real_windows(),
            epochs=epochs or 25,
            seed=numbers[0],
        )


def _override(base: Any, settings: list[str] | None, flags: dict[str, Any]) -> Any:
    """The recipe with what --set and the flags say; flags win."""
    from fixpoint.training.recipe.toml import parse_setting

    base = base.changed(**dict(parse_setting(text) for text in settings or []))
    return base.changed(**{name: value for name, value in flags.items() if value is not None})


def _cores(device: str) -> int:
    return 1 if device != "cpu" else os.cpu_count() or 1


@contextmanager
def _one_line(stopped: str) -> Iterator[None]:
    """What is wrong in one line with exit status 2; `stopped` after Ctrl-C, with 130."""
    try:
        yield
    except OSError as error:
        _refuse(str(error) if error.filename else error.strerror or str(error))
    except (ValueError, TypeError) as error:
        _refuse(str(error))
    except KeyboardInterrupt:
        Console(stderr=True).print(stopped)
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
        int, typer.Option(parser=_count, metavar="N", help="Toy walks of each class to train on.")
    ] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, walks and order.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the PNG files.")] = Path("runs/figures"),
) -> None:
    """Draw the figures of the ERNN paper, and of its analysis, from fresh short runs."""
    with _one_line("Stopped."):
        from fixpoint.paper.figure_files import draw_figures
        from fixpoint.paper.figures import FIGURES

        draw_figures(
            console,
            names or list(FIGURES),
            out=out,
            dataset=dataset or _real_windows(),
            epochs=epochs,
            walks=walks,
            seed=seed,
        )


def _real_windows() -> str:
    return "har2" if os.environ.get("FIXPOINT_DATA") else "har2-sample"


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


def _refuse(message: str) -> NoReturn:
    print(f"fixpoint: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    """Entry point of the command `fixpoint`."""
    app()


if __name__ == "__main__":
    main()
